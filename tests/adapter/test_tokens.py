"""Token ids and logprobs as text."""

import base64
import struct
import sys
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_otel.adapter import tokens
from lightning_otel.adapter.tokens import decode_ids, decode_logprobs, encode_ids, encode_logprobs

ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)
logprobs = st.lists(st.floats() | st.just(0), max_size=20)


@given(st.lists(ids, min_size=1, max_size=4), st.lists(logprobs, min_size=1, max_size=4))
def test_ids_and_logprobs_come_back_to_the_last_bit(
    choices: list[list[int]], values: list[list[float]]
) -> None:
    """Of every choice, empty ones too; infinities, NaN and the sign of zero among them."""
    found, read = decode_ids(encode_ids(choices)), decode_logprobs(encode_logprobs(values))

    assert [list(choice) for choice in found] == choices
    packed = [struct.pack(f"<{len(choice)}d", *choice) for choice in values]
    assert [struct.pack(f"<{len(choice)}d", *choice) for choice in read] == packed
    for choice in choices:
        is_negative = any(number < 0 for number in choice)
        assert tokens.has_negative(array("i", choice)) is is_negative
        assert tokens.has_negative(choice) is is_negative


def test_text_is_little_endian_base64_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any reader of the store can decode it from this description.

    On a big-endian machine bytes are swapped; patched in, as none is at hand.
    """
    assert encode_ids([[1, 2], [-1]]) == ",".join(
        base64.b64encode(packed).decode()
        for packed in (b"\x01\0\0\0\x02\0\0\0", b"\xff\xff\xff\xff")
    )
    assert encode_logprobs([[-0.5]]) == base64.b64encode(struct.pack("<d", -0.5)).decode()
    swapped = array("i", [1, 2])
    swapped.byteswap()
    monkeypatch.setattr(tokens, "_IS_BIG_ENDIAN", sys.byteorder == "little")
    text = encode_ids([[1, 2]])
    assert text == base64.b64encode(swapped.tobytes()).decode()
    assert list(decode_ids(text)[0]) == [1, 2]


@pytest.mark.parametrize(
    ("encode", "bad", "error"),
    [
        *((encode_ids, bad, OverflowError) for bad in (2**31, -(2**31) - 1, 2**80)),
        *((encode_ids, bad, TypeError) for bad in (1.5, "1", None)),
        *((encode_logprobs, bad, TypeError) for bad in ("1", None)),
    ],
)
def test_what_does_not_fit_is_refused(encode: Any, bad: Any, error: type[Exception]) -> None:
    """No id is cut, and nothing is rounded or read as a number."""
    with pytest.raises(error):
        encode([[1, bad]])


@pytest.mark.parametrize(
    "text", ["AAA", "AAAA", "AA AAAA==", "é", "not base64!", "AAAAAA==,A", "AAAAAA==,AAAA"]
)
@pytest.mark.parametrize("decode", [decode_ids, decode_logprobs])
def test_damaged_text_is_refused(decode: Any, text: str) -> None:
    """Text that is cut or no base64 is a ``ValueError``, whatever the damage."""
    with pytest.raises(ValueError):  # noqa: PT011  # the message is base64's own
        decode(text)
