"""Spans of ours on their way out, as the SDK's own encoder writes them."""

import base64
from collections.abc import Sequence
from itertools import chain

import orjson
from google.protobuf.json_format import (  # type: ignore[import-untyped]  # no stubs
    MessageToDict,
)
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lightning_otel.store.engines import otlp
from lightning_otel.types import Span

_IDS = ("traceId", "spanId", "parentSpanId")


def request_of(spans: Sequence[Span]) -> ExportTraceServiceRequest:
    """The trace request in which we, and the SDK likewise, send them."""
    return ExportTraceServiceRequest.FromString(otlp.encode_request(spans, with_content=True))


def json_of(request: ExportTraceServiceRequest | ExportLogsServiceRequest) -> bytes:
    """A request in OTLP's JSON: protobuf's own, but with hex ids."""
    document = MessageToDict(request)
    for in_resource in chain.from_iterable(document.values()):
        for in_scope in (*in_resource.get("scopeSpans", []), *in_resource.get("scopeLogs", [])):
            for record in (*in_scope.get("spans", []), *in_scope.get("logRecords", [])):
                for item in (record, *record.get("links", [])):
                    item |= {key: base64.b64decode(item[key]).hex() for key in _IDS if key in item}
    return orjson.dumps(document)
