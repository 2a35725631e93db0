"""Crews as users write them: every call once, under its agent and task, results untouched."""

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.instrumentors.outline import (
    CallsOnce,
    agents_of,
    assert_each_call_once,
    calls_of,
    named,
    outline,
    without_call_ids,
)

from lightning_otel import Store, auto_trace, uninstrument
from lightning_otel.demo.policy import Policy, Reply
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import conventions as c

crewai = pytest.importorskip("crewai", reason="could not import 'crewai': it has an environment")
pytestmark = pytest.mark.filterwarnings("ignore")

from crewai.tools import tool  # noqa: E402  # after the skip

Way = Callable[[Any], Any]


def kickoff(crew: Any) -> Any:
    """In this thread."""
    return crew.kickoff()


def kickoff_async(crew: Any) -> Any:
    """In a thread, from a coroutine."""
    return asyncio.run(crew.kickoff_async())


def akickoff(crew: Any) -> Any:
    """In coroutines."""
    return asyncio.run(crew.akickoff())


WAYS = pytest.mark.parametrize("way", [kickoff, kickoff_async, akickoff])


@tool("calculator")
def calculator(expression: str) -> str:
    """Works out an expression."""
    return str(eval(expression, {}))


@tool("calculator")
def broken(expression: str) -> str:
    """Fails."""
    raise ZeroDivisionError(f"no {expression}")


def mathematician(llm: Any, **more: Any) -> Any:
    """An agent with a tool."""
    asked: dict[str, Any] = {"tools": [calculator], "llm": llm, **more}
    return crewai.Agent(role="Mathematician", goal="Be right.", backstory="Old.", **asked)


def one_task_crew(agent: Any, **more: Any) -> Any:
    """A crew of one agent with one sum to do."""
    task = crewai.Task(
        name="sum", description="What is 17*23?", expected_output="A number.", agent=agent, **more
    )
    return crewai.Crew(name="maths", agents=[agent], tasks=[task])


ONE_TASK = """
invoke_workflow maths
  execute_task sum
    invoke_agent Mathematician
      chat toy
      execute_tool calculator
      chat toy
""".strip()


def test_crew_whose_coroutine_is_closed_is_abandoned(llm: Callable[..., Any], store: Store) -> None:
    """Nobody goes on with it: that is no error of the crew's, its task's or its agent's."""
    crew = one_task_crew(mathematician(llm()))

    async def leave() -> None:
        running = crew.akickoff()
        running.send(None)
        running.close()

    with auto_trace(store=store) as recording:
        asyncio.run(leave())

    for line in ("invoke_workflow maths", "execute_task sum"):
        span = named(recording, line)
        assert (span.status, span.attributes.get(c.ABANDONED)) == ("UNSET", True)
        assert c.ERROR_TYPE not in span.attributes


class Reasons(Policy):
    """Asks for a tool in plain words, as models without tool calls do."""

    def reply(self, body: Mapping[str, Any], rng: random.Random) -> Reply:
        """The tool first, then the answer to what it observed."""
        text = json.dumps(body["messages"])
        if "Observation: 391" in text:
            return Reply("Thought: I know.\nFinal Answer: 391")
        return Reply('Thought: sum\nAction: calculator\nAction Input: {"expression": "17*23"}')


def person(llm: Any, role: str = "Ann") -> Any:
    """An agent without a tool."""
    return crewai.Agent(role=role, goal="g", backstory="b", llm=llm())


@tool("calculator")
def spanned(expression: str) -> str:
    """Makes a span of the program's own."""
    with trace.get_tracer("mine").start_as_current_span("mine"):
        return "391"


def async_tasks(llm: Any) -> Any:
    """Tasks on threads of their own, and one that waits for both."""
    first, second = person(llm), person(llm, "Bob")
    tasks = [
        crewai.Task(
            name=name,
            description=f"{name}!",
            expected_output="x",
            agent=agent,
            async_execution=True,
        )
        for name, agent in (("one", first), ("two", second))
    ]
    last = crewai.Task(
        name="three", description="end", expected_output="x", agent=first, context=tasks
    )
    return crewai.Crew(name="pair", agents=[first, second], tasks=[*tasks, last])


WORK = '{"task": "add up", "context": "none", "coworker": "Ann"}'


def delegating(llm: Any) -> Any:
    """A manager who lets a coworker do it."""
    return crewai.Crew(
        name="firm",
        agents=[person(llm)],
        tasks=[crewai.Task(name="sum", description="add", expected_output="x")],
        process=crewai.Process.hierarchical,
        manager_llm=llm(),
    )


def guarded(llm: Any) -> Any:
    """A guardrail that wants another try."""
    judged: list[str] = []

    def guardrail(output: Any) -> tuple[bool, Any]:
        judged.append(output.raw)
        return (len(judged) > 1, output.raw if len(judged) > 1 else "say more")

    agent = person(llm)
    task = crewai.Task(
        name="t", description="d", expected_output="x", agent=agent, guardrail=guardrail
    )
    return crewai.Crew(name="strict", agents=[agent], tasks=[task])


def sums(**more: Any) -> Callable[[Any], Any]:
    """Makes the crew of one agent, whose tool is the calculator unless another is named."""
    return lambda llm: one_task_crew(mathematician(llm(), **more))


def streamed(llm: Any) -> Any:
    """A crew that runs on a thread as its chunks are read, under what reads them."""
    crew = one_task_crew(mathematician(llm()))
    crew.stream = True

    async def read(way: Way) -> Any:
        streaming = await (crew.kickoff_async() if way is kickoff_async else crew.akickoff())
        async for _ in streaming:
            pass
        return streaming.result

    def work(way: Way) -> Any:
        if way is not kickoff:
            return asyncio.run(read(way))
        streaming = crew.kickoff()
        list(streaming)
        return streaming.result

    return work


def in_a_loop(llm: Any) -> Any:
    """An agent by itself: there ``kickoff`` gives a coroutine, whose work is the span."""

    async def ask() -> Any:
        return await mathematician(llm()).kickoff("What is 17*23?")

    return lambda _: asyncio.run(ask())


def flow(llm: Any) -> Any:
    """A flow, which holds its crews."""
    from crewai.flow.flow import Flow, listen, start

    class Sums(Flow):  # type: ignore[misc,type-arg]  # untyped where CrewAI is not installed
        @start()
        def first(self) -> str:
            return str(one_task_crew(mathematician(llm())).kickoff().raw)

        @listen(first)
        def second(self, said: str) -> str:
            return said.upper()

    return lambda _: Sums().kickoff()


def for_each(llm: Any) -> Any:
    """A crew run for several inputs: as many workflows, side by side."""
    agent = person(llm)
    task = crewai.Task(name="t", description="say {x}", expected_output="x", agent=agent)
    crew = crewai.Crew(name="each", agents=[agent], tasks=[task])
    asked = [{"x": "1"}, {"x": "2"}]
    return lambda _: [each.raw for each in asyncio.run(crew.kickoff_for_each_async(asked))]


SIDE_BY_SIDE = ("async tasks", "each input")
EACH = """invoke_workflow each
  execute_task t
    invoke_agent Ann
      chat toy"""
CREWS: dict[str, tuple[Callable[[Any], Any], Policy | None, str]] = {
    "tool": (sums(), None, ONE_TASK),
    "streaming model": (
        lambda llm: one_task_crew(mathematician(llm(stream=True))), None, ONE_TASK
    ),
    "time limit": (sums(max_execution_time=30), None, ONE_TASK),
    "failing tool": (sums(tools=[broken]), None, ONE_TASK),
    "no arguments": (sums(), CallsOnce("calculator", '{"expression": ', "sorry"), ONE_TASK),
    "tool asked for in words": (sums(), Reasons(), ONE_TASK),
    # LiteLLM sends by the openai client. Of a model that it knows no tool calls of: for those it
    # wants a newer mcp than CrewAI allows.
    "through LiteLLM": (
        lambda llm: one_task_crew(mathematician(llm(is_litellm=True))), Reasons(), ONE_TASK
    ),
    "program's own span": (
        sums(tools=[spanned]), None, ONE_TASK.replace("calculator", "calculator\n        mine")
    ),
    "async tasks": (async_tasks, None, """
invoke_workflow pair
  execute_task one
    invoke_agent Ann
      chat toy
  execute_task three
    invoke_agent Ann
      chat toy
  execute_task two
    invoke_agent Bob
      chat toy"""),
    "delegated": (delegating, CallsOnce("delegate_work", WORK), """
invoke_workflow firm
  execute_task sum
    invoke_agent Crew Manager
      chat toy
      execute_tool delegate_work_to_coworker
        invoke_agent Ann
          chat toy
      chat toy"""),
    "guardrail": (guarded, None, """
invoke_workflow strict
  execute_task t
    invoke_agent Ann
      chat toy
    invoke_agent Ann
      chat toy"""),
    "streaming crew": (streamed, None, ONE_TASK),
    "agent in a loop": (in_a_loop, None, "\n".join(line[4:] for line in ONE_TASK.split("\n")[2:])),
    "flow": (flow, None, "\n  ".join(["invoke_workflow Sums", *ONE_TASK.split("\n")])),
    "each input": (for_each, None, f"{EACH}\n{EACH}"),
}  # fmt: skip
"""By name: the crew, or what does the work, who plays its models, and the outline of its work."""


@WAYS
@pytest.mark.parametrize("name", CREWS)
def test_crew_is_an_outline_of_its_work(
    name: str, way: Way, store: Store, facts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call and tool stands under its agent, that under its task; nothing else is changed."""
    make, policy, expected = CREWS[name]
    if name == "through LiteLLM":
        pytest.importorskip("litellm", reason="could not import 'litellm'")
    if name == "tool asked for in words":
        cls = type(crewai.LLM(model="openai/toy", base_url="http://127.0.0.1/v1", api_key="k"))
        monkeypatch.setattr(cls, "supports_function_calling", lambda self: False)

    def run(server: DemoServer) -> tuple[str, Any]:
        server.policy = policy or server.policy

        def llm(**options: Any) -> Any:
            return crewai.LLM(model="openai/toy", base_url=server.base_url, api_key="k", **options)

        made = make(llm)
        found = way(made) if isinstance(made, crewai.Crew) else made(way)
        return getattr(found, "raw", found), getattr(found, "token_usage", None)

    with DemoServer() as plain, DemoServer() as server:
        with auto_trace(store=store) as recording:
            result = run(server)
        if not isinstance(policy, Reasons):  # which reads what CrewAI remembers
            uninstrument()
            assert run(plain) == result
            requests = [[each.request for each in found.log] for found in (plain, server)]
            if name not in SIDE_BY_SIDE:
                first, second = (
                    without_call_ids(each, [said for one in each for said in one["messages"]])
                    for each in requests
                )
                assert first == second
        if name != "no arguments":
            assert_each_call_once(recording, server, facts)

    assert outline(recording, is_ordered=name not in SIDE_BY_SIDE) == expected.strip()
    if ONE_TASK not in expected:
        return
    assert agents_of(recording) == ["Mathematician"] * 2
    done = named(recording, "execute_tool calculator")
    asked = (server.log[0].response or {})["choices"][0]["message"].get("tool_calls")
    if asked and name != "no arguments":
        assert done.attributes[c.TOOL_CALL_ID] == asked[0]["id"]
        assert done.attributes[c.TOOL_ARGUMENTS] == asked[0]["function"]["arguments"]
        assert done.attributes[c.AGENT_NAME] == "Mathematician"
    if name == "failing tool":
        assert done.attributes[c.ERROR_TYPE] == "ZeroDivisionError"
        assert "no 17*23" in str(done.attributes[c.TOOL_RESULT])
    elif name != "no arguments":
        assert done.attributes[c.TOOL_RESULT] == "391"
    assert done.status == ("ERROR" if name in ("failing tool", "no arguments") else "UNSET")
    said = json.loads(str(named(recording, "invoke_workflow maths").attributes[c.OUTPUT_MESSAGES]))
    assert said[0]["parts"][0]["content"] == result[0]


@WAYS
def test_model_of_no_known_client_is_recorded_by_what_crewai_knows(way: Way, store: Store) -> None:
    """A custom model's call is one span with its messages, under its agent."""

    class Own(crewai.BaseLLM):  # type: ignore[misc]  # untyped where CrewAI is not installed
        def call(self, messages: Any, *args: Any, **kwargs: Any) -> str:
            text = json.dumps(messages)
            if "Observation: 391" in text:
                return "Thought: I know.\nFinal Answer: 391"
            return 'Thought: sum\nAction: calculator\nAction Input: {"expression": "17*23"}'

        async def acall(self, messages: Any, *args: Any, **kwargs: Any) -> str:
            return self.call(messages)

        def supports_function_calling(self) -> bool:
            return False

    with auto_trace(store=store) as recording:
        result = way(one_task_crew(mathematician(Own(model="own", provider="mine"))))

    assert result.raw == "391"
    assert outline(recording) == ONE_TASK.replace("toy", "own")
    assert agents_of(recording) == ["Mathematician"] * 2
    for span in calls_of(recording):
        assert span.attributes[c.REQUEST_MODEL] == "own"
        assert json.loads(str(span.attributes[c.INPUT_MESSAGES]))[-1]["parts"]
    said = json.loads(str(calls_of(recording)[1].attributes[c.OUTPUT_MESSAGES]))
    assert said[0]["parts"][0]["content"].endswith("Final Answer: 391")


def test_telemetry_of_crewai_gets_nothing_of_ours(
    llm: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it sends to its maker holds none of our spans, and what we keep none of its own.

    Its exporter is replaced by one in memory, as the real one would leave this machine.
    """
    from crewai.telemetry import telemetry

    exporter = InMemorySpanExporter()
    monkeypatch.setattr(telemetry, "SafeOTLPSpanExporter", lambda **_: exporter)
    monkeypatch.setattr(telemetry.Telemetry, "_register_shutdown_handlers", lambda self: None)
    monkeypatch.setattr(telemetry.Telemetry, "_instance", None)
    monkeypatch.delenv("CREWAI_DISABLE_TELEMETRY")
    theirs = telemetry.Telemetry()
    theirs.set_tracer()
    crew = one_task_crew(mathematician(llm()))

    with auto_trace(store=store) as recording:
        theirs.crew_creation(crew, None)
        kickoff(crew)
    theirs.provider.force_flush()

    sent = exporter.get_finished_spans()
    assert "Crew Created" in [span.name for span in sent]
    assert c.SCOPE not in [span.instrumentation_scope.name for span in sent]
    assert "17*23" not in "".join(span.to_json() for span in sent)
    assert outline(recording) == ONE_TASK
    theirs.provider.shutdown()
