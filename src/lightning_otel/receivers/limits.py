"""How much one request may hold, and its inflation within that."""

import zlib
from dataclasses import dataclass
from typing import Final

from lightning_otel.errors import ReceiveError, TooLargeError

_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS
_STEP: Final = 1 << 20


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
    """

    body_bytes: int = 20 << 20
    messages: int = 400_000
    attributes: int = 10_000


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
    while body:
        member = zlib.decompressobj(_GZIP_OR_ZLIB)
        while not member.eof:
            try:
                part = member.decompress(body, min(left + 1, _STEP))
            except zlib.error as exc:
                raise ReceiveError("the body is not compressed as it says; send it again") from exc
            body = member.unconsumed_tail
            left -= len(part)
            if left < 0:
                raise too_large(limits)
            if not part and not body and not member.eof:
                raise ReceiveError("the compressed body is cut off; send it again")
            found.append(part)
        body = member.unused_data.lstrip(b"\0")  # a gzip may be padded
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
