"""OTLP/gRPC on the port of OTLP/HTTP: what real clients send, and what is refused to them."""

from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from tests.serve.serving import Serving, request_of

from lightning_otel import Store

grpc = pytest.importorskip("grpc", reason="needs a gRPC client")
exporters = pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")

SERVICES = "/opentelemetry.proto.collector."
EXPORT = f"{SERVICES}trace.v1.TraceService/Export"


def called(port: int, path: str, body: bytes, **metadata: str) -> bytes:
    """The answer to a call; raises what the client makes of a refusal."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(path)
        answer: bytes = call(body, timeout=20, metadata=[*metadata.items()])
        return answer


@pytest.mark.parametrize("compression", ["NoCompression", "Gzip", "Deflate"])
def test_the_sdks_exporter_is_served(tmp_path: Path, compression: str) -> None:
    """Spans of a program that sends by gRPC, as Python's SDK does by default, are stored."""
    with Serving(tmp_path / "s.duckdb", "--port", "0") as running:
        exporter = exporters.OTLPSpanExporter(
            endpoint=running.url, insecure=True, compression=getattr(grpc.Compression, compression)
        )
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(exporter))
        tracer = provider.get_tracer("some.library")
        for number in range(1000):
            tracer.start_span(f"work {number}", attributes={"text": "x" * 500}).end()
        assert provider.force_flush(20_000)
        provider.shutdown()
        code, said = running.end()

    assert code == 0
    assert "1,000 spans taken" in said
    assert len(Store(tmp_path / "s.duckdb").spans().rows()) == 1000


@pytest.mark.parametrize(
    ("path", "body", "code", "details"),
    [
        (EXPORT, b"\xff\xff", "INVALID_ARGUMENT", "not a trace request in protobuf"),
        (EXPORT, b"\0" * (21 << 20), "RESOURCE_EXHAUSTED", "20971520 bytes"),
        (f"{SERVICES}metrics.v1.MetricsService/Export", b"", "UNIMPLEMENTED", "takes traces"),
        ("/v1/resources/promote", b"", "", "505"),
        ("/v1/traces", b"", "", "505"),
        ("/", b"", "", "505"),
    ],
)
def test_what_is_no_trace_request_is_refused(
    shared: Serving, path: str, body: bytes, code: str, details: str
) -> None:
    """With a status and a reason; no other address is reached by a call."""
    with pytest.raises(grpc.RpcError) as refusal:
        called(shared.port, path, body)

    assert not code or refusal.value.code().name == code
    assert details in refusal.value.details()


def test_a_call_needs_the_token_where_there_is_one(tmp_path: Path) -> None:
    """As a header, like any other sender; a rejected span is named, and takes no other with it."""
    token_file = tmp_path / "token"
    request = request_of(3)
    request.resource_spans[0].scope_spans[0].spans[1].trace_id = b"short"
    body = request.SerializeToString()
    with Serving(tmp_path / "s.duckdb", "--port", "0", "--token-file", str(token_file)) as running:
        bearer = f"Bearer {token_file.read_text().strip()}"
        right = called(running.port, EXPORT, body, authorization=bearer)
        with pytest.raises(grpc.RpcError) as refusal:
            called(running.port, EXPORT, body)

    partial = ExportTraceServiceResponse.FromString(right).partial_success
    assert partial.rejected_spans == 1
    assert "trace id is not 16 bytes long" in partial.error_message
    assert refusal.value.code().name == "UNAUTHENTICATED"
