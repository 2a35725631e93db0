"""A walk over the protobuf of a trace request that builds nothing.

It counts what a decoder would make objects of, mends text that the decoder would refuse, and finds
the spans of a request that it refuses as a whole.
Source: the protobuf encoding guide, and ``trace.proto`` of OTLP 1.x for the field numbers.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

from google.protobuf.descriptor import (  # type: ignore[import-untyped]  # no stubs
    FieldDescriptor,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lightning_otel.errors import ReceiveError
from lightning_otel.receivers.limits import Limits, too_many

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

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT: Final = 10
DEPTH: Final = 100
"""Messages within messages; where the decoder stops too."""


class RawSpan(NamedTuple):
    """A span of a request, still encoded, with the resource and scope it stands under."""

    resource: bytes
    scope: bytes
    span: bytes


def check(body: bytes, limits: Limits) -> None:
    """Refuse a trace request of more messages than it may have, without decoding it.

    Raises:
        TooLargeError: It has more.
        ReceiveError: It is no protobuf, or nested too deep.
    """
    # An empty message takes two bytes: a short body cannot have too many.
    if len(body) > 2 * limits.messages:
        try:
            _count(body, limits)
        except IndexError as exc:
            raise _malformed() from exc


def _count(body: bytes, limits: Limits) -> None:
    position, end, schema, left = 0, len(body), _REQUEST, limits.messages
    above: list[tuple[int, _Schema]] = []
    while True:
        while position == end:
            if not above:
                return
            end, schema = above.pop()
        tag = body[position]
        position += 1
        if tag > 127:
            tag, position = _varint(body, position - 1)
        kind = tag & 7
        if kind == _BYTES:
            length = body[position]
            position += 1
            if length > 127:
                length, position = _varint(body, position - 1)
            if position + length > end:
                raise _malformed()
            inner = schema.get(tag >> 3)
            if inner is None:
                position += length
                continue
            left -= 1
            if left < 0:
                raise too_many(limits)
            if length:
                if len(above) >= DEPTH:
                    raise ReceiveError(f"the body is nested deeper than {DEPTH} messages; flatten")
                above.append((end, schema))
                end, schema = position + length, inner
        else:
            position = _after(body, position, kind)
            if position > end:
                raise _malformed()


def mend_text(body: bytes) -> bytes:
    """A request with a ``?`` for each byte of its texts that is no UTF-8, and so of equal length.

    What is no message is left as it is, for the decoder to refuse.
    """
    mended = bytearray(body)
    left = [(0, len(body), ExportTraceServiceRequest.DESCRIPTOR)]
    while left:
        position, end, message = left.pop()
        try:
            while position < end:
                tag, position = _varint(body, position)
                if tag & 7 != _BYTES:
                    position = _after(body, position, tag & 7)
                    continue
                length, start = _varint(body, position)
                position = start + length
                field = message.fields_by_number.get(tag >> 3)
                if field is None or position > end:
                    continue
                if field.message_type is not None:
                    left.append((start, position, field.message_type))
                elif field.type == FieldDescriptor.TYPE_STRING:
                    mended[start:position] = _mended(body[start:position])
        except (IndexError, ReceiveError):
            continue
    return bytes(mended)


def _mended(text: bytes) -> bytes:
    if text.isascii():
        return text
    return text.decode("utf-8", "surrogateescape").encode("utf-8", "replace")


def raw_spans(body: bytes) -> list[RawSpan]:
    """The spans of a request, each by itself.

    Raises:
        ReceiveError: The body is no trace request.
    """
    found = []
    try:
        for _, in_resource in _messages(body, 1):
            resource = b"".join(part for _, part in _messages(in_resource, 1))
            for _, in_scope in _messages(in_resource, 2):
                scope = b"".join(part for _, part in _messages(in_scope, 1))
                found += [RawSpan(resource, scope, span) for _, span in _messages(in_scope, 2)]
    except IndexError as exc:
        raise _malformed() from exc
    return found


def _messages(body: bytes, wanted: int) -> Iterator[tuple[int, bytes]]:
    """The parts of a message under one field number."""
    position = 0
    while position < len(body):
        tag, position = _varint(body, position)
        if tag & 7 != _BYTES:
            position = _after(body, position, tag & 7)
            continue
        length, position = _varint(body, position)
        if position + length > len(body):
            raise _malformed()
        if tag >> 3 == wanted:
            yield wanted, body[position : position + length]
        position += length
    if position != len(body):
        raise _malformed()


def _varint(body: bytes, position: int) -> tuple[int, int]:
    """The number at a position, and where it ends."""
    number = 0
    for index in range(_LONGEST_VARINT):
        byte = body[position + index]
        number |= (byte & 127) << (7 * index)
        if byte < 128:
            return number, position + index + 1
    raise _malformed()


def _after(body: bytes, position: int, kind: int) -> int:
    """Where a value that is no message ends."""
    if kind == _VARINT:
        return _varint(body, position)[1]
    if kind == _FIXED64:
        return position + 8
    if kind == _FIXED32:
        return position + 4
    raise _malformed()


def _malformed() -> ReceiveError:
    return ReceiveError("the body is not a trace request in protobuf; see the OTLP specification")
