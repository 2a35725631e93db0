"""What makes a transition of a call, and the reason where nothing does."""

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.adapter.forest import call_attributes, said, text_of, token_attributes

from lightning_otel import TripletAdapter
from lightning_otel.adapter import tokens
from lightning_otel.adapter.calls import HistoryParser
from lightning_otel.adapter.tokens import encode_ids, encode_logprobs
from lightning_otel.messages import parse_messages
from lightning_otel.types import Span, Transition
from lightning_otel.types import conventions as c

CALL = Span(
    *("t", "s", None, "chat", 1, 2),  # type: ignore[arg-type]  # by position
    attributes={**call_attributes("question", "answer"), c.AGENT_NAME: "planner"},
)
ASKED, ANSWERED, CUT = c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, {c.CUT: "{}"}
NO_TEXT = {ASKED: None, ANSWERED: None}
FAILED = {"status": "ERROR"}


def read(attributes: dict[str, Any], **fields: Any) -> Transition | str | None:
    """What becomes of the call with attributes changed: None takes one away, and is no call."""
    held = {**CALL.attributes, **attributes}
    span = replace(CALL, attributes={k: v for k, v in held.items() if v is not None}, **fields)
    found = TripletAdapter().explain([span])
    assert found.report.calls == len(found.trajectories) + len(found.report.dropped)
    if found.trajectories:
        return found.trajectories[0].transitions[0]
    return next(iter(found.report.reasons()), None)


@pytest.mark.parametrize(
    ("attributes", "fields", "expected"),
    [
        ({c.ERROR_TYPE: "RateLimitError"}, FAILED, "failed: RateLimitError"),
        ({}, {**FAILED, "status_message": "slow down"}, "failed: slow down"),
        ({c.TRACK_ONLY: ["critic"]}, {}, "not tracked: the agent is not in track_only"),
        ({**NO_TEXT, **token_attributes([1], [2, 3], [-1.0])}, {}, tokens.LENGTHS),
        *[
            ({c.OPERATION: other}, {}, None)
            for other in ("execute_tool", "invoke_agent", "", ["chat"], 5)
        ],
    ],
    ids=lambda value: f"{value}"[:60],
)
def test_a_call_that_cannot_be_learned_from_has_a_reason(
    attributes: dict[str, Any], fields: dict[str, Any], expected: str | None
) -> None:
    """What is no call at all has none; ``bad_input.py`` has the reasons that messages give."""
    assert read(attributes, **fields) == expected


@pytest.mark.parametrize(
    ("attributes", "fields", "expected"),
    [
        *[
            ({c.OPERATION: operation}, {}, "question > answer")
            for operation in ("chat", "text_completion", "generate_content")
        ],
        ({c.FINISH_REASONS: ["stop"]}, FAILED, "question > answer"),  # its client could not use it
        ({c.TRACK_ONLY: ["planner"]}, {}, "question > answer"),
        (
            {c.SYSTEM_INSTRUCTIONS: json.dumps([{"type": "text", "content": "be brief"}])},
            {},
            "be brief question > answer",
        ),
        (
            {ANSWERED: json.dumps([{"role": "assistant", "parts": []}, said("assistant", "two")])},
            {},
            "question > two",
        ),
        (
            {ANSWERED: json.dumps([said("assistant", "\ud83d\ude00 and \ud800")])},
            {},
            "question > \U0001f600 and ?",
        ),
        ({ASKED: "[", ANSWERED: "[", **CUT, **token_attributes([1], [2])}, {}, ">"),
    ],
)
def test_a_call_is_what_was_asked_and_answered(
    attributes: dict[str, Any], fields: dict[str, Any], expected: str
) -> None:
    """Instructions come first, every choice is kept, and text is whole."""
    found = read(attributes, **fields)

    assert isinstance(found, Transition)
    assert f"{text_of(found.observation)} > {text_of(found.action)}".strip() == expected
    assert found.agent == "planner"


def test_a_call_takes_the_ids_of_the_first_choice() -> None:
    """Of several choices the ids and logprobs of the first one count; tools are kept."""
    found = read(
        {
            c.PROMPT_TOKEN_IDS: encode_ids([[1]]),
            c.RESPONSE_TOKEN_IDS: encode_ids([[2, 3], [4]]),
            c.RESPONSE_LOGPROBS: encode_logprobs([[-1.0, -2.0], [-3.0]]),
            c.TOOL_DEFINITIONS: json.dumps([{"type": "function", "name": "add"}]),
        }
    )

    assert isinstance(found, Transition)
    assert (list(found.response_ids), list(found.logprobs)) == ([2, 3], [-1.0, -2.0])
    assert [tool["name"] for tool in found.tools] == ["add"]


ONE, TWO, THREE = (json.dumps(said("user", text)) for text in ("one", "two", "three"))


@pytest.mark.parametrize(
    "inputs",
    [
        [f"[{ONE}]", f"[{ONE},{TWO}]", f"[{ONE},{TWO},{THREE}]"],
        [f"[{ONE},{TWO}]", f"[{ONE}]", f"[{ONE}, {THREE}]", f"[{TWO}]"],
        [f"[{ONE}]", f"[{ONE},{TWO}", f"[{ONE},1]", f"[{ONE},]", f"[{ONE}],{TWO}]"],
        [f"[{ONE}] ", f"[{ONE}],{TWO}]", "[]", f"[{ONE}]"],
        ["[]", "[,]", f"[,{ONE}]", None, f"[{ONE},{TWO}]"],
    ],
)
def test_a_history_that_goes_on_is_as_one_that_is_parsed_whole(inputs: list[str | None]) -> None:
    """Whatever came before, and also where a text is damaged."""
    history = HistoryParser()

    assert list(map(history.read_messages, inputs)) == list(map(parse_messages, inputs))


def test_a_program_that_changes_a_step_changes_no_later_reading() -> None:
    """Instructions come again with every call, and are parsed once for all of them."""
    told = {c.SYSTEM_INSTRUCTIONS: '[{"type":"text","content":"be brief"}]'}
    first = read(told)
    assert isinstance(first, Transition)
    before = json.dumps(first.observation)

    for message in first.observation:
        message["parts"][0]["content"] = "changed"

    second = read(told)
    assert isinstance(second, Transition)
    assert json.dumps(second.observation) == before
