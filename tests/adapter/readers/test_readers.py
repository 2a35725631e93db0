"""Readers on what no package is known to send: odd types, damaged JSON, halves of a convention."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.adapter.fixtures import SPANS, recorded
from tests.adapter.forest import Forest

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter, calls, readers
from lightning_otel.adapter.readers.chat import rows
from lightning_otel.types import Event, Span

ALL = [span for path in sorted(SPANS.glob("*.jsonl")) for span in recorded(path.stem)]
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.text(max_size=3), max_size=3),
    st.sampled_from(
        [
            *("[]", "{}", "[1]", "[{}]", "null", "{'a'", "[" * 5000, '{"kwargs": []}'),
            *('{"choices": 3}', '{"choices": [{"message": 1}]}', '[{"parts": 3}]'),
            '[{"role": null, "content": [[]]}]',
        ]
    ),
)


def one(attributes: dict[str, Any], *, name: str = "call", **extra: Any) -> Span:
    """A span as readers give it."""
    forest = Forest()
    forest.make(name, attributes, **extra)
    (span,) = readers.read(forest.spans)
    return span


@given(data=st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_value_breaks_a_reader(data: st.DataObject) -> None:
    """Whatever stands under the keys of a convention, reading and adapting go through."""
    span = data.draw(st.sampled_from(ALL))
    keys = data.draw(st.lists(st.sampled_from(sorted(span.attributes) or ["x"]), max_size=4))
    attributes = {**span.attributes, **{key: data.draw(ODD) for key in keys}}
    broken = replace(span, attributes=attributes, scope="")

    readers.summary(broken.name, "", attributes, {})
    TripletAdapter().explain([broken])


def test_rows_are_in_order_of_their_numbers() -> None:
    """Row 10 comes after row 9, whatever the order of the keys."""
    attributes = {f"p.{number}.role": str(number) for number in (10, 9, 1, 0)}

    assert [row["role"] for row in rows(attributes, "p")] == ["0", "1", "9", "10"]


def test_rows_take_only_their_own_prefix() -> None:
    """A key that merely begins with the same letters is not among them; nor is a bare value."""
    attributes = {"p.0.a": 1, "prompt.0.a": 2, "p.1": "bare", "p": "none", "p.0": "both"}

    assert rows(attributes, "p") == [{"a": 1}]


def test_a_message_told_in_the_old_and_the_new_form_is_read_once() -> None:
    """Where today's messages are there, the flattened ones are not looked at."""
    new = [{"role": "user", "parts": [{"type": "text", "content": "new"}]}]
    span = one({"gen_ai.system": "x", "gen_ai.prompt.0.content": "old", c.INPUT_MESSAGES: new})

    assert json.loads(span.attributes[c.INPUT_MESSAGES]) == new


@pytest.mark.parametrize(
    ("asked", "operation"),
    [("chat", c.CHAT), ("completion", c.TEXT_COMPLETION), ("embedding", c.EMBEDDINGS)],
)
def test_kind_of_request_in_the_old_form(asked: str, operation: str) -> None:
    """The old request type is today's operation."""
    assert one({"llm.request.type": asked}).attributes[c.OPERATION] == operation


def test_events_with_their_fields_as_attributes_are_messages() -> None:
    """A message event need not hold its body as JSON."""
    events = (
        Event("gen_ai.user.message", 1, {"content": "hi"}),
        Event("gen_ai.choice", 2, {"index": 0, "message": {"content": "yes"}}),
    )

    span = one({c.OPERATION: c.CHAT, "gen_ai.system": "x"}, events=events)

    (given,) = json.loads(span.attributes[c.INPUT_MESSAGES])
    (said,) = json.loads(span.attributes[c.OUTPUT_MESSAGES])
    assert (given["role"], given["parts"][0]["content"]) == ("user", "hi")
    assert (said["role"], said["parts"][0]["content"]) == ("assistant", "yes")


def test_an_openinference_agent_is_named_by_its_attribute_before_its_span() -> None:
    """`agent.name` wins over the span's name, which is often a method's."""
    found = {"openinference.span.kind": "AGENT"}

    assert one(found, name="on_messages").attributes[c.AGENT_NAME] == "on_messages"
    assert one({**found, "agent.name": "writer"}).attributes[c.AGENT_NAME] == "writer"
    assert one({**found, "graph.node.id": "critic"}).attributes[c.AGENT_NAME] == "critic"


def test_an_old_completion_of_openinference_is_text() -> None:
    """Prompts without roles are what the user said."""
    span = one(
        {
            "openinference.span.kind": "LLM",
            "llm.prompts.0.prompt.text": "Once",
            "llm.choices.0.completion.text": " upon",
        }
    )

    (path,) = TripletAdapter().adapt([span])
    assert span.attributes[c.OPERATION] == c.TEXT_COMPLETION
    assert path.transitions[0].action[0]["parts"][0]["content"] == " upon"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("task", {"agentops.task.output": json.dumps({"type": "reward", "value": 0.5})}),
        ("agentlightning.annotation", {"reward": 0.5}),
    ],
)
def test_a_reward_in_an_old_form_is_a_reward(name: str, told: dict[str, Any]) -> None:
    """What Agent Lightning's deprecated `@reward`, or its 0.2, left is credited like any other."""
    forest = Forest()
    call = forest.call("answer")
    forest.make(name, told)

    (path,) = TripletAdapter().adapt(forest.spans)

    assert path.transitions[0].span_id == call
    assert path.transitions[0].reward == 0.5


@pytest.mark.parametrize(
    ("told", "dropped"),
    [
        ({"gen_ai.operation.name": "call_llm"}, 1),  # as of any-agent
        ({"ai.prompt": "hi"}, 1),  # as of Vercel's AI SDK
        ({"gen_ai.operation.name": "invoke_agent"}, 0),
    ],
)
def test_a_call_nobody_reads_has_a_reason(
    told: dict[str, Any], dropped: int, tmp_path: Path
) -> None:
    """What names a model and its tokens is a call; a frame around one that is read is none."""
    usage = {"gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 3, **told}
    forest = Forest()
    forest.make("unknown", usage)
    with forest.inside("frame", **usage):
        forest.call("answer")
    store = Store(tmp_path / "t.duckdb")
    store.add(forest.spans)

    report = TripletAdapter().explain(forest.spans).report

    assert report.reasons() == ({calls.UNKNOWN: 1} if dropped else {})
    assert report.calls == 1 + dropped
    assert store.transitions(bodies=False).report() == report
