"""A span comes back from the store as it went in, whatever stands in it."""

import hashlib
import math
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.trace import Link as OTelLink
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, Tracer
from tests.store.conftest import MakeSpan

from lightning_otel import LightningSpanProcessor, Store
from lightning_otel.store import lines as lines_module
from lightning_otel.store.lines import MAX_RECORD_BYTES, format_line
from lightning_otel.store.schema import BODY_COLUMNS, COLUMNS, build_record, build_span
from lightning_otel.types import Event, Link, Span
from lightning_otel.types import conventions as c
from lightning_otel.types import values as values_module

MIB = 1 << 20
BAD, GOOD = "a\ud800b", "a?b"

TIMES = st.integers(0, (1 << 62) - 1)
TRACE_IDS = st.text("0123456789abcdef", min_size=32, max_size=32)
SPAN_IDS = st.text("0123456789abcdef", min_size=16, max_size=16)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.text(min_size=1) | st.sampled_from(
    [*BODY_COLUMNS.values(), c.OPERATION, c.AGENT_NAME, c.INPUT_TOKENS, c.REWARD_VALUE, c.CUT]
)
ATTRIBUTES = st.dictionaries(KEYS, JSON, max_size=6)
SPANS = st.builds(
    Span,
    trace_id=TRACE_IDS,
    span_id=SPAN_IDS,
    parent_span_id=st.none() | SPAN_IDS,
    name=st.text(),
    start_ns=TIMES,
    end_ns=st.none() | TIMES,
    kind=st.sampled_from(["INTERNAL", "CLIENT", "SERVER", "PRODUCER", "CONSUMER"]),
    status=st.sampled_from(["UNSET", "OK", "ERROR"]),
    status_message=st.text(),
    attributes=ATTRIBUTES,
    events=st.lists(st.builds(Event, st.text(), TIMES, ATTRIBUTES), max_size=2).map(tuple),
    links=st.lists(st.builds(Link, TRACE_IDS, SPAN_IDS, ATTRIBUTES), max_size=2).map(tuple),
    otel_resource=ATTRIBUTES,
    scope=st.text(),
    process=st.text(),
    sequence=st.integers(-1, 1 << 40),
    end_sequence=st.integers(-1, 1 << 40),
)


class Level(IntEnum):
    """An integer with a name."""

    HIGH = 3


class Mode(StrEnum):
    """A text with a name."""

    CHAT = "chat"


class Spiteful:
    """Raises whatever it is asked."""

    def __str__(self) -> str:
        raise RuntimeError("asked for its text")

    __repr__ = __str__

    @property
    def __class__(self) -> Any:
        """Raises where ``isinstance`` looks."""
        raise RuntimeError("asked for its class")

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise RuntimeError("told its class")

    def __iter__(self) -> Iterator[object]:
        raise RuntimeError("iterated")

    def __hash__(self) -> int:
        return 1


def _deep() -> Any:
    deep: Any = "bottom"
    for _ in range(2000):
        deep = [deep]
    return deep


def _circle() -> dict[str, Any]:
    circle: dict[str, Any] = {}
    circle.update(a=circle, b=[circle])
    return circle


VALUES: list[tuple[Any, Any]] = [
    (math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (None, None),
    (b"\xff\x00", "/wA="), (bytearray(b"ab"), "YWI="), (memoryview(b"abcd")[::2], "YWM="),
    (1 << 80, str(1 << 80)), (-(1 << 63) - 1, str(-(1 << 63) - 1)), (10**5000, hex(10**5000)),
    (Decimal("1.10"), "1.10"), (date(2026, 1, 2), "2026-01-02"), (time(3, 4, 5), "03:04:05"),
    (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02T03:04:05+00:00"),
    (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
    (Level.HIGH, 3), (Mode.CHAT, "chat"), (np.float32(0.5), 0.5), (np.float64("nan"), "NaN"),
    (np.int64(7), 7), (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]), ({3}, [3]),
    ((1, (2.5, "x")), [1, [2.5, "x"]]), ([1, 1 << 70], [1, str(1 << 70)]),
    ([0.5, math.inf], [0.5, "Infinity"]), ((0.5, math.nan), [0.5, "NaN"]),
    ({1: "a", None: "b", (1, "x"): "c"}, {"1": "a", "null": "b", '[1,"x"]': "c"}),
    ({BAD: [BAD, {1: 1 << 90}]}, {GOOD: [GOOD, {"1": str(1 << 90)}]}),
    (object(), "<object>"), (Spiteful(), "<Spiteful>"), ([Spiteful()], ["<Spiteful>"]),
    (MagicMock(), "<MagicMock>"), (MagicMock(spec=str), "<MagicMock>"),
    (MagicMock(spec=dict), "<MagicMock>"),
    (_circle(), {"a": "<dict inside itself>", "b": ["<dict inside itself>"]}),
]  # fmt: skip
"""Values of any kind, and what they are in the store."""


def _kept(span: Span) -> Span:
    """Return the span as it comes back, after a look at the line's length."""
    line = format_line(build_record(span))
    assert len(line) <= MAX_RECORD_BYTES
    return build_span(orjson.loads(line))


def _note(span: Span) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(span.attributes[c.CUT])
    return found


@given(SPANS)
def test_span_comes_back_from_its_line(span: Span) -> None:
    """All that JSON knows comes back, also from a row, whose wide columns are JSON text."""
    line = format_line(build_record(span))
    record = orjson.loads(line)
    row = {column: record.get(column) for column in COLUMNS}
    for column in ("attributes", "events", "links", "otel_resource"):
        row[column] = orjson.dumps(row[column]).decode()

    assert (line.count(b"\n"), line[-1:]) == (1, b"\n")
    assert build_span(record) == span == build_span(row)


def test_values_of_any_kind_have_one_form_wherever_they_stand(
    store: Store, make_span: MakeSpan
) -> None:
    """What JSON does not know has a documented form; nothing is asked, and nothing is lost."""
    odd = {str(number): value for number, (value, _) in enumerate(VALUES)}
    plain = {str(number): form for number, (_, form) in enumerate(VALUES)}
    store.add(
        make_span(**{"attributes": {}, "events": (), "links": (), **where})
        for where in (
            {"attributes": odd},
            {"events": (Event("e", 1, odd),)},
            {"links": (Link("0" * 32, "1" * 16, odd),)},
            {"attributes": {"zero": -0.0, "deep": _deep()}},
        )
    )

    one, two, three, four = store.spans().rows()

    assert one.attributes == two.events[0].attributes == three.links[0].attributes == plain
    assert math.copysign(1, four.attributes["zero"]) == -1
    assert "<list nested too deep>" in str(four.attributes["deep"])


def test_texts_of_any_kind_are_repaired_everywhere(store: Store, make_span: MakeSpan) -> None:
    """Half a character in any name, text or key becomes a question mark and loses nothing else."""
    names = {BAD: GOOD, 5: "5", b"raw": "cmF3", None: "", Mode.CHAT: "chat"}
    store.add(make_span(name=name) for name in names)
    store.add([
        make_span(
            status_message=BAD, scope=BAD, attributes={BAD: BAD, c.INPUT_MESSAGES: BAD},
            events=(Event(BAD, 1, {BAD: BAD}),), otel_resource={"service.name": BAD},
        )
    ])  # fmt: skip

    *named, found = store.spans().rows()

    assert [span.name for span in named] == list(names.values())
    assert (found.status_message, found.scope) == (GOOD, GOOD)
    assert found.attributes == {GOOD: GOOD, c.INPUT_MESSAGES: GOOD}
    assert found.events == (Event(GOOD, 1, {GOOD: GOOD}),)
    assert found.otel_resource == {"service.name": GOOD}


def test_lists_that_share_their_parts_do_not_unfold(
    store: Store, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is lowered by a patch, because a million items take a second."""
    monkeypatch.setattr(values_module, "_STORED_ITEMS", 1_000)
    shared: list[Any] = [None, None]
    for _ in range(30):
        shared = [shared, shared]
    store.add([make_span(attributes={"shared": shared})])

    assert "<list of too many items>" in str(store.spans().rows()[0].attributes)


@pytest.mark.parametrize(
    ("attributes", "lengths", "kept"),
    [
        ({"text": "0123456789" * 10_000_000, "s": "whole"}, {"text": 100_000_000}, MIB),
        ({c.INPUT_MESSAGES: "x" * 10 * MIB}, {c.INPUT_MESSAGES: 10 * MIB}, MIB),
        ({c.AGENT_NAME: "a" * 10 * MIB}, {"agent": 10 * MIB, c.AGENT_NAME: 10 * MIB}, MIB),
        ({str(n): "x" * MIB for n in range(7)}, {}, MIB),
        ({str(n): "y" * 65_536 for n in range(512)}, {str(n): 65_536 for n in range(512)}, 4096),
        ({"list": ["z" * MIB] * 9, "short": [1, 2]}, {"list": 9 * (MIB + 3) + 1}, MIB),
        ({"big": "b" * 9 * MIB, c.CUT: "no json"}, {"big": 9 * MIB}, MIB),
        ({"big": "b" * 9 * MIB, c.CUT: 5}, {"big": 9 * MIB}, MIB),
    ],
    ids=["long", "body", "hot", "just fits", "many", "list", "foreign note", "no note"],
)
def test_what_is_too_long_is_cut_and_said(
    make_span: MakeSpan, attributes: dict[str, Any], lengths: dict[str, int], kept: int
) -> None:
    """A span takes a line of 8 MiB: long texts are cut evenly, and how long they were is noted."""
    found = dict(_kept(make_span(attributes=attributes)).attributes)
    note = orjson.loads(found.pop(c.CUT)) if lengths else {}

    assert {key: entry["length"] for key, entry in note.items()} == lengths
    for key, value in attributes.items():
        if key in lengths:
            text = value if isinstance(value, str) else orjson.dumps(value).decode()
            digest = hashlib.sha256(text[:kept].encode()).hexdigest()
            assert (found[key], note[key]["kept"]) == (text[:kept], kept)
            assert note[key]["sha256"] == digest
        elif key != c.CUT:
            assert found[key] == value


def test_what_is_cut_twice_says_its_first_length(make_span: MakeSpan) -> None:
    """Names and events are cut, too; and wide characters by what they take in the file."""
    long = "😀" * (3 * MIB)

    once = _kept(make_span(name=long, events=(Event("e", 1, {"stack": long}),)))
    more = {**once.attributes, **{f"more {n}": "m" * MIB for n in range(9)}}
    again = _kept(make_span(name=once.name, attributes=more))

    assert set(_note(once)) == {"name", "events.0.stack"}
    assert set(once.name) == {"😀"}
    assert _note(again)["name"]["length"] == 3 * MIB
    assert _note(again)["name"]["kept"] == len(again.name)


def test_span_of_too_much_keeps_its_ids_and_a_count(
    make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is lowered by a patch, because 150,000 attributes take a second."""
    monkeypatch.setattr(lines_module, "MAX_RECORD_BYTES", 80_000)
    many = {f"{number:06d}": "v" * 100 for number in range(1_500)}

    found = _kept(make_span(attributes=many, otel_resource={"big": "r" * 100_000}))

    assert (found.name, found.is_incomplete) == ("work", False)
    assert _note(found)["attributes"] == {"length": 1_500, "kept": 0}


@pytest.mark.parametrize(
    ("column", "key", "value", "kept"),
    [
        ("operation", c.OPERATION, "chat", "chat"),
        ("operation", c.OPERATION, 5, None),
        ("agent", c.AGENT_NAME, ["planner"], None),
        ("agent", c.AGENT_NAME, MagicMock(spec=str), None),
        ("response_id", c.RESPONSE_ID, b"id", None),
        ("rollout_id", c.ROLLOUT_ID, {"a": 1}, None),
        ("input_tokens", c.INPUT_TOKENS, 7, 7),
        ("input_tokens", c.INPUT_TOKENS, "7", None),
        ("input_tokens", c.INPUT_TOKENS, 7.5, None),
        ("input_tokens", c.INPUT_TOKENS, True, None),
        ("output_tokens", c.OUTPUT_TOKENS, 1 << 63, None),
        ("reward", c.REWARD_VALUE, 0.5, 0.5),
        ("reward", c.REWARD_VALUE, 1, 1.0),
        ("reward", c.REWARD_VALUE, True, None),
        ("reward", c.REWARD_VALUE, "0.5", None),
        ("reward", c.REWARD_VALUE, math.nan, None),
        ("reward", c.REWARD_VALUE, 10**400, None),
        ("model", c.REQUEST_MODEL, "asked", "asked"),
        ("input_messages", c.INPUT_MESSAGES, "[]", "[]"),
        ("input_messages", c.INPUT_MESSAGES, [1], None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_hot_column_holds_its_type_or_nothing(
    make_span: MakeSpan, column: str, key: str, value: object, kept: object
) -> None:
    """The attribute keeps its value in any case."""
    record = build_record(make_span(attributes={key: value, c.RESPONSE_MODEL: None}))

    assert record.get(column) == kept
    assert record["attributes"].get(key, kept) is value


@pytest.fixture
def tracer(store: Store) -> Iterator[Tracer]:
    """A tracer whose spans go into the store, with the SDK's limits on attributes at 128."""
    provider = TracerProvider(
        resource=Resource({"service.name": "bench"}),
        span_limits=SpanLimits(max_span_attributes=128, max_events=10, max_links=1),
    )
    provider.add_span_processor(LightningSpanProcessor(store.name))
    yield provider.get_tracer("bench.scope")
    provider.shutdown()


def test_span_of_the_sdk_is_kept_as_it_was(store: Store, tracer: Tracer) -> None:
    """Ids, times, status, attributes, events, links, resource and scope arrive as they were."""
    with tracer.start_as_current_span("parent") as parent:
        span = tracer.start_span(
            "child",
            kind=SpanKind.CLIENT,
            attributes={"a": 1, "b": ["x", "y"], "c": 0.5, "d": True, "n": math.nan},
            links=[OTelLink(SpanContext(5, 6, is_remote=False), {"why": "retry"})],
            start_time=1_000,
        )
        span.add_event("tick", {"n": 1}, timestamp=1_500)
        (open_child, _) = store.spans().rows()
        span.set_status(Status(StatusCode.ERROR, "broken"))
        span.end(2_000)

    found, outer = store.spans().rows()

    context = span.get_span_context()
    assert (found.trace_id, found.span_id) == (
        f"{context.trace_id:032x}",
        f"{context.span_id:016x}",
    )
    assert found.parent_span_id == f"{parent.get_span_context().span_id:016x}"
    assert (found.name, found.kind, found.scope) == ("child", "CLIENT", "bench.scope")
    assert (found.start_ns, found.end_ns) == (1_000, 2_000)
    assert (found.status, found.status_message) == ("ERROR", "broken")
    assert {key: found.attributes[key] for key in "abcdn"} == {
        "a": 1, "b": ["x", "y"], "c": 0.5, "d": True, "n": "NaN",
    }  # fmt: skip
    assert found.events == (Event("tick", 1_500, {"n": 1}),)
    assert found.links == (Link(f"{5:032x}", f"{6:016x}", {"why": "retry"}),)
    assert found.otel_resource["service.name"] == "bench"
    assert found.process == outer.process
    assert outer.sequence < found.sequence < found.end_sequence < outer.end_sequence
    assert (open_child.is_incomplete, open_child.attributes["a"]) == (True, 1)


@pytest.mark.parametrize(
    ("start", "start_ns"), [(1 << 80, 0), (-5, 0), ("noon", 0), (5.9, 5), (math.nan, 0)]
)
def test_time_that_is_none_loses_no_span(
    store: Store, tracer: Tracer, start: Any, start_ns: int
) -> None:
    """A time that fits no column is 0, and the rest is kept."""
    tracer.start_span("s", attributes={"kept": 1}, start_time=start).end(9)

    (found,) = store.spans()

    assert (found.start_ns, found.end_ns, found.attributes["kept"]) == (start_ns, 9, 1)


def test_span_is_kept_without_its_lock(store: Store, tracer: Tracer) -> None:
    """Another thread that holds the span's lock does not stop its start from being kept."""
    processor = LightningSpanProcessor(store.name)
    span: Any = tracer.start_span("s")
    with span._lock:  # the lock a slow caller of the SDK would hold
        worker = threading.Thread(target=processor.on_start, args=(span,))
        worker.start()
        worker.join(10)
    processor.shutdown()

    assert not worker.is_alive()
