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
    """What was measured, by part."""
    return {each.part: each for each in measure(steps, Greedy()).parts}


def test_the_engines_own_tokens_come_back() -> None:
    """Where messages and text give the very ids, all is exact."""
    found = parts(step("ab", [3, 0, 4, 5], [0, 1]))

    for part in ("prompt", "response"):
        assert found[part].exact_rate == found[part].prefix_share == 1.0
        assert (found[part].length_delta, found[part].causes) == (0.0, {})


def test_other_ids_of_the_same_text_are_retokenisation() -> None:
    """The engine sampled ``a`` and ``b``; their text encodes to ``ab``."""
    found = parts(step("ab", [3, 1, 2, 4, 5], [2, 1, 2]))

    assert found["prompt"].causes == found["response"].causes == {"retokenisation": 1}
    assert found["prompt"].prefix_share == 1 / 5
    assert found["response"].prefix_share == 1 / 3
    assert found["response"].length_delta == -1.0


def test_another_text_is_the_template() -> None:
    """The engine was given a message more than was recorded."""
    found = parts(step("ab", [3, 1, 4, 3, 0, 4, 5], [1]))

    assert found["prompt"].causes == {"template": 1}
    assert found["prompt"].length_delta == -3.0
    assert found["response"].exact == 1


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        (step("ab", [3, 0, 4, 5], [1], tools=({"name": "f"},)), "prompt"),
        (step("xyz", [3, 0, 4, 5], [1]), "prompt"),
        (step("ab", [3, 50, 4, 5], [1]), "prompt"),
        (step("ab", [3, 0, 4, 5], [50]), "response"),
        (step("ab", [3, 0, 4, 5], [99]), "response"),
    ],
    ids=["refused", "unencodable", "foreign", "foreign-answer", "half"],
)
def test_what_cannot_be_compared_is_neither(changed: Transition, part: str) -> None:
    """Refused messages, ids of another vocabulary and half characters are told apart."""
    assert parts(changed)[part].causes == {"other": 1}


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


def test_nothing_to_measure_gives_nothing() -> None:
    """An empty store has no drift, and no division by nothing."""
    assert measure([], Greedy()) == ([], 0)


ids = st.lists(st.integers(0, 5), min_size=1, max_size=8)


@given(st.lists(st.tuples(ids, ids), max_size=5))
def test_figures_add_up(drawn: list[tuple[list[int], list[int]]]) -> None:
    """Every one is exact or has a cause; shares lie between 0 and 1; exact means all of both."""
    found = measure([step("ab", prompt, sampled) for prompt, sampled in drawn], Greedy()).parts

    for each in found:
        assert each.exact + sum(each.causes.values()) == each.count == len(drawn)
        assert 0.0 <= each.prefix_share <= 1.0
        assert (each.exact == each.count) <= (each.prefix_share == 1.0 and not each.length_delta)
