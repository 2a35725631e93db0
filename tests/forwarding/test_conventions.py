"""Spans and histograms as they leave: in the words of the conventions, as OTLP, and back."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from tests.forwarding.collector import Endpoint
from tests.listening import Handler, listen

from lightning_otel import Store, auto_trace, config, emit_reward, operation
from lightning_otel.adapter.interop import SHOWN, to_conventions
from lightning_otel.demo.server import DemoServer
from lightning_otel.exporters.duckdb import DuckDBSpanExporter
from lightning_otel.exporters.forwarding import Forwarder
from lightning_otel.exporters.forwarding.senders import HttpSender
from lightning_otel.receivers import protobuf
from lightning_otel.store.engines.otlp import encode_request
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

# Source: model/gen-ai/spans.yaml, events.yaml and registry.yaml of semantic-conventions-genai,
# commit 002c8a6e (schema 1.42): operation, kind, name, and what is required beside the operation.
SPANS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "chat": ("CLIENT", "chat {gen_ai.request.model}", ("gen_ai.provider.name",)),
    "invoke_workflow": ("INTERNAL", "invoke_workflow {gen_ai.workflow.name}", ()),
    "invoke_agent": (
        "INTERNAL",
        "invoke_agent {gen_ai.agent.name}",
        ("gen_ai.agent.name", "gen_ai.provider.name"),
    ),
    "execute_tool": ("INTERNAL", "execute_tool {gen_ai.tool.name}", ("gen_ai.tool.name",)),
    # Of our own, as the registry allows where none of its operations applies; named as the node.
    "execute_node": ("INTERNAL", "", ()),
}
OPTIONAL = {
    "chat": (
        "agent.name conversation.id output.type request.model request.max_tokens request.top_k "
        "request.choice.count request.temperature request.top_p request.stop_sequences "
        "request.frequency_penalty request.presence_penalty request.seed request.stream "
        "response.id response.model response.finish_reasons response.time_to_first_chunk "
        "usage.input_tokens usage.output_tokens usage.cache_read.input_tokens "
        "usage.reasoning.output_tokens system_instructions input.messages output.messages "
        "tool.definitions"
    ),
    # Of the registry, though not named for these spans: conversation, and an agent's workflow.
    "invoke_workflow": "workflow.name input.messages output.messages conversation.id agent.name",
    "invoke_agent": (
        "agent.description input.messages output.messages tool.definitions conversation.id "
        "workflow.name request.model"
    ),
    "execute_node": "agent.name conversation.id",
    "execute_tool": "tool.call.id tool.description tool.type tool.call.arguments tool.call.result",
}
EVALUATION = {
    "gen_ai.evaluation.name": str, "gen_ai.evaluation.score.value": float,
    "gen_ai.evaluation.explanation": str, "gen_ai.response.id": str,
}  # fmt: skip
ASKED, ANSWERED = "which way?", '{"way": "north"}'


def violations(span: Span) -> Iterator[str]:
    said = {key: value for key, value in span.attributes.items() if key.startswith("gen_ai.")}
    named = said.pop("gen_ai.operation.name", None)
    if named is not None:
        kind, name, required = SPANS[named]
        if span.kind != kind:
            yield f"{named}: kind {span.kind}"
        wanted = name.replace("{", "{0[").replace("}", "]}").format(said)
        if wanted and span.name != wanted:
            yield f"{named}: named {span.name!r}, not {wanted!r}"
        yield from (f"{named}: lacks {key}" for key in required if key not in said)
        known = {f"gen_ai.{key}" for key in OPTIONAL[named].split()}
        yield from (f"{named}: {key}" for key in said.keys() - known - {*required})
    for event in span.events:
        if event.name == "gen_ai.evaluation.result":
            if "gen_ai.evaluation.name" not in event.attributes:
                yield "an evaluation without a name"
            for key, value in event.attributes.items():
                if type(value) is not EVALUATION.get(key):
                    yield f"evaluation: {key} is {value!r}"


@pytest.fixture
def recorded(store: Store, server: DemoServer) -> Store:
    """A rollout with a call, a piece of work and rewards, by a function and by a block."""

    def act() -> None:
        with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
            asked: Any = [{"role": "user", "content": "hello"}]
            client.chat.completions.create(model="toy", messages=asked)

    @auto_trace(store=store, task=ASKED, reward_evaluator=lambda _: act())
    def choose() -> dict[str, str]:
        act()
        with operation("look"):
            emit_reward({"primary": 0.75, "style": 1}, primary="primary")
        emit_reward("late", 0.5, response_id="x", attributes={c.FEEDBACK_TEXT: "well done"})
        return {"way": "north"}

    choose()
    with auto_trace(name="a block", store=store):
        act()
    return store


def forwarded(store: Store, endpoint: Endpoint, *, with_content: bool) -> list[Span]:
    """What an endpoint took of a store, as OTLP says it."""
    found = config.otlp_endpoint(endpoint.url)
    assert found is not None
    with store.follow("otlp") as follower:
        Forwarder(follower, HttpSender(found), with_content=with_content).send_waiting()
    request = ExportTraceServiceRequest()
    for span in endpoint.spans:
        span.name = f"sent {span.name}"  # under its own name our receiver would turn it back
    request.resource_spans.add().scope_spans.add().spans.extend(endpoint.spans)
    got = protobuf.decode_spans(request.SerializeToString(), "")
    return [replace(each, name=each.name[5:]) for each in got if isinstance(each, Span)]


@pytest.mark.parametrize("with_content", [False, True])
def test_what_leaves_is_as_published(
    recorded: Store, endpoint: Endpoint, with_content: bool
) -> None:
    """Name, input and output of the rollout, and its rewards, as other tools look for them."""
    sent = forwarded(recorded, endpoint, with_content=with_content)

    assert [each for span in sent for each in violations(span)] == []
    roots = [span for span in sent if span.parent_span_id is None]
    function, block = (span.attributes for span in roots)
    assert roots[0].name.startswith("invoke_workflow ")
    assert roots[0].name.endswith("choose")
    assert roots[1].name == "invoke_workflow a block"
    for side, words in (("input", ASKED), ("output", ANSWERED)):
        assert function.get(f"{side}.value") == (words if with_content else None)
        messages = json.loads(function.get(f"gen_ai.{side}.messages", "[]"))
        parts = [part["content"] for message in messages for part in message["parts"]]
        assert parts == ([words] if with_content else [])
    # No result: the last answer. A judge's model answers after the function did.
    assert bool(block.get("output.value")) == with_content
    told = [dict(event.attributes) for span in sent for event in span.events]
    why = {"gen_ai.evaluation.explanation": "well done"} if with_content else {}
    assert told == [
        {"gen_ai.evaluation.name": "primary", "gen_ai.evaluation.score.value": 0.75},
        {"gen_ai.evaluation.name": "style", "gen_ai.evaluation.score.value": 1.0},
        {
            "gen_ai.evaluation.name": "late", "gen_ai.evaluation.score.value": 0.5,
            "gen_ai.response.id": "x", **why,
        },
    ]  # fmt: skip


def test_what_leaves_comes_back_as_it_was(recorded: Store) -> None:
    """A store that receives what another one forwards holds the same spans."""
    kept = recorded.spans().rows()
    said = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "hello"}]}])
    about = {c.OPERATION: c.INVOKE_AGENT, c.INPUT_MESSAGES: said, c.OUTPUT_MESSAGES: said}
    kept.append(ended(about, name="invoke_agent ann", scope=c.SCOPE))
    sent = [to_conventions(span, with_content=True) for span in kept]

    assert sent[-1].attributes["input.value"] == sent[-1].attributes["output.value"] == "hello"
    got = list(protobuf.decode_spans(encode_request(sent, with_content=True), "here"))

    assert sent != kept
    assert {c.SPAN_ROLLOUT, c.SPAN_ANNOTATION} <= {span.name for span in kept}
    by_id = {span.span_id: span for span in got if isinstance(span, Span)}
    for span in kept:
        attributes = {**span.attributes, c.RECEIVED: "here"}
        back = replace(
            by_id[span.span_id], process=span.process, sequence=span.sequence,
            end_sequence=span.end_sequence,
        )  # fmt: skip
        assert back == replace(span, attributes=attributes)


@pytest.mark.parametrize(
    ("task", "words"),
    [('"' + "x" * (2 << 20) + '"', "x" * SHOWN), ('{"cut', '{"cut'), ("[1, 2]", "[1, 2]"),
     ('"\\ud800"', "\ud800")],
)  # fmt: skip
def test_any_task_leaves(task: str, words: str) -> None:
    """A long one is not sent three times over; a damaged or structured one goes as it stands."""
    root = Span("ab" * 16, "cd" * 8, None, c.SPAN_ROLLOUT, 1, 2, attributes={c.TASK: task})

    sent = to_conventions(root, with_content=True)

    assert len(encode_request([sent], with_content=True)) < len(task) + 3 * SHOWN
    assert sent.name == "invoke_workflow"
    assert (sent.attributes[c.TASK], sent.attributes["input.value"]) == (task, words)


def ended(attributes: Mapping[str, Any] | None = None, **changes: Any) -> Span:
    fields: dict[str, Any] = {"name": "work", "parent_span_id": None, "start_ns": 1, "end_ns": 2}
    return Span("ab" * 16, "cd" * 8, attributes=attributes or {}, **{**fields, **changes})


def test_request_is_the_sdks_own(tmp_path: Path) -> None:
    """A span that went through the store is encoded as the SDK's exporter would have done it."""
    memory = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "x", "host.cpus": 4}))
    provider.add_span_processor(SimpleSpanProcessor(memory))
    provider.add_span_processor(SimpleSpanProcessor(DuckDBSpanExporter(str(tmp_path / "s.duckdb"))))
    tracer = provider.get_tracer("some.scope")
    with tracer.start_as_current_span("root", kind=SpanKind.SERVER) as root:
        link = Link(root.get_span_context(), {"why": "so"})
        with tracer.start_as_current_span("child", kind=SpanKind.CLIENT, links=[link]) as child:
            child.set_attributes({"text": "ä", "n": 3, "x": 0.5, "yes": True, "many": ["a", "b"]})
            child.add_event("something", {"size": 1}, timestamp=7)
            child.set_status(Status(StatusCode.ERROR, "it broke"))
        tracer.start_span("fine").set_status(Status(StatusCode.OK))
        provider.get_tracer("another.scope").start_span("beside").end()
    provider.shutdown()

    spans = list(Store(tmp_path / "s.duckdb").spans())
    for span in spans:
        for key in (c.ROLLOUT_ID, c.ATTEMPT_ID):  # the exporter's, in the store's record alone
            span.attributes.pop(key, None)
    body = encode_request(spans, with_content=True)

    theirs = encode_spans(sorted(memory.get_finished_spans(), key=lambda span: span.start_time))
    assert ExportTraceServiceRequest.FromString(body) == theirs


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("half \ud83d a pair", "half ? a pair"),
        (1 << 80, str(1 << 80)),
        (object, "<class 'object'>"),
        ({"a": [1, None, {"b": "\udc00"}]}, None),
        (None, None),
    ],
)
def test_request_takes_any_value(value: object, wanted: str | None) -> None:
    """What OTLP has no form for becomes text; a lone surrogate spoils only itself."""
    span = ended({"odd": value, "fine": "yes"}, name="na\udcffme", scope="\ud800")

    (sent,) = (
        ExportTraceServiceRequest.FromString(encode_request([span], with_content=True))
        .resource_spans[0]
        .scope_spans[0]
        .spans
    )

    found = {each.key: each.value for each in sent.attributes}
    assert found["fine"].string_value == "yes"
    assert sent.name == "na?me"
    if wanted is not None:
        assert found["odd"].string_value == wanted


# Source: semantic-conventions-genai, commit 002c8a6e, docs/gen-ai/gen-ai-metrics.md.
DURATIONS = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
TOKENS = [
    1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864,
]  # fmt: skip
REQUIRED = {"gen_ai.operation.name", "gen_ai.provider.name"}
OPTIONAL_KEYS = {
    "gen_ai.request.model", "gen_ai.response.model", "server.address", "server.port",
}  # fmt: skip

PROGRAM = """
import os, sys
os.environ.update(eval(sys.argv[2]))
from opentelemetry import metrics, trace
if "own" in sys.argv[3]:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))
import openai
from lightning_otel import auto_trace, capture
@auto_trace(store=sys.argv[4])
def act():
    client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
    for model in ("toy", "toy", "fail-400"):
        try:
            asked = [{"role": "user", "content": model}]
            client.chat.completions.create(model=model, messages=asked)
        except openai.BadRequestError:
            pass
act()
if "own" in sys.argv[3]:
    print(reader.get_metrics_data().to_json())
print(capture.process.meter is None)
"""


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """An endpoint for metrics on loopback, and what it took."""
    taken: list[Any] = []

    class Metrics(Handler):
        def do_POST(self) -> None:
            request = ExportMetricsServiceRequest.FromString(self.read_body())
            for in_resource in request.resource_metrics:
                for in_scope in in_resource.scope_metrics:
                    taken.extend((self.path, metric) for metric in in_scope.metrics)
            self.send(b"")

    with listen(Metrics) as url:
        yield url, taken


def test_metrics_leave_by_otlp_where_they_are_asked_for(
    run_python: Callable[..., str], server: DemoServer, collector: Any, tmp_path: Any
) -> None:
    """With the standard variables alone: names, units, buckets and attributes as published."""
    url, taken = collector
    asked = {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{url}/v1/m"}

    run_python(PROGRAM, server.base_url, asked, "-", tmp_path / "t.duckdb")

    found = {metric.name: metric for _, metric in taken}
    assert {path for path, _ in taken} == {"/v1/m"}
    assert {name: metric.unit for name, metric in found.items()} == {
        "gen_ai.client.operation.duration": "s", "gen_ai.client.token.usage": "{token}",
    }  # fmt: skip
    durations, tokens = (found[name].histogram.data_points for name in sorted(found))
    assert {tuple(point.explicit_bounds) for point in durations} == {tuple(DURATIONS)}
    assert {tuple(point.explicit_bounds) for point in tokens} == {tuple(TOKENS)}
    keys = [{each.key for each in point.attributes} for point in (*durations, *tokens)]
    known = REQUIRED | OPTIONAL_KEYS | {"gen_ai.token.type", "error.type"}
    assert all(known >= each >= REQUIRED for each in keys)
    assert sorted(point.count for point in durations) == [1, 2]
    assert [point.count for point in tokens] == [2, 2]


@pytest.mark.parametrize("is_set", [True, False])
def test_a_meter_provider_of_ones_own_is_used(
    run_python: Callable[..., str], server: DemoServer, tmp_path: Any, is_set: bool
) -> None:
    """Set before the rollout; without one there is no meter at all."""
    own = "own" if is_set else "-"
    told = run_python(PROGRAM, server.base_url, {}, own, tmp_path / "t.duckdb").splitlines()

    assert told[-1] == str(not is_set)
    if is_set:
        (scope,) = json.loads("".join(told[:-1]))["resource_metrics"][0]["scope_metrics"]
        kinds = {
            point["attributes"].get("gen_ai.token.type") or point["attributes"].get("error.type")
            for metric in scope["metrics"]
            for point in metric["data"]["data_points"]
        }
        assert kinds == {None, "openai.BadRequestError", "input", "output"}
