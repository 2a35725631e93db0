"""OTLP's protobuf as spans, and as log records.

Source: ``trace.proto`` and ``logs.proto`` of OTLP 1.x, and the protobuf encoding guide.
"""

import base64
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

from google.protobuf.descriptor_pb2 import (  # type: ignore[import-untyped]  # no stubs
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import (  # type: ignore[import-untyped]  # no stubs
    DescriptorPool,
)
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # no stubs
from google.protobuf.message_factory import (  # type: ignore[import-untyped]  # no stubs
    GetMessageClass,
)
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.logs.v1 import logs_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from lightning_otel.errors import ReceiveError
from lightning_otel.receivers import DEFAULT_LIMITS, Rejected, RequestLimits, logs
from lightning_otel.receivers.otlp import DecodedAttributes, InvalidSpanError, read_span
from lightning_otel.types import Span

_Schema: TypeAlias = "dict[int, _Schema]"
"""The messages within a message by their field number; what is not named is not looked into."""

_ANY_VALUE: Final[_Schema] = {}
_KEY_VALUE: Final[_Schema] = {2: _ANY_VALUE}
_ANY_VALUE.update({5: {1: _ANY_VALUE}, 6: {1: _KEY_VALUE}})
_EVENT: Final[_Schema] = {3: _KEY_VALUE}
_LINK: Final[_Schema] = {4: _KEY_VALUE}
_SPAN: Final[_Schema] = {9: _KEY_VALUE, 11: _EVENT, 13: _LINK, 15: {}}
_SCOPE_SPANS: Final[_Schema] = {1: {3: _KEY_VALUE}, 2: _SPAN}
_REQUEST: Final[_Schema] = {1: {1: {1: _KEY_VALUE, 3: {}}, 2: _SCOPE_SPANS}}
_SCOPE_LOGS: Final[_Schema] = {1: {3: _KEY_VALUE}, 2: {5: _ANY_VALUE, 6: _KEY_VALUE}}
_LOG_REQUEST: Final[_Schema] = {1: {1: {1: _KEY_VALUE, 3: {}}, 2: _SCOPE_LOGS}}

_VARINT, _BYTES, _FIXED = 0, 2, {1: 8, 5: 4}
_MAX_VARINT_BYTES: Final = 10
_MAX_DEPTH: Final = 100
"""Messages within messages; where the decoder stops too."""
# Of the decoder; a pure Python one recurses.
_UNDECODABLE: Final = (DecodeError, RecursionError)

_APART: Final = (
    "opentelemetry.proto.trace.v1.Span",
    "opentelemetry.proto.resource.v1.Resource",
    "opentelemetry.proto.common.v1.InstrumentationScope",
    "opentelemetry.proto.logs.v1.LogRecord",
)
_TEXTS: Final = frozenset({"name", "message", "event_name", "severity_text"})


def _message_classes() -> list[Any]:
    """Return classes of OTLP's messages in which a text is bytes, and each span stays encoded.

    The decoder refuses a whole message for one byte that is no UTF-8, or one value too deep in it.
    """
    pool = DescriptorPool()
    for module in (common_pb2, resource_pb2, trace_pb2, logs_pb2):
        file = FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        messages = list(file.message_type)
        for message in messages:
            messages += message.nested_type
            for field in message.field:
                if field.type == field.TYPE_STRING or field.type_name.lstrip(".") in _APART:
                    field.type = field.TYPE_BYTES
                    field.ClearField("type_name")
        pool.AddSerializedFile(file.SerializeToString())
    requests = "opentelemetry.proto.trace.v1.TracesData", "opentelemetry.proto.logs.v1.LogsData"
    names = (*requests, *_APART)
    return [GetMessageClass(pool.FindMessageTypeByName(name)) for name in names]


_Request, _LogRequest, _Span, _Resource, _Scope, _Log = _message_classes()


def decode_spans(
    body: bytes, came: str, limits: RequestLimits = DEFAULT_LIMITS
) -> Iterator[Span | Rejected]:
    """Return the spans of an ``ExportTraceServiceRequest``; ``came`` is noted on each.

    Raises:
        TooLargeError: It exceeds the limits; nothing was decoded.
        ReceiveError: It is no such message.
    """
    return _read_spans(_parse(body, _Request, _REQUEST, limits), came, limits)


def decode_logs(
    body: bytes, came: str, limits: RequestLimits = DEFAULT_LIMITS
) -> Iterator[Span | Rejected]:
    """Return spans of the records of an ``ExportLogsServiceRequest``, likewise."""
    return logs.read_logs(_read_logs(_parse(body, _LogRequest, _LOG_REQUEST, limits)), came, limits)


def _parse(body: bytes, message: Any, schema: _Schema, limits: RequestLimits) -> Any:
    # An empty message takes two bytes: a short body cannot have too many.
    if len(body) > 2 * limits.messages:
        try:
            budget = _count_messages_left(body, 0, len(body), schema, limits.messages)
        except IndexError as exc:
            raise _malformed_error() from exc
        if budget < 0:
            raise limits.too_many()
    try:
        return message.FromString(body)
    except _UNDECODABLE as exc:
        raise _malformed_error() from exc


def _read_spans(request: Any, came: str, limits: RequestLimits) -> Iterator[Span | Rejected]:
    for item in _read_items(request.resource_spans, "scope_spans", "spans", _Span):
        try:
            yield item if isinstance(item, Rejected) else read_span(*item, came, limits)
        except InvalidSpanError as exc:
            yield Rejected(str(exc))


def _read_logs(request: Any) -> Iterator[logs.Log | Rejected]:
    for item in _read_items(request.resource_logs, "scope_logs", "log_records", _Log):
        if isinstance(item, Rejected):
            yield item
            continue
        fields, otel_resource, scope = item
        try:
            attributes = fields.get("attributes", {})
            yield logs.make_log(fields, attributes, fields.get("body"), otel_resource, scope)
        except InvalidSpanError as exc:
            yield Rejected(str(exc))


def _read_items(
    resources: Any, scoped: str, names: str, message: Any
) -> Iterator[tuple[dict[str, Any], dict[str, Any], str] | Rejected]:
    for in_resource in resources:
        for in_scope in getattr(in_resource, scoped):
            try:
                attributes = _read_attributes(_Resource.FromString(in_resource.resource).attributes)
                scope = _decode_text(_Scope.FromString(in_scope.scope).name)
            except _UNDECODABLE:
                reason = "resource or scope cannot be decoded"
                yield from (Rejected(reason) for _ in getattr(in_scope, names))
                continue
            for encoded in getattr(in_scope, names):
                try:
                    yield _read_fields(message.FromString(encoded)), attributes, scope
                except _UNDECODABLE:
                    noun = message.DESCRIPTOR.name.lower()
                    yield Rejected(f"{noun} cannot be decoded: malformed, or nested too deep")


def _read_fields(message: Any) -> dict[str, Any]:
    fields = {}
    for field, content in message.ListFields():
        if field.name == "attributes":
            content = DecodedAttributes(_read_attributes(content))
        elif field.name in _TEXTS:
            content = _decode_text(content)
        elif field.name == "body":
            content = _read_value(content)
        elif field.name in ("events", "links"):
            content = [_read_fields(item) for item in content]
        elif field.name == "status":
            content = _read_fields(content)
        fields[field.json_name] = content
    return fields


def _read_attributes(message: Any) -> dict[str, Any]:
    return {_decode_text(pair.key): _read_value(pair.value) for pair in message}


def _read_value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    content = getattr(value, kind)
    if kind == "string_value":
        return _decode_text(content)
    if kind == "array_value":
        return [_read_value(item) for item in content.values]
    if kind == "kvlist_value":
        return _read_attributes(content.values)
    if kind == "bytes_value":
        return base64.b64encode(content).decode("ascii")
    return content


def _decode_text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content.decode("utf-8", "surrogateescape").encode("utf-8", "replace").decode()


def _count_messages_left(
    body: bytes, position: int, end: int, schema: _Schema, budget: int, depth: int = 0
) -> int:
    """Return how many more messages a body may have after those in a part of it, undecoded."""
    if depth > _MAX_DEPTH:
        raise ReceiveError(f"the body is nested deeper than {_MAX_DEPTH} messages; flatten")
    while position < end and budget >= 0:
        tag, position = _read_varint(body, position)
        kind = tag & 7
        if kind == _BYTES:
            length, position = _read_varint(body, position)
        elif kind == _VARINT:
            length, position = 0, _read_varint(body, position)[1]
        elif kind in _FIXED:
            length = _FIXED[kind]
        else:
            raise _malformed_error()
        if position + length > end:
            raise _malformed_error()
        inner = schema.get(tag >> 3) if kind == _BYTES else None
        if inner is not None:
            budget -= 1
            if length:
                budget = _count_messages_left(
                    body, position, position + length, inner, budget, depth + 1
                )
        position += length
    return budget


def _read_varint(body: bytes, position: int) -> tuple[int, int]:
    number = body[position]
    if number < 128:
        return number, position + 1
    number &= 127
    for index in range(1, _MAX_VARINT_BYTES):
        byte = body[position + index]
        number |= (byte & 127) << (7 * index)
        if byte < 128:
            return number, position + index + 1
    raise _malformed_error()


def _malformed_error() -> ReceiveError:
    return ReceiveError(
        "the body is not a trace request in protobuf, nor one of logs at /v1/logs; "
        "see the OTLP specification"
    )
