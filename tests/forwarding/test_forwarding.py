"""Forwarding: each span until the endpoint has its last word on it, and nothing in silence."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from email.utils import formatdate

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from tests.forwarding.collector import Endpoint, Reply, partial

from lightning_otel import Store, config
from lightning_otel.errors import ConfigError
from lightning_otel.exporters import forwarding
from lightning_otel.exporters.forwarding import Disposition, Forwarder, Receipt
from lightning_otel.exporters.forwarding.senders import HttpSender, sender_for
from lightning_otel.types import Event, Span
from lightning_otel.types import conventions as c

Fill = Callable[..., list[Span]]


def sender(endpoint: Endpoint, **changes: object) -> HttpSender:
    found = config.otlp_endpoint(endpoint.url)
    assert found is not None
    return HttpSender(replace(found, timeout_s=2.0, **changes))  # type: ignore[arg-type]  # any


class Clock:
    """Waits in no time, and knows how long it would have been."""

    def __init__(self, is_over: Callable[[float], bool] = lambda now: False) -> None:
        self.waits: list[float] = []
        self._is_over = is_over

    @property
    def now_s(self) -> float:
        return sum(self.waits)

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return self._is_over(self.now_s)


@contextmanager
def forwarder_of(
    store: Store, endpoint: Endpoint, clock: Clock | None = None
) -> Iterator[Forwarder]:
    """Forwards the store under one name; a process's end is the block's."""
    with store.follow("otlp") as follower:
        yield Forwarder(
            follower, sender(endpoint), with_content=False, wait=(clock or Clock()).wait
        )
        follower.close()


def test_forwarder_keeps_what_the_program_suppressed(
    store: Store, fill: Fill, endpoint: Endpoint
) -> None:
    """It is in the store, and waits for nothing; alone in a batch no request is made of it."""
    fill(2)
    fill(1, attributes={c.SUPPRESSED: True})

    with forwarder_of(store, endpoint) as forwarder:
        assert forwarder.send_waiting()
        fill(1, attributes={c.SUPPRESSED: True})
        assert forwarder.send_waiting()

    assert (forwarder.delivered, forwarder.withheld) == (2, 2)


@pytest.mark.parametrize("is_allowed", [False, True])
def test_forwarder_sends_content_only_where_allowed(
    store: Store, fill: Fill, endpoint: Endpoint, is_allowed: bool
) -> None:
    """Messages, token ids and the like stay here unless they may leave, in events too."""
    content = dict.fromkeys(c.CONTENT_KEYS, "secret")
    fill(1, attributes={**content, "n": 1}, events=(Event("e", 5, {**content, "index": 0}),))
    with store.follow("otlp") as follower:
        Forwarder(follower, sender(endpoint), with_content=is_allowed).send_waiting()

    (span,) = endpoint.spans
    found = [{each.key for each in under.attributes} for under in (span, *span.events)]
    kept = set(content) if is_allowed else set()
    assert found == [{"n", *kept}, {"index", *kept}]


JSON_PARTIAL = b'{"partialSuccess": {"rejectedSpans": "2", "errorMessage": "too old"}}'
ALL, NONE = (3, {}, ""), (0, {}, "waits")
SOME = (1, {"partial success: too old": 2}, "")
ANSWERS = {
    "redirect": (Reply(302, headers=(("Location", "http://127.0.0.1:1/login"),)), NONE),
    "not modified": (Reply(304), NONE),
    "a page": (Reply(200, b"<html>please log in</html>", "text/html"), NONE),
    "a page called protobuf": (Reply(200, b"<html>please log in</html>"), NONE),
    "broken JSON": (Reply(200, b"[1", "application/json"), NONE),
    "unauthorized": (Reply(401, b"who are you", "text/plain"), NONE),
    "not found": (Reply(404), NONE),
    "busy": (Reply(503), NONE),
    "broken": (Reply(500), NONE),
    "bad whatever it is sent": (Reply(400), NONE),
    "accepted": (Reply(202), ALL),
    "empty": (Reply(200, b"", "text/plain"), ALL),
    "empty JSON": (Reply(200, b"{}", "application/json"), ALL),
    "a warning": (Reply(200, partial(0, "a warning")), ALL),
    "none rejected": (
        Reply(200, b'{"partialSuccess": {"rejectedSpans": "0"}}', "application/json; x=y"),
        ALL,
    ),
    "partial": (Reply(200, partial(2, "too old")), SOME),
    "partial in JSON": (Reply(200, JSON_PARTIAL, "application/json"), SOME),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_forwarder_believes_a_well_formed_answer_alone(
    store: Store, fill: Fill, endpoint: Endpoint, name: str
) -> None:
    """Until one comes the spans wait; what it leaves out is counted and not sent again."""
    spans = fill(3)
    reply, (delivered, rejected, last_error) = ANSWERS[name]
    endpoint.reply = lambda sent, size: reply
    with forwarder_of(store, endpoint, Clock(lambda now: now > 100)) as forwarder:
        is_taken = forwarder.send_waiting()
        counts = forwarder.delivered, dict(forwarder.rejected), bool(forwarder.last_error)
    requests = len(endpoint.sizes)
    endpoint.spans.clear()
    endpoint.reply = lambda sent, size: Reply()
    with forwarder_of(store, endpoint) as forwarder:
        assert forwarder.send_waiting()
        assert forwarder.last_error == ""

    assert counts == (delivered, rejected, bool(last_error))
    assert is_taken == (requests == 1)
    assert endpoint.counts() == ({} if is_taken else {span.span_id: 1 for span in spans})


def test_forwarder_passes_over_what_cannot_be_sent(
    store: Store, fill: Fill, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """413 makes batches small; one span too large, or of no id, costs no other one."""
    monkeypatch.setattr(forwarding, "BATCH_BYTES", 50_000)
    spans = fill(40, attributes={"text": "x" * 1_000})
    fill(1, attributes={"text": "x" * 20_000})
    fill(1, trace_id="abc")
    spans += fill(1, attributes={"text": "half \ud83d"}, name="\udcff")
    endpoint.reply = lambda sent, size: Reply(413) if size > 10_000 else Reply()
    with forwarder_of(store, endpoint) as forwarder:
        assert forwarder.send_waiting()
        counts = forwarder.delivered, dict(forwarder.rejected)

    large = "HTTP 413 Request Entity Too Large"
    assert counts == (41, {large: 1, "'abc' is no id of 16 bytes": 1})
    assert endpoint.counts() == {span.span_id: 1 for span in spans}
    assert max(endpoint.sizes) < 40


@settings(
    deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(bad=st.sets(st.integers(0, 19), max_size=4))
def test_forwarder_finds_the_poison(
    store: Store, fill: Fill, endpoint: Endpoint, bad: set[int]
) -> None:
    """400 for a batch is tracked down to the spans at fault; every other one is delivered once."""
    spans = fill(20)
    poison = {spans[index].span_id for index in bad}

    def reply(sent: Sequence[OtlpSpan], size: int) -> Reply:
        is_bad = any(span.span_id.hex() in poison for span in sent)
        return Reply(400, b"bad thing", "text/plain") if is_bad else Reply()

    endpoint.spans.clear()
    endpoint.reply = reply
    with forwarder_of(store, endpoint) as forwarder:
        assert forwarder.send_waiting()
        counts = forwarder.delivered, dict(forwarder.rejected)

    assert counts == (20 - len(bad), {"HTTP 400 Bad Request: bad thing": len(bad)} if bad else {})
    assert endpoint.counts() == {s.span_id: 1 for s in spans if s.span_id not in poison}


@pytest.mark.parametrize(
    ("header", "waits"),
    [
        ("", [(0.5 * longest, longest) for longest in (1, 2, 4, 8, 16, 32, 60, 60)]),
        ("120", [(120, 120)]),
        ("a date in 300 s", [(200, 300)]),
        ("1000000", [(900, 900)]),
        ("soon", [(0.5, 1)]),
        ("-5", [(0.5, 1)]),
    ],
)
def test_forwarder_waits_ever_longer_or_as_it_is_asked_to(
    store: Store, fill: Fill, endpoint: Endpoint, header: str, waits: list[tuple[float, float]]
) -> None:
    """Up to a minute, with jitter; a server that says when to come back is left alone till then."""
    fill(1)
    if header == "a date in 300 s":
        header = formatdate(time.time() + 300, usegmt=True)
    endpoint.reply = lambda sent, size: Reply(429, headers=(("Retry-After", header),))
    clock = Clock()
    clock._is_over = lambda now: len(clock.waits) == len(waits)
    with forwarder_of(store, endpoint, clock) as forwarder:
        forwarder.send_waiting()
        assert "429" in forwarder.last_error

    for waited, (low, high) in zip(clock.waits, waits, strict=True):
        assert low <= waited <= high


def test_forwarder_resumes_after_each_kind_of_end(
    store: Store, fill: Fill, endpoint: Endpoint
) -> None:
    """A half that was delivered before the end is not sent again by the next start."""
    spans = fill(64)
    endpoint.reply = lambda sent, size: (
        Reply(413) if len(sent) > 16 else Reply(503) if len(endpoint.spans) >= 32 else Reply()
    )
    with forwarder_of(store, endpoint, Clock(lambda now: now > 10)) as forwarder:
        assert not forwarder.send_waiting()
        assert forwarder.delivered == 32
    endpoint.reply = lambda sent, size: Reply()
    with forwarder_of(store, endpoint) as forwarder:
        assert forwarder.send_waiting()

    assert endpoint.counts() == {span.span_id: 1 for span in spans}


def test_sender_survives_silence_and_nonsense(endpoint: Endpoint) -> None:
    """No answer, half an answer, an endless one and nobody at all are all: later."""
    hang = threading.Event()
    spoken = sender(endpoint)
    spoken._timeout_s = 0.2
    replies = [
        Reply(hang=hang),
        Reply(200, b"x" * 100_000),
        Reply(headers=(("Content-Encoding", "gzip"),), body=b"not gzip"),
    ]
    endpoint.reply = lambda sent, size: replies.pop(0)
    found = [spoken.send(b"") for _ in range(3)]
    hang.set()
    spoken.url = "http://127.0.0.1:9/v1/traces"
    found.append(spoken.send(b""))

    assert [answer.verdict for answer in found] == [Disposition.LATER] * 4
    assert found[0].reason == "no answer in time"
    assert "refused" in found[3].reason


def test_sender_sends_as_the_environment_says(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers, compression and the path are those OpenTelemetry's settings name."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x,x-team=a%2Cb")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint.url + "/own/path")
    own = config.otlp_endpoint()
    named = config.otlp_endpoint(endpoint.url + "/base/")
    assert own is not None
    assert named is not None
    answers = [sender_for(each).send(b"") for each in (own, named)]

    assert answers == [Receipt(Disposition.DELIVERED)] * 2
    assert endpoint.paths == ["/own/path", "/base/v1/traces"]
    assert endpoint.headers[0]["authorization"] == "Bearer x"
    assert endpoint.headers[0]["x-team"] == "a,b"
    assert endpoint.headers[0]["content-encoding"] == "gzip"


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "ftp://x", "http://", "file:///etc/passwd"])
def test_sender_refuses_what_is_no_endpoint(url: str) -> None:
    """A URL without a scheme or a host is named."""
    found = config.otlp_endpoint(url)
    assert found is not None
    with pytest.raises(ConfigError, match="no OTLP endpoint"):
        sender_for(found)


def test_forwarder_speaks_grpc(store: Store, fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gRPC the same: taken, too large, bad and down are told apart; by HTTP it is named."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc  # type: ignore[import-untyped]  # has no stubs
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    taken: list[str] = []
    spans = fill(10)

    def export(body: bytes, context: grpc.ServicerContext) -> bytes:
        (resource, *_) = ExportTraceServiceRequest.FromString(body).resource_spans or [None]
        sent = [span.span_id.hex() for span in resource.scope_spans[0].spans] if resource else []
        if spans[3].span_id in sent:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "bad")
        taken.extend(sent)
        return b""

    server = grpc.server(ThreadPoolExecutor(2))
    methods = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    found = config.otlp_endpoint(f"http://127.0.0.1:{port}")
    assert found is not None
    spoken = sender_for(found)
    with store.follow("otlp") as follower:
        forwarder = Forwarder(follower, spoken, with_content=False, wait=Clock().wait)
        assert forwarder.send_waiting()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    by_http = config.otlp_endpoint(f"http://127.0.0.1:{port}")
    assert by_http is not None
    wrong = sender_for(by_http).send(b"")
    server.stop(0).wait()
    down = spoken.send(b"")

    assert sorted(taken) == sorted(s.span_id for s in spans if s is not spans[3])
    assert dict(forwarder.rejected) == {"gRPC INVALID_ARGUMENT: bad": 1}
    assert wrong.verdict is Disposition.LATER
    assert wrong.reason == "this is a gRPC port: set OTEL_EXPORTER_OTLP_PROTOCOL=grpc"
    assert down.verdict is Disposition.LATER
