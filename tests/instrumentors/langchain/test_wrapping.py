"""One object traced by itself: of its own kind, and never doubled."""

import asyncio
import gc
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from langchain.agents import create_agent
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.tools import tool
from langgraph.graph import START, StateGraph
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.instrumentors.conftest import instrumentor
from tests.instrumentors.langchain.conftest import Chat, all_of
from tests.instrumentors.outline import assert_each_call_once, outline

from lightning_otel import Store, auto_trace, instrument, uninstrument, wrap_langchain
from lightning_otel.demo.server import DemoServer

QUESTION: Any = {"messages": [("user", "What is 17*23?")]}
ASKED = [HumanMessage("hello")]


@tool
def calculator(expression: str) -> str:
    """Works out an expression."""
    return expression


def spans_of(exported: InMemorySpanExporter) -> list[ReadableSpan]:
    return sorted(exported.get_finished_spans(), key=lambda span: span.start_time or 0)


def names(exported: InMemorySpanExporter) -> list[str]:
    return [span.name for span in spans_of(exported)]


RUNS: dict[str, Any] = {
    "invoke": lambda model: model.invoke(ASKED),
    "stream": lambda model: list(model.stream(ASKED)),
    "batch": lambda model: model.batch([ASKED]),
    "ainvoke": lambda model: asyncio.run(model.ainvoke(ASKED)),
    "astream": lambda model: asyncio.run(all_of(model.astream(ASKED))),
    "abatch": lambda model: asyncio.run(model.abatch([ASKED])),
}


def last_of(stream: Any) -> Any:
    """What is there at the end of an async stream, or of one that is to be awaited first."""

    async def read() -> list[Any]:
        return await all_of(await stream if hasattr(stream, "__await__") else stream)

    return asyncio.run(read())


async def some(asked: Any) -> Any:
    yield asked


EVERY: dict[str, Any] = {
    "invoke": lambda it, asked: it.invoke(asked),
    "ainvoke": lambda it, asked: asyncio.run(it.ainvoke(asked)),
    "stream": lambda it, asked: list(it.stream(asked)),
    "astream": lambda it, asked: last_of(it.astream(asked)),
    "batch": lambda it, asked: it.batch([asked, asked]),
    "abatch": lambda it, asked: asyncio.run(it.abatch([asked, asked])),
    "batch_as_completed": lambda it, asked: list(it.batch_as_completed([asked, asked])),
    "abatch_as_completed": lambda it, asked: last_of(it.abatch_as_completed([asked, asked])),
    "transform": lambda it, asked: list(it.transform(iter([asked]))),
    "atransform": lambda it, asked: last_of(it.atransform(some(asked))),
    "astream_events": lambda it, asked: last_of(it.astream_events(asked, version="v2")),
    "with_config": lambda it, asked: it.with_config(tags=["x"]).with_config(tags=[]).invoke(asked),
    "with_retry": lambda it, asked: it.with_retry().batch([asked, asked]),
    "with_fallbacks": lambda it, asked: it.with_fallbacks([it]).invoke(asked),
    "bind": lambda it, asked: list(it.bind().stream(asked)),
    "map": lambda it, asked: it.map().invoke([asked, asked]),
    "or": lambda it, asked: (it | RunnableLambda(str)).batch([asked, asked]),
    "pipe": lambda it, asked: list(it.pipe(RunnableLambda(str)).stream(asked)),
}
KINDS: dict[str, Any] = {
    "model": lambda model: model,
    "chain": lambda model: RunnableLambda(lambda asked: asked) | model,
    "binding": lambda model: (RunnableLambda(lambda asked: asked) | model).with_config(tags=["z"]),
    "retry": lambda model: model.with_retry(),
    "graph": lambda model: create_agent(model, [calculator], name="mathy"),
}


@pytest.mark.usefixtures("own_client")
@pytest.mark.parametrize("has_store", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_method_of_a_wrapped_runnable_is_recorded(
    kind: str, has_store: bool, server: DemoServer, chat: Chat, store: Store,
    exported: InMemorySpanExporter,
) -> None:  # fmt: skip
    """Of what is made of it, too: each request is a call, each input a rollout of its own."""
    is_graph = kind == "graph"
    calls = rollouts = 0
    for number, (name, run) in enumerate(EVERY.items()):
        model = chat(timeout=100 + number)  # its client is its own, as an event loop keeps it
        wrapped = wrap_langchain(KINDS[kind](model), store=store.name if has_store else None)
        assert type(wrapped) is type(model) or kind != "model"
        before = len(server.log)

        run(wrapped, QUESTION if is_graph else ASKED)

        requests = len(server.log) - before
        chat(model="other").invoke(ASKED)
        assert requests > 0, name
        calls, rollouts = calls + requests, rollouts + requests // (1 + is_graph)
        if not has_store:
            assert names(exported).count("chat toy") == calls, name
            continue
        spans = store.spans().rows()
        assert [span.name for span in spans if span.operation == "chat"] == ["chat toy"] * calls
        assert len({span.rollout_id for span in spans}) == rollouts, name


@pytest.mark.usefixtures("own_client")
@pytest.mark.parametrize("name", RUNS)
def test_wrapped_model_is_traced_and_others_are_not(
    name: str, server: DemoServer, facts: Any, chat: Chat, store: Store, exported: Any
) -> None:
    """With all instrumentation off, only its calls are spans; where all is captured, none twice."""
    model = chat()
    wrapped = wrap_langchain(model)

    RUNS[name](wrapped)
    RUNS[name](chat(model="other", timeout=9))  # whose client is its own, as an event loop keeps it

    assert type(wrapped) is type(model)
    assert wrapped is not model
    assert model.callbacks is None
    assert names(exported) == ["chat toy"]
    wrapped, count = wrap_langchain(chat(timeout=8)), len(server.log)
    with auto_trace(store=store) as recording:
        RUNS[name](RunnableLambda(lambda _: RUNS["invoke"](wrapped)))
        RUNS[name](wrapped)
    outline(recording)
    assert_each_call_once(recording, SimpleNamespace(log=server.log[count:]), facts)


def test_wrapped_agents_tools_and_chains_are_trees(
    chat: Chat, exported: InMemorySpanExporter
) -> None:
    """Each is of its own kind as before, a chain what its own ``with_config`` gives."""
    agent = create_agent(chat(), [calculator], name="mathy")
    ours = [wrap_langchain(each) for each in (agent, calculator, chat() | StrOutputParser())]
    wrapped, wrapped_tool, chain = ours

    wrapped.invoke(QUESTION)
    agent.invoke(QUESTION)
    wrapped_tool.invoke({"expression": "1"})
    answer = chain.invoke(ASKED)

    assert [type(wrapped), type(wrapped_tool)] == [type(agent), type(calculator)]
    assert isinstance(chain, Runnable)
    assert isinstance(answer, str)
    tree = ["model", "chat toy", "tools", "execute_tool calculator", "model", "chat toy"]
    roots = ["invoke_agent mathy", "execute_tool calculator", "RunnableSequence"]
    assert names(exported) == [roots[0], *tree, *roots[1:], "chat toy"]
    assert [span.name for span in spans_of(exported) if span.parent is None] == roots


@pytest.mark.usefixtures("own_client")
def test_wrapped_model_goes_on_after_uninstrument(
    chat: Chat, exported: InMemorySpanExporter, store: Store
) -> None:
    """It is traced while it lives, whatever is switched off; then nothing of ours is left."""
    wrapped = wrap_langchain(chat())
    with auto_trace(store=store):
        pass

    exported.clear()
    uninstrument()
    wrapped.invoke(ASKED)

    assert names(exported) == ["chat toy"]
    del wrapped
    gc.collect()
    instrument("langchain_core")
    uninstrument()
    assert not instrumentor("langchain").is_active
    assert not hasattr(BaseChatModel._generate_with_cache, "__lightning_otel_wrapped__")


def test_call_in_a_fresh_context_still_stands_in_its_node(
    server: DemoServer, exported: InMemorySpanExporter
) -> None:
    """Where OpenTelemetry's context was emptied, LangChain's own variable names the node."""
    client = openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)

    def ask(state: dict[str, Any]) -> dict[str, Any]:
        token = otel_context.attach(Context())
        asked: Any = [{"role": "user", "content": "hello"}]
        client.chat.completions.create(model="toy", messages=asked)
        otel_context.detach(token)
        return {}

    builder: Any = StateGraph(dict)
    builder.add_node("ask", ask)
    builder.add_edge(START, "ask")
    instrumentor("langchain").instrument(skip_dep_check=True)
    instrumentor("openai").instrument(skip_dep_check=True)

    builder.compile(name="pipe").invoke({"a": 1})
    client.close()

    assert names(exported) == ["invoke_workflow pipe", "ask", "chat toy"]
    by_name = {span.name: span for span in spans_of(exported)}
    assert by_name["chat toy"].parent.span_id == by_name["ask"].context.span_id


def test_wrapped_agents_and_chains_with_a_store(chat: Chat, store: Store) -> None:
    """A graph, a chain and a tool loop are one rollout a run, also within a recording there."""
    agent = wrap_langchain(create_agent(chat(), [calculator], name="mathy"), store=store)
    chain = wrap_langchain(chat() | StrOutputParser(), store=store)

    agent.invoke(QUESTION)
    asyncio.run(agent.ainvoke(QUESTION))
    assert list(chain.stream(ASKED))
    with auto_trace(store=store) as recording:
        agent.invoke(QUESTION)
        chain.invoke(ASKED)

    calls = store.sql("SELECT calls FROM rollouts WHERE calls > 0 ORDER BY start_ns").rows()
    assert [row["calls"] for row in calls] == [2, 2, 1, 3]
    assert len(list(recording.trajectories())) > 0


def test_wrapped_where_nothing_records_warns_once(server: DemoServer, tmp_path: Path) -> None:
    """A program without a recording, a store or a provider is told that nothing was kept."""
    script = f"""
from langchain_openai import ChatOpenAI
from lightning_otel import wrap_langchain
model = wrap_langchain(ChatOpenAI(model="toy", base_url={server.base_url!r}, api_key="k"))
print([model.invoke("hello").type for _ in range(2)])
"""

    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )

    assert done.stdout == "['ai', 'ai']\n"
    assert done.stderr.count("wrap_langchain(agent, store=…)") == len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_runnable_is_refused() -> None:
    """The message says what was given."""
    with pytest.raises(TypeError, match="not dict"):
        wrap_langchain({})
