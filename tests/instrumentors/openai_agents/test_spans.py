"""Agents, tools, hand-offs, guardrails and workflows stand where the SDK says they stand."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry import trace

import lightning_otel
from lightning_otel import Store, auto_trace
from lightning_otel import conventions as c
from lightning_otel.demo.policy import Reply, ToolCall, ToyPolicy
from lightning_otel.demo.server import DemoServer, Exchange
from lightning_otel.types import Span

from .conftest import Listener, agents, model_calls, named, said_last, tree

CALL = ("chat toy", ())
DISABLED = ["traced", "disabled by a call", "disabled by the run", "disabled by the environment"]


@agents.function_tool  # type: ignore[untyped-decorator]  # of a module imported if it is there
def add(a: int, b: int) -> int:
    """Add two numbers."""
    with trace.get_tracer("the program").start_as_current_span("by hand"):
        return a + b


@agents.function_tool  # type: ignore[untyped-decorator]  # as above
async def double(value: int) -> int:
    """Double a number."""
    await asyncio.sleep(0.01)
    with lightning_otel.operation("marked"):
        return 2 * value


@agents.function_tool  # type: ignore[untyped-decorator]  # as above
def burst(what: str) -> str:
    """Fail."""
    raise ValueError(f"no {what} today")


@pytest.fixture(params=DISABLED)
def config(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run's configuration, with the SDK's tracing on and off in each way there is."""
    monkeypatch.setattr(agents.tracing.setup, "GLOBAL_TRACE_PROVIDER", None)
    if request.param == DISABLED[1]:
        agents.set_tracing_disabled(True)
    elif request.param == DISABLED[3]:
        monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    if request.param == DISABLED[0]:
        agents.set_trace_processors([])
    return agents.RunConfig(workflow_name="sums", tracing_disabled=request.param == DISABLED[2])


def test_spans_of_a_run_are_one_tree(
    store: Store, server: DemoServer, facts: Any, model: Any, run: Callable[..., Any], config: Any
) -> None:
    """However it is run, traced by the SDK or not; each request is one call, as the server saw."""
    agent = agents.Agent(name="math", instructions="Use tools.", model=model, tools=[add])

    with auto_trace(store=store) as recording:
        said = run(agent, "add 3 and 4", run_config=config)

    assert said == said_last(server)
    tool = ("execute_tool add", (("by hand", ()),))
    work = ("invoke_agent math", (CALL, tool, CALL))
    assert tree(recording) == (c.SPAN_ROLLOUT, (("invoke_workflow sums", (work,)),))
    calls = model_calls(recording)
    assert len(calls) == len(server.log) == 2
    for span, exchange in zip(calls, server.log, strict=True):
        agree(facts, span, exchange)
    transitions = [step for path in recording.trajectories() for step in path.transitions]
    assert [step.agent for step in transitions] == ["math", "math"]


def agree(facts: Any, span: Span, exchange: Exchange) -> None:
    """Assert that a call says what the server's log says, whatever the order of its fields."""
    content = facts.content(exchange)
    for key in c.CONTENT_KEYS & span.attributes.keys():
        found = span.attributes[key]
        expected = content.pop(key)
        if found.startswith("["):
            assert json.loads(found) == json.loads(expected)
        else:
            assert found == expected
    assert not content
    for key, value in facts.attributes(exchange).items():
        assert span.attributes[key] == value
    assert (span.kind, span.status) == ("CLIENT", "UNSET")


class AsksForBoth(ToyPolicy):
    """Calls both tools at once, then says what the last one said."""

    def reply(self, body: Mapping[str, Any], rng: random.Random) -> Reply:
        """Of the first turn the calls."""
        if body["messages"][-1]["role"] == "tool":
            return super().reply(body, rng)
        calls = (
            ToolCall("call_one", "add", '{"a": 3, "b": 4}'),
            ToolCall("call_two", "double", '{"value": 21}'),
        )
        asked = Reply(text="", tool_calls=calls, finish_reason="tool_calls")
        return replace(asked, logprobs=(0.0,) * len(asked.tokens))


def test_spans_of_a_tool_hold_its_call(store: Store, server: DemoServer, model: Any) -> None:
    """Name, call id, arguments and result, of each of several that run side by side."""
    server.policy = AsksForBoth()
    agent = agents.Agent(name="math", instructions="Use tools.", model=model, tools=[add, double])

    with auto_trace(store=store) as recording:
        asyncio.run(agents.Runner.run(agent, "hello"))

    found = {span.name: span for span in named(recording, "execute_tool")}
    answer = json.loads(model_calls(recording)[0].attributes[c.OUTPUT_MESSAGES])
    asked = {part["name"]: part for part in answer[0]["parts"]}
    assert asked.keys() == {"add", "double"}
    for name, part in asked.items():
        attributes = found[f"execute_tool {name}"].attributes
        assert attributes[c.OPERATION] == "execute_tool"
        assert attributes[c.TOOL_NAME] == name
        assert attributes[c.TOOL_CALL_ID] == part["id"]
        assert json.loads(attributes[c.TOOL_ARGUMENTS]) == part["arguments"]
        given = part["arguments"]
        assert attributes[c.TOOL_RESULT] == str(
            2 * given["value"] if name == "double" else given["a"] + given["b"]
        )
    ((_, (flow,)),) = (tree(recording),)
    first, *tools, last = flow[1][0][1]
    assert first == last == CALL
    assert set(tools) == {
        ("execute_tool add", (("by hand", ()),)),
        ("execute_tool double", ((c.SPAN_OPERATION, ()),)),
    }


def test_spans_of_a_hand_off_name_its_target(
    store: Store, model: Any, run: Callable[..., Any]
) -> None:
    """The new agent stands beside the old one, and each call under its own."""
    math = agents.Agent(name="math", instructions="Use tools.", model=model, tools=[add])
    triage = agents.Agent(name="triage", instructions="Hand over.", model=model, handoffs=[math])

    with auto_trace(store=store) as recording:
        run(triage, "transfer to math: add 3 and 4")

    (handoff,) = named(recording, "handoff")
    assert handoff.name == "handoff math"
    assert handoff.attributes[c.HANDOFF_TARGET] == "math"
    ((_, (flow,)),) = (tree(recording),)
    assert flow[1] == (
        ("invoke_agent triage", (CALL, ("handoff math", ()))),
        ("invoke_agent math", (CALL, ("execute_tool add", (("by hand", ()),)), CALL)),
    )
    assert {path.agent: len(path.transitions) for path in recording.trajectories()} == {
        "triage": 1,
        "math": 2,
    }


def test_spans_of_an_agent_as_tool_stand_under_the_tool(store: Store, model: Any) -> None:
    """The inner agent and its calls, in the same trace."""
    inner = agents.Agent(name="inner", instructions="Echo.", model=model)
    tool = inner.as_tool("consult", "Consult the inner agent.")
    outer = agents.Agent(name="outer", instructions="Use tools.", model=model, tools=[tool])

    with auto_trace(store=store) as recording:
        asyncio.run(agents.Runner.run(outer, 'consult "the stars"'))

    consult = ("execute_tool consult", (("invoke_agent inner", (CALL,)),))
    ((_, (flow,)),) = (tree(recording),)
    assert flow[1] == (("invoke_agent outer", (CALL, consult, CALL)),)


def test_spans_of_a_failing_tool_say_so(store: Store, model: Any) -> None:
    """Where the SDK tells the model of it, and where the run fails with it."""
    strict = agents.function_tool(_burst, name_override="burst", failure_error_function=None)
    told = agents.Agent(name="told", instructions="Use tools.", model=model, tools=[burst])
    fails = agents.Agent(name="fails", instructions="Use tools.", model=model, tools=[strict])

    with auto_trace(store=store) as recording:
        asyncio.run(agents.Runner.run(told, 'burst "bread"'))
        with pytest.raises(agents.exceptions.UserError, match="no bread") as raised:
            asyncio.run(agents.Runner.run(fails, 'burst "bread"'))

    first, second = named(recording, "execute_tool burst")
    assert (first.status, second.status) == ("ERROR", "ERROR")
    assert first.status_message.startswith("Error running tool")
    assert "no bread today" in second.status_message
    assert second.attributes[c.ERROR_TYPE] == "agents.exceptions.UserError"
    one, other = named(recording, "invoke_agent")
    assert (one.status, other.status) == ("UNSET", "ERROR")
    assert isinstance(raised.value.__cause__, ValueError)
    tree(recording)


def _burst(what: str) -> str:
    """Fail."""
    raise ValueError(f"no {what} today")


def test_spans_of_too_many_turns_fail(store: Store, model: Any, run: Callable[..., Any]) -> None:
    """The program gets the SDK's exception, the agent's span says what went wrong."""
    agent = agents.Agent(name="math", instructions="Use tools.", model=model, tools=[add])

    with (
        auto_trace(store=store) as recording,
        pytest.raises(agents.exceptions.MaxTurnsExceeded),
    ):
        run(agent, "add 3 and 4", max_turns=1)

    (span,) = named(recording, "invoke_agent")
    assert (span.status, span.status_message[:9]) == ("ERROR", "Max turns")
    assert len(model_calls(recording)) == 1
    tree(recording)


@pytest.mark.parametrize("triggered", [False, True])
def test_spans_of_guardrails_say_what_they_found(
    store: Store, model: Any, *, triggered: bool
) -> None:
    """Of input and output; a tripwire's exception goes on to the program."""
    found = agents.GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)
    stops = agents.GuardrailFunctionOutput(output_info=None, tripwire_triggered=triggered)

    async def polite(context: Any, agent: Any, given: Any) -> Any:
        with trace.get_tracer("the program").start_as_current_span("by hand"):
            return found

    async def short(context: Any, agent: Any, answer: Any) -> Any:
        return stops

    agent = agents.Agent(
        name="careful",
        model=model,
        input_guardrails=[agents.InputGuardrail(polite, run_in_parallel=False)],
        output_guardrails=[agents.OutputGuardrail(short)],
    )
    with auto_trace(store=store) as recording:
        if triggered:
            with pytest.raises(agents.exceptions.OutputGuardrailTripwireTriggered):
                asyncio.run(agents.Runner.run(agent, "hello"))
        else:
            asyncio.run(agents.Runner.run(agent, "hello"))

    spans = {span.attributes[c.GUARDRAIL_NAME]: span for span in named(recording, "guardrail")}
    assert spans["polite"].attributes[c.GUARDRAIL_TRIGGERED] is False
    assert spans["short"].attributes[c.GUARDRAIL_TRIGGERED] is triggered
    ((_, (flow,)),) = (tree(recording),)
    (agent_node,) = flow[1]
    assert agent_node[1] == (
        ("guardrail polite", (("by hand", ()),)),
        CALL,
        ("guardrail short", ()),
    )


def test_spans_know_their_conversation(store: Store, model: Any, run: Callable[..., Any]) -> None:
    """The group's, or else the session's, which is on the calls as well."""
    agent = agents.Agent(name="a", model=model)
    session = agents.SQLiteSession("session-1")

    with auto_trace(store=store) as recording:
        run(agent, "hello", run_config=agents.RunConfig(group_id="group-1"))
        run(agent, "hello", session=session)
        run(agent, "hello")

    found = [span.attributes.get(c.CONVERSATION_ID) for span in model_calls(recording)]
    assert found == ["group-1", "session-1", None]
    flows = named(recording, "invoke_workflow")
    assert [span.attributes.get(c.CONVERSATION_ID) for span in flows] == found
    session.close()


def test_spans_of_a_users_trace_hold_several_runs(store: Store, model: Any) -> None:
    """One workflow around them; a span of the program's own stands between."""
    agent = agents.Agent(name="a", model=model)

    async def work() -> None:
        with agents.trace("both"), agents.custom_span("step", {"number": 1}):
            await agents.Runner.run(agent, "hello")
            await agents.Runner.run(agent, "again")

    with auto_trace(store=store) as recording:
        asyncio.run(work())

    run_of = ("invoke_agent a", (CALL,))
    step = (c.SPAN_OPERATION, (run_of, run_of))
    assert tree(recording) == (c.SPAN_ROLLOUT, (("invoke_workflow both", (step,)),))
    (mark,) = named(recording, c.SPAN_OPERATION)
    assert mark.attributes[c.OPERATION_NAME] == "step"
    assert json.loads(mark.attributes[c.OPERATION_INPUT]) == {"number": 1}


def test_spans_given_a_parent_stand_in_it(store: Store) -> None:
    """Whatever is current where they start."""
    with auto_trace(store=store) as recording, agents.trace("flow") as flow:
        outer = agents.custom_span("outer")
        outer.start()
        with agents.custom_span("current"):
            inner = agents.custom_span("inner", parent=outer)
            inner.start()
            beside = agents.custom_span("beside", parent=flow)
            beside.start()
            for span in (beside, inner):
                span.finish()
        outer.finish()

    by_id = {span.span_id: span for span in recording.spans()}
    names = {
        str(span.attributes.get(c.OPERATION_NAME)): by_id[span.parent_span_id or ""]
        for span in named(recording, c.SPAN_OPERATION)
    }
    assert names["inner"].attributes[c.OPERATION_NAME] == "outer"
    assert names["beside"].name == names["current"].name == "invoke_workflow flow"


def test_spans_of_a_cancelled_stream_end(store: Store, server: DemoServer, model: Any) -> None:
    """Cancelled by the program at once; nothing stays open, nobody is left waiting."""
    server.chunk_delay_s = 0.02
    agent = agents.Agent(name="a", model=model)

    async def work() -> None:
        result = agents.Runner.run_streamed(agent, "hello, tell me much about everything")
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                result.cancel()

    with auto_trace(store=store) as recording:
        asyncio.run(work())

    assert len(model_calls(recording)) == 1
    tree(recording)


def test_spans_of_an_abandoned_stream_end(
    store: Store, server: DemoServer, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Left after its first event; the program's own spans in between are not its children."""
    server.chunk_delay_s = 0.02
    agent = agents.Agent(name="a", model=model)

    async def work() -> None:
        result = agents.Runner.run_streamed(agent, "hello, tell me much about everything")
        async for event in result.stream_events():
            with trace.get_tracer("the program").start_as_current_span("between"):
                if event.type == "raw_response_event":
                    break
        result.run_loop_task.cancel()
        await asyncio.wait([result.run_loop_task])

    with auto_trace(store=store) as recording:
        asyncio.run(work())

    _, below = tree(recording)
    assert {name for name, _ in below} == {"between", "invoke_workflow Agent workflow"}
    (call,) = model_calls(recording)
    assert call.status == "ERROR" or call.attributes.get(c.ABANDONED)
    assert "detach" not in caplog.text


def test_spans_leave_the_program_as_it_is(
    store: Store, server: DemoServer, model: Any, listener: Listener, run: Callable[..., Any]
) -> None:
    """Its processors hear the same, the server is sent the same, the answer is the same."""
    agent = agents.Agent(name="math", instructions="Use tools.", model=model, tools=[add])

    server.policy = ToyPolicy({"copy": 60.0})
    plain = run(agent, "add 3 and 4")
    heard, listener.heard[:] = listener.heard.copy(), []
    with auto_trace(store=store):
        traced = run(agent, "add 3 and 4")

    assert traced == plain
    assert traced == plain
    assert listener.heard == heard
    assert [e.path for e in server.log[:2]] == [e.path for e in server.log[2:]]
    for one, other in zip(server.log[:2], server.log[2:], strict=True):
        assert _without_ids(one.request) == _without_ids(other.request)


def _without_ids(request: Any) -> str:
    """A request without what is drawn at random for each run."""
    import re

    return re.sub(
        r"(call|fc|msg|resp|cache|agents)[-_:\w]*[0-9a-f]{12,}", "id", json.dumps(request)
    )


class Hostile:
    """What a tool gives back at its worst."""

    def __init__(self) -> None:
        self.asked = 0

    def __str__(self) -> str:
        self.asked += 1
        return "hostile"

    __repr__ = __str__


def test_spans_hold_any_result_safely(store: Store, model: Any) -> None:
    """No code of the result's own runs for it, and nothing is drained."""
    hostile = Hostile()
    looped: dict[str, Any] = {}
    looped["self"] = looped
    drained: list[int] = []

    def numbers() -> Iterator[int]:
        drained.append(1)
        yield 1

    results = iter([hostile, looped, numbers(), "x" * 10_000_000])

    @agents.function_tool  # type: ignore[untyped-decorator]  # of a module imported if there
    def fetch(what: str) -> Any:
        """Fetch it."""
        return next(results)

    agent = agents.Agent(name="a", instructions="Use tools.", model=model, tools=[fetch])
    with auto_trace(store=store) as recording:
        for _ in range(4):
            asyncio.run(agents.Runner.run(agent, 'fetch "it"'))

    spans = named(recording, "execute_tool fetch")
    texts = [str(span.attributes[c.TOOL_RESULT]) for span in spans]
    assert texts[0] == '"<Hostile>"'
    assert texts[1].startswith('{"self":{"self":')
    assert texts[2] == '"<generator>"'
    assert 0 < len(texts[3]) < 8 << 20
    assert not drained
    traced, hostile.asked = hostile.asked, 0
    results = iter([hostile])
    asyncio.run(agents.Runner.run(agent, 'fetch "it"'))
    assert hostile.asked == traced


def test_spans_hold_half_a_pair_safely(store: Store, model: Any) -> None:
    """A lone surrogate, which neither the client can send nor a file can hold."""

    @agents.function_tool  # type: ignore[untyped-decorator]  # of a module imported if there
    def fetch(what: str) -> Any:
        """Fetch it."""
        return "\ud800"

    agent = agents.Agent(name="a", instructions="Use tools.", model=model, tools=[fetch])

    with auto_trace(store=store) as recording, pytest.raises(UnicodeEncodeError):
        asyncio.run(agents.Runner.run(agent, 'fetch "it"'))

    (tool,) = named(recording, "execute_tool fetch")
    assert tool.attributes[c.TOOL_RESULT] == "?"
    assert [span.status for span in model_calls(recording)] == ["UNSET", "ERROR"]
    tree(recording)


def test_spans_hold_no_content_that_is_not_wanted(
    store: Store, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the SDK's own setting for its tracing, and by OpenTelemetry's for everything."""
    agent = agents.Agent(name="math", instructions="Use tools.", model=model, tools=[add])
    config = agents.RunConfig(trace_include_sensitive_data=False)

    with auto_trace(store=store) as quiet:
        asyncio.run(agents.Runner.run(agent, "add 3 and 4", run_config=config))
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "false")
    with auto_trace(store=store) as silent:
        asyncio.run(agents.Runner.run(agent, "add 3 and 4"))

    (tool,) = named(quiet, "execute_tool")
    assert not c.CONTENT_KEYS & tool.attributes.keys()
    assert tool.attributes[c.TOOL_CALL_ID]
    assert len(silent.spans()) == len(quiet.spans())
    for span in silent.spans():
        assert not c.CONTENT_KEYS & span.attributes.keys()


def test_spans_of_a_resumed_run_go_on(store: Store, model: Any) -> None:
    """A run that stopped to ask for approval, and was taken up again from its state."""

    @agents.function_tool(needs_approval=True)  # type: ignore[untyped-decorator]  # of a module imported if there
    def erase(what: str) -> str:
        """Erase it."""
        return f"erased {what}"

    agent = agents.Agent(name="careful", instructions="Use tools.", model=model, tools=[erase])

    async def work() -> str:
        result = await agents.Runner.run(agent, 'erase "it"')
        state = result.to_state()
        (asked,) = result.interruptions
        state.approve(asked)
        return str((await agents.Runner.run(agent, state)).final_output)

    with auto_trace(store=store) as recording:
        asyncio.run(work())

    tree(recording)
    assert [span.name for span in named(recording, "invoke_agent")] == ["invoke_agent careful"] * 2
    *_, tool = named(recording, "execute_tool erase")
    assert tool.attributes[c.TOOL_RESULT] == "erased it"
    assert len(model_calls(recording)) == 2
    flows = named(recording, "invoke_workflow")
    assert len(flows) == 2
