"""Transitions and trajectories: what each field says of the call it came from."""

import json
from typing import Any

import pytest
from tests.adapter.forest import (
    SECOND,
    Forest,
    call_attributes,
    said,
    text_of,
)

from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter
from lightning_otel.types import Transition


def one(attributes: dict[str, Any]) -> Transition:
    """The transition of a single call with attributes added."""
    forest = Forest(rollout_id="r7", attempt_id="3")
    forest.make("chat", {**call_attributes("question", "answer"), **attributes})
    ((step,),) = (path.transitions for path in TripletAdapter().adapt(forest.spans))
    return step


def test_transition_says_where_it_came_from() -> None:
    """Ids, times, model and usage are those of the call's span."""
    found = one(
        {
            c.REQUEST_MODEL: "asked",
            c.RESPONSE_MODEL: "answered",
            c.RESPONSE_ID: "chatcmpl-1",
            c.FINISH_REASONS: ["stop", "length"],
            c.INPUT_TOKENS: 12,
            c.OUTPUT_TOKENS: 3,
            c.RESOURCE_VERSION: "prompt@4",
        }
    )

    assert (found.rollout_id, found.attempt_id, found.agent) == ("r7", "3", "")
    assert (found.trace_id, found.start_ns, found.end_ns) == ("a" * 32, SECOND, 2 * SECOND)
    assert (found.model, found.response_id, found.finish_reason) == (
        "answered",
        "chatcmpl-1",
        "stop",
    )
    assert (found.input_tokens, found.output_tokens) == (12, 3)
    assert found.resource_version == "prompt@4"


def test_transition_falls_back_on_the_requested_model() -> None:
    """Where the answer names no model, the request's stands for it."""
    assert one({c.REQUEST_MODEL: "asked"}).model == "asked"


@pytest.mark.parametrize("odd", [None, [], {}, 5.5, True, ["x"], b"x"])
def test_transition_leaves_odd_attributes_out(odd: object) -> None:
    """Attributes of another type than they should have are absent, and cost nothing else."""
    keys = (c.REQUEST_MODEL, c.RESPONSE_MODEL, c.RESPONSE_ID, c.RESOURCE_VERSION)
    counts = (c.INPUT_TOKENS, c.OUTPUT_TOKENS)

    found = one(dict.fromkeys((*keys, *counts, c.TOOL_DEFINITIONS), odd))

    assert (found.model, found.response_id, found.resource_version) == (None, None, None)
    assert (found.input_tokens, found.output_tokens, found.tools) == (None, None, ())
    assert text_of(found.action) == "answer"


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (["stop"], "stop"),
        (("length",), "length"),
        ("stop", "stop"),
        ([], None),
        ([5], None),
        (5, None),
    ],
)
def test_transition_takes_the_first_finish_reason(reasons: object, expected: str | None) -> None:
    """The first choice's reason counts; one that is no text is none."""
    assert one({c.FINISH_REASONS: reasons}).finish_reason == expected


def test_observation_keeps_every_message_and_field() -> None:
    """Messages pass as they were recorded, roles, names and unknown parts included."""
    given = [said("system", "be brief"), {**said("user", "hi"), "name": "Ada"}, {"role": "odd"}]

    found = one({c.INPUT_MESSAGES: json.dumps(given)})

    assert list(found.observation) == given
