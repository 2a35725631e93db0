"""The one lifecycle of everything captured, and the fence around it."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import copy_context
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind

from lightning_otel import capture, provider
from lightning_otel import conventions as c
from lightning_otel.capture import Frame
from lightning_otel.operations import Operation

KEY = "sk-" + "a1B2" * 8


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.spans: list[tuple[ReadableSpan, Mapping[str, str]]] = []

    def started(self, span: ReadableSpan, stamps: Mapping[str, Any], transforms: Any = ()) -> None:
        """Do nothing."""

    def ended(self, span: ReadableSpan, body: Mapping[str, str]) -> None:
        """Keep an end."""
        self.spans.append((span, dict(body)))

    def one(self) -> tuple[ReadableSpan, dict[str, Any], Mapping[str, str]]:
        """The only span ended, with its attributes and content."""
        ((span, body),) = self.spans
        return span, dict(span.attributes or {}), body


@pytest.fixture
def kept() -> Iterator[Kept]:
    """Where the spans of the test go."""
    provider.ensure_provider()
    capture.refresh_settings()
    sink = Kept()
    with capture.attached(capture.in_frame(Frame(sink, {"stamp": "here"}))):
        yield sink


def begin(**options: Any) -> Operation:
    """An operation with nothing in particular."""
    return Operation("chat toy", SpanKind.CLIENT, options.pop("attributes", {}), **options)


def test_operation_is_one_span_with_all_that_was_gathered(kept: Kept) -> None:
    """Start attributes, later ones, stamps, kind and content arrive together, as valid text.

    A lone surrogate in a stop sequence would cost other exporters a batch. Base64 of token ids can
    look like a key by chance; changing it would change the ids.
    """
    lookalike = "/AKIA" + "A" * 16 + "+"
    operation = begin(
        attributes={"model": "to\ud800y", "stop": ["\ud800", "é"], "n": 2},
        body={c.INPUT_MESSAGES: KEY, c.RESPONSE_TOKEN_IDS: lookalike},
    )
    operation.attributes["id"] = "\udfff"
    operation.body[c.OUTPUT_MESSAGES] = "[1]"

    operation.stop()

    span, attributes, body = kept.one()
    assert (span.name, span.kind) == ("chat toy", SpanKind.CLIENT)
    assert attributes == {"stamp": "here", "model": "to?y", "stop": ("?", "é"), "n": 2, "id": "?"}
    assert body == {
        c.INPUT_MESSAGES: "[redacted:api_key]",
        c.RESPONSE_TOKEN_IDS: lookalike,
        c.OUTPUT_MESSAGES: "[1]",
    }


@pytest.mark.parametrize("first", ["stop", "fail", "fail_with"])
def test_operation_ends_once_and_as_it_ended_first(first: str, kept: Kept) -> None:
    """Whatever is said after the end changes nothing."""
    operation = begin()
    ends: dict[str, Callable[[], None]] = {
        "stop": operation.stop,
        "fail": lambda: operation.fail(ValueError("first")),
        "fail_with": lambda: operation.fail_with("first", "words"),
    }

    for end in (ends[first], *ends.values()):
        end()

    found = kept.one()[1].get(c.ERROR_TYPE)
    assert found == {"stop": None, "fail": "ValueError", "fail_with": "first"}[first]


def test_operation_ended_by_many_threads_at_once_ends_once(kept: Kept) -> None:
    """A reader and a garbage collector may both end it."""
    operations = [begin() for _ in range(200)]
    ready = threading.Barrier(4)

    def end_all() -> None:
        ready.wait()
        for operation in operations:
            operation.stop()

    ending = [threading.Thread(target=end_all) for _ in range(4)]
    for thread in ending:
        thread.start()
    for thread in ending:
        thread.join()

    assert len(kept.spans) == 200


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
    ("exc", "name", "words"),
    [
        (ConnectionError(f"no route for {KEY}"), "ConnectionError", "no route for [redacted:"),
        (ValueError("x " * 4090 + KEY + "y" * 1_000_000), "ValueError", "x x"),
        (Silent(), "Silent", ""),
        (Touching(), "Touching", "touched"),
    ],
)
def test_failure_is_told_by_type_and_words(
    exc: Exception, name: str, words: str, kept: Kept
) -> None:
    """To the status without secrets, be they cut in two; no words are no fault of ours."""
    operation = begin()

    with capture.attached(operation.context):
        operation.fail(exc)

    span, attributes, _ = kept.one()
    said = span.status.description or ""
    assert attributes[c.ERROR_TYPE].endswith(name)
    assert span.status.status_code.name == "ERROR"
    assert said.startswith(words)
    assert KEY[:8] not in said
    assert len(said) <= 8192
    assert capture.process.faults == 0


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_guarded_lets_through_what_is_not_a_fault(kind: type[BaseException]) -> None:
    """An interrupt that happens to arrive in our code is the program's."""

    def interrupted() -> None:
        raise kind

    with pytest.raises(kind):
        capture.guarded(interrupted)


def test_attached_block_left_in_another_context_is_left_quietly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A generator closed elsewhere neither complains nor puts a stranger's context back."""

    def steps() -> Iterator[None]:
        with capture.attached(otel_context.set_value("key", "theirs")):
            yield

    generator = steps()
    copy_context().run(next, generator)

    with capture.attached(otel_context.set_value("key", "ours")):
        generator.close()  # type: ignore[attr-defined]  # a generator
        found = otel_context.get_value("key")

    assert found == "ours"
    assert caplog.records == []


@pytest.fixture
def framework() -> Iterator[list[Operation]]:
    """A framework whose innermost open operation is the last of the list; it fails with none."""
    open_operations: list[Operation] = []
    before = capture.process.frameworks
    capture.process.frameworks = {**before, lambda: open_operations[-1]: None}
    yield open_operations
    capture.process.frameworks = before


def test_framework_gives_the_parent_where_the_context_knows_nothing(
    kept: Kept, framework: list[Operation]
) -> None:
    """A span by hand inside its operation is nearer; another rollout is none of its business."""

    def parent_of(operation: Operation) -> int | None:
        parent = operation.span.parent  # type: ignore[attr-defined]  # the SDK's
        return parent.span_id if parent is not None else None

    tool = begin()
    faults = capture.process.faults
    framework.append(tool)
    called = begin()
    with (
        capture.attached(tool.context),
        trace.get_tracer("user").start_as_current_span("by hand") as hand,
    ):
        nearer = begin()
    with capture.attached(capture.in_frame(Frame(kept, {c.ROLLOUT_ID: "other"}))):
        elsewhere = begin()

    assert called.outer is tool
    assert [parent_of(each) for each in (tool, called, nearer, elsewhere)] == [
        None, tool.span.get_span_context().span_id, hand.get_span_context().span_id, None,
    ]  # fmt: skip
    assert faults == 1
