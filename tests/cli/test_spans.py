"""``export spans`` held against the SDK's own ``ReadableSpan.to_json()``, field by field."""

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from tests.cli.conftest import Cli

from lightning_otel.exporters.duckdb import DuckDBSpanExporter
from lightning_otel.types import conventions as c


@pytest.fixture
def exported(tmp_path: Path, cli: Cli) -> Callable[[TracerProvider], list[dict[str, Any]]]:
    """Gives what ``export spans`` prints of a provider's spans, in the order of their start."""
    path = tmp_path / "spans.duckdb"

    def lines(provider: TracerProvider) -> list[dict[str, Any]]:
        provider.shutdown()
        done = cli("export", "spans", "--store", path)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return lines


@pytest.fixture
def provider(tmp_path: Path) -> TracerProvider:
    """A provider whose spans go into a store and into memory."""
    made = TracerProvider(resource=Resource({"service.name": "ärger", "host.cpus": 4}))
    made.add_span_processor(SimpleSpanProcessor(DuckDBSpanExporter(str(tmp_path / "spans.duckdb"))))
    return made


@pytest.fixture
def memory(provider: TracerProvider) -> InMemorySpanExporter:
    """The same spans, as the SDK holds them."""
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


def sdk_lines(spans: Sequence[ReadableSpan]) -> list[dict[str, Any]]:
    ordered = sorted(spans, key=lambda span: span.start_time or 0)
    return [json.loads(span.to_json()) for span in ordered]


def test_sdk_json_equals_the_sdk(
    provider: TracerProvider,
    memory: InMemorySpanExporter,
    exported: Callable[[TracerProvider], list[dict[str, Any]]],
) -> None:
    """Names, ids, times, kinds, states, attributes, events, links and resource are the SDK's."""
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("root", kind=SpanKind.SERVER) as root:
        root.set_attributes(
            {
                "text": 'quotes " and ünïcode',
                "number": -7,
                "share": 0.1,
                "whole": 2.0,
                "yes": True,
                "texts": ["a", "b"],
                "numbers": (1, 2, 3),
                "empty": "",
                "gen_ai.operation.name": "chat",
                "gen_ai.input.messages": '[{"role":"user","parts":[]}]',
                "gen_ai.usage.input_tokens": 12,
                "agentlightning.reward.0.value": 1.0,
            }
        )
        link = Link(root.get_span_context(), {"why": "it was there"})
        with tracer.start_as_current_span("child", kind=SpanKind.CLIENT, links=[link]) as child:
            child.add_event("something", {"size": 3, "names": ["x"]}, timestamp=1_700_000_000_123)
            child.add_event("bare")
            child.set_status(Status(StatusCode.ERROR, "it broke"))
        with pytest.raises(KeyError), tracer.start_as_current_span("raising"):
            raise KeyError("gone")
        tracer.start_span("fine").end()
        ok = tracer.start_span("ok", kind=SpanKind.PRODUCER)
        ok.set_status(Status(StatusCode.OK))
        ok.end()
        tracer.start_span("old", start_time=1_000_000_001).end(1_999_999_999)

    found = exported(provider)

    wanted = sdk_lines(memory.get_finished_spans())
    assert [span["name"] for span in found] == ["old", "root", "child", "raising", "fine", "ok"]
    for ours, theirs in zip(found, wanted, strict=True):
        ours.pop("lightning_otel")  # what the SDK leaves out; read back by import
        for key in (c.ROLLOUT_ID, c.ATTEMPT_ID):  # of the process, in the store's record alone
            ours["attributes"].pop(key, None)
        for field in {**theirs, **ours}:
            assert ours[field] == theirs[field], (theirs["name"], field)


def test_sdk_json_keeps_what_the_sdk_raises_on(
    provider: TracerProvider, exported: Callable[[TracerProvider], list[dict[str, Any]]]
) -> None:
    """Bytes, on which ``to_json()`` raises, are printed as base64."""
    span = provider.get_tracer("test").start_span("bytes", attributes={"raw": b"\x00\xff"})
    span.end()

    (found,) = exported(provider)

    assert isinstance(span, ReadableSpan)
    with pytest.raises(TypeError):
        span.to_json()
    assert found["attributes"]["raw"] == base64.b64encode(b"\x00\xff").decode()


def test_sdk_json_of_an_open_span_has_no_end(tmp_path: Path, cli: Cli) -> None:
    """A span that never ended is printed with an empty end, as the SDK prints one."""
    from lightning_otel import Store, auto_trace, operation

    store = Store(tmp_path / "open.duckdb")
    with auto_trace(store=store), operation("work"):
        done = cli("export", "spans", "--store", tmp_path / "open.duckdb")
        sdk = json.loads(getattr(trace.get_current_span(), "to_json")())  # noqa: B009

    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 2
    assert {field: found[1][field] for field in ("name", "context", "parent_id", "end_time")} == {
        field: sdk[field] for field in ("name", "context", "parent_id", "end_time")
    }
    assert found[1]["end_time"] is None
