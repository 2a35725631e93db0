"""Spans as OTLP: the same bytes as the SDK's, content kept here, nothing that spoils a request."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

from lightning_otel import Store
from lightning_otel.exporters.duckdb import DuckDBSpanExporter
from lightning_otel.store.engines.otlp import encode_request
from lightning_otel.types import Span


def ended(attributes: Mapping[str, Any] | None = None, **changes: Any) -> Span:
    """A finished span."""
    fields: dict[str, Any] = {"name": "work", "parent_span_id": None, "start_ns": 1, "end_ns": 2}
    return Span("ab" * 16, "cd" * 8, attributes=attributes or {}, **{**fields, **changes})


def test_request_is_the_sdks_own(tmp_path: Path) -> None:
    """A span that went through the store is encoded as the SDK's exporter would have done it."""
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
        provider.get_tracer("another.scope").start_span("beside").end()
    provider.shutdown()

    body = encode_request(Store(tmp_path / "s.duckdb").spans(), with_content=True)

    theirs = encode_spans(sorted(memory.get_finished_spans(), key=lambda span: span.start_time))
    assert ExportTraceServiceRequest.FromString(body) == theirs


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("half \ud83d a pair", "half ? a pair"),
        (1 << 80, str(1 << 80)),
        (object, "<class 'object'>"),
        ({"a": [1, None, {"b": "\udc00"}]}, None),
        (None, None),
    ],
)
def test_request_takes_any_value(value: object, wanted: str | None) -> None:
    """What OTLP has no form for becomes text; a lone surrogate spoils only itself."""
    span = ended({"odd": value, "fine": "yes"}, name="na\udcffme", scope="\ud800")

    (sent,) = (
        ExportTraceServiceRequest.FromString(encode_request([span], with_content=True))
        .resource_spans[0]
        .scope_spans[0]
        .spans
    )

    found = {each.key: each.value for each in sent.attributes}
    assert found["fine"].string_value == "yes"
    assert sent.name == "na?me"
    if wanted is not None:
        assert found["odd"].string_value == wanted
