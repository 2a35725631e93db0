"""Spans out by OTLP: their form, what stays here, and each delivered once from growing segments."""

import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.exporters.duckdb import DuckDBSpanExporter
from lightning_otel.exporters.otlp import Forwarder, forward, otlp_exporter, readable_span
from lightning_otel.store.layout import Layout
from lightning_otel.types import Event, Span

RUN, TRACE = "rollout-ours", "ab" * 16


class Collecting(SpanExporter):
    """Takes a number of batches, then refuses until it is given room for more."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.room = room
        self.spans: list[ReadableSpan] = []
        self.requests = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Take a batch, or refuse all of it."""
        self.requests += 1
        if not self.room:
            return SpanExportResult.FAILURE
        self.room -= 1
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is open."""

    def ids(self) -> Counter[str]:
        """How often each span came."""
        return Counter(format(span.context.span_id, "016x") for span in self.spans)


def ended(trace_id: str = TRACE, rollout_id: str = RUN, **attributes: object) -> Span:
    """A finished span."""
    return Span(
        trace_id=trace_id,
        span_id=secrets.token_hex(8),
        parent_span_id=None,
        name="work",
        start_ns=1_000,
        end_ns=2_000,
        attributes={c.ROLLOUT_ID: rollout_id, **attributes},
    )


@pytest.fixture
def layout(store: Store) -> Layout:
    """The paths of a store that stands."""
    assert store.layout is not None
    store.layout.create()
    return store.layout


def keep(store: Store, spans: Sequence[Span]) -> None:
    """Write spans into a segment of their own."""
    store.add(spans)
    store.writer().seal()


def test_readable_span_is_the_sdks_own(tmp_path: Path) -> None:
    """A span that went through the store is encoded as the SDK's own would have been."""
    memory = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "x", "host.cpus": 4}))
    provider.add_span_processor(SimpleSpanProcessor(memory))
    provider.add_span_processor(SimpleSpanProcessor(DuckDBSpanExporter(str(tmp_path / "s.duckdb"))))
    tracer = provider.get_tracer("some.scope")
    with tracer.start_as_current_span("root", kind=SpanKind.SERVER) as root:
        link = Link(root.get_span_context(), {"why": "so"})
        with tracer.start_as_current_span("child", kind=SpanKind.CLIENT, links=[link]) as child:
            child.set_attributes({"text": "ä", "n": 3, "x": 0.5, "yes": True, "many": ["a", "b"]})
            child.add_event("something", {"size": 1}, timestamp=7)
            child.set_status(Status(StatusCode.ERROR, "it broke"))
        tracer.start_span("fine").set_status(Status(StatusCode.OK))
    provider.shutdown()

    found = [
        readable_span(span, with_content=True) for span in Store(tmp_path / "s.duckdb").spans()
    ]

    theirs = sorted(memory.get_finished_spans(), key=lambda span: span.start_time or 0)
    assert [json.loads(span.to_json()) for span in found] == [
        json.loads(span.to_json()) for span in theirs
    ]
    assert encode_spans(found) == encode_spans(theirs)


def test_readable_span_leaves_content_here() -> None:
    """Messages, token ids and the like stay behind, on the span and in its events."""
    event = Event("gen_ai.choice", 5, {c.OUTPUT_MESSAGES: "[]", "index": 0})
    span = replace(
        ended(**{key: "secret" for key in c.CONTENT_KEYS}, kept=1),  # noqa: C420  # keywords
        events=(event,),
    )

    stripped = readable_span(span, with_content=False)
    whole = readable_span(span, with_content=True)

    assert dict(stripped.attributes or {}) == {c.ROLLOUT_ID: RUN, "kept": 1}
    assert dict(stripped.events[0].attributes or {}) == {"index": 0}
    assert set(whole.attributes or {}) == {c.ROLLOUT_ID, "kept", *c.CONTENT_KEYS}
    assert set(whole.events[0].attributes or {}) == {c.OUTPUT_MESSAGES, "index"}


@pytest.mark.parametrize("is_allowed", [False, True])
def test_forward_asks_the_environment(monkeypatch: pytest.MonkeyPatch, is_allowed: bool) -> None:
    """Content goes out only where the environment allows it."""
    if is_allowed:
        monkeypatch.setenv("LIGHTNING_OTEL_EXPORT_CONTENT", "1")
    exporter = Collecting()

    forward([ended(**{c.INPUT_MESSAGES: "[]"})], exporter)

    assert (c.INPUT_MESSAGES in (exporter.spans[0].attributes or {})) == is_allowed


@pytest.mark.parametrize(
    ("count", "room", "delivered"), [(0, 9, 0), (1, 9, 1), (600, 9, 600), (600, 1, 256), (5, 0, 0)]
)
def test_forward_stops_at_a_refusal(count: int, room: int, delivered: int) -> None:
    """Batches go out in order until one is refused, and what was taken is counted."""
    exporter = Collecting(room)
    spans = [ended() for _ in range(count)]

    done = forward(spans, exporter)

    assert done == delivered
    assert list(exporter.ids()) == [span.span_id for span in spans[:delivered]]


def test_forwarder_sends_the_run_alone(store: Store, layout: Layout) -> None:
    """Spans of the run's rollout or trace go out; others', and those before it, do not."""
    keep(store, [ended()])
    exporter = Collecting()
    earlier = {path.name for path in layout.segments()}
    forwarder = Forwarder(layout, RUN, TRACE, exporter, earlier)
    ours = [ended(), ended(trace_id="cd" * 16), ended(rollout_id="named by the program")]
    mention = ended(trace_id="ef" * 16, rollout_id="other", text=f"{RUN} {TRACE}")
    keep(store, [*ours, mention, ended(trace_id="ef" * 16, rollout_id="other")])

    is_done = forwarder.poll()
    forwarder.close()

    assert is_done
    assert exporter.ids() == {span.span_id: 1 for span in ours}
    assert forwarder.delivered == 3


def test_forwarder_sends_each_span_once(store: Store, layout: Layout) -> None:
    """However often it polls, and in whatever segments spans come, each is sent once."""
    exporter = Collecting()
    forwarder = Forwarder(layout, RUN, TRACE, exporter)
    spans = [ended() for _ in range(9)]

    for start in range(0, 9, 3):
        store.add(spans[start : start + 2])
        assert forwarder.poll()
        keep(store, spans[start + 2 : start + 3])
        assert forwarder.poll()
        assert forwarder.poll()
    forwarder.close()

    assert exporter.ids() == {span.span_id: 1 for span in spans}
    assert forwarder.waiting() == 0


@settings(deadline=None, max_examples=30)
@given(
    rooms=st.lists(st.integers(0, 3), max_size=6), sizes=st.lists(st.integers(0, 600), max_size=3)
)
def test_forwarder_delivers_once_whatever_is_refused(
    tmp_path_factory: pytest.TempPathFactory, rooms: list[int], sizes: list[int]
) -> None:
    """Whatever the collector refuses in between, in the end it has every span once."""
    store = Store(tmp_path_factory.mktemp("otlp") / "s.duckdb")
    assert store.layout is not None
    store.layout.create()
    exporter = Collecting(0)
    forwarder = Forwarder(store.layout, RUN, TRACE, exporter)
    batches = [[ended() for _ in range(size)] for size in sizes]

    for index in range(max(len(rooms), len(sizes))):
        exporter.room = rooms[index] if index < len(rooms) else 0
        if index < len(batches):
            keep(store, batches[index])
        is_done = forwarder.poll()
        assert is_done == (forwarder.waiting() == 0)
    exporter.room = 1_000_000
    assert forwarder.poll()
    forwarder.close()

    wanted = [span.span_id for batch in batches for span in batch]
    assert exporter.ids() == dict.fromkeys(wanted, 1)
    assert forwarder.delivered == len(wanted)


def test_forwarder_asks_a_refusing_collector_once(store: Store, layout: Layout) -> None:
    """A poll ends at the first refusal: each further request would wait for its own retries."""
    for _ in range(5):
        keep(store, [ended()])
    exporter = Collecting(0)
    forwarder = Forwarder(layout, RUN, TRACE, exporter)

    is_done = forwarder.poll()

    assert not is_done
    assert exporter.requests == 1
    assert forwarder.waiting() == 5
    forwarder.close()


def test_forwarder_holds_what_is_unlinked(store: Store, layout: Layout) -> None:
    """A segment that is settled and removed while the collector is down is still delivered."""
    exporter = Collecting(0)
    forwarder = Forwarder(layout, RUN, TRACE, exporter)
    span = ended()
    keep(store, [span])
    forwarder.poll()
    for path in layout.segments():
        path.unlink()

    exporter.room = 1
    is_done = forwarder.poll()
    forwarder.close()

    assert is_done
    assert exporter.ids() == {span.span_id: 1}


def test_forwarder_steps_over_damage(store: Store, layout: Layout) -> None:
    """Damaged lines and records that are no spans cost nothing; half a line waits for its end."""
    whole, late = ended(), ended()
    keep(store, [whole])
    (path,) = layout.segments()
    good = path.read_bytes().splitlines(keepends=True)[0]
    late_line = good.replace(whole.span_id.encode(), late.span_id.encode())
    damaged = b'{"record":"span","rollout_id":"%s", oops\n' % RUN.encode()
    lacking = b'{"record":"span","rollout_id":"%s"}\n' % RUN.encode()
    path.write_bytes(damaged + lacking + b"\xff\n" + good + late_line[:-20])
    exporter = Collecting()
    forwarder = Forwarder(layout, RUN, TRACE, exporter)

    forwarder.poll()
    before = exporter.ids()
    with path.open("ab") as file:
        file.write(late_line[-20:])
    forwarder.poll()
    forwarder.close()

    assert before == {whole.span_id: 1}
    assert exporter.ids() == {whole.span_id: 1, late.span_id: 1}


def test_forwarder_sends_what_ended(store: Store, layout: Layout) -> None:
    """A span that began and has not ended is not sent, and not waited for."""
    from lightning_otel import auto_trace, emit_message

    exporter = Collecting()
    forwarder = Forwarder(layout, RUN, TRACE, exporter)

    with auto_trace(store=store, rollout_id=RUN):
        emit_message("within")
        forwarder.poll()
        within = [span.name for span in exporter.spans]
        waiting = forwarder.waiting()
    forwarder.poll()
    forwarder.close()

    assert (within, waiting) == ([c.SPAN_MESSAGE], 0)
    assert [span.name for span in exporter.spans] == [c.SPAN_MESSAGE, c.SPAN_ROLLOUT]


class Refusing:
    """An endpoint that answers every request with 503, and counts them."""

    def __init__(self) -> None:
        self.requests = threading.Semaphore(0)
        self.count = 0
        refusing = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                refusing.count += 1
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
                refusing.requests.release()

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Refusing]:
    """Such an endpoint, named by the environment."""
    made = Refusing()
    port = made.server.server_address[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_otlp_exporter_tries_once_when_hurried(
    refusing: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that ends asks a refusing collector once, and one warning says what it answered."""
    exporter = otlp_exporter()
    exporter.hurry()

    results = [exporter.export([readable_span(ended(), with_content=False)]) for _ in range(2)]
    exporter.shutdown()

    own = [record for record in caplog.records if record.name.startswith("lightning_otel")]
    assert results == [SpanExportResult.FAILURE] * 2
    assert refusing.count == 1
    assert exporter.complaint == "Service Unavailable"
    assert len(own) == 1
    assert "they are all kept here" in own[0].getMessage()


def test_otlp_exporter_is_woken_from_its_retries(refusing: Refusing) -> None:
    """One that waits to try again stops waiting when the program wants to end."""
    exporter = otlp_exporter(is_quiet=True)
    batch = [readable_span(ended(), with_content=False)]
    thread = threading.Thread(target=exporter.export, args=(batch,))
    thread.start()
    refusing.requests.acquire()
    while not exporter.complaint:
        time.sleep(0.001)

    exporter.hurry()
    thread.join(30)
    exporter.shutdown()

    assert not thread.is_alive()
    assert refusing.count == 1


@pytest.mark.parametrize(
    ("protocol", "module"),
    [("", "http"), ("http/protobuf", "http"), ("grpc", "grpc"), ("http/json", "http")],
)
def test_otlp_exporter_heeds_the_protocol(
    monkeypatch: pytest.MonkeyPatch, protocol: str, module: str
) -> None:
    """The SDK's own exporter for the protocol the environment names; OTLP's default is HTTP."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")

    exporter = otlp_exporter()
    kind = type(exporter.inner)
    exporter.shutdown()

    assert f".proto.{module}." in kind.__module__
