"""Inflation within limits."""

import gzip
import os
from random import Random

import pytest

from lightning_otel.errors import ReceiveError, TooLargeError
from lightning_otel.receivers.limits import Limits, inflated


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 3_000_000])
@pytest.mark.parametrize("make", [os.urandom, bytes])
def test_inflated_gives_back_what_was_compressed(size: int, make: object) -> None:
    """Of any length and compressibility."""
    body = make(size)  # type: ignore[operator]  # one of two functions

    assert inflated(gzip.compress(body)) == body


def test_inflated_reads_every_member() -> None:
    """A gzip may be several, and be padded with zeros."""
    assert inflated(gzip.compress(b"a") + gzip.compress(b"b") + bytes(100)) == b"ab"


def test_inflated_takes_members_in_linear_time_and_so_many() -> None:
    """Members of every length are read across slices; a body of more than allowed is refused."""
    draw = Random(0)  # within random bytes a member may seem to begin
    parts = [draw.randbytes(size) for size in range(0, 10_000, 10)]
    members = [gzip.compress(part, 1) for part in parts]

    assert inflated(b"".join(members)) == b"".join(parts)
    with pytest.raises(TooLargeError):
        inflated(b"".join(members) + gzip.compress(b""))


@pytest.mark.parametrize("size", [1 << 20, 5 << 20])
def test_inflated_holds_the_limit_exactly(size: int) -> None:
    """As much as allowed is read, one byte more is refused."""
    limits = Limits(body_bytes=size)

    assert len(inflated(gzip.compress(bytes(size)), limits)) == size
    with pytest.raises(TooLargeError):
        inflated(gzip.compress(bytes(size + 1)), limits)
    with pytest.raises(TooLargeError):
        inflated(gzip.compress(bytes(size)) + gzip.compress(b"x"), limits)


@pytest.mark.parametrize(
    "body",
    [b"", b"no gzip", gzip.compress(b"abc")[:-1], gzip.compress(os.urandom(3 << 20))[:-100_000],
     gzip.compress(b"abc") + b"more", gzip.compress(b"abc")[:-5] + b"\0\0\0\0\0"],
    ids=["empty", "other", "cut", "cut-long", "more", "wrong-sum"],
)  # fmt: skip
def test_inflated_refuses_what_is_damaged(body: bytes) -> None:
    """Cut off, not a gzip, something behind it, a wrong checksum."""
    with pytest.raises(ReceiveError):
        inflated(body)
