"""The one lifecycle of everything captured, and the fence around it."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind
from tests.instrumentors.outline import named, outline

from lightning_otel import Store, auto_trace, capture, operation
from lightning_otel.capture.operations import Operation
from lightning_otel.types import conventions as c

KEY = "sk-" + "a1B2" * 8


def begin(name: str, **options: Any) -> Operation:
    return Operation(name, SpanKind.CLIENT, options.pop("attributes", {}), **options)


def test_operation_is_one_span_with_all_that_was_gathered(store: Store) -> None:
    """Attributes and content arrive together, as valid text."""
    lookalike = "/AKIA" + "A" * 16 + "+"
    with auto_trace(store=store) as recording:
        made = begin(
            "chat toy",
            attributes={"model": "to\ud800y", "stop": ["\ud800", "é"], "n": 2},
            body={c.INPUT_MESSAGES: KEY, c.RESPONSE_TOKEN_IDS: lookalike},
        )
        made.attributes["id"] = "\udfff"
        made.stop()

    wanted = {"model": "to?y", "stop": ["?", "é"], "n": 2, "id": "?"}
    content = {c.INPUT_MESSAGES: "[redacted:api_key]", c.RESPONSE_TOKEN_IDS: lookalike}
    found = named(recording, "chat toy").attributes
    assert {key: found.get(key) for key in wanted | content} == wanted | content


class Silent(Exception):  # noqa: N818  # named for what it does
    """Has no words."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Touching(Exception):  # noqa: N818  # named for what it does
    """Speaks by touching the span: the SDK holds a lock that is not re-entrant."""

    def __str__(self) -> str:
        trace.get_current_span().set_attribute("touched", True)
        return "touched"


@pytest.mark.parametrize(
    ("exc", "words"),
    [
        (ConnectionError(f"no route for {KEY}"), "no route for [redacted:"),
        (ValueError("x " * 4090 + KEY + "y" * 1_000_000), "x x"),
        (Silent(), ""),
        (Touching(), "touched"),
    ],
)
def test_failure_is_told_by_type_and_words(exc: Exception, words: str, store: Store) -> None:
    """To the status without secrets, be they cut in two; no words are no fault of ours."""
    faults = capture.process.faults
    with auto_trace(store=store) as recording, pytest.raises(type(exc)), operation("x"):
        raise exc

    span = named(recording, c.SPAN_OPERATION)
    said = span.status_message or ""
    assert (span.status, capture.process.faults) == ("ERROR", faults)
    assert str(span.attributes[c.ERROR_TYPE]).endswith(type(exc).__name__)
    assert said.startswith(words)
    assert KEY[:8] not in said
    assert len(said) <= 8192


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_guarded_lets_through_what_is_not_a_fault(kind: type[BaseException]) -> None:
    """An interrupt that happens to arrive in our code is the program's."""

    def interrupted() -> None:
        raise kind

    with pytest.raises(kind):
        capture.guard_call(interrupted)


@pytest.fixture
def framework() -> Iterator[list[Operation]]:
    """A framework whose innermost open operation is the last of the list; it fails with none."""
    open_operations: list[Operation] = []
    before = capture.process.frameworks
    capture.process.frameworks = {**before, lambda: open_operations[-1]: None}
    yield open_operations
    capture.process.frameworks = before


def test_framework_gives_the_parent_where_the_context_knows_nothing(
    store: Store, framework: list[Operation]
) -> None:
    """A span by hand inside its operation is nearer; another rollout is none of its business."""
    with auto_trace(store=store) as recording:
        framework.append(begin("tool"))
        begin("called").stop()
        tracer = trace.get_tracer("user")
        with capture.attach_context(framework[0].context), tracer.start_as_current_span("by hand"):
            begin("nearer").stop()
        with auto_trace(rollout_id="other") as other:
            begin("elsewhere").stop()
        framework[0].stop()

    assert outline(recording) == "tool\n  called\n  by hand\n    nearer"
    assert named(other, "elsewhere").parent_span_id == other.span_id
