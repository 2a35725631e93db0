"""Token ids and logprobs as text, held against each other, and the funnel's words for both."""

import base64
import struct
import sys
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.adapter.forest import Forest, token_attributes

from lightning_otel.adapter import Adaptation, TripletAdapter, tokens
from lightning_otel.adapter.tokens import decode_ids, decode_logprobs, encode_ids, encode_logprobs
from lightning_otel.types import Transition
from lightning_otel.types import conventions as c

NAN, INFINITE = float("nan"), float("inf")
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


def explain(attributes: dict[str, Any], **span: Any) -> Adaptation:
    """The adaptation of a call with these attributes."""
    forest = Forest()
    forest.tag(forest.call("answer", "question", **span), **attributes)
    return TripletAdapter().explain(forest.spans)


def transition(attributes: dict[str, Any], **span: Any) -> Transition:
    """The transition of a call with these attributes."""
    ((found,),) = [path.transitions for path in explain(attributes, **span).trajectories]
    return found


def sampled(*logprobs: float) -> dict[str, Any]:
    """A call of three sampled tokens."""
    return token_attributes([1, 2], [3, 4, 5], logprobs)


def named(*ids: int) -> dict[str, str]:
    """The ids that a server names beside the logprobs."""
    return {c.LOGPROB_TOKEN_IDS: encode_ids([ids])}


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({}, tokens.NO_IDS),
        ({c.RESPONSE_LOGPROBS: encode_logprobs([[-1.0]])}, tokens.NO_IDS),
        (token_attributes([1], []), tokens.NO_RESPONSE_IDS),
        (token_attributes([], [1]), tokens.NO_PROMPT_IDS),
        ({**sampled(), c.PROMPT_TOKEN_IDS: "@@"}, tokens.DAMAGED_IDS),
        ({**sampled(), c.RESPONSE_TOKEN_IDS: 7}, tokens.DAMAGED_IDS),
        ({**sampled(), c.RESPONSE_LOGPROBS: "AAAA"}, tokens.DAMAGED_LOGPROBS),
        ({**sampled(), c.RESPONSE_LOGPROBS: [-1.0]}, tokens.DAMAGED_LOGPROBS),
        (token_attributes([1, -1], [2]), tokens.NEGATIVE_IDS),
        (token_attributes([1], [-2]), tokens.NEGATIVE_IDS),
        (sampled(-1.0, -2.0), tokens.LENGTHS),
        (sampled(-1.0, -2.0, -3.0, -4.0), tokens.LENGTHS),
        (sampled(-1.0, NAN, -3.0), tokens.NOT_FINITE),
        (sampled(-1.0, -INFINITE, -3.0), tokens.NOT_FINITE),
        (sampled(INFINITE, -INFINITE, -3.0), tokens.NOT_FINITE),
        (sampled(-1.0, 0.1, -3.0), tokens.POSITIVE),
        (sampled(-1e308, -1e308, 2.0), tokens.POSITIVE),
        ({**sampled(*[-1.0] * 3), **named(3, 4, 6)}, tokens.PAIRING),
        ({**sampled(*[-1.0] * 3), **named(3, 4)}, tokens.PAIRING),
        ({**sampled(*[-1.0] * 3), c.LOGPROB_TOKEN_IDS: "@"}, tokens.PAIRING),
        ({**sampled(*[-1.0] * 3), **named(3, 4, 5)}, ""),
        *[(sampled(*p), "") for p in ((), (-1.0, -2.0, 0.0), (-1e308, -1e308, 1e-7), (-0.0,) * 3)],
    ],
    ids=str,
)
def test_every_text_step_has_its_reason(attributes: dict[str, Any], reason: str) -> None:
    """Nothing is trained on tokens that are missing, damaged, or contradicted by their logprobs."""
    found = transition(attributes)

    assert (found.capture, found.inexact) == ("text" if reason else "exact", reason)
    assert found.action
    if reason in (tokens.LENGTHS, tokens.NOT_FINITE, tokens.POSITIVE):
        assert not len(found.prompt_ids) + len(found.response_ids) + len(found.logprobs)


SAMPLED = {
    c.REQUEST_TEMPERATURE: 0.7,
    c.REQUEST_TOP_P: 0.9,
    c.REQUEST_TOP_K: 20,
    c.REQUEST_SEED: 7,
    c.REQUEST_MIN_P: 0.05,
    c.REQUEST_FREQUENCY_PENALTY: 0.5,
    c.REQUEST_MAX_TOKENS: 64,
    c.REQUEST_PRESENCE_PENALTY: NAN,
    c.REQUEST_REPETITION_PENALTY: "1.1",
    c.REQUEST_CHOICES: True,
}


@pytest.mark.parametrize(
    ("attributes", "resource", "known"),
    [
        (
            SAMPLED,
            {},
            {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": 7}
            | {"frequency_penalty": 0.5, "max_tokens": 64},
        ),
        ({c.LOGPROBS_MODE: "processed"}, {}, {"logprobs_mode": "processed"}),
        ({}, {c.LOGPROBS_MODE: "raw"}, {"logprobs_mode": "raw"}),
        (
            {c.LOGPROBS_MODE: "processed"},
            {c.LOGPROBS_MODE: "raw"},
            {"logprobs_mode": "processed"},
        ),
        ({c.LOGPROBS_MODE: "raw_logits"}, {}, {}),
    ],
)
def test_sampling_is_what_was_asked_by_its_usual_name(
    attributes: dict[str, Any], resource: dict[str, str], known: dict[str, Any]
) -> None:
    """What is no number stays away; a mode is the span's, else that of its process's resource."""
    assert transition(attributes, otel_resource=resource).sampling == known


@pytest.mark.parametrize(
    ("attributes", "notes"),
    [
        ({}, []),
        ({c.REQUEST_TEMPERATURE: 1.0, c.REQUEST_TOP_P: 1, c.REQUEST_TOP_K: -1}, []),
        ({c.REQUEST_TOP_P: 0.9}, [tokens.TRUNCATED]),
        ({c.REQUEST_TOP_K: 20, c.REQUEST_MIN_P: 0.1}, [tokens.TRUNCATED]),
        ({c.REQUEST_REPETITION_PENALTY: 1.1}, [tokens.PENALISED]),
        ({c.REQUEST_TEMPERATURE: 0.7}, [tokens.MODE_UNKNOWN]),
        ({c.REQUEST_TEMPERATURE: 0.7, c.LOGPROBS_MODE: "processed"}, []),
        ({c.REQUEST_CHOICES: 4}, [tokens.CHOICES]),
        ({c.FINISH_REASONS: ["length"]}, [tokens.LENGTH]),
        ({c.RESPONSE_LOGPROBS: ""}, [tokens.NO_LOGPROBS]),
        ({c.OUTPUT_TOKENS: 3}, []),
        ({c.OUTPUT_TOKENS: 4}, [tokens.COUNTS]),
        ({c.OUTPUT_TOKENS: 12, c.REQUEST_CHOICES: 4}, [tokens.CHOICES]),
    ],
    ids=str,
)
def test_what_is_sound_and_unusual_is_a_note(attributes: dict[str, Any], notes: list[str]) -> None:
    """A trainer should know of it, and no token is lost by it."""
    report = explain({**sampled(-1.0, -1.0, -1.0), **attributes}).report

    assert report.exact == 1
    assert list(report.notes) == notes
    of_text = explain(attributes).report.notes
    assert list(of_text) == [note for note in notes if note in (tokens.LENGTH,)]


@given(
    st.lists(st.integers(-1, 9), max_size=4),
    st.lists(st.integers(-1, 9), max_size=4),
    st.lists(st.floats(width=64), max_size=4),
)
def test_exact_tokens_pass_every_check(
    prompt: list[int], response: list[int], logprobs: list[float]
) -> None:
    """Tokens called exact are what was packed, aligned, finite and not positive."""
    found = transition(token_attributes(prompt, response, logprobs))

    is_sound = not logprobs or (
        len(logprobs) == len(response) and all(-INFINITE < p <= 1e-6 for p in logprobs)
    )
    is_whole = bool(prompt and response) and min(prompt + response) >= 0
    assert (not found.inexact) is (is_whole and is_sound)
    if not found.inexact:
        assert (list(found.prompt_ids), list(found.response_ids)) == (prompt, response)
        assert list(found.logprobs) == logprobs
