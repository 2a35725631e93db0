"""Readers on what other packages record: real agents and requests, old forms, halves of a form.

``tests/data/make_agents.py`` made the files of Agent Lightning's agents.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, Status, StatusCode
from tests.adapter.fixtures import recorded
from tests.adapter.forest import Forest, steps_of, text_of
from tests.adapter.readers.test_conventions import OURS, SOURCES, Carried

from lightning_otel import Store
from lightning_otel.adapter import TripletAdapter, calls, readers, tree
from lightning_otel.adapter.triplet import span_of
from lightning_otel.messages import plain_text
from lightning_otel.receivers import Rejected, documents
from lightning_otel.types import Event, Message, Span
from lightning_otel.types import conventions as c

AGENTS = Path(__file__).resolve().parents[2] / "data" / "agents"


def one(attributes: dict[str, Any], *, name: str = "call", **extra: Any) -> Span:
    """A span as readers give it."""
    forest = Forest()
    forest.make(name, attributes, **extra)
    (span,) = readers.read(forest.spans)
    return span


TODAY = [{"role": "user", "parts": [{"type": "text", "content": "new"}]}]
LLM, AGENT = {"openinference.span.kind": "LLM"}, {"openinference.span.kind": "AGENT"}
READ: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # Where today's messages are there, the flattened ones are not looked at.
    (
        {"gen_ai.system": "x", "gen_ai.prompt.0.content": "old", c.INPUT_MESSAGES: TODAY},
        {c.INPUT_MESSAGES: json.dumps(TODAY)},
    ),
    ({"llm.request.type": "chat"}, {c.OPERATION: c.CHAT}),
    ({"llm.request.type": "completion"}, {c.OPERATION: c.TEXT_COMPLETION}),
    ({"llm.request.type": "embedding"}, {c.OPERATION: c.EMBEDDINGS}),
    # An agent's own name wins over the span's, which is often a method's.
    (AGENT, {c.AGENT_NAME: "call"}),
    ({**AGENT, "agent.name": "writer"}, {c.AGENT_NAME: "writer"}),
    ({**AGENT, "graph.node.id": "critic"}, {c.AGENT_NAME: "critic"}),
    ({**LLM, "llm.prompts.0.prompt.text": "a"}, {c.OPERATION: c.TEXT_COMPLETION}),
    # Haystack's agents, and the tools that they run.
    (
        {"haystack.component.name": "cook", "haystack.component.type": "Agent"},
        {c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: "cook"},
    ),
    (
        {"haystack.tool.name": "add", "haystack.agent.step.tool.input": "[1]"},
        {c.OPERATION: c.EXECUTE_TOOL, c.TOOL_NAME: "add", c.TOOL_ARGUMENTS: "[1]"},
    ),
]


@pytest.mark.parametrize(("told", "found"), READ)
def test_a_form_of_another_package_is_todays(told: dict[str, Any], found: dict[str, Any]) -> None:
    """Messages, kinds of requests and agents."""
    attributes = one(told).attributes

    assert {key: attributes[key] for key in found} == found


@pytest.mark.parametrize(
    ("name", "text", "agent"),
    [
        # smolagents' spans have the method's name after the agent's.
        ("desk.run", "", "desk"),
        # LlamaIndex tells it at the end of a step's input; what stands before is anybody's.
        ("W.run_agent_step", "current_agent_name='a')\"}], current_agent_name='b')\"}", "b"),
        ("W.run_agent_step", "current_agent_name='a')\"}...", None),
    ],
)
def test_an_agent_without_a_key_is_named_by_its_span(
    name: str, text: str, agent: str | None
) -> None:
    """OpenInference's spans of smolagents and LlamaIndex."""
    kind = {"openinference.span.kind": "CHAIN", "input.value": text} if text else AGENT

    assert one(kind, name=name).attributes.get(c.AGENT_NAME) == agent


def test_a_result_among_the_users_parts_is_the_tools() -> None:
    """As Pydantic AI's own spans tell it, between what the user says."""
    result = {"type": "tool_call_response", "id": "c1", "result": "3"}
    text = {"type": "text", "content": "and?"}
    given = [{"role": "user", "parts": [result, text]}]

    found = json.loads(one({c.INPUT_MESSAGES: json.dumps(given)}).attributes[c.INPUT_MESSAGES])

    assert [(each["role"], each["parts"]) for each in found] == [
        ("tool", [result]), ("user", [text]),
    ]  # fmt: skip


def test_blocks_of_bedrock_are_read() -> None:
    """Strands writes questions and answers as JSON lists of blocks in events."""
    blocks: list[dict[str, Any]] = [
        {"text": "Let me look."},
        {"toolUse": {"toolUseId": "c1", "name": "weather", "input": {"city": "Rome"}}},
    ]
    result = [{"toolResult": {"toolUseId": "c1", "content": [{"text": "sunny"}]}}]
    events = (
        Event("gen_ai.user.message", 1, {"content": json.dumps([{"text": "Rome?"}])}),
        Event("gen_ai.tool.message", 2, {"content": json.dumps(result)}),
        Event("gen_ai.choice", 3, {"message": json.dumps(blocks), "finish_reason": "tool_use"}),
    )
    asks = {"gen_ai.system": "strands-agents", c.OPERATION: c.CHAT}

    call = one(asks, events=events).attributes
    tool = one({**asks, c.OPERATION: c.EXECUTE_TOOL}, events=events[2:]).attributes

    given, answer = (json.loads(call[key]) for key in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES))
    assert [(each["role"], each["parts"][0]["type"]) for each in given] == [
        ("user", "text"), ("tool", "tool_call_response"),
    ]  # fmt: skip
    assert [part["type"] for part in answer[0]["parts"]] == ["text", "tool_call"]
    assert answer[0]["parts"][1]["arguments"] == {"city": "Rome"}
    assert "Let me look." in tool[c.TOOL_RESULT]


def test_blocks_of_bedrock_keep_all_that_they_say() -> None:
    """Signatures, several results, values and failures of tools, and blocks of other kinds."""
    thought = {"reasoningText": {"text": "hm", "signature": "gAAA"}}
    asks = [
        {"reasoningContent": thought},
        {"toolUse": {"toolUseId": "c1", "name": "f", "input": {}}},
    ]
    results = [
        {"toolResult": {"toolUseId": "c1", "content": [{"json": {"t": 20}}], "status": "success"}},
        {"toolResult": {"toolUseId": "c2", "content": [{"text": "no"}], "status": "error"}},
        {"text": "and?"},
        {"cachePoint": {"type": "default"}},
    ]
    events = (
        Event("gen_ai.assistant.message", 1, {"content": json.dumps(asks)}),
        Event("gen_ai.user.message", 2, {"content": json.dumps(results)}),
        Event("gen_ai.choice", 3, {"message": json.dumps(asks)}),
        Event("gen_ai.user.message", 4, {"content": '[{"text": "a"}, {"novel": 1}]'}),
    )
    told = one({"gen_ai.system": "strands-agents", c.OPERATION: c.CHAT}, events=events).attributes
    given, answered = (json.loads(told[key]) for key in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES))
    said = [
        {"type": "reasoning", "content": "hm", "signature": "gAAA"},
        {"type": "tool_call", "id": "c1", "name": "f", "arguments": {}},
    ]
    assert answered[0]["parts"] == given[0]["parts"] == said
    assert [(each["role"], each["parts"]) for each in given[1:3]] == [
        ("tool", [
            {"type": "tool_call_response", "id": "c1", "response": {"t": 20}},
            {"type": "tool_call_response", "id": "c2", "response": "no", "is_error": True},
        ]),
        ("user", [
            {"type": "text", "content": "and?"},
            {"type": "cachePoint", "cachePoint": {"type": "default"}},
        ]),
    ]  # fmt: skip
    assert given[3]["parts"][0]["content"] == events[3].attributes["content"]


_ANSWER = "llm.output_messages.0.message"
_CALLED = f"{_ANSWER}.tool_calls.0.tool_call.function.name"


@pytest.mark.parametrize(
    ("told", "asked", "answered"),
    [
        ({**LLM, "llm.prompts": ["Once"], "output.value": "upon"}, "Once", "upon"),  # LlamaIndex
        (
            {**LLM, "llm.prompts.0.prompt.text": "Once", "llm.choices.0.completion.text": " upon"},
            "Once",
            " upon",
        ),
        ({**LLM, "llm.input_messages.0.message.content": "go", _CALLED: "stop"}, "go", "stop({})"),
    ],
)
def test_a_request_of_openinference_is_a_call(
    told: dict[str, Any], asked: str, answered: str
) -> None:
    """Prompts without roles are what the user said; a tool that takes none is called with none."""
    (path,) = TripletAdapter().adapt([one(told)])

    (step,) = path.transitions
    assert (text_of(step.observation), plain_text(step.action)) == (asked, answered)


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


def test_a_count_of_tokens_is_no_call() -> None:
    """OpenInference's instrumentor of anthropic makes an LLM span of it."""
    assert one(LLM, name="messages.count_tokens").operation is None


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


# --- real agents ---------------------------------------------------------------------------------

CALL = ["tool_call call_1"]
SAID = ["text I will work it out", *CALL]
RESULT = ["tool_call_response call_1"]


def shown(messages: tuple[Message, ...]) -> list[list[str]]:
    """The parts of messages but instructions, each by its kind and what tells it apart."""
    return [
        [f"{part['type']} {part.get('id') or part.get('content')}" for part in message["parts"]]
        for message in messages
        if message["role"] not in ("system", "developer")
    ]


@pytest.mark.parametrize(
    ("name", "only", "expected"),
    [
        ("langchain", "", [([["text hello"]], [["text it is 42"]])]),
        ("responses", "", [([["text go"]], [SAID])]),
        *(
            (
                "autogen",
                only,
                [
                    ([["text go"]], [SAID]),
                    ([["text go"], SAID, RESULT], [["text it is 42"]]),
                ],
            )
            for only in ("", "autogen_agentchat")
        ),
    ],
)
def test_each_request_is_one_whole_call(name: str, only: str, expected: list[Any]) -> None:
    """One for two records that name the model with and without a date; results and texts in it."""
    spans = [span for span in recorded(f"openinference/{name}") if only in span.scope]

    (path,) = TripletAdapter().adapt(spans)

    steps = path.transitions
    assert [(shown(step.observation), shown(step.action)) for step in steps] == expected
    if not only:
        assert [(step.model, bool(step.response_id)) for step in steps] == [
            ("toy-2024-07-18", True)
        ] * len(expected)


def stored(name: str) -> list[Span]:
    """The spans of a file, as `lightning-otel import` reads them."""
    spans: list[Span] = []
    for line in (AGENTS / f"{name}.jsonl").read_bytes().splitlines():
        for found in documents.decode_spans(line):
            assert not isinstance(found, Rejected), found
            spans.append(found)
    return spans


@pytest.mark.parametrize(
    ("name", "expected", "moved"),
    [
        (
            "openai_agents",
            [
                ("Main Agent", None),
                ("MathAgent", 0.0),
                ("MathAgent", None),
                ("MathAgent", 1.0),
                ("Judge", 0.5),
            ],
            5,
        ),
        ("langgraph", [("model", None), ("model", 1.0), ("model", 0.25)], 0),
    ],
)
def test_calls_belong_to_their_agents(
    name: str, expected: list[tuple[str, float | None]], moved: int
) -> None:
    """Also those that lie beside their agent; so each reward goes to the call it is for."""
    found = TripletAdapter().explain(stored(name))

    assert [(step.agent, step.reward) for step in steps_of(found)] == expected
    assert [each.rule for each in found.report.repairs] == [tree.ENCLOSED] * moved


@pytest.mark.parametrize(
    ("name", "answer"),
    [("vercel_4", []), ("vercel_6", ["reasoning thinking…", "text Let me look."])],
)
def test_a_loop_of_vercels_sdk_is_its_calls(name: str, answer: list[str]) -> None:
    """As its fourth and sixth releases tell of it."""
    (path,) = TripletAdapter().adapt(stored(name))

    first, second = path.transitions
    question = [["text Weather in Rome?", "blob AQID"]]
    message = ["reasoning thinking…", *answer[1:], "tool_call call-1"]
    turn = [message, ["tool_call_response call-1"]]
    assert (first.agent, second.agent) == ("my-agent", "my-agent")
    assert shown(first.observation) == question
    assert shown(first.action) == [[*answer, "tool_call call-1"]]
    assert shown(second.observation) == question + turn
    assert shown(second.action) == [["text It is sunny."]]
    assert [tool["name"] for tool in first.tools] == ["weather"]
    assert [step.action[0]["finish_reason"] for step in path.transitions] == ["tool_calls", "stop"]


@pytest.mark.parametrize(("source", "carried"), SOURCES.items())
def test_tools_that_ran_are_read(source: str, carried: Carried) -> None:
    """Running a tool is a span with its name, arguments and result under today's keys."""
    spans = readers.read(recorded(source))

    ran = [
        (
            span.attributes[c.TOOL_NAME],
            span.attributes[c.TOOL_ARGUMENTS].replace(" ", ""),
            span.attributes[c.TOOL_RESULT],
        )
        for span in spans
        if span.attributes.get(c.OPERATION) == c.EXECUTE_TOOL
    ]

    wanted = [
        ("calculator", '{"expression":"17*23"}', "391"),
        ("calculator", '{"expression":"12+30"}', "42"),
    ]
    assert ran == (wanted if carried.has_spans_of_tools else [])


@pytest.mark.parametrize("source", [*SOURCES, "litellm"])
def test_reading_keeps_what_a_source_said(source: str) -> None:
    """A read span keeps its ids and times and every attribute that is of another convention."""
    before = recorded(source)

    after = list(readers.read(before))

    for old, new in zip(before, after, strict=True):
        assert replace(new, attributes=old.attributes) == old
        assert {key for key in old.attributes if key not in new.attributes} == set()


def test_our_spans_are_not_looked_at() -> None:
    """A span of ours is passed on as the very object it is."""
    assert all(a is b for a, b in zip(OURS, readers.read(OURS), strict=True))
    for span in OURS:
        summary = readers.summary(span.name, span.scope, span.attributes, span.otel_resource)
        assert summary is span.attributes


def test_span_of_keeps_everything() -> None:
    """Times, status, events, links, resource and scope come through; lists are lists."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("a.scope")
    with tracer.start_as_current_span("other") as other:
        link = Link(other.get_span_context(), {"why": "because"})
    with tracer.start_as_current_span("outer") as outer:
        inner = tracer.start_span("inner", attributes={"list": ["a", "b"]}, links=[link])
        inner.add_event("happened", {"n": 1}, timestamp=5)
        inner.set_status(Status(StatusCode.ERROR, "broke"))
        inner.end(7)
        given = exporter.get_finished_spans()[-1]

    found = span_of(given)

    assert found.parent_span_id == format(outer.get_span_context().span_id, "016x")
    assert (found.name, found.kind, found.scope, found.end_ns) == (
        "inner",
        "INTERNAL",
        "a.scope",
        7,
    )
    assert (found.status, found.status_message) == ("ERROR", "broke")
    assert found.attributes == {"list": ["a", "b"]}
    assert [(e.name, e.time_ns, e.attributes) for e in found.events] == [("happened", 5, {"n": 1})]
    assert [(each.span_id, each.attributes) for each in found.links] == [
        (format(other.get_span_context().span_id, "016x"), {"why": "because"})
    ]
    assert found.otel_resource["telemetry.sdk.language"] == "python"
