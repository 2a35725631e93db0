"""Trajectories as conversations of chat messages."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.adapter.forest import Forest, call_attributes, conversation, draw, said
from tests.adapter.forests import forests

from lightning_otel import Store
from lightning_otel.types import Conversation, Span
from lightning_otel.types import conventions as c


def found_in(forest: Forest) -> list[Conversation]:
    return list(held_in(forest.spans).messages())


def held_in(spans: list[Span]) -> Store:
    """A store of these spans."""
    store = Store(":memory:")
    store.add(spans)
    return store


def answer(forest: Forest, given: Any, *messages: Any, **attributes: Any) -> None:
    """A call that was answered by these messages."""
    told = {c.OUTPUT_MESSAGES: json.dumps(messages), **attributes}
    forest.make("chat", {**call_attributes(given, ""), **told})


def texts(row: Conversation) -> list[Any]:
    return [item["content"] for item in row.messages]


CASES = {
    "a growing history": (
        "A[ a<s:kind|u:one !1 b<s:kind|u:one|a:a|u:two d<s:kind|u:one|a:a|u:two|a:b|u:three !.5 ]",
        ["kind one *a two *b three *d"],
        [(1.0, None, 0.5)],
    ),
    "a history edited in place": (
        "a<one b<one|a|two d<summary|b|three",
        ["one *a two *b", "summary b three *d"],
        [(None, None), (None,)],
    ),
    "an answer that branches share": (
        "a<one +b<one|a|left +d<one|a|right -b -d",
        ["one *a left *b", "one a right *d"],
        [(None, None), (None,)],
    ),
}


@pytest.mark.parametrize(("drawing", "expected", "rewards"), CASES.values(), ids=CASES)
def test_each_message_stands_once(
    drawing: str, expected: list[str], rewards: list[tuple[float | None, ...]]
) -> None:
    """A row joins what the model was given together; ``*`` marks the answers that are its own."""
    forest = draw(drawing)

    rows = found_in(forest)

    told = [
        " ".join(f"{'*' * (i in row.answers)}{text}" for i, text in enumerate(texts(row)))
        for row in rows
    ]
    assert told == expected
    assert [row.rewards for row in rows] == rewards
    assert rows[0].agent == ("A" if "A[" in drawing else "")
    assert rows[0].span_ids == tuple(forest.named[texts(rows[0])[i]] for i in rows[0].answers)
    assert [row.step for row in rows[1:]] == [2 if "summary" in drawing else 0] * len(rows[1:])


def test_the_choice_that_was_gone_on_with_is_the_answer() -> None:
    """Of several choices the continued one stands in the row, the others beside it."""
    forest = Forest()
    choices = [said("assistant", text) for text in ("x", "y")]
    answer(forest, "one", *choices)
    answer(forest, conversation("one", "y", "two"), *choices)

    (row,) = found_in(forest)

    assert texts(row) == ["one", "y", "two", "x"]
    assert [(place, item["content"]) for place, item in row.alternatives] == [(1, "x"), (3, "y")]


def test_reasoning_stays_with_the_answer_it_led_to() -> None:
    """A request that repeats an answer without its reasoning continues it nevertheless."""
    forest = Forest()
    thought = {"type": "reasoning", "content": "hm"}
    call = {"type": "tool_call", "id": "c", "name": "f", "arguments": {}}
    thinking = {"role": "assistant", "parts": [thought, {"type": "text", "content": "ok"}, call]}
    tools = [{"type": "function", "name": "f", "parameters": {}}]
    answer(forest, "one", thinking, **{c.TOOL_DEFINITIONS: json.dumps(tools)})
    result = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": "7"}]}
    repeated = {"role": "assistant", "parts": thinking["parts"][1:]}
    forest.call("done", [said("user", "one"), repeated, result])

    (row,) = found_in(forest)

    asked, answered, told, done = row.messages
    assert answered["reasoning_content"] == "hm"
    assert (answered["content"], answered["tool_calls"][0]["id"]) == ("ok", "c")
    assert told == {"role": "tool", "tool_call_id": "c", "content": "7"}
    assert (asked["content"], done["content"]) == ("one", "done")
    assert row.tools == ({"type": "function", "function": {"name": "f", "parameters": {}}},)


@given(forests, st.booleans())
def test_every_answer_is_named_once(spans: list[Span], is_discounted: bool) -> None:
    """Each transition that said something is an answer of exactly one conversation, as it was."""
    store, credit = held_in(spans), "discounted" if is_discounted else "previous"

    rows = list(store.messages(credit=credit, include_incomplete=True))

    steps = list(store.transitions(credit=credit, include_incomplete=True))
    named = Counter(name for row in rows for name in row.span_ids)
    assert named == Counter(step.span_id for step in steps if step.action)
    rewards = {step.span_id: step.reward for step in steps}
    for row in rows:
        assert [rewards[name] for name in row.span_ids] == list(row.rewards)
        assert {row.messages[place]["role"] for place in row.answers} == {"assistant"}
        assert list(row.answers) == sorted(set(row.answers))


def test_an_answer_without_a_role_is_the_assistants() -> None:
    """What a tracer left out of an answer does not make it the user's."""
    forest = Forest()
    answer(forest, "one", {"parts": [{"type": "text", "content": "a"}]})

    (row,) = found_in(forest)

    assert row.messages[1] == {"role": "assistant", "content": "a"}
