"""Agents, tools, handoffs, guardrails and workflows stand where the SDK says they stand."""

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from tests.facts import sent
from tests.forwarding.test_conventions import violations
from tests.instrumentors.outline import assert_each_call_once, calls_of, named, outline

import lightning_otel
from lightning_otel import Store, auto_trace, capture
from lightning_otel.demo.policy import Reply, ToolCall, ToyPolicy
from lightning_otel.demo.server import DemoServer
from lightning_otel.instrumentors import openai_agents
from lightning_otel.instrumentors.openai_agents import OpenAIAgentsInstrumentor
from lightning_otel.types import conventions as c

from .conftest import Listener, agents, spans_of

Run = Callable[..., Any]


def _add(a: int, b: int) -> int:
    """Add two numbers."""
    with trace.get_tracer("the program").start_as_current_span("by hand"):
        return a + b


async def _double(value: int) -> int:
    """Double a number."""
    await asyncio.sleep(0.01)
    with lightning_otel.operation("marked"):
        return 2 * value


def _burst(what: str) -> str:
    """Fail."""
    raise ValueError(f"no {what} today")


add, double, burst = (
    agents.function_tool(each, name_override=each.__name__[1:]) for each in (_add, _double, _burst)
)


def agent_of(model: Any, name: str = "math", **more: Any) -> Any:
    return agents.Agent(name=name, instructions="Use tools.", model=model, **more)


def consulting(model: Any) -> Any:
    """An agent that has another one as its tool."""
    inner = agent_of(model, "inner").as_tool("consult", "Consult the inner agent.")
    return agent_of(model, "outer", tools=[inner])


def handing(model: Any) -> Any:
    """An agent that hands over."""
    return agent_of(model, "triage", handoffs=[agent_of(model, tools=[add])])


async def _polite(context: Any, agent: Any, given: Any) -> Any:
    with trace.get_tracer("the program").start_as_current_span("by hand"):
        return agents.GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)


def careful(model: Any, *, triggered: bool = False) -> Any:
    """An agent with guardrails before and after."""

    async def short(context: Any, agent: Any, answer: Any) -> Any:
        return agents.GuardrailFunctionOutput(output_info=None, tripwire_triggered=triggered)

    return agents.Agent(
        name="careful",
        model=model,
        input_guardrails=[agents.InputGuardrail(_polite, run_in_parallel=False)],
        output_guardrails=[agents.OutputGuardrail(short)],
    )


MATH = """
  invoke_agent math
    chat toy
    execute_tool add
      by hand
    chat toy"""
PROGRAMS: dict[str, tuple[Callable[[Any], Any], str, str, dict[str, int]]] = {
    "tool": (lambda model: agent_of(model, tools=[add]), "add 3 and 4", MATH, {"math": 2}),
    "handoff": (
        handing,
        "transfer to math: add 3 and 4",
        """
  invoke_agent triage
    chat toy
    handoff math"""
        + MATH,
        {"triage": 1, "math": 2},
    ),
    "agent as tool": (
        consulting,
        'consult "the stars"',
        """
  invoke_agent outer
    chat toy
    execute_tool consult
      invoke_agent inner
        chat toy
    chat toy""",
        {"outer": 2, "inner": 1},
    ),
    "guardrails": (
        careful,
        "hello",
        """
  invoke_agent careful
    guardrail _polite
      by hand
    chat toy
    guardrail short""",
        {"careful": 1},
    ),
}
"""By name: the agent, what it is asked, what stands in its workflow, and whose the steps are."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_run_is_one_tree_and_leaves_the_program_as_it_is(
    name: str,
    store: Store,
    server: DemoServer,
    model: Any,
    listener: Listener,
    run: Run,
    facts: Any,
) -> None:
    """Its processors hear the same, the server is sent the same, the answer is the same."""
    make, asked, expected, steps = PROGRAMS[name]
    server.policy = ToyPolicy({"copy": 60.0})
    plain = run(make(model), asked)
    untraced = server.log
    heard, listener.heard[:] = listener.heard.copy(), []

    with auto_trace(store=store) as recording:
        assert run(make(model), asked) == plain

    since: Any = SimpleNamespace(log=server.log[len(untraced) :])
    assert outline(recording) == f"invoke_workflow Agent workflow{expected}"
    assert listener.heard == heard
    assert list(map(sent, since.log)) == list(map(sent, untraced))
    assert_each_call_once(recording, since, facts)
    found: dict[str, int] = {}
    for path in recording.trajectories():
        found[path.agent] = found.get(path.agent, 0) + len(path.transitions)
    assert found == steps
    assert [each for span in recording.spans() for each in violations(span)] == []
    for handoff in spans_of(recording, "handoff"):
        assert handoff.attributes[c.HANDOFF_TARGET] == "math"
    for guardrail in spans_of(recording, "guardrail"):
        assert guardrail.attributes[c.GUARDRAIL_TRIGGERED] is False


@pytest.mark.parametrize("how", ["by a call", "by the run", "by the environment", "not"])
def test_run_is_the_same_tree_where_the_sdk_traces_nothing(
    how: str, store: Store, model: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disabled in each way there is, or with no processor at all."""
    monkeypatch.setattr(agents.tracing.setup, "GLOBAL_TRACE_PROVIDER", None)
    if how == "by a call":
        agents.set_tracing_disabled(True)
    elif how == "by the environment":
        monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    elif how == "not":
        agents.set_trace_processors([])
    config = agents.RunConfig(workflow_name="sums", tracing_disabled=how == "by the run")

    with auto_trace(store=store) as recording:
        run(agent_of(model, tools=[add]), "add 3 and 4", run_config=config)

    assert outline(recording) == f"invoke_workflow sums{MATH}"


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


def test_tools_side_by_side_have_each_their_own(
    store: Store, server: DemoServer, model: Any
) -> None:
    """Call id, arguments, result, and what is done in them."""
    server.policy = AsksForBoth()

    with auto_trace(store=store) as recording:
        asyncio.run(agents.Runner.run(agent_of(model, tools=[add, double]), "hello"))

    lines = outline(recording, is_ordered=False).splitlines()
    assert [line for line in lines if line.startswith("      ")] == [
        "      by hand",
        f"      {c.SPAN_OPERATION}",
    ]
    for name, call_id, given, result in (
        ("add", "call_one", '{"a":3,"b":4}', "7"),
        ("double", "call_two", '{"value":21}', "42"),
    ):
        found = named(recording, f"execute_tool {name}").attributes
        assert found[c.TOOL_CALL_ID] == call_id
        assert str(found[c.TOOL_ARGUMENTS]).replace(" ", "") == given
        assert found[c.TOOL_RESULT] == result


def test_failing_tool_says_so(store: Store, model: Any) -> None:
    """Where the SDK tells the model of it, and where the run fails with it."""
    strict = agents.function_tool(_burst, name_override="burst", failure_error_function=None)

    with auto_trace(store=store) as recording:
        asyncio.run(agents.Runner.run(agent_of(model, "told", tools=[burst]), 'burst "bread"'))
        with pytest.raises(agents.exceptions.UserError, match="no bread") as raised:
            asyncio.run(agents.Runner.run(agent_of(model, tools=[strict]), 'burst "bread"'))

    first, second = spans_of(recording, "execute_tool burst")
    assert (first.status, second.status) == ("ERROR", "ERROR")
    assert first.status_message.startswith("Error running tool")
    assert "no bread today" in second.status_message
    assert second.attributes[c.ERROR_TYPE] == "agents.exceptions.UserError"
    assert [span.status for span in spans_of(recording, "invoke_agent")] == ["UNSET", "ERROR"]
    assert isinstance(raised.value.__cause__, ValueError)
    outline(recording)


def test_run_that_the_sdk_ends_fails_its_agent(store: Store, model: Any, run: Run) -> None:
    """After too many turns, and by a tripwire; the program gets the SDK's exception."""
    with auto_trace(store=store) as recording:
        with pytest.raises(agents.exceptions.MaxTurnsExceeded):
            run(agent_of(model, tools=[add]), "add 3 and 4", max_turns=1)
        with pytest.raises(agents.exceptions.OutputGuardrailTripwireTriggered):
            run(careful(model, triggered=True), "hello")

    turns, tripped = spans_of(recording, "invoke_agent")
    assert (turns.status, turns.status_message[:9]) == ("ERROR", "Max turns")
    assert tripped.status == "ERROR"
    assert named(recording, "guardrail short").attributes[c.GUARDRAIL_TRIGGERED] is True
    outline(recording)


def test_conversation_is_the_groups_or_else_the_sessions(
    store: Store, model: Any, run: Run
) -> None:
    """On the calls as well."""
    agent, session = agents.Agent(name="a", model=model), agents.SQLiteSession("session-1")

    with auto_trace(store=store) as recording:
        run(agent, "hello", run_config=agents.RunConfig(group_id="group-1"))
        run(agent, "hello", session=session)
        run(agent, "hello")
    session.close()

    for found in (calls_of(recording), spans_of(recording, "invoke_workflow")):
        conversations = [span.attributes.get(c.CONVERSATION_ID) for span in found]
        assert conversations == ["group-1", "session-1", None]


def test_trace_of_the_users_holds_several_runs(store: Store, model: Any) -> None:
    """One workflow around them; a span of the program's own stands between."""
    agent = agents.Agent(name="a", model=model)

    async def work() -> None:
        with agents.trace("both"), agents.custom_span("step", {"number": 1}):
            await agents.Runner.run(agent, "hello")
            await agents.Runner.run(agent, "again")

    with auto_trace(store=store) as recording:
        asyncio.run(work())

    run_of = "\n    invoke_agent a\n      chat toy"
    assert outline(recording) == f"invoke_workflow both\n  {c.SPAN_OPERATION}{run_of}{run_of}"
    mark = named(recording, c.SPAN_OPERATION)
    assert mark.attributes[c.OPERATION_NAME] == "step"
    assert json.loads(mark.attributes[c.OPERATION_INPUT]) == {"number": 1}


def test_span_given_a_parent_stands_in_it(store: Store) -> None:
    """Whatever is current where it starts."""
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
        for span in spans_of(recording, c.SPAN_OPERATION)
    }
    assert names["inner"].attributes[c.OPERATION_NAME] == "outer"
    assert names["beside"].name == names["current"].name == "invoke_workflow flow"


def test_setting_of_the_sdk_keeps_content_out(store: Store, model: Any) -> None:
    """The one for its own tracing; the tool is there all the same."""
    config = agents.RunConfig(trace_include_sensitive_data=False)

    with auto_trace(store=store) as recording:
        asyncio.run(
            agents.Runner.run(agent_of(model, tools=[add]), "add 3 and 4", run_config=config)
        )

    tool = named(recording, "execute_tool add").attributes
    assert not c.CONTENT_KEYS & tool.keys()
    assert tool[c.TOOL_CALL_ID]


def test_resumed_run_goes_on(store: Store, model: Any) -> None:
    """A run that stopped to ask for approval, and was taken up again from its state."""

    @agents.function_tool(needs_approval=True)  # type: ignore[untyped-decorator]  # of a module imported if there
    def erase(what: str) -> str:
        """Erase it."""
        return f"erased {what}"

    agent = agent_of(model, "careful", tools=[erase])

    async def work() -> None:
        result = await agents.Runner.run(agent, 'erase "it"')
        state = result.to_state()
        state.approve(result.interruptions[0])
        await agents.Runner.run(agent, state)

    with auto_trace(store=store) as recording:
        asyncio.run(work())

    lines = outline(recording).splitlines()
    assert [lines.count(each) for each in lines[:2]] == [2, 2]
    *_, tool = spans_of(recording, "execute_tool erase")
    assert tool.attributes[c.TOOL_RESULT] == "erased it"
    assert len(calls_of(recording)) == 2


def test_sdk_is_not_what_merely_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's own ``agents`` package is left alone, without a fault."""
    monkeypatch.setattr(openai_agents._spans, "scope", None)
    monkeypatch.setattr(OpenAIAgentsInstrumentor(), "_model", None, raising=False)
    before = capture.process.faults

    for name, patch in OpenAIAgentsInstrumentor().patches().items():
        stranger = ModuleType(name)
        patch(stranger)
        vars(stranger).update(Scope=None, SpanImpl=3, Model="none", AgentRunner=object)
        patch(stranger)

    assert capture.process.faults == before
    assert openai_agents._spans.innermost() is None


class LazySession:
    """A session without an id before its first request, as OpenAI's conversations are."""

    session_settings = None

    def __init__(self) -> None:
        self.items: list[Any] = []

    @property
    def session_id(self) -> str:
        raise ValueError("not yet available")

    async def get_items(self, limit: int | None = None) -> list[Any]:
        return list(self.items)

    async def add_items(self, items: list[Any]) -> None:
        self.items += items


def test_session_without_an_id_yet_is_no_fault(
    store: Store, model: Any, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Its property raises: the run is recorded whole, and nothing is logged."""
    with auto_trace(store=store) as recording:
        run(agents.Agent(name="a", model=model), "hello", session=LazySession())

    (call,) = calls_of(recording)
    assert c.CONVERSATION_ID not in call.attributes
    assert [record for record in caplog.records if record.name.startswith("lightning_otel")] == []
