"""What the store's tests share: spans by number, and Python in a process of its own."""

import itertools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import Tracer

from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import Span


@pytest.fixture
def make_span() -> Callable[..., Span]:
    """A function that makes a span with ids of its own, and whatever else it is told."""
    numbers = itertools.count(1)

    def make(**changes: Any) -> Span:
        number = next(numbers)
        fields: dict[str, Any] = {
            "trace_id": f"{number:032x}",
            "span_id": f"{number:016x}",
            "parent_span_id": None,
            "name": "work",
            "start_ns": 1_000 * number,
            "end_ns": 1_000 * number + 500,
        }
        return Span(**{**fields, **changes})

    return make


class _Feed(SpanProcessor):
    """Hands every span of a provider to one writer."""

    def __init__(self, writer: SpanWriter) -> None:
        self._writer = writer

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """Start it."""
        self._writer.started(span)

    def on_end(self, span: ReadableSpan) -> None:
        """End it."""
        self._writer.ended(span, {})


@pytest.fixture
def tracer_of() -> Callable[[SpanWriter], Tracer]:
    """A function that gives a tracer whose spans go to a writer."""

    def make(writer: SpanWriter) -> Tracer:
        provider = TracerProvider()
        provider.add_span_processor(_Feed(writer))
        return provider.get_tracer("test")

    return make


@pytest.fixture
def run_python() -> Callable[..., str]:
    """A function that runs a script in a process of its own and gives what it printed."""

    def run(script: str, *arguments: object, timeout_s: float = 50) -> str:
        # From 3.12 on Python warns of each fork in a process with threads, which is what is tested.
        quiet = "-Wignore:This process:DeprecationWarning"
        done = subprocess.run(
            [sys.executable, quiet, "-c", textwrap.dedent(script), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    return run
