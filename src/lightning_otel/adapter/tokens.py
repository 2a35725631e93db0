"""Token ids and log-probabilities of calls: their encoding, their checks, and notes for trainers.

An attribute holds base64 of packed little-endian numbers, comma-joined per choice: 640 ints cost
150 microseconds to set on a span, this text 29. What fails a check is no token data, with the
reason. What is sound and yet unlike what a trainer assumes is a note.
"""

import base64
import binascii
import contextlib
import math
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from lightning_otel.adapter.attributes import to_number
from lightning_otel.types import conventions as c

if TYPE_CHECKING:
    from lightning_otel.types import Transition

NO_IDS: Final = "no token ids: none were recorded"
NO_PROMPT_IDS: Final = "no token ids of the prompt: only the response's were recorded"
NO_RESPONSE_IDS: Final = "no token ids of the response: only the prompt's were recorded"
DAMAGED_IDS: Final = "token ids damaged: they are not packed numbers"
NEGATIVE_IDS: Final = "token ids damaged: one is negative"
DAMAGED_LOGPROBS: Final = "logprobs damaged: they are not packed numbers"
LENGTHS: Final = "logprobs of another length: there is not one for each sampled token"
NOT_FINITE: Final = "logprobs not finite: one is NaN or infinite"
POSITIVE: Final = "logprobs positive: one is more than 0"
PAIRING: Final = "tokens not paired: the logprobs name other token ids than were sampled"
MARKED: Final = "manual step: no tokens"

LENGTH: Final = "cut off: the answer reached its token limit"
FILTERED: Final = "cut off: a filter stopped the answer"
CUTS: Final = {"length": LENGTH, "max_tokens": LENGTH, "content_filter": FILTERED}
"""Notes on answers that are not whole, by the reason why they finished."""
NO_LOGPROBS: Final = "no logprobs: the server gave token ids alone"
TRUNCATED: Final = "truncating sampling: top_p, top_k or min_p left tokens out"
PENALISED: Final = "penalised sampling: a penalty moved the probabilities"
MODE_UNKNOWN: Final = "temperature other than 1: not known whether logprobs are raw or processed"
COUNTS: Final = "tokens counted otherwise: the server's usage is not as many as it gave ids of"
CHOICES: Final = "several choices: only the first one's tokens are kept"

T = TypeVar("T")

_IS_BIG_ENDIAN = sys.byteorder == "big"


def _pack_array(typecode: str, choices: Iterable[Iterable[float]]) -> str:
    texts = []
    for values in choices:
        packed = array(typecode, values)
        if _IS_BIG_ENDIAN:
            packed.byteswap()
        texts.append(base64.b64encode(packed.tobytes()).decode("ascii"))
    return ",".join(texts)


def _unpack_array(typecode: str, text: str) -> list[Sequence[Any]]:
    lists: list[Sequence[Any]] = []
    for part in text.split(",") if "," in text else (text,):
        packed = array(typecode)
        packed.frombytes(binascii.a2b_base64(part, strict_mode=True))
        if _IS_BIG_ENDIAN:
            packed.byteswap()
        lists.append(packed)
    return lists


encode_ids: Final = partial(_pack_array, "i")
"""Makes one text of the token ids of each choice; OverflowError if one does not fit 32 bits."""
decode_ids: Final = partial(_unpack_array, "i")
"""Returns the token ids of each choice, [choices][R]; ValueError if the text is none of these."""
encode_logprobs: Final = partial(_pack_array, "d")
"""Makes one text of the log-probabilities of each choice, without loss."""
decode_logprobs: Final = partial(_unpack_array, "d")
"""Returns the log-probabilities of each choice, [choices][R]; ValueError likewise."""


def sampled_ids(body: Mapping[str, Any], choices: Sequence[object]) -> Sequence[object]:
    """Return the token ids of each choice: its own, else what the answer has at its top.

    Source: vLLM's ``token_ids``; Agent Lightning 0.3's ``response_token_ids``, [choices][R].
    """
    top = body.get("response_token_ids")
    return top if isinstance(top, list) and not any(choices) else choices


def has_negative(ids: Sequence[int]) -> bool:
    """Return whether an id is negative, by the sign bits: a look at each costs too much."""
    if isinstance(ids, array):
        signs = ids.tobytes()[0 if _IS_BIG_ENDIAN else ids.itemsize - 1 :: ids.itemsize]
        return not signs.isascii()
    return min(ids, default=0) < 0


def token_content(
    prompt_ids: object, response_ids: Sequence[object], logprobs: Sequence[object]
) -> dict[str, str]:
    """Return token ids and logprobs by attribute, where a server gave them, whole and as numbers.

    Shapes: prompt [P], responses and logprobs [choices][R], None where a choice has none.
    """
    content: dict[str, str] = {}
    for key, encode, choices in (
        (c.PROMPT_TOKEN_IDS, encode_ids, [prompt_ids]),
        (c.RESPONSE_TOKEN_IDS, encode_ids, response_ids),
        (c.RESPONSE_LOGPROBS, encode_logprobs, logprobs),
    ):
        lists = [value if isinstance(value, (list, tuple)) else () for value in choices]
        if any(lists):
            add_encoded(content, key, encode, lists)
    return content


def add_encoded(
    content: dict[str, str], key: str, encode: Callable[[Any], str], choices: Sequence[Any]
) -> None:
    """Add what can be encoded; a null among the logprobs leaves no list to trust."""
    with contextlib.suppress(TypeError, OverflowError):
        content[key] = encode(choices)


_ROUNDING: Final = 1e-6
"""Log of a probability that rounded up to float32's next number above 1 is 1.2e-7."""
_SAMPLING: Final = (
    (c.REQUEST_TEMPERATURE, "temperature"),
    (c.REQUEST_TOP_P, "top_p"),
    (c.REQUEST_TOP_K, "top_k"),
    (c.REQUEST_MIN_P, "min_p"),
    (c.REQUEST_FREQUENCY_PENALTY, "frequency_penalty"),
    (c.REQUEST_PRESENCE_PENALTY, "presence_penalty"),
    (c.REQUEST_REPETITION_PENALTY, "repetition_penalty"),
    (c.REQUEST_SEED, "seed"),
    (c.REQUEST_MAX_TOKENS, "max_tokens"),
    (c.REQUEST_CHOICES, "n"),
)
_TOKENS: Final = (c.PROMPT_TOKEN_IDS, c.RESPONSE_TOKEN_IDS, c.RESPONSE_LOGPROBS)
_WHOLE: Final = frozenset({"top_k", "seed", "max_tokens", "n"})
"""Those that are counts; the others are measures, 1.0 also where somebody's store made it 1."""
_MODES: Final = ("raw", "processed")
_NEUTRAL: Final[Mapping[str, tuple[float, ...]]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "repetition_penalty": (1.0,),
}
"""Values that leave the model's own distribution alone.

Source: vLLM's ``SamplingParams``.
"""


class Tokens(NamedTuple):
    """Tokens of a call's first choice: ids given [P] and sampled [R], with logprobs [R].

    Each is empty if not said or not sound; ``inexact`` is why they are not all there.
    """

    prompt_ids: Sequence[int] = ()
    response_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    inexact: str = ""


def read_tokens(attributes: Mapping[str, Any]) -> Tokens:
    """Return the first choice's tokens, if they pass every check; else only the reason.

    Ids without logprobs are exact. What a server gave of one part alone is kept.
    """
    if attributes.keys().isdisjoint(_TOKENS):
        return Tokens(inexact=NO_IDS)
    prompt = _first_choice(decode_ids, attributes.get(c.PROMPT_TOKEN_IDS))
    response = _first_choice(decode_ids, attributes.get(c.RESPONSE_TOKEN_IDS))
    if prompt is None or response is None:
        return Tokens(inexact=DAMAGED_IDS)
    if has_negative(prompt) or has_negative(response):
        return Tokens(inexact=NEGATIVE_IDS)
    logprobs = _first_choice(decode_logprobs, attributes.get(c.RESPONSE_LOGPROBS))
    if not len(response):
        return Tokens(prompt, (), logprobs or (), NO_RESPONSE_IDS if len(prompt) else NO_IDS)
    ids = _first_choice(decode_ids, attributes.get(c.LOGPROB_TOKEN_IDS))
    if ids is None or (len(ids) and list(ids) != list(response)):
        return Tokens(inexact=PAIRING)
    if logprobs is None:
        return Tokens(inexact=DAMAGED_LOGPROBS)
    if len(logprobs):
        if len(logprobs) != len(response):
            # Tokens were lost on the way, of one list or the other: nobody can say of which.
            return Tokens(inexact=LENGTHS)
        # A sum is NaN or infinite as soon as one number is; only a huge one is that besides.
        if not math.isfinite(sum(logprobs)) and not all(map(math.isfinite, logprobs)):
            return Tokens(inexact=NOT_FINITE)
        if max(logprobs) > _ROUNDING:
            return Tokens(inexact=POSITIVE)
    return Tokens(prompt, response, logprobs, "" if len(prompt) else NO_PROMPT_IDS)


def _first_choice(decode: Callable[[Any], list[Sequence[T]]], packed: object) -> Sequence[T] | None:
    """Return numbers of the first choice; none where none are packed, None if they are damaged."""
    if packed is None or packed == "":
        return ()
    try:
        return decode(packed)[0]
    except (ValueError, TypeError, AttributeError):
        return None


def sampling_of(attributes: Mapping[str, Any], otel_resource: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters and the mode of the logprobs, by their usual names.

    No server says the mode; whoever runs one may, in the resource of the process.
    """
    values: dict[str, Any] = {
        name: value if name in _WHOLE else float(value)
        for key, name in _SAMPLING
        if key in attributes and to_number(value := attributes[key]) is not None
    }
    mode = attributes.get(c.LOGPROBS_MODE, otel_resource.get(c.LOGPROBS_MODE))
    if mode in _MODES:
        values["logprobs_mode"] = mode
    return values


def notes_of(step: "Transition") -> list[str]:
    """List the notes for a trainer that hold of a sound transition."""
    notes = [CUTS[step.finish_reason]] if step.finish_reason in CUTS else []
    if step.capture != "exact":
        return notes
    if not len(step.logprobs):
        notes.append(NO_LOGPROBS)
    sampling = step.sampling
    is_one = sampling.get("n", 1) == 1
    # A stream that loses tokens on the way is found by this where there are no logprobs.
    if is_one and step.output_tokens not in (None, len(step.response_ids)):
        notes.append(COUNTS)
    if not sampling:
        return notes
    moved = {name for name, usual in _NEUTRAL.items() if sampling.get(name, usual[0]) not in usual}
    if moved & {"top_p", "top_k", "min_p"}:
        notes.append(TRUNCATED)
    if moved & {"frequency_penalty", "presence_penalty", "repetition_penalty"}:
        notes.append(PENALISED)
    is_warmed = len(step.logprobs) and sampling.get("temperature", 1) != 1
    if is_warmed and "logprobs_mode" not in sampling:
        notes.append(MODE_UNKNOWN)
    if not is_one:
        notes.append(CHOICES)
    return notes
