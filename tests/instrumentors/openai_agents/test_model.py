"""A request to a model is one call, whoever sends it, and however many models hand it on."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry import trace
from tests.instrumentors.outline import calls_of, named, outline

import lightning_otel
from lightning_otel import Store, auto_trace, instrument
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

from .conftest import agents, client_of, run_streamed, spans_of

pytest.importorskip("agents.testing.model", reason="this openai-agents has no testing module")


@agents.function_tool  # type: ignore[untyped-decorator]  # of a module imported if it is there
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def said(span: Span, key: str = c.OUTPUT_MESSAGES) -> Any:
    return json.loads(span.attributes[key])


def scripted(*steps: Any, **options: Any) -> Any:
    """The SDK's own model without a server."""
    return agents.testing.ScriptedModel(list(steps), **options)


def step(*output: Any, **fields: Any) -> Any:
    """An answer with its usage."""
    usage = agents.Usage(requests=1, input_tokens=11, output_tokens=7, total_tokens=18)
    return agents.testing.model.ModelStep(output=list(output), usage=usage, **fields)


AGENT = "invoke_workflow Agent workflow\n  invoke_agent "
TEXT = agents.testing.model.assistant_message
ASKS = agents.testing.model.function_call


async def ask(agent: Any, asked: str, *, is_stream: bool) -> Any:
    run = run_streamed if is_stream else agents.Runner.run
    return (await run(agent, asked)).final_output


CALL = {"type": "tool_call", "id": "call-1", "name": "add", "arguments": {"a": 3, "b": 4}}
CALLED = {"role": "assistant", "parts": [CALL]}
GIVEN = [
    {"role": "user", "parts": [{"type": "text", "content": "3 and 4?"}]},
    CALLED,
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call-1", "response": "7"}]},
]
ANSWER = {"role": "assistant", "parts": [{"type": "text", "content": "It is 7."}]}


@pytest.mark.parametrize("emits_traces", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
def test_model_without_a_client_is_a_call_all_the_same(
    store: Store, *, is_stream: bool, emits_traces: bool
) -> None:
    """With what the SDK knows: messages, tools, settings, usage, finish reason, response id."""
    model = scripted(
        step(ASKS("add", {"a": 3, "b": 4}, call_id="call-1"), response_id="resp-1"),
        step(TEXT("It is 7."), response_id="resp-2"),
        emit_traces=emits_traces,
    )
    settings = agents.ModelSettings(temperature=0.5, max_tokens=9)
    more: Any = {"instructions": "Add.", "tools": [add], "model_settings": settings}
    agent = agents.Agent(name="math", model=model, **more)

    with auto_trace(store=store) as recording:
        assert asyncio.run(ask(agent, "3 and 4?", is_stream=is_stream)) == "It is 7."

    assert outline(recording) == f"{AGENT}math\n    chat\n    execute_tool add\n    chat"
    first, second = calls_of(recording)
    assert (first.kind, first.status) == ("CLIENT", "UNSET")
    numbers = {
        c.REQUEST_TEMPERATURE: 0.5,
        c.REQUEST_MAX_TOKENS: 9,
        c.INPUT_TOKENS: 11,
        c.OUTPUT_TOKENS: 7,
    }
    assert first.attributes.items() >= numbers.items()
    for span, reason, answer, n in ((first, "tool_calls", CALLED, 1), (second, "stop", ANSWER, 2)):
        assert span.attributes[c.FINISH_REASONS] == [reason]
        assert span.attributes[c.RESPONSE_ID] == f"resp-{n}"
        assert said(span) == [{**answer, "finish_reason": reason}]
    assert said(first, c.SYSTEM_INSTRUCTIONS) == [{"type": "text", "content": "Add."}]
    (tool,) = said(first, c.TOOL_DEFINITIONS)
    assert (tool["name"], tool["description"]) == ("add", "Add two numbers.")
    assert tool["parameters"]["required"] == ["a", "b"]
    assert said(second, c.INPUT_MESSAGES) == GIVEN
    (path,) = recording.trajectories()
    assert [path.agent, len(path.transitions)] == ["math", 2]


@pytest.mark.parametrize("is_stream", [False, True])
def test_model_that_raises_is_a_failed_call(store: Store, *, is_stream: bool) -> None:
    """And the program gets its exception, the very object."""
    error = RuntimeError("no such weights")
    failing = scripted(agents.testing.model.ModelStep.raise_error(error))

    with auto_trace(store=store) as recording, pytest.raises(RuntimeError) as raised:
        asyncio.run(ask(agents.Agent(name="a", model=failing), "x", is_stream=is_stream))

    assert raised.value is error
    (call,) = calls_of(recording)
    assert (call.status, call.status_message) == ("ERROR", "no such weights")
    assert call.attributes[c.ERROR_TYPE] == "RuntimeError"
    outline(recording)


class Handing(agents.Model):  # type: ignore[misc]  # of a module imported if it is there
    """Hands every request on to others, one after the other, and gives the last one's answer."""

    def __init__(self, *others: Any) -> None:
        self.others = others

    async def get_response(self, *args: Any, **kwargs: Any) -> Any:
        for other in self.others:
            response = await other.get_response(*args, **kwargs)
        return response

    async def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        for other in self.others[:-1]:
            async for _ in other.stream_response(*args, **kwargs):
                pass
        async for event in self.others[-1].stream_response(*args, **kwargs):
            yield event


class Racing(Handing):
    """Asks all at once and gives the first one's answer."""

    async def get_response(self, *args: Any, **kwargs: Any) -> Any:
        asked = [other.get_response(*args, **kwargs) for other in self.others]
        return (await asyncio.gather(*asked))[0]


@pytest.mark.parametrize(
    ("kind", "count", "is_stream"),
    [*((Handing, count, is_stream) for count in (1, 3) for is_stream in (False, True)),
     (Racing, 2, False)],
)  # fmt: skip
def test_model_that_hands_on_makes_no_call_of_its_own(
    store: Store, server: DemoServer, model: Any, *, kind: Any, count: int, is_stream: bool
) -> None:
    """One for each request, beside each other under the agent, also of those asked at once."""
    handing = kind(*[model] * count)

    with auto_trace(store=store) as recording:
        asyncio.run(ask(agents.Agent(name="a", model=handing), "hello", is_stream=is_stream))

    assert len(server.log) == count
    assert outline(recording) == f"{AGENT}a" + "\n    chat toy" * count
    found = {span.attributes[c.RESPONSE_ID] for span in calls_of(recording)}
    assert found == {exchange.response_id for exchange in server.log}


class Delegating(agents.Model):  # type: ignore[misc]  # as above
    """Has an agent of its own answer."""

    model = "delegate"

    def __init__(self, agent: Any) -> None:
        self.agent = agent

    async def get_response(self, *args: Any, **kwargs: Any) -> Any:
        said = await ask(self.agent, "inside", is_stream=False)
        return agents.ModelResponse(output=[TEXT(said)], usage=agents.Usage(), response_id=None)

    def stream_response(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_agent_within_a_models_call_has_calls_of_its_own(
    store: Store, server: DemoServer, model: Any
) -> None:
    """The call around it, which no client has claimed, is not that of its requests."""
    inner = agents.Agent(name="inner", model=model)
    outer = agents.Agent(name="outer", model=Delegating(inner))

    with auto_trace(store=store) as recording:
        asyncio.run(ask(outer, "hello", is_stream=False))

    assert len(server.log) == 1
    assert sorted(span.name for span in calls_of(recording)) == ["chat delegate", "chat toy"]
    (call,) = spans_of(recording, "chat toy")
    (agent,) = spans_of(recording, "invoke_agent inner")
    assert call.parent_span_id == agent.span_id


class Thinking(agents.Model):  # type: ignore[misc]  # as above
    """Tells the SDK nothing, and does things of its own on the way."""

    model = "thinker"

    async def get_response(self, *args: Any, **kwargs: Any) -> Any:
        with trace.get_tracer("the program").start_as_current_span("by hand"):
            await asyncio.sleep(0)
        with lightning_otel.operation("marked"):
            await asyncio.sleep(0)
        return agents.ModelResponse(output=[TEXT("yes")], usage=agents.Usage(), response_id=None)

    async def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        for _ in range(2):
            with lightning_otel.operation("marked"):
                await asyncio.sleep(0)
            yield agents.testing.model.assistant_message("x")


def test_model_runs_within_its_call(store: Store) -> None:
    """What it does on its way stands in the call; it has a name, and no usage it did not say."""
    with auto_trace(store=store) as recording:
        asyncio.run(ask(agents.Agent(name="a", model=Thinking()), "x", is_stream=False))

    within = f"      by hand\n      {c.SPAN_OPERATION}"
    assert outline(recording) == f"{AGENT}a\n    chat thinker\n{within}"
    (call,) = calls_of(recording)
    assert c.INPUT_TOKENS not in call.attributes
    assert c.RESPONSE_ID not in call.attributes


def test_model_stream_left_early_is_abandoned(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """What the program does between two events is not in the call; closed elsewhere, it ends."""

    async def close(stream: Any) -> None:
        await stream.aclose()

    async def work() -> None:
        await ask(agents.Agent(name="a", model=scripted(step(TEXT("x")))), "x", is_stream=False)
        stream = Thinking().stream_response(None, "asked")
        await anext(stream)
        trace.get_tracer("the program").start_span("between").end()
        await asyncio.create_task(close(stream))
        dropped = Thinking().stream_response(None, "asked")
        await anext(dropped)
        del dropped
        gc.collect()
        await asyncio.sleep(0.01)

    with auto_trace(store=store) as recording:
        asyncio.run(work())

    calls = spans_of(recording, "chat thinker")
    assert [span.attributes.get(c.ABANDONED) for span in calls] == [True, True]
    assert all(span.end_ns is not None for span in calls)
    assert named(recording, "between").parent_span_id == recording.span_id
    assert "detach" not in caplog.text


def test_generation_span_of_the_program_is_a_call(store: Store, server: DemoServer) -> None:
    """As the program describes it, or with the payload of the client that asks within it."""
    function = {"name": "f", "arguments": "{}"}
    asked: Any = [{"role": "user", "content": "hi"}]
    calls = [{"id": "1", "type": "function", "function": function}]
    output = [{"role": "assistant", "content": "ho", "tool_calls": calls}]
    more: Any = {"input": asked, "output": output, "usage": {"input_tokens": 3, "output_tokens": 2}}

    async def work() -> None:
        with agents.trace("flow"):
            with agents.generation_span(model="mine", **more):
                trace.get_tracer("the program").start_span("by hand").end()
            with agents.generation_span(model="told"):
                create = client_of(server.base_url).chat.completions.create
                await create(model="toy", messages=asked)

    with auto_trace(store=store) as recording:
        asyncio.run(work())

    assert outline(recording) == "invoke_workflow flow\n  chat mine\n    by hand\n  chat toy"
    call, sent = calls_of(recording)
    assert sent.attributes[c.RESPONSE_ID] == server.log[0].response_id
    assert (call.attributes[c.INPUT_TOKENS], call.attributes[c.OUTPUT_TOKENS]) == (3, 2)
    assert call.attributes[c.FINISH_REASONS] == ["tool_calls"]
    assert said(call, c.INPUT_MESSAGES) == [
        {"role": "user", "parts": [{"type": "text", "content": "hi"}]}
    ]
    assert said(call)[0]["parts"] == [
        {"type": "text", "content": "ho"},
        {"type": "tool_call", "id": "1", "name": "f", "arguments": {}},
    ]


def test_sdk_models_defined_later_are_watched(store: Store) -> None:
    """The program's own classes, of any depth, once an agent runs."""
    instrument()

    class Mine(agents.testing.ScriptedModel):  # type: ignore[misc]  # of a module imported if there
        """A model of the program's own."""

        async def get_response(self, *args: Any, **kwargs: Any) -> Any:
            return await super().get_response(*args, **kwargs)

    with auto_trace(store=store) as recording:
        asyncio.run(ask(agents.Agent(name="a", model=Mine([[TEXT("x")]])), "one", is_stream=False))

    assert len(calls_of(recording)) == 1
