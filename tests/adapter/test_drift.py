"""The drift detector: what is the same, how far the rest is, and why."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.adapter.forest import said, text_of

from lightning_otel.adapter.drift import Drift, measure
from lightning_otel.types import Message, Transition

VOCABULARY = ["ab", "a", "b", "<", ">", "?", "\ufffd"]


class Greedy:
    """A tokenizer of seven tokens that always takes the longest; ``?`` opens an answer."""

    template = "greedy"

    def encode(self, text: str, /) -> list[int]:
        """The longest token at each place."""
        found = []
        while text:
            token = next((token for token in VOCABULARY if text.startswith(token)), None)
            if token is None:
                raise ValueError(f"no token for {text!r}")
            found.append(VOCABULARY.index(token))
            text = text[len(token) :]
        return found

    def decode(self, token_ids: Sequence[int], /) -> str:
        """The tokens' texts; 99 is half of a character, whatever follows it."""
        if any(token_id >= len(VOCABULARY) and token_id != 99 for token_id in token_ids):
            raise ValueError("not in the vocabulary")
        return "".join("\ufffd" if n == 99 else VOCABULARY[n] for n in token_ids)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]], /) -> str:
        """Each message in angles."""
        if tools:
            raise ValueError("knows no tools")
        return "".join(f"<{text_of([item])}>" for item in messages) + "?"


def step(text: str, prompt: Sequence[int], sampled: Sequence[int], **fields: Any) -> Transition:
    """A transition that was asked one text."""
    return Transition(
        "r", "1", "a", 0, (said("user", text),), (), None, None, True,
        prompt_ids=prompt, response_ids=sampled, **{"model": "m", **fields},
    )  # fmt: skip


def parts(*steps: Transition) -> dict[str, Drift]:
    return {each.part: each for each in measure(steps, Greedy()).parts}


CASES: dict[str, tuple[Transition, str, float, float, dict[str, int]]] = {
    "the very ids": (step("ab", [3, 0, 4, 5], [0, 1]), "prompt", 1.0, 0.0, {}),
    "the very ids of an answer": (step("ab", [3, 0, 4, 5], [0, 1]), "response", 1.0, 0.0, {}),
    "other ids of the same text": (
        *(step("ab", [3, 1, 2, 4, 5], [2, 1, 2]), "prompt", 1 / 5, -1.0, {"retokenisation": 1}),
    ),
    "other ids of the same answer": (
        *(step("ab", [3, 1, 2, 4, 5], [2, 1, 2]), "response", 1 / 3, -1.0, {"retokenisation": 1}),
    ),
    "a message more than was recorded": (
        *(step("ab", [3, 1, 4, 3, 0, 4, 5], [1]), "prompt", 1 / 7, -3.0, {"template": 1}),
    ),
}
REFUSED = {
    "tools": (step("ab", [3, 0, 4, 5], [1], tools=({"name": "f"},)), "prompt"),
    "unencodable": (step("xyz", [3, 0, 4, 5], [1]), "prompt"),
    "foreign": (step("ab", [3, 50, 4, 5], [1]), "prompt"),
    "foreign answer": (step("ab", [3, 0, 4, 5], [50]), "response"),
    "half of a character": (step("ab", [3, 0, 4, 5], [99]), "response"),
}


@pytest.mark.parametrize(("one", "part", "share", "delta", "causes"), CASES.values(), ids=CASES)
def test_drift_has_a_measure_and_a_cause(
    one: Transition, part: str, share: float, delta: float, causes: dict[str, int]
) -> None:
    """The share of the prefix that is the same, the difference in length, and why."""
    found = parts(one)[part]

    assert (found.prefix_share, found.length_delta, found.causes) == (share, delta, causes)
    assert found.exact == (not causes)


@pytest.mark.parametrize(("given_step", "part"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compared_is_neither(given_step: Transition, part: str) -> None:
    """Refused messages, ids of another vocabulary and half characters are told apart."""
    assert parts(given_step)[part].causes == {"other": 1}


def test_models_are_measured_apart_and_text_is_skipped() -> None:
    """One line for each model and part; steps without ids are counted."""
    steps = [
        step("ab", [3, 0, 4, 5], [0]),
        step("ab", [3, 1, 2, 4, 5], [0]),
        step("ab", [3, 0, 4, 5], [0], model=None),
        step("ab", [], [0]),
    ]

    found = measure(steps, Greedy())

    assert [(each.model, each.part, each.count, each.exact) for each in found.parts] == [
        ("", "prompt", 1, 1),
        ("", "response", 1, 1),
        ("m", "prompt", 2, 1),
        ("m", "response", 2, 2),
    ]
    assert found.parts[2].prefix_share == (1 + 1 / 5) / 2
    assert found.skipped == 1


ids = st.lists(st.integers(0, 5), min_size=1, max_size=8)


@given(st.lists(st.tuples(ids, ids), max_size=5))
def test_figures_add_up(drawn: list[tuple[list[int], list[int]]]) -> None:
    """Every one is exact or has a cause; shares lie between 0 and 1; exact means all of both."""
    found = measure([step("ab", prompt, sampled) for prompt, sampled in drawn], Greedy()).parts

    for each in found:
        assert each.exact + sum(each.causes.values()) == each.count == len(drawn)
        assert 0.0 <= each.prefix_share <= 1.0
        assert (each.exact == each.count) <= (each.prefix_share == 1.0 and not each.length_delta)
