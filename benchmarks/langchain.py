"""What capturing LangChain adds to a run of it, beside three other families of instrumentors.

A family is an instrumentor of LangChain and one of ``openai``, both on. Each family has a process
of its own, and so has LangChain as it is; all of them live at once and take turns of a few calls,
so that whatever else the machine does meets them alike. What counts is the median over the turns of
the difference from the plain process in the same turn, in CPU time of the caller's thread: on a
clock, a run long enough to lose its core costs whatever the others do meanwhile. The models are one
that answers by itself, and ``ChatOpenAI`` over a transport in memory. Peers hand their spans to a
``BatchSpanProcessor`` with an exporter that does nothing, and its thread is not counted; ours are
recorded into a segment file on disk.
"""

import argparse
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import peers
from capture import CONTROL, MARK, OURS, PEERS, SETTINGS, Counter, answer, start_peer, words
from capture import REQUIREMENTS as OF_OPENAI

# From here on this file would be found in place of the library whose name it has.
sys.path.remove(str(Path(__file__).resolve().parent))

PLAIN = "plain"
LANGCHAIN_PEERS = {
    "official": "opentelemetry-instrumentation-genai-langchain",
    "openinference": "openinference-instrumentation-langchain",
    "openllmetry": "opentelemetry-instrumentation-langchain",
}
LIBRARIES = ("langchain-core", "langchain-openai", "langgraph", "openai")
REQUIREMENTS = (
    "langchain==1.4.7",
    "langchain-core==1.7.2",
    "langchain-openai==1.7.3",
    "langgraph==1.2.22",
    "opentelemetry-instrumentation-genai-langchain==1.3b0",
    "openinference-instrumentation-langchain==0.1.80",
    "opentelemetry-instrumentation-langchain==0.62.4",
    *OF_OPENAI,
)
QUESTION = words(2000, 1) + " " + MARK
WARM_CALLS = 3
"""Calls at the beginning of a turn that do not count: the other processes had the caches."""


class Scenario(NamedTuple):
    """One shape of run, and how many of it are a turn."""

    name: str
    calls: int


SCENARIOS = (
    Scenario("model.invoke", 40),
    Scenario("prompt | model | parser", 20),
    Scenario("LangGraph of two nodes", 12),
    Scenario("ChatOpenAI.invoke", 12),
)


# --- the worker: one family, one process ---------------------------------------------------------


def runs() -> dict[str, Callable[[], object]]:
    """A run of each scenario."""
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate

    model = fake_model()
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{question}")])
    chain = prompt | model | StrOutputParser()
    graph = two_nodes(model)
    client = openai_model()
    made: tuple[Callable[[], object], ...] = (
        lambda: model.invoke(QUESTION),
        lambda: chain.invoke({"question": QUESTION}),
        lambda: graph.invoke({"question": QUESTION, "answer": ""}),
        lambda: client.invoke(QUESTION),
    )
    return {scenario.name: run for scenario, run in zip(SCENARIOS, made, strict=True)}


def fake_model() -> Any:
    """A chat model that answers by itself, and says what a real one says of itself."""
    from langchain_core.language_models.chat_models import BaseChatModel
    from langchain_core.messages import AIMessage
    from langchain_core.outputs import ChatGeneration, ChatResult

    text = words(400, 7)

    class FakeModel(BaseChatModel):
        model_name: str = "demo-1"

        @property
        def _llm_type(self) -> str:
            return "fake-chat-model"

        def _get_ls_params(self, stop: Any = None, **kwargs: Any) -> Any:
            return {"ls_provider": "fake", "ls_model_name": "demo-1", "ls_model_type": "chat"}

        def _generate(
            self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
        ) -> ChatResult:
            usage = {"input_tokens": 500, "output_tokens": 80, "total_tokens": 580}
            facts = {"model_name": "demo-1", "finish_reason": "stop"}
            message = AIMessage(text, usage_metadata=usage, response_metadata=facts)
            return ChatResult(generations=[ChatGeneration(message=message)])

    return FakeModel()


def two_nodes(model: Any) -> Any:
    """A graph whose first node asks the model and whose second one looks at the answer."""
    from typing import TypedDict

    from langgraph.graph import END, START, StateGraph

    # Functional: the annotations of a class made in a function cannot be found by name.
    State = TypedDict("State", {"question": str, "answer": str})  # noqa: UP013

    def ask(state: Any) -> dict[str, str]:
        return {"answer": model.invoke(state["question"]).content}

    def look(state: Any) -> dict[str, str]:
        return {"answer": state["answer"].strip()}

    graph = StateGraph(State)
    graph.add_node("ask", ask)
    graph.add_node("look", look)
    graph.add_edge(START, "ask")
    graph.add_edge("ask", "look")
    graph.add_edge("look", END)
    return graph.compile()


def openai_model() -> Any:
    """``ChatOpenAI`` whose network is in memory."""
    import httpx2
    from langchain_openai import ChatOpenAI

    body = answer()

    def handle(request: Any) -> Any:
        return httpx2.Response(200, headers={"content-type": "application/json"}, content=body)

    return ChatOpenAI(
        model="demo-1",
        api_key="none",
        base_url="http://127.0.0.1:9/v1",
        max_retries=0,
        http_client=httpx2.Client(transport=httpx2.MockTransport(handle)),
    )


def start_family(name: str, exporter: Counter) -> None:
    """Switch a peer's two instrumentors on."""
    start_peer(name, exporter)()
    if name == "official":
        from opentelemetry.instrumentation.genai.langchain import LangChainInstrumentor
    elif name == "openinference":
        from openinference.instrumentation.langchain import LangChainInstrumentor
    else:
        from opentelemetry.instrumentation.langchain import (
            LangchainInstrumentor as LangChainInstrumentor,
        )
    from opentelemetry import trace

    LangChainInstrumentor().instrument(tracer_provider=trace.get_tracer_provider())


class Kept:
    """How many spans were kept so far, and whether the content is in them."""

    def __init__(self, name: str, exporter: Counter, recording: Any) -> None:
        self._name = name
        self._exporter = exporter
        self._recording = recording

    def spans(self) -> int:
        if self._name in (PLAIN, CONTROL):
            return 0
        if self._name == OURS:
            return len(self._recording.spans())
        self.settle()
        return self._exporter.spans

    def has_content(self) -> bool:
        if self._name == OURS:
            return any(MARK in str(span.attributes) for span in self._recording.spans())
        return bool(self._exporter.with_content)

    def settle(self) -> None:
        """Have the peers' threads do their work, so that they are idle in the others' turns."""
        if self._name in PEERS:
            from opentelemetry import trace

            trace.get_tracer_provider().force_flush()


def worker(name: str) -> None:
    """Answer each question, which names a scenario and a number of calls, with their times."""
    exporter = Counter()
    with tempfile.TemporaryDirectory() as folder:
        recording: Any = nullcontext()
        if name == OURS:
            import lightning_otel

            recording = lightning_otel.auto_trace(store=str(Path(folder) / "traces.duckdb"))
        elif name in PEERS:
            start_family(name, exporter)
        with recording as recorded:
            found = runs()
            kept = Kept(name, exporter, recorded)
            peers.report(checked(name, found, kept))
            for question in peers.questions():
                peers.report(timed(found[question["scenario"]], question["calls"]))
                kept.settle()
                gc.collect()


def checked(name: str, found: dict[str, Callable[[], object]], kept: Kept) -> dict[str, int]:
    """The spans that a run of each scenario makes; stops if a family does not do its work."""
    for run in found.values():  # what a library makes only once
        run()
    spans = {}
    for scenario, run in found.items():
        before = kept.spans()
        run()
        spans[scenario] = kept.spans() - before
    if name not in (PLAIN, CONTROL) and not (all(spans.values()) and kept.has_content()):
        raise SystemExit(f"{name}: {spans}, with content: {kept.has_content()}")
    return spans


def timed(run: Callable[[], object], calls: int) -> float:
    """Microseconds of a run: the median of a turn."""
    clock = time.thread_time_ns
    for _ in range(WARM_CALLS):
        run()
    times = []
    for _ in range(calls):
        begun = clock()
        run()
        times.append(clock() - begun)
    return median(times) / 1e3


# --- the driver ----------------------------------------------------------------------------------


def main() -> None:
    parser = peers.arguments(__doc__ or "")
    parser.add_argument("--turns", type=int, help="turns of each process (default 40)")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    python = peers.environment(options.env, "langchain", REQUIREMENTS)
    figures = measured(python, options.turns or (8 if options.quick else 40), options)
    show(figures)
    packages = (*LIBRARIES, "opentelemetry-sdk", *LANGCHAIN_PEERS.values(), *PEERS.values())
    peers.finish(options.json, peers.facts(python, *packages), figures)


def measured(python: Path, turns: int, options: argparse.Namespace) -> dict[str, Any]:
    """Every turn of every family: microseconds of a run, by family and scenario."""
    names = (PLAIN, CONTROL, OURS, *PEERS)
    workers: dict[str, subprocess.Popen[str]] = {}
    times: dict[str, dict[str, list[float]]] = {
        name: {scenario.name: [] for scenario in SCENARIOS} for name in names
    }
    try:
        for name in names:
            # OpenInference makes LangChain warn with each run.
            settings = {**SETTINGS, "PYTHONWARNINGS": "ignore"} if name in PEERS else {}
            workers[name] = peers.start(python, __file__, name, settings=settings)
        spans = {name: peers.answer(process) for name, process in workers.items()}
        for turn in range(turns):
            if turn % 10 == 0:
                peers.say(f"turn {turn + 1} of {turns}")
            for scenario in SCENARIOS:
                # Whoever comes first finds other caches than who comes last.
                for name in names if turn % 2 else reversed(names):
                    question = {"scenario": scenario.name, "calls": scenario.calls}
                    found = peers.answer(workers[name], question)
                    times[name][scenario.name].append(found)
    finally:
        for process in workers.values():
            process.kill()
            process.wait()
    return {"spans": spans, "times_us": times}


def show(figures: dict[str, Any]) -> None:
    """The table: added microseconds, and ours as a multiple of the best peer."""
    times, spans = figures["times_us"], figures["spans"]
    rows = []
    for scenario in SCENARIOS:
        plain = times[PLAIN][scenario.name]
        added = {
            name: [one - base for one, base in zip(turns[scenario.name], plain, strict=True)]
            for name, turns in times.items()
            if name != PLAIN
        }
        best = min(median(added[name]) for name in PEERS)
        rows.append(
            [
                f"{scenario.name} ({median(plain):,.0f})",
                peers.with_quartiles(added[CONTROL]),
                *(
                    f"{peers.with_quartiles(added[name])} / {spans[name][scenario.name]}"
                    for name in (OURS, *PEERS)
                ),
                peers.ratio(median(added[OURS]), best),
            ]
        )
    peers.table(
        "Microseconds added to a run, content on: median of turns (quartiles) / spans of a run",
        ["scenario (plain run)", CONTROL, OURS, *PEERS, "ours / best peer"],
        rows,
    )


if __name__ == "__main__":
    main()
