"""CPU time that capturing adds to a call of ``openai``, or with ``--langchain`` of LangChain."""

import asyncio
import json
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import harness
from harness import OURS, text
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

PLAIN, CONTROL = "plain", "control (none)"
GENAI, INFERENCE, TRACELOOP = (
    "opentelemetry.instrumentation.genai", "openinference.instrumentation",
    "opentelemetry.instrumentation",
)  # fmt: skip
PEERS = {"official": GENAI, "openinference": INFERENCE, "openllmetry": TRACELOOP}
OPENAI = (
    "openai==3.52.0",
    "httpx<1",  # openai breaks when a pre-release of the old httpx is importable
    *harness.SDK, "opentelemetry-util-genai==1.3b0",
    "opentelemetry-instrumentation-genai-openai==1.3b0",
    "openinference-instrumentation-openai==0.1.66", "opentelemetry-instrumentation-openai==0.62.4",
    "-e", str(harness.ROOT),
)  # fmt: skip
LANGCHAIN = (
    "langchain==1.4.7", "langchain-core==1.7.2", "langchain-openai==1.7.3", "langgraph==1.2.22",
    "opentelemetry-instrumentation-genai-langchain==1.3b0",
    "openinference-instrumentation-langchain==0.1.80",
    "opentelemetry-instrumentation-langchain==0.62.4", *OPENAI,
)  # fmt: skip
MARK = "the-last-words-of-the-request"
CHUNKS = 200
QUESTION = f"{text(2000, 1)} {MARK}"
SCENARIOS = {
    "2 KB history": 40, "2 KB history, async": 40, "50 KB history, tools": 12,
    f"stream of {CHUNKS} chunks": 6,
}  # fmt: skip
LANGCHAIN_SCENARIOS = {
    "model.invoke": 40, "prompt | model | parser": 20, "LangGraph of two nodes": 12,
    "ChatOpenAI.invoke": 12,
}  # fmt: skip


def short_history() -> dict[str, Any]:
    roles = ["system", *["user", "assistant"] * 2, "user"]
    messages = [{"role": role, "content": text(290, seed)} for seed, role in enumerate(roles)]
    messages[-1]["content"] += " " + MARK
    return {"model": "demo-1", "messages": messages, "temperature": 0.7, "max_tokens": 256}


def long_history() -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": text(900)}]
    for turn in range(16):
        function = {"name": "search", "arguments": json.dumps({"query": text(400, turn)})}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        messages += [
            {"role": "user", "content": text(700, 100 + turn)},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": text(900, 200 + turn)},
            {"role": "assistant", "content": text(700, 300 + turn)},
        ]
    messages.append({"role": "user", "content": f"{text(300, 1)} {MARK}"})
    schema = {"type": "object", "properties": {"query": {"type": "string"}}}
    facts = {"description": text(120), "parameters": schema}
    names = ("search", "read", "write", "run")
    tools = [{"type": "function", "function": {"name": name, **facts}} for name in names]
    return {"model": "demo-1", "messages": messages, "tools": tools, "temperature": 0.7}


def answer(kind: str, part: str, content: str, reason: str | None, **more: Any) -> str:
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, part: message, "finish_reason": reason}
    head = {"id": "chatcmpl-benchmark", "object": kind, "created": 1, "model": "demo-1"}
    return json.dumps({**head, "choices": [choice], **more})


def transports() -> tuple[Any, Any]:
    import httpx2

    usage = {"prompt_tokens": 500, "completion_tokens": 80, "total_tokens": 580}
    whole = answer("chat.completion", "message", text(400, 7), "stop", usage=usage).encode()
    reasons = [*[None] * (CHUNKS - 1), "stop"]
    chunk = partial(answer, "chat.completion.chunk", "delta")
    events = [chunk(f"word{n} ", reason) for n, reason in enumerate(reasons)]
    chunks = [f"data: {event}\n\n".encode() for event in (*events, "[DONE]")]

    def handle(request: Any) -> Any:
        is_stream = b'"stream":true' in request.content
        headers = {"content-type": "text/event-stream" if is_stream else "application/json"}
        content = (chunk for chunk in chunks) if is_stream else whole
        return httpx2.Response(200, headers=headers, content=content)

    transport = httpx2.MockTransport(handle)
    return httpx2.Client(transport=transport), httpx2.AsyncClient(transport=transport)


def openai_runs() -> dict[str, Callable[[], object]]:
    import openai

    sync, asynchronous = transports()
    create = openai.OpenAI(api_key="none", http_client=sync).chat.completions.create
    client = openai.AsyncOpenAI(api_key="none", http_client=asynchronous)
    create_async = client.chat.completions.create
    loop = asyncio.new_event_loop()
    short, long = short_history(), long_history()
    runs: tuple[Callable[[], object], ...] = (
        lambda: create(**short),
        lambda: loop.run_until_complete(create_async(**short)),
        lambda: create(**long),
        lambda: [None for _ in create(**short, stream=True)],
    )
    return dict(zip(SCENARIOS, runs, strict=True))


def langchain_runs() -> dict[str, Callable[[], object]]:
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_openai import ChatOpenAI

    model = fake_model()
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{question}")])
    chain, graph = prompt | model | StrOutputParser(), two_nodes(model)
    client = ChatOpenAI(
        model="demo-1", api_key="none", base_url="http://127.0.0.1:9/v1", max_retries=0,
        http_client=transports()[0],
    )  # fmt: skip
    runs: tuple[Callable[[], object], ...] = (
        lambda: model.invoke(QUESTION), lambda: chain.invoke({"question": QUESTION}),
        lambda: graph.invoke({"question": QUESTION, "answer": ""}), lambda: client.invoke(QUESTION),
    )  # fmt: skip
    return dict(zip(LANGCHAIN_SCENARIOS, runs, strict=True))


def fake_model() -> Any:
    from langchain_core.language_models.chat_models import BaseChatModel
    from langchain_core.messages import AIMessage
    from langchain_core.outputs import ChatGeneration, ChatResult

    class FakeModel(BaseChatModel):
        model_name: str = "demo-1"

        @property
        def _llm_type(self) -> str:
            return "fake-chat-model"

        def _get_ls_params(self, stop: Any = None, **kwargs: Any) -> Any:
            return {"ls_provider": "fake", "ls_model_name": "demo-1", "ls_model_type": "chat"}

        def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
            message = AIMessage(
                text(400, 7),
                usage_metadata={"input_tokens": 500, "output_tokens": 80, "total_tokens": 580},
                response_metadata={"model_name": "demo-1", "finish_reason": "stop"},
            )
            return ChatResult(generations=[ChatGeneration(message=message)])

    return FakeModel()


def two_nodes(model: Any) -> Any:
    from typing import TypedDict

    from langgraph.graph import END, START, StateGraph

    # Functional: the annotations of a class made in a function cannot be found by name.
    State = TypedDict("State", {"question": str, "answer": str})  # noqa: UP013
    graph = StateGraph(State)
    graph.add_node("ask", lambda state: {"answer": model.invoke(state["question"]).content})
    graph.add_node("read", lambda state: {"answer": state["answer"].strip()})
    for edge in ((START, "ask"), ("ask", "read"), ("read", END)):
        graph.add_edge(*edge)
    return graph.compile()


class Counter(SpanExporter):
    spans, has_content = 0, False

    def export(self, spans: Any) -> SpanExportResult:
        self.spans += len(spans)
        self.has_content |= any(MARK in str(dict(span.attributes)) for span in spans)
        return SpanExportResult.SUCCESS


def start_peer(name: str, exporter: Counter, *, langchain: bool) -> Any:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    for library, title in (("openai", "OpenAI"), ("langchain", "LangChain"))[: 1 + langchain]:
        module = import_module(f"{PEERS[name]}.{library}")
        title = "Langchain" if (name, library) == ("openllmetry", "langchain") else title
        getattr(module, f"{title}Instrumentor")().instrument(tracer_provider=provider)
    return provider


def work(name: str, *, langchain: bool) -> None:
    exporter, provider = Counter(), None
    recording: Any = nullcontext()
    with tempfile.TemporaryDirectory() as folder:
        if name == OURS:
            import lightning_otel

            recording = lightning_otel.auto_trace(store=str(Path(folder) / "traces.duckdb"))
        elif name in PEERS:
            provider = start_peer(name, exporter, langchain=langchain)

        # Peers' threads do their work then, and are idle in the others' turns.
        settle = provider.force_flush if provider else lambda: None
        with recording as recorded:
            runs = langchain_runs() if langchain else openai_runs()
            for run in runs.values():
                run()
            settle()
            if recorded is not None:
                exporter.export([span for span in recorded.spans() if span.operation])
            if name not in (PLAIN, CONTROL) and not (exporter.spans >= 4 and exporter.has_content):
                raise SystemExit(f"{name}: {exporter.spans} spans, {exporter.has_content=}")
            harness.report(exporter.spans)
            harness.take_turns(runs, settle)


def main(options: Any) -> None:
    kind, needed = ("langchain", LANGCHAIN) if options.langchain else ("capture", OPENAI)
    python = harness.environment(options.env, kind, needed)
    peers = [name for name in PEERS if not options.only or name in options.only]
    content = {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "SPAN_ONLY"}
    workers = {
        name: harness.Worker(
            __file__, python=python, name=name, langchain=options.langchain,
            # Content is off by default in the official family. OpenInference makes LangChain warn.
            env={**content, "PYTHONWARNINGS": "ignore"} if name in PEERS else {},
        )
        for name in (PLAIN, CONTROL, OURS, *peers)
    }  # fmt: skip
    spans = {name: worker.answer() for name, worker in workers.items()}
    scenarios = LANGCHAIN_SCENARIOS if options.langchain else SCENARIOS
    times = harness.compare(workers, scenarios, 8 if options.quick else 40)
    title = "Microseconds of CPU added to a run, content on: median of turns (range)"
    harness.show_added(title, times, PLAIN, peers)
    print(f"\nSpans of one run of each: {spans}")
    families = [each.partition("==")[0] for each in needed if "instrumentation-" in each]
    packages = ("openai", "opentelemetry-sdk", *families)
    harness.finish(options, {"times_us": times, "spans": spans}, *packages, python=python)


if __name__ == "__main__":
    harness.run(main, work, langchain={"action": "store_true"})
