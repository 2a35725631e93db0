"""Receivers: OTLP of any form, and Agent Lightning's stores, become spans.

Pure decoding with limits, checked before anything is built. A bad span becomes a :class:`Rejected`
with its reason; only what is no batch at all raises.
"""

import gzip
import io
import zlib
from dataclasses import dataclass
from typing import Final

from lightning_otel.errors import ReceiveError, TooLargeError

_MEMBER: Final = b"\x1f\x8b\x08"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A span that is not stored, and why; ``is_known`` if the store recorded it itself."""

    reason: str
    is_known: bool = False


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one request, all checked before it is decoded.

    Attributes:
        body_bytes: Of the body, inflated. Source: the OTLP specification recommends 20 MiB.
        messages: Of spans, attributes, values, events. An empty one takes two bytes on the wire and
            175 in memory, so a gzip of 10 kB can stand for 877 MB. The Collector's default batch
            of 8,192 spans with 20 attributes each holds 344,064.
        attributes: Of one span.
        members: Of a gzip, counted by their first three bytes, which occur by chance once in 16 MB.
            bgzip makes a member of each 64 KiB: 320 of the longest body.
    """

    body_bytes: int = 20 << 20
    messages: int = 400_000
    attributes: int = 10_000
    members: int = 1000

    def too_many(self) -> TooLargeError:
        """Return the refusal of a body of too many parts."""
        return TooLargeError(
            f"the body has more than {self.messages} spans, attributes, values and events; "
            "send fewer spans at once"
        )


DEFAULT_LIMITS: Final = RequestLimits()


def inflated(body: bytes, limits: RequestLimits = DEFAULT_LIMITS) -> bytes:
    """Return the content of a gzip of one or several members, or of zlib's (``deflate``).

    Raises:
        ReceiveError: It is neither, or cut off.
        TooLargeError: It exceeds the limit of a body, up to which it was inflated.
    """
    if body.count(_MEMBER) > limits.members:
        raise TooLargeError(f"the body has more than {limits.members} gzip members; send one")
    most = limits.body_bytes + 1
    try:
        if body.startswith(_MEMBER):
            content = gzip.GzipFile(fileobj=io.BytesIO(body)).read(most)
        else:
            inflating = zlib.decompressobj()
            content = inflating.decompress(body, most)
            if len(content) < most and (not inflating.eof or inflating.unused_data):
                raise EOFError
    except EOFError as exc:
        raise ReceiveError("the compressed body is cut off; send it again") from exc
    except (zlib.error, gzip.BadGzipFile) as exc:
        raise ReceiveError("the body is not compressed as it says; send it again") from exc
    if len(content) == most:
        raise TooLargeError(
            f"the body is larger than {limits.body_bytes} bytes; send fewer spans at once"
        )
    return content
