"""Items of whatever kind become messages; what is none of them does no harm."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_otel import conventions as c
from lightning_otel.instrumentors.openai_agents import items


def given(value: object) -> Any:
    """The messages read of a request's input."""
    return json.loads(items.of_request({"input": value}).content[c.INPUT_MESSAGES])


def text(content: str) -> dict[str, str]:
    """A part of text."""
    return {"type": "text", "content": content}


@pytest.mark.parametrize(
    ("item", "role", "parts"),
    [
        ({"role": "system", "content": "x"}, "system", [text("x")]),
        ({"content": [{"type": "input_text", "text": "x"}, "y"]}, "user", [text("x"), text("y")]),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            "assistant",
            [{"type": "refusal", "content": "no"}],
        ),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "u"}]},
            "user",
            [{"type": "uri", "modality": "image", "uri": "u"}],
        ),
        (
            {"role": "tool", "tool_call_id": "1", "content": "7"},
            "tool",
            [{"type": "tool_call_response", "id": "1", "response": "7"}],
        ),
        (
            {"type": "function_call_output", "call_id": "1", "output": "7"},
            "tool",
            [{"type": "tool_call_response", "id": "1", "response": "7"}],
        ),
        (
            {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "half {"},
            "assistant",
            [{"type": "tool_call", "id": "1", "name": "f", "arguments": "half {"}],
        ),
        (
            {"type": "reasoning", "summary": [{"text": "one"}], "content": [{"text": "two"}]},
            "assistant",
            [{"type": "reasoning", "content": "one\ntwo"}],
        ),
        (
            {"type": "web_search_call", "id": "w"},
            "assistant",
            [{"type": "openai.web_search_call", "id": "w"}],
        ),
    ],
)
def test_items_become_messages(item: Any, role: str, parts: list[Any]) -> None:
    """Of the Responses API and of chat."""
    assert given([item]) == [{"role": role, "parts": parts}]


def test_items_of_one_turn_are_one_message() -> None:
    """What the model said and what it called."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    (message,) = given([{"role": "assistant", "content": "a"}, call, call])

    assert [part["type"] for part in message["parts"]] == ["text", "tool_call", "tool_call"]


class Evil:
    """Whose every method is a mistake."""

    def _refuse(self, *args: object) -> Any:
        raise RuntimeError

    __str__ = __repr__ = __iter__ = __len__ = __getattr__ = _refuse


def test_items_that_are_none_do_no_harm() -> None:
    """There is a list of messages all the same."""
    odd = [None, 3, b"x", [None, 3, [[]], Evil()], Evil(), [{"role": 3, "content": 4}]]

    for found in map(given, odd):
        assert isinstance(found, list)
        assert all(isinstance(part, dict) for message in found for part in message["parts"])


def test_items_are_not_drained() -> None:
    """A generator's items are the program's."""
    source = iter([{"role": "user", "content": "x"}])

    assert given(source) == []
    assert next(source)["content"] == "x"


@pytest.mark.parametrize("limit", [True, "9", 9.5, None])
def test_settings_of_a_wrong_type_are_left_out(limit: object) -> None:
    """Rather than recorded as what they are not."""
    settings = SimpleNamespace(temperature="hot", top_p=True, max_tokens=limit)

    assert items.of_request({"model_settings": settings}).attributes == {}


def test_usage_that_counts_nothing_is_no_usage() -> None:
    """Zero tokens are what the SDK says where it was told nothing."""
    assert items.usage({"input_tokens": 0, "output_tokens": 0}) == {}
    assert items.usage({"prompt_tokens": 3, "completion_tokens": None}) == {c.INPUT_TOKENS: 3}
    assert items.usage([]) == {}


def test_items_with_great_numbers_are_kept() -> None:
    """JSON has integers of any size; the fast reader and writer have not."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": f'{{"n": {10**30}}}'}
    answer = {"type": "function_call_output", "call_id": "1", "output": 10**30}

    asked, told = given([call, answer])

    assert asked["parts"][0]["arguments"] == {"n": 10**30}
    assert told["parts"][0]["response"] == 10**30
