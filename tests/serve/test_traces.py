"""Spans of real senders over real HTTP: in the store when 200 is heard, or refused, or kept later.

``LIGHTNING_TEST_KILLS`` is how many servers are killed, times five.
"""

import asyncio
import gc
import gzip
import json
import os
import random
import resource
import signal
import socket
import threading
from pathlib import Path

import orjson
import pytest
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]  # no stubs
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from tests.receivers.requests import json_of
from tests.serve.serving import JSON, PROTOBUF, Serving, body_of, request_of

from lightning_otel import Store
from lightning_otel.messages import plain_text
from lightning_otel.serve import ingest, server
from lightning_otel.serve.ingest import Ingester
from lightning_otel.serve.responses import RefusalError
from lightning_otel.store.maintenance import Maintainer
from lightning_otel.types import conventions as c

KILLS = -(-int(os.environ.get("LIGHTNING_TEST_KILLS", "5")) // 5)


@pytest.mark.parametrize("compression", list(Compression))
def test_traces_takes_what_the_sdk_sends(shared: Serving, compression: Compression) -> None:
    """A traced program elsewhere is stored span by span, with tree, events and how it came."""
    name = f"sdk {compression}"
    exporter = OTLPSpanExporter(f"{shared.url}/v1/traces", compression=compression)
    provider = TracerProvider(resource=Resource({"service.name": "elsewhere"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("a.library")
    with tracer.start_as_current_span(name) as root, tracer.start_as_current_span("inner") as inner:
        inner.set_attributes({c.OPERATION: "chat", "numbers": [1, 2], "on": True})
        inner.add_event("happened", {"why": "because"})
    provider.shutdown()

    trace_id = format(root.get_span_context().trace_id, "032x")
    outer, within = Store(shared.store).spans(trace_id=trace_id).rows()
    assert (outer.name, within.name) == (name, "inner")
    assert within.parent_span_id == outer.span_id
    assert within.attributes == {
        c.OPERATION: "chat",
        "numbers": [1, 2],
        "on": True,
        c.RECEIVED: "otlp:127.0.0.1",
    }
    assert within.events[0].attributes == {"why": "because"}
    assert within.otel_resource["service.name"] == "elsewhere"
    assert within.scope == "a.library"


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
@pytest.mark.parametrize("content_type", [PROTOBUF, JSON, "application/json; charset=utf-8"])
def test_traces_answers_in_the_senders_format(
    shared: Serving, content_type: str, encoding: str
) -> None:
    """A batch with one bad span is kept but for that one, which the answer counts and explains."""
    request = request_of(3)
    request.resource_spans[0].scope_spans[0].spans[1].trace_id = b"abc"
    kind = content_type.partition(";")[0]
    body = json_of(request) if kind == JSON else request.SerializeToString()

    answer = shared.post(
        gzip.compress(body) if encoding == "gzip" else body,
        content_type,
        content_encoding=encoding,
    )

    reason = "1 × trace id is not 16 bytes long"
    assert (answer.status, answer.headers["content-type"]) == (200, kind)
    if kind == JSON:
        expected = {"rejectedSpans": "1", "errorMessage": reason}
        assert orjson.loads(answer.body) == {"partialSuccess": expected}
    else:
        partial = ExportTraceServiceResponse.FromString(answer.body).partial_success
        assert (partial.rejected_spans, partial.error_message) == (1, reason)
    # Partial success stays unset, as the specification asks; an empty request is one too.
    empty = b"{}" if kind == JSON else b""
    for whole in (json_of(request_of(2)) if kind == JSON else body_of(2), empty):
        answer = shared.post(whole, content_type)
        assert (answer.status, answer.body) == (200, empty)


@pytest.mark.parametrize(
    ("body", "kind", "encoding", "status"),
    [
        (b"no protobuf at all", PROTOBUF, "identity", 400),
        (b"{no json", JSON, "identity", 400),
        (b"[]", JSON, "identity", 400),
        (b"no gzip", PROTOBUF, "gzip", 400),
        (body_of(1), PROTOBUF, "zstd", 415),
        (body_of(1), "text/plain", "identity", 415),
        (body_of(1), "application/x-www-form-urlencoded", "identity", 415),
        (body_of(1), "", "identity", 415),
        (bytes((20 << 20) + 1), PROTOBUF, "identity", 413),
        (gzip.compress(bytes((20 << 20) + 1)), PROTOBUF, "gzip", 413),
    ],
    ids=[
        "no-protobuf", "no-json", "no-object", "no-gzip", "zstd", "text", "form", "untold", "long",
        "long-once-inflated",
    ],
)  # fmt: skip
def test_traces_refuses_what_is_none(
    shared: Serving, body: bytes, kind: str, encoding: str, status: int
) -> None:
    """With the status the specification names, a Status that says why, and nothing of the body."""
    answer = shared.post(body, kind, content_encoding=encoding)

    assert answer.status == status
    message = (
        Status.FromString(answer.body).message
        if kind == PROTOBUF
        else json.loads(answer.body)["message"]
    )
    assert message
    assert body[:8] not in answer.body


@pytest.mark.parametrize("content_type", [PROTOBUF, JSON])
def test_logs_of_model_calls_are_joined_with_their_spans(
    shared: Serving, content_type: str
) -> None:
    """What an instrumentation tells by events alone is the call's; other logs are counted out."""
    trace, span = os.urandom(16), os.urandom(8)
    call = request_of(1)
    found = call.resource_spans[0].scope_spans[0].spans[0]
    found.trace_id, found.span_id = trace, span
    found.attributes.extend(_attributes({c.OPERATION: "chat", c.RESPONSE_ID: span.hex()}))
    said = {
        key: [{"role": role, "parts": [{"type": "text", "content": text}]}]
        for key, role, text in (
            (c.INPUT_MESSAGES, "user", "q"),
            (c.OUTPUT_MESSAGES, "assistant", "a"),
        )
    }
    told = _attributes({c.OPERATION: "chat", c.RESPONSE_ID: span.hex(), **said})
    at_ns = found.end_time_unix_nano
    name = "gen_ai.client.inference.operation.details"
    event = LogRecord(
        time_unix_nano=at_ns, trace_id=trace, span_id=span, event_name=name, attributes=told
    )
    scoped = ScopeLogs(log_records=[event, LogRecord(time_unix_nano=at_ns)])
    logs = ExportLogsServiceRequest(resource_logs=[ResourceLogs(scope_logs=[scoped])])
    body = json_of(logs) if content_type == JSON else logs.SerializeToString()
    assert shared.post(call.SerializeToString()).status == 200

    answer = shared.ask("POST", "/v1/logs", body, content_type=content_type)

    assert answer.status == 200
    reason = "1 × the log record tells of no model call; only spans and GenAI events are kept"
    if content_type == JSON:
        expected = {"rejectedLogRecords": "1", "errorMessage": reason}
        assert orjson.loads(answer.body) == {"partialSuccess": expected}
    else:
        partial = ExportLogsServiceResponse.FromString(answer.body).partial_success
        assert (partial.rejected_log_records, partial.error_message) == (1, reason)
    steps = [s for s in Store(shared.store).transitions() if s.rollout_id == trace.hex()]
    assert [(plain_text(s.observation), plain_text(s.action)) for s in steps] == [("q", "a")]


def _attributes(values: dict[str, object]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in values.items()]


def _value(value: object) -> AnyValue:
    if isinstance(value, dict):
        return AnyValue(kvlist_value=KeyValueList(values=_attributes(value)))
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=map(_value, value)))
    return AnyValue(string_value=str(value))


def test_other_signals_are_refused_for_good(shared: Serving) -> None:
    """Metrics are not stored: 404, which no sender tries again."""
    assert shared.ask("POST", "/v1/metrics", b"", content_type=PROTOBUF).status == 404
    key = f"Bearer {shared.key}"
    other = shared.ask("POST", "/v1/other", b"", content_type=PROTOBUF, authorization=key)
    assert other.status == 404
    assert shared.ask("GET", "/v1/traces", authorization=key).status == 405


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_server_counts_what_came_and_seals_its_segment(tmp_path: Path, number: int) -> None:
    """Stored, rejected and refused are counted, said at the end, and in the store's own sum."""
    request = request_of(3)
    request.resource_spans[0].scope_spans[0].spans[0].span_id = b""
    again = body_of(5)
    store = Store(tmp_path / "s.duckdb")
    with Serving(tmp_path / "s.duckdb", "--port", "0") as running:
        running.post(request.SerializeToString())
        running.post(b"nonsense")
        assert [running.post(again).status for _ in range(3)] == [200] * 3
        key = f"Bearer {running.key}"
        about = json.loads(running.ask("GET", "/v1/status", authorization=key).body)
        code, said = running.end(number)
    (segment,) = (tmp_path / "s.duckdb.d" / "live").glob("*-*.ndjson")
    last = orjson.loads(segment.read_bytes().splitlines()[-1])
    found = [store.accounting()]
    store.settle()
    found.append(store.accounting())

    assert (about["stored"], about["refused"]) == (17, {"400": 1})
    assert about["rejected"] == {"span id is not 8 bytes long": 1}
    assert (code, last["record"]) == (0, "seal")
    assert "17 spans taken" in said
    assert "1 × span id is not 8 bytes long" in said
    assert "1 request refused" in said
    told = (7, {"unfit": 1, "duplicate": 10})
    assert [(each.stored, each.rejected) for each in found] == [told] * 2
    assert all(each.is_balanced for each in found)
    assert len(store.spans().rows()) == 7


def test_serve_takes_the_next_port_that_is_free_and_says_so(tmp_path: Path) -> None:
    """Where OTLP's own port is taken; a port that was asked for is not exchanged for another."""
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", 4318))
        except OSError:
            pass  # taken already, which does as well
        else:
            other.listen()
        with Serving(tmp_path / "s.duckdb") as running:
            assert running.port > 4318
            assert running.post(body_of(1)).status == 200
            _, said = running.end()
        with Serving(tmp_path / "s.duckdb", "--port", "4318") as refused:
            _, why = refused.process.communicate(timeout=20)

    assert "port 4318 is in use" in said
    assert f"listening at {running.port}" in said
    assert refused.process.returncode == 2
    assert "cannot listen at 127.0.0.1, port 4318" in why


@pytest.mark.parametrize("number", range(KILLS))
def test_kill_loses_nothing_that_was_acknowledged(tmp_path: Path, number: int) -> None:
    """``kill -9`` while four senders send: each batch that got 200 is in the store, once."""
    acknowledged: list[str] = []
    enough = threading.Event()
    wanted = random.randint(20, 2000)

    with Serving(tmp_path / "s.duckdb", "--port", "0") as running:

        def send() -> None:
            while True:
                request = request_of(20)
                try:
                    status = running.post(request.SerializeToString()).status
                except OSError:
                    return
                except Exception:  # noqa: BLE001  # the answer was cut by the kill
                    return
                if status == 200:
                    spans = request.resource_spans[0].scope_spans[0].spans
                    acknowledged.extend(span.span_id.hex() for span in spans)
                if len(acknowledged) >= wanted:
                    enough.set()

        senders = [threading.Thread(target=send) for _ in range(4)]
        for sender in senders:
            sender.start()
        assert enough.wait(30)
        os.kill(running.process.pid, signal.SIGKILL)
        for sender in senders:
            sender.join(30)

    kept = [span.span_id for span in Store(tmp_path / "s.duckdb").spans()]
    assert set(acknowledged) <= set(kept)
    assert len(kept) == len(set(kept))


def test_full_disk_is_said_and_loses_nothing(tmp_path: Path) -> None:
    """Where a write fails the sender gets 503 and when to come again, and then all is stored."""
    bodies = [body_of(50) for _ in range(10)]
    with Serving(tmp_path / "s.duckdb", "--port", "0") as running:
        pid = running.process.pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, hard))
        answers = [running.post(body) for body in bodies]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        pairs = zip(bodies, answers, strict=True)
        again = [running.post(body).status for body, answer in pairs if answer.status != 200]
        running.end()

    assert {answer.status for answer in answers} == {200, 503}
    assert {answer.headers.get("retry-after") for answer in answers} == {None, "5"}
    assert set(again) == {200}
    assert len(Store(tmp_path / "s.duckdb").spans().rows()) == 500


def test_intake_sends_away_whom_it_has_no_room_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond so many bodies that wait, a sender is told when to come again; others are served."""
    monkeypatch.setattr(ingest, "_MOST_WAITING", 3)
    ingester = Ingester(store)
    gate = threading.Event()
    ingester._turn.submit(gate.wait)

    async def send() -> list[object]:
        bodies = (
            ingester.take(body_of(1), PROTOBUF, is_compressed=False, came="otlp:x")
            for _ in range(5)
        )
        sent = [asyncio.create_task(body) for body in bodies]
        await asyncio.sleep(0.05)
        gate.set()
        return await asyncio.gather(*sent, return_exceptions=True)

    found = asyncio.run(send())
    ingester.close()

    refused = [each for each in found if isinstance(each, RefusalError)]
    assert [(each.status, each.headers) for each in refused] == [(503, {"Retry-After": "1"})] * 2
    assert len(store.spans().rows()) == 3


@pytest.mark.parametrize("is_idle", [False, True])
def test_upkeep_seals_when_idle_and_settles_what_is_worth_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, is_idle: bool
) -> None:
    """An idle server leaves no open segment, and many become a file; a busy one writes one."""
    if is_idle:
        monkeypatch.setattr(server, "IDLE_S", 0.0)
    ingester = Ingester(store)
    assert store.layout is not None
    maintainer = Maintainer(store.layout)

    gc.freeze()  # each of 64 collections would go through all that earlier tests left
    try:
        for _ in range(64):
            body = ingester.take(body_of(2), PROTOBUF, is_compressed=False, came="otlp:x")
            asyncio.run(body)
            server._settle_store(maintainer, ingester)
    finally:
        gc.unfreeze()
    ingester.close()

    assert bool(list(store.layout.data.glob("spans-*.parquet"))) == is_idle
    assert is_idle or len(store.layout.segments()) == 1
    assert len(store.spans().rows()) == 128
