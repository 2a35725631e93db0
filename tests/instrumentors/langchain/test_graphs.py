"""LangGraph's graphs and LangChain's agents: every call under its node, tool and agent."""

import asyncio
import contextlib
import threading
import warnings
from typing import Any, TypedDict

import openai
import pytest
from langchain.agents import create_agent
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import create_react_agent
from langgraph.types import Command, Send, interrupt
from opentelemetry import trace
from tests.instrumentors.langchain.conftest import Chat, Tree

from lightning_otel import Store, auto_trace
from lightning_otel import conventions as c
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import Span

QUESTION: Any = {"messages": [("user", "What is 17*23?")]}
mine = trace.get_tracer("the program's own")


class State(TypedDict, total=False):
    """A graph's state."""

    text: str
    done: str


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


AGENT_LINES = [
    "invoke_agent mathy",
    "  model",
    "    chat toy",
    "  tools",
    "    execute_tool calculator",
    "      mine",
    "        chat inner",
    "  model",
    "    chat toy",
]


def agents_of(tree: Tree, spans: list[Span]) -> list[str]:
    """The agent each span belongs to, as its nearest span with a name says."""
    found = []
    for span in spans:
        above: Span | None = span
        while above is not None and c.AGENT_NAME not in above.attributes:
            above = tree.up(above)
        found.append(str(above.attributes[c.AGENT_NAME]) if above else "")
    return found


def matches(tree: Tree, facts: Any, server: DemoServer, **more: Any) -> None:
    """Hold each call against the server's log: one span for each exchange, with all it says."""
    calls = [span for span in tree.spans if span.attributes.get(c.OPERATION) == c.CHAT]
    assert len(calls) == len(server.log)
    by_id = {span.attributes[c.RESPONSE_ID]: span for span in calls}
    for exchange in server.log:
        span = by_id[exchange.response_id]
        for key, value in more.items():
            assert span.attributes.get(key) == value
        attributes = {key: held for key, held in span.attributes.items() if key not in more}
        plain = Span(
            **{name: getattr(span, name) for name in Span.__dataclass_fields__}
            | {"attributes": attributes}
        )
        facts.agree(plain, exchange)


async def all_of(stream: Any) -> list[Any]:
    """Everything an async stream gives."""
    return [item async for item in stream]


SYNC_RUNS: dict[str, Any] = {
    "invoke": lambda agent, config: agent.invoke(QUESTION, config),
    "stream": lambda agent, config: list(agent.stream(QUESTION, config)),
    "stream of messages": lambda agent, config: list(
        agent.stream(QUESTION, config, stream_mode="messages")
    ),
}
ASYNC_RUNS: dict[str, Any] = {
    "ainvoke": lambda agent, config: agent.ainvoke(QUESTION, config),
    "astream": lambda agent, config: all_of(agent.astream(QUESTION, config)),
    "astream of messages": lambda agent, config: all_of(
        agent.astream(QUESTION, config, stream_mode="messages")
    ),
    "astream_events": lambda agent, config: all_of(
        agent.astream_events(QUESTION, config, version="v2")
    ),
}


@pytest.mark.parametrize("name", SYNC_RUNS)
def test_agent_is_a_tree(
    name: str, server: DemoServer, facts: Any, chat: Chat, store: Store
) -> None:
    """An agent, its nodes, tools and calls stand in one another, with their facts."""
    agent = create_agent(chat(), [calculator_of(chat)], name="mathy")

    with auto_trace(store=store) as recording:
        SYNC_RUNS[name](agent, {"configurable": {"thread_id": "t1"}})

    tree = Tree(recording).check()
    assert tree.lines() == AGENT_LINES
    matches(tree, facts, server, **{c.CONVERSATION_ID: "t1"})
    assert set(agents_of(tree, tree.named("chat toy") + tree.named("chat inner"))) == {"mathy"}
    tool_span_agrees(tree, server)


@pytest.mark.parametrize("name", ASYNC_RUNS)
def test_async_agent_is_a_tree(
    name: str, server: DemoServer, facts: Any, chat: Chat, store: Store
) -> None:
    """The same of coroutines and async streams."""
    agent = create_agent(chat(), [calculator_of(chat, is_async=True)], name="mathy")

    async def main() -> None:
        await ASYNC_RUNS[name](agent, {"configurable": {"thread_id": "t1"}})

    with auto_trace(store=store) as recording:
        asyncio.run(main())

    tree = Tree(recording).check()
    assert tree.lines() == AGENT_LINES
    matches(tree, facts, server, **{c.CONVERSATION_ID: "t1"})
    tool_span_agrees(tree, server)


def tool_span_agrees(tree: Tree, server: DemoServer) -> None:
    """Hold the tool's span against the requests it was asked for and answered in."""
    (asked,) = [
        call
        for exchange in server.log
        if exchange.request and exchange.request["model"] == "toy"
        for choice in (exchange.response or {})["choices"]
        for call in choice["message"].get("tool_calls") or ()
    ]
    answers = [
        message
        for exchange in server.log
        for message in (exchange.request or {})["messages"]
        if message["role"] == "tool"
    ]
    (span,) = tree.named("execute_tool calculator")
    found = span.attributes
    assert (span.kind, span.status) == ("INTERNAL", "UNSET")
    assert found[c.OPERATION] == "execute_tool"
    assert found[c.TOOL_NAME] == asked["function"]["name"]
    assert found[c.TOOL_CALL_ID] == asked["id"]
    assert found[c.TOOL_ARGUMENTS] == asked["function"]["arguments"].replace(": ", ":")
    assert found[c.TOOL_RESULT] == answers[0]["content"]


def test_traced_agent_gives_what_the_untraced_one_gives(chat: Chat, store: Store) -> None:
    """The state an agent ends with is the same, save for the ids that LangChain draws."""
    with DemoServer() as other:
        tools = [calculator_of(lambda **options: chat(base_url=other.base_url, **options))]
        agent: Any = create_agent(chat(base_url=other.base_url), tools, name="mathy")
        before = agent.invoke(QUESTION)
    agent = create_agent(chat(), [calculator_of(chat)], name="mathy")

    with auto_trace(store=store):
        after = agent.invoke(QUESTION)

    assert [message.type for message in after["messages"]] == [
        message.type for message in before["messages"]
    ]
    assert [message.content for message in after["messages"]] == [
        message.content for message in before["messages"]
    ]


def test_graph_is_a_workflow_whose_nodes_act(
    server: DemoServer, facts: Any, chat: Chat, store: Store
) -> None:
    """Calls in a node stand in it, of whichever client, also through a span of the program's."""
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

    builder = StateGraph(State)
    builder.add_node("plan", plan)
    builder.add_node("act", act)
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "act")
    builder.add_conditional_edges("act", route)
    graph = builder.compile(name="pipe")

    with auto_trace(store=store) as recording:
        asyncio.run(graph.ainvoke({}))
    client.close()

    tree = Tree(recording).check()
    assert tree.lines() == [
        "invoke_workflow pipe",
        "  plan",
        "    chat toy",
        "    mine",
        "      chat toy",
        "  act",
        "    chat toy",
        "    route",
        "      chat router",
    ]
    matches(tree, facts, server)
    assert tree.named("invoke_workflow pipe")[0].attributes[c.WORKFLOW_NAME] == "pipe"
    assert agents_of(tree, tree.named("chat toy")) == ["plan", "plan", "act"]
    assert agents_of(tree, tree.named("chat router")) == ["act"]


def test_agents_within_a_graph_keep_their_names(chat: Chat, store: Store) -> None:
    """An agent that is a node, and one that is another's tool, act under their own names."""
    helper = create_agent(chat(model="helper"), name="helper")

    @tool
    def calculator(expression: str) -> str:
        """Works out an expression."""
        return str(helper.invoke({"messages": [("user", expression)]})["messages"][-1].content)

    builder: Any = StateGraph(dict)
    builder.add_node("first", create_agent(chat(), [calculator], name="boss"))
    builder.add_edge(START, "first")

    with auto_trace(store=store) as recording:
        builder.compile().invoke(QUESTION)

    tree = Tree(recording).check()
    assert tree.lines()[:3] == ["invoke_workflow LangGraph", "  first", "    invoke_agent boss"]
    assert agents_of(tree, tree.named("chat toy")) == ["boss", "boss"]
    assert agents_of(tree, tree.named("chat helper")) == ["helper"]
    assert tree.path(tree.named("invoke_agent helper")[0])[-2] == "execute_tool calculator"


def test_prebuilt_agent_acts_under_its_name(chat: Chat, store: Store) -> None:
    """LangGraph's older way to make an agent says nothing of it but by its nodes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agent = create_react_agent(chat(), [calculator_of(chat)], name="older")

    with auto_trace(store=store) as recording:
        agent.invoke(QUESTION)

    tree = Tree(recording).check()
    calls = tree.named("chat toy") + tree.named("chat inner")
    assert tree.lines()[0] == "invoke_agent older"
    assert agents_of(tree, calls) == ["older"] * 3


def test_node_beside_an_agents_acts_under_its_own_name(chat: Chat, store: Store) -> None:
    """In a graph that begins with an agent's node, a critic is still a critic."""

    def ask(state: State) -> State:
        return {"text": str(chat().invoke("hello").content)}

    builder = StateGraph(State)
    builder.add_node("agent", ask)
    builder.add_node("critic", ask)
    builder.add_edge(START, "agent")
    builder.add_edge("agent", "critic")

    with auto_trace(store=store) as recording:
        builder.compile(name="writer").invoke({})
        builder.compile().invoke({})

    tree = Tree(recording).check()
    assert agents_of(tree, tree.named("chat toy")) == ["writer", "critic", "agent", "critic"]


def test_subgraph_is_a_workflow_in_its_node(chat: Chat, store: Store) -> None:
    """A graph within a graph is known as one by its first node."""

    def ask(state: State) -> State:
        return {"text": str(chat().invoke("hello").content)}

    inner = StateGraph(State)
    inner.add_node("ask", ask)
    inner.add_edge(START, "ask")
    outer = StateGraph(State)
    outer.add_node("within", inner.compile(name="small"))
    outer.add_edge(START, "within")

    with auto_trace(store=store) as recording:
        outer.compile(name="big").invoke({})

    tree = Tree(recording).check()
    assert tree.lines() == [
        "invoke_workflow big",
        "  within",
        "    invoke_workflow small",
        "      ask",
        "        chat toy",
    ]
    assert tree.named("invoke_workflow small")[0].attributes[c.WORKFLOW_NAME] == "small"
    assert agents_of(tree, tree.named("chat toy")) == ["ask"]


def test_interrupt_is_no_error_and_resumes(chat: Chat, store: Store) -> None:
    """A graph that waits for someone ends its spans without an error, and goes on later."""

    def ask(state: State) -> State:
        return {"text": str(interrupt("go on?"))}

    def act(state: State) -> State:
        return {"done": str(chat().invoke(state["text"]).content)}

    builder = StateGraph(State)
    builder.add_node("ask", ask)
    builder.add_node("act", act)
    builder.add_edge(START, "ask")
    builder.add_edge("ask", "act")
    graph = builder.compile(checkpointer=InMemorySaver(), name="waits")
    config: Any = {"configurable": {"thread_id": "t7"}}

    with auto_trace(store=store) as recording:
        graph.invoke({}, config)
        graph.invoke(Command(resume="yes"), config)

    tree = Tree(recording).check()
    assert tree.lines() == [
        "invoke_workflow waits",
        "  ask",
        "invoke_workflow waits",
        "  ask",
        "  act",
        "    chat toy",
    ]
    assert {span.status for span in tree.spans} == {"UNSET"}
    assert tree.named("chat toy")[0].attributes[c.CONVERSATION_ID] == "t7"


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

    tree = Tree(recording).check()
    for name in names:
        assert [tree.path(span)[-3:] for span in tree.named(f"chat {name}")] == [
            ["ask", f"mine {name}", f"chat {name}"]
        ] * 2


def test_thread_within_a_node_stays_in_it(chat: Chat, store: Store) -> None:
    """A plain thread that a node starts, and one that is handed its config, stand in the node."""

    def ask(state: State, config: RunnableConfig) -> State:
        threads = [
            threading.Thread(target=lambda: chat(model="plain").invoke("hello")),
            threading.Thread(target=lambda: chat(model="handed").invoke("hello", config)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {}

    builder = StateGraph(State)
    builder.add_node("ask", ask)
    builder.add_edge(START, "ask")

    with auto_trace(store=store) as recording:
        builder.compile().invoke({})

    tree = Tree(recording).check()
    for name in ("chat plain", "chat handed"):
        assert tree.path(tree.named(name)[0])[-2:] == ["ask", name]


def test_failing_node_fails_its_spans(chat: Chat, store: Store) -> None:
    """What a node raises ends it and its graph, and is the program's own exception."""

    def ask(state: State) -> State:
        chat().invoke("hello")
        raise KeyError("mine")

    builder = StateGraph(State)
    builder.add_node("ask", ask)
    builder.add_edge(START, "ask")

    with auto_trace(store=store) as recording, pytest.raises(KeyError, match="mine"):
        builder.compile(name="fails").invoke({})

    tree = Tree(recording).check()
    assert [(span.name, span.status) for span in tree.walk()[1:]] == [
        ("invoke_workflow fails", "ERROR"),
        ("ask", "ERROR"),
        ("chat toy", "UNSET"),
    ]
    assert tree.named("ask")[0].attributes[c.ERROR_TYPE] == "KeyError"


def test_cancelled_agent_ends_all_its_spans(silent: Any, chat: Chat, store: Store) -> None:
    """A run that is cancelled while a tool waits leaves no span open, and none in the map."""

    @tool
    async def calculator(expression: str) -> str:
        """Works out an expression."""
        return str((await chat(base_url=silent.base_url, model="waits").ainvoke("hi")).content)

    async def main() -> None:
        agent = create_agent(chat(), [calculator], name="mathy")
        running = asyncio.create_task(agent.ainvoke(QUESTION))  # type: ignore[arg-type]  # a coroutine
        await silent.asked(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    with auto_trace(store=store) as recording:
        asyncio.run(main())

    tree = Tree(recording).check()
    cancelled = ["invoke_agent mathy", "tools", "execute_tool calculator", "chat waits"]
    for name in cancelled:
        assert tree.named(name)[0].attributes[c.ERROR_TYPE].endswith("CancelledError")


def test_cancelled_tool_alone_ends_its_span(store: Store) -> None:
    """LangChain tells no handler of a tool that is cancelled outside any chain."""
    begun = asyncio.Event()

    @tool
    async def wait(seconds: int) -> str:
        """Waits."""
        begun.set()
        await asyncio.sleep(seconds)
        return "done"

    async def main() -> None:
        running = asyncio.create_task(wait.ainvoke({"seconds": 60}))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    with auto_trace(store=store) as recording:
        asyncio.run(main())

    (span,) = Tree(recording).check().named("execute_tool wait")
    assert span.attributes[c.ERROR_TYPE].endswith("CancelledError")


@pytest.mark.parametrize("is_async", [False, True])
def test_abandoned_graph_ends_its_spans(is_async: bool, chat: Chat, store: Store) -> None:
    """A graph's stream that the program leaves ends without an error."""

    def ask(state: State) -> State:
        return {"text": str(chat().invoke("hello").content)}

    builder = StateGraph(State)
    builder.add_node("one", ask)
    builder.add_node("two", ask)
    builder.add_edge(START, "one")
    builder.add_edge("one", "two")
    graph = builder.compile(name="left")

    async def main() -> None:
        async with contextlib.aclosing(graph.astream({})) as stream:  # type: ignore[type-var]  # a generator
            async for _ in stream:
                break

    with auto_trace(store=store) as recording:
        if is_async:
            asyncio.run(main())
        else:
            for _ in graph.stream({}):
                break

    tree = Tree(recording).check()
    assert tree.named("invoke_workflow left")[0].status == "UNSET"


def test_named_chain_has_a_span_and_its_steps_stand_in_it(chat: Chat, store: Store) -> None:
    """A chain that was given a name is worth a span; what LangChain makes of it is not."""
    named = (RunnableLambda(lambda text: text) | chat()).with_config(run_name="mine")
    chain = RunnableLambda(lambda text: text) | named | (lambda answer: answer.content)

    with auto_trace(store=store) as recording:
        chain.batch(["one", "two"])

    tree = Tree(recording).check()
    assert tree.lines() == ["RunnableSequence", "  mine", "    chat toy"] * 2
