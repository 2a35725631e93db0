"""LangGraph's graphs and LangChain's agents: every call under its node, tool and agent."""

import asyncio
import threading
import warnings
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, TypedDict

import openai
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import create_react_agent
from langgraph.types import Command, Send, interrupt
from opentelemetry import trace
from tests.forwarding.test_conventions import violations
from tests.instrumentors.langchain.conftest import Chat, all_of
from tests.instrumentors.outline import (
    agents_of,
    assert_each_call_once,
    calls_of,
    named,
    outline,
)

from lightning_otel import Store, auto_trace
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import conventions as c

QUESTION: Any = {"messages": [("user", "What is 17*23?")]}
mine = trace.get_tracer("the program's own")


class State(TypedDict, total=False):
    """A graph's state."""

    text: str
    done: str


def graph_of(name: str | None = None, checkpointer: Any = None, /, **nodes: Any) -> Any:
    builder: Any = StateGraph(State)
    last = START
    for node, function in nodes.items():
        builder.add_node(node, function)
        builder.add_edge(last, node)
        last = node
    return builder.compile(name=name, checkpointer=checkpointer)


def asking(chat: Chat, model: str = "toy") -> Callable[[State], State]:
    return lambda state: {"text": str(chat(model=model).invoke("hello").content)}


def calculator_of(chat: Chat, *, is_async: bool = False) -> BaseTool:
    """A tool with a span of the program's own, in which a model is asked."""
    if is_async:

        @tool
        async def calculator(expression: str) -> str:
            """Works out an expression."""
            with mine.start_as_current_span("mine"):
                return str((await chat(model="inner").ainvoke(expression)).content)

    else:

        @tool
        def calculator(expression: str) -> str:
            """Works out an expression."""
            with mine.start_as_current_span("mine"):
                return str(chat(model="inner").invoke(expression).content)

    return calculator


RUNS: dict[str, Callable[[Any, Any], Any]] = {
    "invoke": lambda agent, config: agent.invoke(QUESTION, config),
    "stream": lambda agent, config: list(agent.stream(QUESTION, config)),
    "stream of messages": lambda agent, config: list(
        agent.stream(QUESTION, config, stream_mode="messages")
    ),
    "ainvoke": lambda agent, config: agent.ainvoke(QUESTION, config),
    "astream": lambda agent, config: all_of(agent.astream(QUESTION, config)),
    "astream of messages": lambda agent, config: all_of(
        agent.astream(QUESTION, config, stream_mode="messages")
    ),
    "astream_events": lambda agent, config: all_of(
        agent.astream_events(QUESTION, config, version="v2")
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_agent_is_a_tree(
    name: str, server: DemoServer, facts: Any, chat: Chat, store: Store
) -> None:
    """An agent, its nodes, tools and calls stand in one another, with their facts."""
    is_async = name.startswith("a")
    agent = create_agent(chat(), [calculator_of(chat, is_async=is_async)], name="mathy")
    config = {"configurable": {"thread_id": "t1"}}

    async def run() -> None:
        await RUNS[name](agent, config)

    with auto_trace(store=store) as recording:
        asyncio.run(run()) if is_async else RUNS[name](agent, config)

    wanted = """
invoke_agent mathy
  model
    chat toy
  tools
    execute_tool calculator
      mine
        chat inner
  model
    chat toy
"""
    assert outline(recording) == wanted.strip()
    assert_each_call_once(recording, server, facts, conversation="t1")
    assert set(agents_of(recording)) == {"mathy"}


def piped(chat: Chat, server: DemoServer) -> None:
    """A graph whose nodes ask by whichever client, and whose way a model chooses."""
    client = openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)

    def plan(state: State) -> State:
        asked: Any = [{"role": "user", "content": "plain client"}]
        client.chat.completions.create(model="toy", messages=asked)
        with mine.start_as_current_span("mine"):
            return {"text": str(chat().invoke("hello").content)}

    async def act(state: State) -> State:
        return {"done": str((await chat().ainvoke(state["text"])).content)}

    def route(state: State) -> str:
        chat(model="router").invoke("where to?")
        return END

    builder: Any = StateGraph(State)
    builder.add_node("plan", plan).add_node("act", act)
    builder.add_edge(START, "plan").add_edge("plan", "act").add_conditional_edges("act", route)
    asyncio.run(builder.compile(name="pipe").ainvoke({}))
    client.close()


def in_each_other(chat: Chat, server: DemoServer) -> None:
    """An agent that is a node, and one that is another's tool."""
    helper = create_agent(chat(model="helper"), name="helper")

    @tool
    def calculator(expression: str) -> str:
        """Works out an expression."""
        return str(helper.invoke({"messages": [("user", expression)]})["messages"][-1].content)

    builder: Any = StateGraph(dict)
    builder.add_node("first", create_agent(chat(), [calculator], name="boss"))
    builder.add_edge(START, "first")
    builder.compile().invoke(QUESTION)


def prebuilt(chat: Chat, server: DemoServer) -> None:
    """LangGraph's older way to make an agent, which says nothing of it but by its nodes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        create_react_agent(chat(), [calculator_of(chat)], name="older").invoke(QUESTION)


class Summary(AgentMiddleware):
    """Asks a model before the agent does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def before_agent(self, state: Any, runtime: Any) -> None:
        self.model.invoke("sum it up")


def deep(chat: Chat, server: DemoServer) -> None:
    """Agents without a name, with metadata as Deep Agents has them, and as nobody knows them."""
    for maker in ("deepagents", "of tomorrow"):
        metadata = {"ls_integration": maker, "lc_agent_name": None}
        agent: Any = create_agent(
            chat(), [calculator_of(chat)], middleware=[Summary(chat(model="sums"))]
        )
        agent.with_config({"metadata": metadata}).invoke(QUESTION)


def beside_an_agents(chat: Chat, server: DemoServer) -> None:
    """A graph that begins with a node called as an agent's is; with a name it is one."""
    nodes = {"agent": asking(chat), "critic": asking(chat)}
    graph_of("writer", **nodes).invoke({})
    graph_of(**nodes).invoke({})


def subgraph(chat: Chat, server: DemoServer) -> None:
    """A graph within a graph, which is known as one by its first node."""
    graph_of("big", within=graph_of("small", ask=asking(chat))).invoke({})


def interrupted(chat: Chat, server: DemoServer) -> None:
    """A graph that waits for someone, and goes on later."""
    graph = graph_of(
        "waits",
        InMemorySaver(),
        ask=lambda state: {"text": str(interrupt("go on?"))},
        act=asking(chat),
    )
    config: Any = {"configurable": {"thread_id": "t7"}}
    graph.invoke({}, config)
    graph.invoke(Command(resume="yes"), config)


def named_chain(chat: Chat, server: DemoServer) -> None:
    """A chain that was given a name; what LangChain makes of it is worth no span."""
    inner = (RunnableLambda(lambda text: text) | chat()).with_config(run_name="mine")
    (RunnableLambda(lambda text: text) | inner | (lambda answer: answer.content)).batch(["a", "b"])


def threaded(chat: Chat, server: DemoServer) -> None:
    """A node that starts a plain thread, and then one that is handed its config."""

    def ask(state: State, config: RunnableConfig) -> State:
        for model, more in (("plain", ()), ("handed", (config,))):
            thread = threading.Thread(
                target=lambda m=model, more=more: chat(model=m).invoke("x", *more)
            )
            thread.start()
            thread.join()
        return {}

    graph_of(ask=ask).invoke({})


DEEP = """
invoke_agent LangGraph
  Summary.before_agent
    chat sums
  model
    chat toy
  tools
    execute_tool calculator
      mine
        chat inner
  model
    chat toy
"""
CHAIN = "RunnableSequence\n  mine\n    chat toy"
PROGRAMS: list[tuple[Callable[[Chat, DemoServer], None], str, list[str]]] = [
    (
        piped,
        """
invoke_workflow pipe
  plan
    chat toy
    mine
      chat toy
  act
    chat toy
    route
      chat router
""",
        ["plan", "plan", "act", "act"],
    ),
    (
        in_each_other,
        """
invoke_workflow LangGraph
  first
    invoke_agent boss
      model
        chat toy
      tools
        execute_tool calculator
          invoke_agent helper
            model
              chat helper
      model
        chat toy
""",
        ["boss", "helper", "boss"],
    ),
    (
        prebuilt,
        "invoke_agent older\n",
        ["older"] * 3,
    ),
    (
        deep,
        f"{DEEP.strip()}\n{DEEP.strip()}",
        ["Summary", "LangGraph", "LangGraph", "LangGraph"] * 2,
    ),
    (
        beside_an_agents,
        """
invoke_agent writer
  agent
    chat toy
  critic
    chat toy
invoke_workflow LangGraph
  agent
    chat toy
  critic
    chat toy
""",
        ["writer", "critic", "agent", "critic"],
    ),
    (
        subgraph,
        """
invoke_workflow big
  within
    invoke_workflow small
      ask
        chat toy
""",
        ["ask"],
    ),
    (
        interrupted,
        """
invoke_workflow waits
  ask
invoke_workflow waits
  ask
  act
    chat toy
""",
        ["act"],
    ),
    (named_chain, f"{CHAIN}\n{CHAIN}", ["", ""]),
    (threaded, "invoke_workflow LangGraph\n  ask\n    chat plain\n    chat handed", ["ask"] * 2),
]


@pytest.mark.parametrize(
    ("program", "expected", "agents"), PROGRAMS, ids=lambda each: getattr(each, "__name__", "")
)
def test_program_is_a_tree(
    program: Any, expected: str, agents: list[str], server: DemoServer, chat: Chat, store: Store
) -> None:
    """Each call stands in its node and belongs to the agent that acts there; nothing failed."""
    with auto_trace(store=store) as recording:
        program(chat, server)

    lines = outline(recording)
    # Of the older agent each release has other steps.
    assert (lines.partition("\n")[0] if program is prebuilt else lines) == expected.strip()
    assert agents_of(recording) == agents
    assert len(calls_of(recording)) == len(server.log)
    assert {span.status for span in recording.spans()} == {"UNSET"}
    assert [each for span in recording.spans() for each in violations(span)] == []
    if program is interrupted:
        assert calls_of(recording)[0].attributes[c.CONVERSATION_ID] == "t7"


def test_parallel_nodes_keep_their_calls(chat: Chat, store: Store) -> None:
    """Nodes that run side by side, in threads or as tasks, each have their own call."""

    def ask(state: State) -> State:
        with mine.start_as_current_span(f"mine {state['text']}"):
            chat(model=state["text"]).invoke("hello")
        return {}

    names = ["one", "two", "three", "four"]
    builder: Any = StateGraph(State)
    builder.add_node("ask", ask)
    builder.add_conditional_edges(START, lambda state: [Send("ask", {"text": n}) for n in names])
    graph = builder.compile()

    with auto_trace(store=store) as recording:
        graph.invoke({})
        asyncio.run(graph.ainvoke({}))

    lines = outline(recording)
    for name in names:
        assert lines.count(f"  ask\n    mine {name}\n      chat {name}") == 2


def test_failing_node_fails_its_spans(chat: Chat, store: Store) -> None:
    """What a node raises ends it and its graph, and is the program's own exception."""

    def ask(state: State) -> State:
        chat().invoke("hello")
        raise KeyError("mine")

    with auto_trace(store=store) as recording, pytest.raises(KeyError, match="mine"):
        graph_of("fails", ask=ask).invoke({})

    assert outline(recording) == "invoke_workflow fails\n  ask\n    chat toy"
    assert [span.status for span in recording.spans()[1:]] == ["ERROR", "ERROR", "UNSET"]
    assert named(recording, "ask").attributes[c.ERROR_TYPE] == "KeyError"
    assert named(recording, "ask").attributes[c.OPERATION] == "execute_node"


def test_cancelled_agent_ends_all_its_spans(silent: Any, chat: Chat, store: Store) -> None:
    """A run that is cancelled while a tool waits, and a tool alone, which no handler is told of."""

    @tool
    async def calculator(expression: str) -> str:
        """Works out an expression."""
        return str((await chat(base_url=silent.base_url, model="waits").ainvoke("hi")).content)

    async def main() -> None:
        agent: Any = create_agent(chat(), [calculator], name="mathy")
        for work in (agent.ainvoke(QUESTION), calculator.ainvoke({"expression": "1"})):
            running = asyncio.ensure_future(work)
            await silent.asked(1)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    with auto_trace(store=store) as recording:
        asyncio.run(main())

    cancelled = ("invoke_agent mathy", "tools", "execute_tool calculator", "chat waits")
    failed = [span for span in recording.spans() if span.name in cancelled]
    assert len(failed) == 6
    assert all(span.attributes[c.ERROR_TYPE].endswith("CancelledError") for span in failed)
    outline(recording)


def test_events_left_early_are_no_error(chat: Chat, store: Store) -> None:
    """LangChain cancels the run in its task; a run that the program cancels has failed."""

    async def wait(_: State) -> State:
        await asyncio.sleep(60)
        return {}

    def events_of(name: str) -> Any:
        graph = graph_of(name, one=asking(chat), two=wait)
        return graph.astream_events({}, version="v2")

    async def read_some(events: Any) -> None:
        async with aclosing(events) as stream:
            async for event in stream:
                if "two" in repr(event):
                    break

    async def main() -> None:
        await read_some(events_of("left"))
        running = asyncio.ensure_future(all_of(events_of("cancelled")))
        await asyncio.sleep(0.5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    with auto_trace(store=store) as recording:
        asyncio.run(main())

    left, cancelled = (
        named(recording, f"invoke_workflow {name}") for name in ("left", "cancelled")
    )
    assert [left.status, cancelled.status] == ["UNSET", "ERROR"]
    nodes = [span for span in recording.spans() if span.parent_span_id == left.span_id]
    assert {span.status for span in nodes} == {"UNSET"}
    outline(recording)


@pytest.mark.parametrize("is_async", [False, True])
def test_abandoned_graph_ends_its_spans(is_async: bool, chat: Chat, store: Store) -> None:
    """A graph's stream that the program leaves ends without an error."""
    graph = graph_of("left", one=asking(chat), two=asking(chat))

    async def main() -> None:
        async with aclosing(graph.astream({})) as stream:
            async for _ in stream:
                break

    with auto_trace(store=store) as recording:
        if is_async:
            asyncio.run(main())
        else:
            for _ in graph.stream({}):
                break

    assert named(recording, "invoke_workflow left").status == "UNSET"
    outline(recording)
