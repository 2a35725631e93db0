"""Tokenizer drift: the places where re-encoded text gives other tokens, and why.

A measurement: its ids are compared and thrown away, and nothing is ever trained on them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from lightning_otel.types import Message, Transition

Part: TypeAlias = Literal["prompt", "response"]
Cause: TypeAlias = Literal["template", "retokenisation", "other"]
"""``template``: the messages render to another text than the engine was given;
``retokenisation``: the same text encodes to other ids; ``other``: it could not be compared, as the
template refuses the messages or the tokenizer does not know the ids."""

_FAULTS: Final = (ValueError, TypeError, LookupError, OverflowError)
"""What tokenizers raise at ids that are not theirs, and templates at messages they refuse."""

_HALF: Final = "\ufffd"
"""What tokenizers write for bytes that are no character."""


class Tokenizer(Protocol):
    """A tokenizer and its chat template: what the engine is believed to use."""

    @property
    def template(self) -> str:
        """The digest of its chat template."""

    def encode(self, text: str, /) -> Sequence[int]:
        """The ids of a text, special tokens in it read as such, none added around it."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """The text of ids, special tokens written out.

        Raises:
            ValueError: An id is not in the vocabulary.
        """

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]], /) -> str:
        """The prompt that messages and tools make, up to where the model goes on.

        Raises:
            ValueError: The template refuses them.
        """


@dataclass(frozen=True, slots=True)
class Drift:
    """The drift of one model's prompts or responses.

    Attributes:
        template: The chat template they were rendered with.
        part: Of which of the two.
        count: How many were looked at.
        exact: How many came back the very same.
        prefix_share: Mean share of each one's tokens before the first that differs, 0 to 1.
        length_delta: Mean number of tokens by which what came back is longer.
        causes: How many of the others differ for each cause.
    """

    model: str
    template: str
    part: Part
    count: int
    exact: int
    prefix_share: float
    length_delta: float
    causes: Mapping[Cause, int]

    @property
    def exact_rate(self) -> float:
        """Share that came back the very same, 0 to 1."""
        return self.exact / self.count


class Drifts(NamedTuple):
    """A measurement of transitions.

    Attributes:
        parts: One entry for each model and part, in order.
        skipped: How many transitions have no token ids to compare with.
    """

    parts: list[Drift]
    skipped: int


class _Compared(NamedTuple):
    cause: Cause | None
    prefix_share: float = 0.0
    length_delta: int = 0


def measure(steps: Iterable[Transition], tokenizer: Tokenizer) -> Drifts:
    """Re-encode each step's prompt and response, and compare tokens, by model.

    Args:
        steps: Transitions, such as ``store.transitions()``; those without token ids are skipped.
        tokenizer: What stands in for the engine's own.
    """
    found: dict[tuple[str, Part], list[_Compared]] = {}
    skipped = 0
    for step in steps:
        if not (len(step.prompt_ids) and len(step.response_ids)):
            skipped += 1
            continue
        model = step.model or ""
        found.setdefault((model, "prompt"), []).append(_compare_prompt(step, tokenizer))
        found.setdefault((model, "response"), []).append(_compare_response(step, tokenizer))
    parts = [
        _make_drift(model, tokenizer.template, part, compared)
        for (model, part), compared in sorted(found.items())
    ]
    return Drifts(parts, skipped)


def _make_drift(model: str, template: str, part: Part, compared: Sequence[_Compared]) -> Drift:
    causes = Counter(each.cause for each in compared if each.cause is not None)
    count = len(compared)
    return Drift(
        model=model,
        template=template,
        part=part,
        count=count,
        exact=count - causes.total(),
        prefix_share=sum(each.prefix_share for each in compared) / count,
        length_delta=sum(each.length_delta for each in compared) / count,
        causes=dict(causes.most_common()),
    )


def _compare_prompt(step: Transition, tokenizer: Tokenizer) -> _Compared:
    given = list(step.prompt_ids)
    try:
        text = tokenizer.render(step.observation, step.tools)
        again = list(tokenizer.encode(text))
        cause: Cause = "retokenisation" if tokenizer.decode(given) == text else "template"
    except _FAULTS:
        return _Compared("other")
    return _compare_ids(given, again, cause)


def _compare_response(step: Transition, tokenizer: Tokenizer) -> _Compared:
    given = list(step.response_ids)
    try:
        text = tokenizer.decode(given)
        again = list(tokenizer.encode(text))
        # Half a character, where an answer was cut off, is no text that could be encoded again.
        is_text = _HALF not in text and tokenizer.decode(again) == text
        cause: Cause = "retokenisation" if is_text else "other"
    except _FAULTS:
        return _Compared("other")
    return _compare_ids(given, again, cause)


def _compare_ids(given: Sequence[int], again: Sequence[int], cause: Cause) -> _Compared:
    pairs = enumerate(zip(given, again, strict=False))
    same = next((i for i, (one, other) in pairs if one != other), min(len(given), len(again)))
    is_exact = same == len(given) == len(again)
    return _Compared(None if is_exact else cause, same / len(given), len(again) - len(given))
