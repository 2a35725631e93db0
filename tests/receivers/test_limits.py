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


def test_inflated_gives_back_what_was_compressed() -> None:
    """Up to the limit itself, in members of every length, padded; one member more is refused."""
    members = b"".join(gzip.compress(part, 1) for part in _DRAWN)

    assert inflated(members + bytes(100)) == b"".join(_DRAWN)
    for each in (b"", os.urandom(_LIMIT), bytes(_LIMIT)):
        assert inflated(gzip.compress(each), Limits(body_bytes=_LIMIT)) == each
        assert inflated(zlib.compress(each), Limits(body_bytes=_LIMIT)) == each
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
