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
        """Return the text of ids, special tokens written out; ValueError for an unknown id."""

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]], /) -> str:
        """Return the prompt of messages and tools; ValueError if the template refuses them."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The drift of one model's prompts or responses.

    Attributes:
        template: The chat template they were rendered with.
        exact: How many of ``count`` came back the very same.
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
    """A measurement of transitions; ``skipped`` ones have no token ids to compare with."""

    parts: list[Drift]
    skipped: int


class _TokenComparison(NamedTuple):
    cause: Cause | None
    prefix_share: float = 0.0
    length_delta: int = 0


def measure(steps: Iterable[Transition], tokenizer: Tokenizer) -> Drifts:
    """Re-encode each step's prompt and response, and compare tokens, by model.

    Transitions without token ids are skipped; the tokenizer stands in for the engine's own.
    """
    groups: dict[tuple[str, Part], list[_TokenComparison]] = {}
    skipped = 0
    for step in steps:
        if not (len(step.prompt_ids) and len(step.response_ids)):
            skipped += 1
            continue
        parts: tuple[Part, ...] = ("prompt", "response")
        for part in parts:
            compared = _compare_part(step, part, tokenizer)
            groups.setdefault((step.model or "", part), []).append(compared)
    drifts = []
    for (model, part), group in sorted(groups.items()):
        causes = Counter(one.cause for one in group if one.cause is not None)
        drifts.append(
            Drift(
                model=model,
                template=tokenizer.template,
                part=part,
                count=len(group),
                exact=len(group) - causes.total(),
                prefix_share=sum(one.prefix_share for one in group) / len(group),
                length_delta=sum(one.length_delta for one in group) / len(group),
                causes=dict(causes.most_common()),
            )
        )
    return Drifts(drifts, skipped)


def _compare_part(step: Transition, part: Part, tokenizer: Tokenizer) -> _TokenComparison:
    tokens = list(step.prompt_ids if part == "prompt" else step.response_ids)
    cause: Cause
    try:
        if part == "prompt":
            text = tokenizer.render(step.observation, step.tools)
            encoding = list(tokenizer.encode(text))
            cause = "retokenisation" if tokenizer.decode(tokens) == text else "template"
        else:
            text = tokenizer.decode(tokens)
            encoding = list(tokenizer.encode(text))
            # Half a character, where an answer was cut off, is no text that could be encoded again.
            is_text = _HALF not in text and tokenizer.decode(encoding) == text
            cause = "retokenisation" if is_text else "other"
    except _FAULTS:
        return _TokenComparison("other")
    pairs = enumerate(zip(tokens, encoding, strict=False))
    same = next((i for i, (one, other) in pairs if one != other), min(len(tokens), len(encoding)))
    is_exact = same == len(tokens) == len(encoding)
    return _TokenComparison(
        None if is_exact else cause, same / len(tokens), len(encoding) - len(tokens)
    )
