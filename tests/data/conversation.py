"""The small conversation behind every fixture, held under one instrumentor in its own environment.

Run by `make_spans.py`, never by hand. Knows nothing of lightning-otel but the source that is it:
in the other environments it is not installed. An agent with a calculator answers two questions, the
first in whole answers, the second in streams; where a source can tell of agents, tools and rewards,
it is told of them in the way its own documentation shows.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

AGENT = "calc"
MODEL = "toy-policy"
QUESTIONS = (("What is 17*23?", False), ("And what is 12+30?", True))
SYSTEM = "Use the calculator, then answer with the number."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Work out an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]

Work = Callable[..., Any]
Json = dict[str, Any]


def _plainly(work: Work) -> Work:
    return work


@contextmanager
def _silently() -> Iterator[None]:
    yield


@dataclass(frozen=True)
class Source:
    """One way of telling the conversation.

    Attributes:
        create: Sends a chat request with the arguments of the `openai` client.
        spans: The spans made, once the conversation is over.
        agent: Makes a function known as the agent's work.
        tool: Makes a function known as a tool.
        reward: Tells a reward.
        around: Entered around all of it.
    """

    create: Work
    spans: Callable[[], list[Json]]
    agent: Callable[[Work], Work] = _plainly
    tool: Callable[[Work], Work] = _plainly
    reward: Callable[[float], object] = lambda value: None
    around: Callable[[], Any] = _silently


def converse(source: Source) -> None:
    """Hold the conversation."""

    def calculator(expression: str) -> str:
        left, sign, right = expression.partition("*" if "*" in expression else "+")
        return str(int(left) * int(right) if sign == "*" else int(left) + int(right))

    def calc(questions: tuple[tuple[str, bool], ...]) -> str:
        work_out = source.tool(calculator)
        messages: list[Json] = [{"role": "system", "content": SYSTEM}]
        for question, is_stream in questions:
            messages.append({"role": "user", "content": question})
            while calls := _answer(source, messages, is_stream=is_stream):
                for call in calls:
                    result = work_out(**json.loads(call["function"]["arguments"]))
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return str(messages[-1]["content"])

    with source.around():
        answer = source.agent(calc)(QUESTIONS)
        source.reward(float(answer.endswith(" 42")))


def _answer(source: Source, messages: list[Json], *, is_stream: bool) -> list[Json]:
    """Ask the model once; gives the tool calls it wants and adds its answer to the messages."""
    asked: Json = {"model": MODEL, "messages": list(messages), "tools": TOOLS, "temperature": 0.5}
    asked |= {"logprobs": True, "extra_body": {"return_token_ids": True}}
    if is_stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    reply = source.create(**asked)
    answer = _joined(reply) if is_stream else _plain(reply.choices[0].message)
    messages.append(answer)
    calls: list[Json] = answer.get("tool_calls") or []
    return calls


def _plain(message: Any) -> Json:
    whole: Json = message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
    for call in whole.get("tool_calls") or ():
        call.pop("index", None)
    return whole


def _joined(chunks: Any) -> Json:
    """The message that a stream's chunks add up to."""
    content, calls = "", list[Json]()
    for chunk in chunks:
        for delta in [choice.delta for choice in chunk.choices]:
            content += delta.content or ""
            for piece in delta.tool_calls or ():
                if piece.index == len(calls):
                    function = {"name": piece.function.name, "arguments": ""}
                    calls.append({"id": piece.id, "function": function, "type": "function"})
                calls[piece.index]["function"]["arguments"] += piece.function.arguments or ""
    message: Json = {"role": "assistant"}
    message |= {"content": content} if content else {}
    return message | ({"tool_calls": calls} if calls else {})


# --- what the sources have in common -------------------------------------------------------------


def _provider() -> tuple[Any, Callable[[], list[Json]]]:
    """A provider that keeps its spans, set globally, and what it kept."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return provider, lambda: [_told(span) for span in exporter.get_finished_spans()]


def _told(span: Any) -> Json:
    """A span of the SDK as plain JSON, by what it shows publicly."""
    return {
        "trace_id": f"{span.context.trace_id:032x}",
        "span_id": f"{span.context.span_id:016x}",
        "parent_span_id": f"{span.parent.span_id:016x}" if span.parent else None,
        "name": span.name,
        "kind": span.kind.name,
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "status": span.status.status_code.name,
        "status_message": span.status.description or "",
        "attributes": dict(span.attributes),
        "events": [
            {"name": e.name, "time_ns": e.timestamp, "attributes": dict(e.attributes)}
            for e in span.events
        ],
        "links": [
            {
                "trace_id": f"{link.context.trace_id:032x}",
                "span_id": f"{link.context.span_id:016x}",
                "attributes": dict(link.attributes),
            }
            for link in span.links
        ],
        "otel_resource": dict(span.resource.attributes),
        "scope": span.instrumentation_scope.name,
    }


def _client(base_url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=base_url, api_key="none-needed")


def _inside(provider: Any, name: str) -> Callable[[], Any]:
    """A span by hand around the conversation, for sources that know only calls."""
    return lambda: provider.get_tracer("by hand").start_as_current_span(name)


# --- the sources ---------------------------------------------------------------------------------


def current(base_url: str) -> Source:
    """OpenTelemetry's own instrumentor and handler for today's GenAI conventions."""
    from opentelemetry.instrumentation.genai.openai import OpenAIInstrumentor
    from opentelemetry.util.genai.handler import get_telemetry_handler

    provider, spans = _provider()
    OpenAIInstrumentor().instrument(tracer_provider=provider)
    handler = get_telemetry_handler(tracer_provider=provider)

    def agent(work: Work) -> Work:
        def told(*args: Any) -> Any:
            with handler.invoke_local_agent(agent_name=AGENT):
                return work(*args)

        return told

    def tool(work: Work) -> Work:
        def told(**arguments: Any) -> Any:
            with handler.tool("calculator", tool_type="function") as invocation:
                invocation.arguments = arguments
                invocation.tool_result = work(**arguments)
                return invocation.tool_result

        return told

    return Source(_client(base_url).chat.completions.create, spans, agent, tool)


def legacy(base_url: str) -> Source:
    """OpenTelemetry's instrumentor for the GenAI conventions as they were.

    It tells of messages in log records; each is put on the span that it names, as an event, which
    is how the conventions had them before and how backends show them.
    """
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor
    from opentelemetry.sdk._events import EventLoggerProvider
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import InMemoryLogExporter, SimpleLogRecordProcessor

    provider, spans = _provider()
    logs = InMemoryLogExporter()
    loggers = LoggerProvider()
    loggers.add_log_record_processor(SimpleLogRecordProcessor(logs))
    events = EventLoggerProvider(loggers)
    OpenAIInstrumentor().instrument(tracer_provider=provider, event_logger_provider=events)

    def with_events() -> list[Json]:
        found = spans()
        by_id = {span["span_id"]: span for span in found}
        for each in logs.get_finished_logs():
            record = each.log_record
            attributes = dict(record.attributes)
            name = attributes.pop("event.name")
            attributes["gen_ai.event.content"] = json.dumps(record.body)
            event = {"name": name, "time_ns": record.timestamp or record.observed_timestamp}
            by_id[f"{record.span_id:016x}"]["events"].append({**event, "attributes": attributes})
        return found

    return Source(
        _client(base_url).chat.completions.create, with_events, around=_inside(provider, "work")
    )


def openinference(base_url: str) -> Source:
    """Arize's instrumentor, with agent and tool by its tracer's decorators."""
    from openinference.instrumentation import OITracer, TraceConfig
    from openinference.instrumentation.openai import OpenAIInstrumentor

    provider, spans = _provider()
    OpenAIInstrumentor().instrument(tracer_provider=provider)
    tracer = OITracer(provider.get_tracer("by decorator"), config=TraceConfig())
    return Source(
        _client(base_url).chat.completions.create, spans, tracer.agent(name=AGENT), tracer.tool
    )


def openllmetry(base_url: str) -> Source:
    """Traceloop's instrumentor, with agent and tool by its SDK's decorators."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from traceloop.sdk import Traceloop
    from traceloop.sdk.decorators import agent, tool, workflow
    from traceloop.sdk.instruments import Instruments

    exporter = InMemorySpanExporter()
    Traceloop.init(
        "fixture",
        exporter=exporter,
        disable_batch=True,
        telemetry_enabled=False,
        instruments={Instruments.OPENAI},
    )
    return Source(
        _client(base_url).chat.completions.create,
        lambda: [_told(span) for span in exporter.get_finished_spans()],
        lambda work: workflow(name="work")(agent(name=AGENT)(work)),
        tool(name="calculator"),
    )


def flattened(base_url: str) -> Source:
    """Traceloop's instrumentor as it was: messages flattened into keys."""
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor

    provider, spans = _provider()
    OpenAIInstrumentor().instrument(tracer_provider=provider)
    return Source(
        _client(base_url).chat.completions.create, spans, around=_inside(provider, "work")
    )


def agentops(base_url: str) -> Source:
    """AgentOps, with agent and tool by its decorators."""
    import agentops
    from agentops.sdk.decorators import agent, operation, tool
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    agentops.init(
        api_key="00000000-0000-4000-8000-000000000000",
        endpoint="http://127.0.0.1:9",
        exporter_endpoint="http://127.0.0.1:9",
        auto_start_session=False,
        instrument_llm_calls=True,
        fail_safe=True,
    )
    exporter = InMemorySpanExporter()
    trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(exporter))
    operating = operation(name="answer")

    def within_agent(work: Work) -> Work:
        @agent(name=AGENT)
        class Calc:
            @operating
            def answer(self, *args: Any) -> Any:
                return work(*args)

        return lambda *args: Calc().answer(*args)

    return Source(
        _client(base_url).chat.completions.create,
        lambda: [_told(span) for span in exporter.get_finished_spans()],
        within_agent,
        tool(name="calculator"),
    )


def litellm(base_url: str) -> Source:
    """LiteLLM's own OpenTelemetry callback."""
    import litellm as library
    from litellm.integrations.opentelemetry import OpenTelemetry, OpenTelemetryConfig
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    told = OpenTelemetry(config=OpenTelemetryConfig(exporter=exporter))
    library.callbacks = [told]

    def create(model: str, **asked: Any) -> Any:
        return library.completion(
            f"openai/{model}", api_base=base_url, api_key="none-needed", **asked
        )

    def spans() -> list[Json]:
        import time

        until = time.monotonic() + 10  # its callbacks run in a thread of their own
        while time.monotonic() < until and len(exporter.get_finished_spans()) < 4:
            time.sleep(0.05)
        time.sleep(0.5)
        return [_told(span) for span in exporter.get_finished_spans()]

    around = partial(told.tracer.start_as_current_span, "work")
    return Source(create, spans, around=around)


def agentlightning(base_url: str) -> Source:
    """Agent Lightning 0.3 with the tracer its trainer uses."""
    import asyncio

    from agentlightning import emit_reward, operation
    from agentlightning.store import InMemoryLightningStore
    from agentlightning.tracer import AgentOpsTracer

    store = InMemoryLightningStore()
    running = asyncio.new_event_loop()
    begun = running.run_until_complete(store.start_rollout(input="two sums"))
    ids = {"rollout_id": begun.rollout_id, "attempt_id": begun.attempt.attempt_id}
    tracer = AgentOpsTracer()
    tracer.init()
    tracer.init_worker(0, store)

    @contextmanager
    def around() -> Iterator[None]:
        context = tracer.trace_context("work", **ids)
        running.run_until_complete(context.__aenter__())
        yield
        running.run_until_complete(context.__aexit__(None, None, None))

    return Source(
        _client(base_url).chat.completions.create,
        lambda: [_of_agentlightning(span) for span in tracer.get_last_trace()],
        tool=lambda work: operation(name="calculator")(work),
        reward=emit_reward,
        around=around,
    )


def _of_agentlightning(span: Any) -> Json:
    """A span of Agent Lightning's own type, with the ids it keeps beside as its OTLP has them."""
    ids = {
        "agentlightning.rollout_id": span.rollout_id,
        "agentlightning.attempt_id": span.attempt_id,
        "agentlightning.span_sequence_id": span.sequence_id,
    }
    return {
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "parent_span_id": span.parent_id,
        "name": span.name,
        "kind": "INTERNAL",
        "start_ns": int(span.start_time * 1e9),
        "end_ns": int(span.end_time * 1e9),
        "status": span.status.status_code,
        "status_message": span.status.description or "",
        "attributes": span.attributes,
        "events": [
            {"name": e.name, "time_ns": int(e.timestamp * 1e9), "attributes": e.attributes}
            for e in span.events
        ],
        "links": [],
        "otel_resource": {**span.resource.attributes, **ids},
        "scope": "",
    }


def lightning(base_url: str) -> Source:
    """lightning-otel itself."""
    from dataclasses import asdict

    import lightning_otel as lo

    traced = lo.auto_trace(store=os.environ["FIXTURE_STORE"], name="work", agent=AGENT)
    recordings = []

    @contextmanager
    def around() -> Iterator[None]:
        with traced as recording:
            recordings.append(recording)
            yield

    return Source(
        _client(base_url).chat.completions.create,
        lambda: [asdict(span) for span in recordings[0].spans()],
        reward=lo.emit_reward,
        around=around,
    )


def main() -> None:
    """Converse under the named source and write its spans, one JSON object a line."""
    name, base_url, path = sys.argv[1:]
    source: Source = globals()[name](base_url)
    converse(source)
    with open(path, "w", encoding="utf-8") as file:
        for span in source.spans():
            file.write(json.dumps(span) + "\n")


if __name__ == "__main__":
    main()
