"""How much one request may hold, and its inflation within that."""

import zlib
from dataclasses import dataclass
from typing import Final

from lightning_otel.errors import ReceiveError, TooLargeError

_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS
_STEP: Final = 1 << 20
_SLICE: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may hold; all of it is checked before the request is decoded.

    Attributes:
        body_bytes: Of the body, inflated. Source: the OTLP specification recommends 20 MiB.
        messages: Of the parts that a decoder makes an object of: spans, attributes, values, events.
            An empty one takes two bytes on the wire and 175 in memory, so that a gzip of 10 kB can
            stand for 877 MB. The Collector's default batch of 8,192 spans with 20 attributes each
            holds 344,064.
        attributes: Of one span.
        members: Of a gzip; bgzip makes one of each 64 KiB, which are 320 in the longest body.
    """

    body_bytes: int = 20 << 20
    messages: int = 400_000
    attributes: int = 10_000
    members: int = 1000


DEFAULT_LIMITS: Final = Limits()


def inflated(body: bytes, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """The content of a body that is a gzip of one or several members, or zlib's (``deflate``).

    Raises:
        ReceiveError: It is neither, or cut off.
        TooLargeError: There is more in it than a body may hold; no more than that was inflated.
    """
    if not body:
        raise ReceiveError("the compressed body is empty; send it again")
    found: list[bytes] = []
    left = limits.body_bytes
    member, members = zlib.decompressobj(_GZIP_OR_ZLIB), 1
    # In slices: what is behind a member's end is copied for each member.
    for start in range(0, len(body), _SLICE):
        rest, part = body[start : start + _SLICE], b""
        while rest or len(part) == _STEP:  # a full step may have left some inside
            if member.eof:
                rest = rest.lstrip(b"\0")  # a gzip may be padded
                if not rest:
                    break
                member, members = zlib.decompressobj(_GZIP_OR_ZLIB), members + 1
            if members > limits.members:
                raise TooLargeError(
                    f"the body has more than {limits.members} gzip members; send one"
                )
            try:
                part = member.decompress(rest, min(left + 1, _STEP))
            except zlib.error as exc:
                raise ReceiveError("the body is not compressed as it says; send it again") from exc
            left -= len(part)
            if left < 0:
                raise too_large(limits)
            found.append(part)
            rest = member.unused_data if member.eof else member.unconsumed_tail
    if not member.eof:
        raise ReceiveError("the compressed body is cut off; send it again")
    return b"".join(found)


def too_large(limits: Limits) -> TooLargeError:
    """The refusal of a body that is too long."""
    return TooLargeError(
        f"the body is larger than {limits.body_bytes} bytes; send fewer spans at once"
    )


def too_many(limits: Limits) -> TooLargeError:
    """The refusal of a body of too many parts."""
    return TooLargeError(
        f"the body has more than {limits.messages} spans, attributes, values and events; "
        "send fewer spans at once"
    )
