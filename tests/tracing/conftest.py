"""What the tests of ``tracing`` share: reading a recording, and a clean slate of warnings."""

import logging
from collections.abc import Callable

import pytest

from lightning_otel import conventions as c
from lightning_otel.tracing import Recording
from lightning_otel.types import Span


@pytest.fixture
def root_of() -> Callable[[Recording], Span]:
    """Finds the one root span of a recording."""

    def find(recording: Recording) -> Span:
        (root,) = [span for span in recording.spans() if span.span_id == recording.span_id]
        assert root.name == c.SPAN_ROLLOUT
        return root

    return find


@pytest.fixture
def warnings_in(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Lists what was logged so far at warning level or above."""

    def find() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]

    return find
