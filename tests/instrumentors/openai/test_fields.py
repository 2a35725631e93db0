"""What the endpoints' formats have in common."""

import datetime
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from lightning_otel.adapter.tokens import decode_ids, decode_logprobs, token_content
from lightning_otel.instrumentors.openai import fields
from lightning_otel.messages import called_part

texts = st.text(max_size=5)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_dump_gives_the_value_back(value: Any) -> None:
    """Any JSON value survives, huge integers among them."""
    assert json.loads(fields.dump(value)) == value


def test_dump_is_valid_text_whatever_it_holds() -> None:
    """The text of half a character is an escape, which every store and exporter can carry."""
    text = fields.dump(["\ud800", "é"])

    assert text.encode()
    assert json.loads(text) == ["\ud800", "é"]


class Item(BaseModel):
    """Something a program may put into a request."""

    name: str
    size: int = 1


def test_dump_writes_models_and_times_as_the_client_sends_them() -> None:
    """What the client can send and JSON does not know has the form it is sent in."""
    moment = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)

    found = json.loads(fields.dump({"item": Item(name="a"), "when": moment, "what": object()}))

    assert found["item"] == {"name": "a"}
    assert found["when"].startswith("2026-01-02T00:00:00")
    assert found["what"] == "<object>"


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"temperature": 1}, {"gen_ai.request.temperature": 1.0}),
        ({"temperature": True}, {}),
        ({"temperature": "hot"}, {}),
        ({"max_tokens": 5}, {"gen_ai.request.max_tokens": 5}),
        ({"max_tokens": 5.5}, {}),
        ({"top_k": 3, "top_p": 0.5}, {"gen_ai.request.top_k": 3, "gen_ai.request.top_p": 0.5}),
        ({"stop": "a"}, {"gen_ai.request.stop_sequences": ["a"]}),
        ({"stop": ["a", "b"]}, {"gen_ai.request.stop_sequences": ["a", "b"]}),
        ({"stop": ["a", 1]}, {}),
        ({"n": 1}, {}),
        ({"n": 3}, {"gen_ai.request.choice.count": 3}),
        ({"service_tier": "auto"}, {}),
        ({"service_tier": "flex"}, {"openai.request.service_tier": "flex"}),
        ({"seed": None}, {}),
    ],
)
def test_request_scalars_have_the_type_the_conventions_name(body: Any, wanted: Any) -> None:
    """A value of another type is left out, a whole temperature is a float."""
    found = fields.request_scalars(body)

    assert found == wanted
    assert all(type(found[key]) is type(value) for key, value in wanted.items())


def test_usage_is_read_under_both_names() -> None:
    """The two APIs name the same counts differently."""
    chat = {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 4},
    }
    responses = {
        "input_tokens": 1,
        "output_tokens": 2,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens_details": {"reasoning_tokens": 4},
    }

    found = [fields.usage({"usage": usage}) for usage in (chat, responses)]

    assert found[0] == found[1]
    assert list(found[0].values()) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "usage", [None, 7, [], {}, {"prompt_tokens": "1", "prompt_tokens_details": None}]
)
def test_usage_of_nonsense_is_no_usage(usage: object) -> None:
    """Missing is missing, never 0."""
    assert fields.usage({"usage": usage}) == {}


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), min_size=1, max_size=3),
    st.lists(st.lists(st.floats(allow_nan=False), max_size=5), min_size=1, max_size=3),
)
def test_token_content_keeps_every_number(
    prompt: list[int], ids: list[list[int]], logprobs: list[list[float]]
) -> None:
    """Ids and logprobs come back exactly, choice by choice; none given is none kept."""
    found = token_content(prompt, ids, logprobs)

    assert list(decode_ids(found["lightning.prompt.token_ids"])[0]) == prompt
    if any(ids):
        decoded = decode_ids(found["lightning.response.token_ids"])
        assert [list(held) for held in decoded] == ids
    if any(logprobs):
        values = decode_logprobs(found["lightning.response.logprobs"])
        assert [list(held) for held in values] == logprobs
    assert len(found) == 1 + any(ids) + any(logprobs)


@pytest.mark.parametrize("bad", ["x", None, 2**40, -(2**40), 1.5, [1]])
def test_token_content_leaves_out_ids_that_are_none(bad: object) -> None:
    """One value that is no token id leaves no list to trust; the others stay."""
    found = token_content([1, bad], [[1, 2]], [[-0.5]])

    assert sorted(found) == ["lightning.response.logprobs", "lightning.response.token_ids"]


@pytest.mark.parametrize(
    ("tokens", "ids"),
    [
        (["token_id:3", "token_id:40"], [3, 40]),
        (["token_id:3", " word"], []),
        (["token_id:3", None], []),
        (["token_id:x"], []),
        (["token_id:"], []),
        ([" word"], []),
        ([], []),
    ],
    ids=str,
)
def test_named_ids_are_all_or_none(tokens: list[object], ids: list[int]) -> None:
    """A list of words, or with a gap, names no ids, and is never taken for some."""
    assert fields.named_ids(tokens) == ids


def test_prompt_ids_stand_at_the_top_or_on_a_choice() -> None:
    """Chat answers of vLLM have them at the top, SGLang's and legacy ones on each choice."""
    assert fields.prompt_ids_of({"prompt_token_ids": [1]}, [{"prompt_token_ids": [2]}]) == [1]
    assert fields.prompt_ids_of({}, [{}, {"prompt_token_ids": [2]}]) == [2]
    assert fields.prompt_ids_of({"prompt_token_ids": None}, [{}]) is None


@pytest.mark.parametrize(
    ("values", "whole"),
    [
        (["a", "b"], "ab"),
        ([[1], [2, 3]], [1, 2, 3]),
        ([{"a": "x"}, {"a": "y", "b": [1]}, {"b": [2]}], {"a": "xy", "b": [1, 2]}),
        ([{"a": "x"}, {"a": None}], {"a": "x"}),
        ([1, 2], 2),
        (["a", 1], 1),
        ([True], True),
    ],
)
def test_joined_pieces_are_the_whole(values: list[Any], whole: object) -> None:
    """Texts and lists grow, objects grow by field, of anything else the last one counts."""
    assert fields.joined(values) == whole


def test_dump_repairs_text_beside_a_tool_calls_arguments() -> None:
    """Half a pair in one message costs no other message its tool call."""
    call = called_part("c1", "search", '{"big": 123456789012345678901234567890}')

    text = fields.dump([{"content": "half \ud800"}, call])

    found = json.loads(text.encode("utf-8", "replace"))
    assert found[1]["name"] == "search"
    assert "big" in found[1]["arguments"]
