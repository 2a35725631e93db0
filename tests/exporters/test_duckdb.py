"""Spans reach the store through our processor at once, and through the exporter in batches."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SpanExportResult,
)
from opentelemetry.trace import SpanContext, Tracer

from lightning_otel import Store, auto_trace
from lightning_otel.exporters.duckdb import DuckDBSpanExporter, FrameSpanProcessor
from lightning_otel.types import Span
from lightning_otel.types import conventions as c


@pytest.fixture
def tracer() -> Tracer:
    """A tracer whose provider has our processor."""
    provider = TracerProvider()
    provider.add_span_processor(FrameSpanProcessor())
    return provider.get_tracer("test")


@pytest.fixture
def recorded(store: Store) -> Iterator[Store]:
    """A store that is the sink of the current context."""
    with auto_trace(store=store, rollout_id="r1"):
        yield store


def _spans(store: Store) -> list[Span]:
    return [span for span in store.spans() if span.scope == "test"]


def test_processor_follows_the_frame_a_span_started_in(tracer: Tracer, tmp_path: Path) -> None:
    """Where a span ends, and on which thread, does not matter."""
    stores = [Store(tmp_path / name / "x.duckdb") for name in ("one", "two")]
    spans = []
    for index, store in enumerate(stores):
        with auto_trace(store=store):
            spans.append(tracer.start_span(f"s{index}"))
    with auto_trace(store=stores[1]):
        spans[0].end()
    thread = threading.Thread(target=spans[1].end)
    thread.start()
    thread.join()

    assert [[span.name for span in _spans(store)] for store in stores] == [["s0"], ["s1"]]


def test_processor_twice_keeps_a_span_once(recorded: Store) -> None:
    """Who adds our processor to a provider that has it gets no second copy."""
    provider = TracerProvider()
    provider.add_span_processor(FrameSpanProcessor())
    provider.add_span_processor(FrameSpanProcessor())

    provider.get_tracer("test").start_span("work").end()

    assert len(_spans(recorded)) == 1


class Anonymizing(FrameSpanProcessor):
    """Hands on a copy without attributes and resource, as a processor of a program's own may."""

    def on_end(self, span: ReadableSpan) -> None:
        copy = ReadableSpan(
            span.name,
            SpanContext(span.context.trace_id, span.context.span_id, is_remote=False),
            resource=Resource({"host": "hidden"}),
            instrumentation_scope=span.instrumentation_scope,
            start_time=span.start_time,
            end_time=span.end_time,
        )
        super().on_end(copy)


def test_copy_of_a_span_is_kept_in_its_place(recorded: Store) -> None:
    """It ends what the original began."""
    provider = TracerProvider()
    provider.add_span_processor(Anonymizing())

    provider.get_tracer("test").start_span("work", attributes={"who": "me"}).end()

    (span,) = _spans(recorded)
    assert (span.name, span.is_incomplete, "who" in span.attributes) == ("work", False, False)
    assert span.otel_resource == {"host": "hidden"}


def test_stamps_stand_where_a_span_says_nothing_of_its_own(recorded: Store, tracer: Tracer) -> None:
    """What a span says of its rollout counts, as it starts and when it ended."""
    own = tracer.start_span("own", attributes={c.ROLLOUT_ID: "its own"})
    tracer.start_span("other").end()
    started, _ = _spans(recorded)
    own.end()

    found = {span.name: span.rollout_id for span in _spans(recorded)}
    assert found == {"own": "its own", "other": "r1"}
    assert (started.name, started.is_incomplete, started.rollout_id) == ("own", True, "its own")


def test_processor_shutdown_seals_the_segment_and_loses_no_span(
    recorded: Store, tracer: Tracer
) -> None:
    """After it the segment can be settled; spans open then, and later ones, are kept still."""
    tracer.start_span("work").end()
    left_open = tracer.start_span("open")
    FrameSpanProcessor().shutdown()
    recorded.settle()
    left_open.end()
    tracer.start_span("late").end()

    found = [(span.name, span.is_incomplete) for span in _spans(recorded)]
    assert found == [("work", False), ("open", False), ("late", False)]


def test_exporter_appends_batches(store: Store) -> None:
    """Spans come complete; the segment is made with the first of them and sealed at the end."""
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(DuckDBSpanExporter(store.name)))
    assert store.layout is not None
    is_made_early = store.layout.catalogue.parent.exists()

    with provider.get_tracer("test").start_as_current_span("parent") as parent:
        parent.add_event("tick", {"n": 1})
        provider.get_tracer("test").start_span("child", attributes={"raw": b"x"}).end()
    provider.shutdown()

    root, child = store.spans()
    assert not is_made_early
    assert (root.name, child.name) == ("parent", "child")
    assert child.parent_span_id == root.span_id
    assert child.rollout_id == root.rollout_id != root.trace_id
    assert child.attributes == root.attributes | {"raw": "eA=="}
    assert root.events[0].name == "tick"
    assert store.settle().rows == 2


def test_exporter_fails_with_one_warning_where_no_store_can_be_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The pipeline is told, and the user once."""
    (tmp_path / "file").write_text("")
    exporter = DuckDBSpanExporter(str(tmp_path / "file" / "x.duckdb"))

    results = [exporter.export([]) for _ in range(3)]
    exporter.shutdown()

    assert results == [SpanExportResult.FAILURE] * 3
    (warning,) = caplog.records
    assert "were not stored: cannot make the store" in warning.getMessage()


def test_exporter_holds_no_content_of_what_is_not_sampled(
    run_python: Callable[..., str], tmp_path: Path
) -> None:
    """Unsampled text of 90 MB leaves the content that waits for the exporter where it is."""
    script = """
    import sys
    import lightning_otel
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    provider = TracerProvider()
    exporter = lightning_otel.DuckDBSpanExporter(sys.argv[1])
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=600_000))
    trace.set_tracer_provider(provider)
    lightning_otel.instrument([])
    lightning_otel.emit_message("said")
    with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=True))):
        for _ in range(3):
            lightning_otel.emit_message("x" * 30_000_000)
    provider.shutdown()
    """

    run_python(script, tmp_path / "x.duckdb")

    (found,) = Store(tmp_path / "x.duckdb").spans()
    assert found.attributes[c.MESSAGE_BODY] == "said"
