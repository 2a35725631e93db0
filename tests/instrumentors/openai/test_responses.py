"""The Responses format, read whole, from its closing event, and from what came of a stream."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_otel.demo import wire
from lightning_otel.demo.policy import Reply, ToolCall
from lightning_otel.instrumentors.openai import responses

KINDS = ("response.created", "response.output_item.added", "response.output_text.delta", None)
NAMES = [
    *("input", "instructions", "tools", "reasoning", "text", "conversation", "output", "usage"),
    *("incomplete_details", "status", "error", "prompt_token_ids", "token_ids", "response"),
]
CALL = ToolCall("call_1", "calculator", '{"expression": "1 + 1"}')


def said(content: dict[str, str], key: str = "gen_ai.output.messages") -> Any:
    """The messages of some content."""
    return json.loads(content[key])


@given(st.text("ab \n", max_size=12), st.text("cd ", max_size=6), st.booleans())
def test_assembled_events_say_what_the_whole_answer_says(
    text: str, reasoning: str, has_call: bool
) -> None:
    """A streamed answer is the one its closing event holds."""
    reply = Reply(text, (CALL,) if has_call else (), reasoning)
    answer = wire.response({"model": "toy", "input": "hi"}, reply)

    whole = responses.assemble(list(answer.chunks))

    assert whole == answer.response
    assert responses.is_complete(list(answer.chunks))


@given(st.integers(0, 30))
def test_assembled_events_of_a_stream_left_early_are_a_beginning(kept: int) -> None:
    """Any first part of a stream gives a beginning of the answer, and never an error."""
    reply = Reply("one two three", (CALL,), "let me think")
    events = list(wire.response({"model": "toy", "input": "hi"}, reply).chunks)[:-1]

    whole = responses.assemble(events[:kept])

    messages = said(responses.response_content(whole))
    parts = messages[0]["parts"] if messages else []
    texts = "".join(part["content"] for part in parts if part["type"] == "text")
    assert "one two three".startswith(texts)
    assert not responses.is_complete(events[:kept])
    assert bool(responses.response_attributes(whole)) == bool(kept)


def test_assembled_deltas_of_a_call_are_its_arguments() -> None:
    """A call whose arguments were under way keeps those that came."""
    answer = wire.response({"model": "toy", "input": "hi"}, Reply("", (CALL,)))
    events = [
        event
        for event in answer.chunks
        if event["type"]
        in (
            "response.created",
            "response.output_item.added",
            "response.function_call_arguments.delta",
        )
    ]

    whole = responses.assemble(events)

    (message,) = said(responses.response_content(whole))
    (part,) = message["parts"]
    assert (part["id"], part["name"]) == ("call_1", "calculator")
    assert part["arguments"] == {"expression": "1 + 1"}


def test_error_event_is_kept_beside_what_came() -> None:
    """An ``error`` event names its code; the answer so far keeps its id."""
    events: list[Any] = [
        {"type": "response.created", "response": {"id": "resp_1", "model": "toy", "output": []}},
        {"type": "error", "code": "server_error", "message": "broken", "sequence_number": 2},
    ]

    whole = responses.assemble(events)

    assert whole["error"]["type"] == "server_error"
    assert whole["error"]["message"] == "broken"
    assert responses.response_attributes(whole)["gen_ai.response.id"] == "resp_1"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"status": "completed", "output": []}, "stop"),
        ({"status": "completed", "output": [{"type": "function_call"}]}, "tool_calls"),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            "length",
        ),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}},
            "content_filter",
        ),
        ({"status": "incomplete"}, "length"),
        ({"status": "failed"}, "error"),
        ({"status": "in_progress"}, None),
        ({}, None),
    ],
)
def test_finish_reason_is_told_by_status_and_output(body: Any, reason: str | None) -> None:
    """This API has no finish reason of its own."""
    found = responses.response_attributes(body)

    assert found.get("gen_ai.response.finish_reasons") == ([reason] if reason else None)


def test_request_attributes_name_reasoning_conversation_and_format() -> None:
    """What this API nests is found."""
    body = {
        "reasoning": {"effort": "high"},
        "conversation": {"id": "conv_1"},
        "text": {"format": {"type": "json_schema"}},
    }

    found = responses.request_attributes(body)

    assert found == {
        "openai.api.type": "responses",
        "gen_ai.request.reasoning.level": "high",
        "gen_ai.conversation.id": "conv_1",
        "gen_ai.output.type": "json",
    }


def test_request_content_joins_what_one_turn_of_the_model_made() -> None:
    """Reasoning, text and calls that follow each other are one assistant message."""
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "custom_tool_call", "call_id": "c", "name": "sh", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "x"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "item_reference", "id": "msg_1"},
    ]

    found = said(responses.request_content({"input": items}), "gen_ai.input.messages")

    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant"]
    assert [part["type"] for part in found[1]["parts"]] == ["reasoning", "text", "tool_call"]
    assert [part["type"] for part in found[3]["parts"]] == [
        "openai.web_search_call",
        "openai.item_reference",
    ]


@pytest.mark.parametrize("nonsense", [None, 7, "text", {"a": 1}, [None, 7, "x"], [[]], [{}]])
@pytest.mark.parametrize("name", NAMES)
def test_bodies_of_nonsense_are_read_as_far_as_they_make_sense(name: str, nonsense: object) -> None:
    """Whatever stands in a request, an answer or an event, reading it raises nothing."""
    body: Any = {"model": "toy", "id": "resp_1", "status": "incomplete", name: nonsense}

    responses.request_attributes(body)
    responses.request_content(body)
    content = responses.response_content(body)
    whole = responses.assemble([{**body, "type": kind, "item": nonsense} for kind in KINDS])

    assert responses.response_attributes(body)["gen_ai.response.id"] == "resp_1"
    assert isinstance(said(content), list)
    assert isinstance(responses.response_content(whole), dict)
