"""The SDK's spans become records, whatever a program put on them."""

import threading
from collections.abc import Mapping
from typing import Any
from unittest.mock import MagicMock

import orjson
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, Tracer

from lightning_otel import conventions as c
from lightning_otel.store import lines as lines_module
from lightning_otel.store.lines import line_of
from lightning_otel.store.schema import Record, span_of
from lightning_otel.store.sdk import end_record, start_record
from lightning_otel.store.values import fragment_of
from lightning_otel.types import Span


class Bench:
    """A tracer whose ended spans are at hand."""

    def __init__(self, limits: SpanLimits | None = None) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(
            resource=Resource({"service.name": "bench"}), span_limits=limits or SpanLimits()
        )
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer: Tracer = provider.get_tracer("bench.scope")

    def ended(self) -> ReadableSpan:
        """The span that ended last."""
        return self._exporter.get_finished_spans()[-1]


@pytest.fixture
def bench() -> Bench:
    """A tracer with the SDK's own limits."""
    return Bench()


def _stored(span: ReadableSpan, body: Mapping[str, str] | None = None) -> Span:
    start = _started(span, fragment_of(span.resource.attributes))
    return span_of(orjson.loads(line_of(end_record(start, span, body or {}, 4, {}))))


def _started(span: ReadableSpan, otel_resource: object = None) -> Record:
    return start_record(span, "p", 7, otel_resource or {}, {})


def test_end_record_has_all_that_the_span_has(bench: Bench) -> None:
    """Ids, times, status, attributes, events, links, resource and scope arrive as they were."""
    target = SpanContext(5, 6, is_remote=False)
    with bench.tracer.start_as_current_span("parent") as parent:
        span = bench.tracer.start_span(
            "child",
            kind=SpanKind.CLIENT,
            attributes={"a": 1, "b": ["x", "y"], "c": 0.5, "d": True},
            links=[Link(target, {"why": "retry"})],
            start_time=1_000,
        )
        span.add_event("tick", {"n": 1}, timestamp=1_500)
        span.set_status(Status(StatusCode.ERROR, "broken"))
        span.end(2_000)
        ended = bench.ended()

    found = _stored(ended, {c.INPUT_MESSAGES: "[]"})

    context = span.get_span_context()
    assert found.trace_id == format(context.trace_id, "032x")
    assert found.span_id == format(context.span_id, "016x")
    assert found.parent_span_id == format(parent.get_span_context().span_id, "016x")
    assert (found.name, found.kind, found.scope) == ("child", "CLIENT", "bench.scope")
    assert (found.start_ns, found.end_ns) == (1_000, 2_000)
    assert (found.status, found.status_message) == ("ERROR", "broken")
    assert found.attributes == {
        "a": 1,
        "b": ["x", "y"],
        "c": 0.5,
        "d": True,
        c.INPUT_MESSAGES: "[]",
    }
    (event,) = found.events
    assert (event.name, event.time_ns, event.attributes) == ("tick", 1_500, {"n": 1})
    (link,) = found.links
    assert (link.trace_id, link.span_id) == (format(5, "032x"), format(6, "016x"))
    assert link.attributes == {"why": "retry"}
    assert found.otel_resource["service.name"] == "bench"
    assert (found.process, found.sequence, found.end_sequence) == ("p", 7, 4)


def test_end_record_prefers_the_body_kept_beside_the_span(bench: Bench) -> None:
    """Content on the span and beside it is stored once."""
    bench.tracer.start_span("s", attributes={c.INPUT_MESSAGES: "on the span"}).end()

    found = _stored(bench.ended(), {c.INPUT_MESSAGES: "beside it"})

    assert found.attributes == {c.INPUT_MESSAGES: "beside it"}


@pytest.mark.parametrize(
    ("name", "text"), [("a\ud800", "a?"), (5, "5"), (b"raw", "cmF3"), (None, "")]
)
def test_end_record_has_a_name_whatever_was_given(bench: Bench, name: Any, text: str) -> None:
    """A span or event whose name is no text is stored with one."""
    span = bench.tracer.start_span(name)
    span.add_event(name)
    span.end()

    found = _stored(bench.ended())

    assert found.name == text
    assert found.events[0].name == text


@pytest.mark.parametrize("start", [1 << 80, -5, "noon"])
def test_end_record_survives_a_start_that_is_no_time(bench: Bench, start: Any) -> None:
    """A time that fits no column is 0, and the rest is kept."""
    bench.tracer.start_span("s", attributes={"kept": 1}, start_time=start).end(9)

    found = _stored(bench.ended())

    assert (found.start_ns, found.end_ns) == (0, 9)
    assert found.attributes == {"kept": 1}


def test_end_record_takes_a_float_for_a_time(bench: Bench) -> None:
    """``time.time() * 1e9`` is a start."""
    bench.tracer.start_span("s", start_time=1.5e9).end(2_000_000_000)  # type: ignore[arg-type]  # as users do

    assert _stored(bench.ended()).start_ns == 1_500_000_000


def test_end_record_stores_every_kind_of_attribute(bench: Bench) -> None:
    """What the SDK lets through is stored in its text form."""
    values: dict[str, Any] = {
        "bytes": b"\x00\xff",
        "nan": float("nan"),
        "huge": 1 << 80,
        "none": None,
        "map": {"deep": {"er": [1, b"x"]}},
        "mock": MagicMock(spec=str, __str__=lambda self: "mocked"),
        "surrogate": "\udcff",
    }
    bench.tracer.start_span("s", attributes=values).end()

    found = _stored(bench.ended()).attributes

    assert found["bytes"] == "AP8="
    assert found["nan"] == "NaN"
    assert found["huge"] == str(1 << 80)
    assert found["none"] is None
    assert found["map"] == {"deep": {"er": [1, "eA=="]}}
    assert found["mock"] == "<MagicMock>"
    assert found["surrogate"] == "?"


def test_end_record_says_what_the_sdk_dropped(bench: Bench) -> None:
    """Attributes, events and links beyond the SDK's limits are counted."""
    limits = SpanLimits(max_span_attributes=128, max_events=10, max_links=1)
    small = Bench(limits)
    links = [Link(SpanContext(n, n, is_remote=False)) for n in (1, 2, 3)]
    span = small.tracer.start_span("s", attributes={f"k{n}": n for n in range(300)}, links=links)
    for number in range(12):
        span.add_event(f"e{number}")
    span.end()

    found = _stored(small.ended())

    assert len(found.attributes) == 129
    assert orjson.loads(found.attributes[c.CUT]) == {
        "attributes": {"length": 300, "kept": 128},
        "events": {"length": 12, "kept": 10},
        "links": {"length": 3, "kept": 1},
    }


def test_end_record_holds_three_hundred_attributes_where_the_sdk_does() -> None:
    """Without the SDK's limit nothing is dropped."""
    wide = Bench(SpanLimits(max_span_attributes=SpanLimits.UNSET))
    wide.tracer.start_span("s", attributes={f"k{n}": n for n in range(300)}).end()

    assert len(_stored(wide.ended()).attributes) == 300


def test_start_record_has_what_is_known_at_the_start(bench: Bench) -> None:
    """A started span is known by its ids, its name and the attributes set so far."""
    with bench.tracer.start_as_current_span("parent") as parent:
        span = bench.tracer.start_span(
            "chat x", attributes={c.OPERATION: "chat", c.AGENT_NAME: "planner", "n": b"x"}
        )
        assert isinstance(span, ReadableSpan)
        record = _started(span)

    found = span_of(orjson.loads(line_of(record)))

    assert record["record"] == "start"
    assert found.is_incomplete
    assert found.parent_span_id == format(parent.get_span_context().span_id, "016x")
    assert (found.name, found.sequence, found.end_sequence) == ("chat x", 7, -1)
    assert (record["operation"], record["agent"]) == ("chat", "planner")
    assert found.attributes["n"] == "eA=="


def test_start_record_too_large_for_a_line_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start with thousands of long attributes is cut like an ended span.

    The limit is lowered by a patch, because 50,000 attributes take a second.
    """
    monkeypatch.setattr(lines_module, "MAX_RECORD_BYTES", 100_000)
    wide = Bench(SpanLimits(max_span_attributes=SpanLimits.UNSET))
    span = wide.tracer.start_span("s", attributes={f"k{n:05d}": "v" * 300 for n in range(500)})
    assert isinstance(span, ReadableSpan)

    line = line_of(_started(span))

    assert len(line) < 100_000
    assert span_of(orjson.loads(line)).name == "s"


def test_records_are_made_without_the_spans_lock(bench: Bench) -> None:
    """Another thread that holds the span's lock does not stop the record."""
    span = bench.tracer.start_span("s")
    assert isinstance(span, ReadableSpan)
    done = threading.Event()

    def make() -> None:
        _started(span)
        done.set()

    with span._lock:  # type: ignore[attr-defined]  # the lock a slow caller of the SDK would hold
        worker = threading.Thread(target=make)
        worker.start()
        is_done = done.wait(10)

    worker.join()
    assert is_done
