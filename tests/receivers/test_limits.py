"""Inflation within limits."""

import gzip
import os
import zlib
from random import Random

import pytest

from lightning_otel.errors import ReceiveError, TooLargeError
from lightning_otel.receivers import Limits, inflated

_LIMIT = 1 << 20
_DRAWN = [Random(0).randbytes(size) for size in range(0, 10_000, 10)]  # some look like members


@pytest.mark.parametrize(
    ("body", "content"),
    [(gzip.compress(each), each) for each in (b"", os.urandom(_LIMIT), bytes(_LIMIT))]
    + [
        (zlib.compress(bytes(_LIMIT)), bytes(_LIMIT)),
        (gzip.compress(b"a") + gzip.compress(b"b") + bytes(100), b"ab"),
    ],
    ids=["empty", "random", "zeros", "deflate", "members and padding"],
)
def test_inflated_gives_back_what_was_compressed(body: bytes, content: bytes) -> None:
    """Of any compressibility, in one member or several, up to the limit itself."""
    assert inflated(body, Limits(body_bytes=_LIMIT)) == content


def test_inflated_takes_so_many_members() -> None:
    """Members of every length are read across slices; a body of more than allowed is refused."""
    members = b"".join(gzip.compress(part, 1) for part in _DRAWN)

    assert inflated(members) == b"".join(_DRAWN)
    with pytest.raises(TooLargeError):
        inflated(members + gzip.compress(b""))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", ReceiveError),
        (b"no gzip", ReceiveError),
        (gzip.compress(b"abc")[:-1], ReceiveError),
        (gzip.compress(os.urandom(_LIMIT))[:-100_000], ReceiveError),
        (gzip.compress(b"abc") + b"more", ReceiveError),
        (gzip.compress(b"abc")[:-5] + b"\0\0\0\0\0", ReceiveError),
        (gzip.compress(bytes(_LIMIT + 1)), TooLargeError),
        (gzip.compress(bytes(_LIMIT)) + gzip.compress(b"x"), TooLargeError),
    ],
    ids=["empty", "other", "cut", "cut-long", "more", "wrong-sum", "large", "large-in-two"],
)
def test_inflated_refuses(body: bytes, error: type[Exception]) -> None:
    """Cut off, not a gzip, something behind it, a wrong checksum, one byte too much."""
    with pytest.raises(error):
        inflated(body, Limits(body_bytes=_LIMIT))
