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
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind

from lightning_otel import capture, provider
from lightning_otel import conventions as c
from lightning_otel.capture import Frame, Operation

KEY = "sk-" + "a1B2" * 8


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.begun: list[ReadableSpan] = []
        self.spans: list[tuple[ReadableSpan, Mapping[str, str]]] = []

    def started(self, span: ReadableSpan, stamps: Mapping[str, Any]) -> None:
        """Note a start."""
        self.begun.append(span)

    def ended(self, span: ReadableSpan, body: Mapping[str, str]) -> None:
        """Keep an end."""
        self.spans.append((span, dict(body)))

    def one(self) -> ReadableSpan:
        """The only span ended."""
        ((span, _),) = self.spans
        return span


@pytest.fixture
def kept() -> Iterator[Kept]:
    """Where the spans of the test go."""
    provider.ensure_provider()
    capture.refresh_settings()
    sink = Kept()
    with capture.attached(capture.in_frame(Frame(sink, {"stamp": "here"}))):
        yield sink


@pytest.fixture
def no_faults_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no fault of ours had happened in this process."""
    monkeypatch.setattr(capture.process, "faults", 0)


def begin(**options: Any) -> Operation:
    """An operation with nothing in particular."""
    return Operation("chat toy", SpanKind.CLIENT, options.pop("attributes", {}), **options)


def test_operation_is_one_span_with_all_that_was_gathered(kept: Kept) -> None:
    """Start attributes, later ones, stamps, kind and content arrive together."""
    operation = begin(attributes={"a": 1}, body={c.INPUT_MESSAGES: "[]"})
    operation.attributes["b"] = "two"
    operation.body[c.OUTPUT_MESSAGES] = "[1]"
    is_over = operation.is_over

    operation.stop()

    ((span, body),) = kept.spans
    assert (is_over, operation.is_over) == (False, True)
    assert dict(span.attributes or {}) == {"a": 1, "stamp": "here", "b": "two"}
    assert (span.name, span.kind, span.status.status_code.name) == (
        "chat toy",
        SpanKind.CLIENT,
        "UNSET",
    )
    assert body == {c.INPUT_MESSAGES: "[]", c.OUTPUT_MESSAGES: "[1]"}
    assert [begun.name for begun in kept.begun] == ["chat toy"]


@pytest.mark.parametrize("first", ["stop", "fail", "fail_with"])
def test_operation_ends_once_and_as_it_ended_first(first: str, kept: Kept) -> None:
    """Whatever is said after the end changes nothing."""
    operation = begin()
    ends: dict[str, Callable[[], None]] = {
        "stop": operation.stop,
        "fail": lambda: operation.fail(ValueError("first")),
        "fail_with": lambda: operation.fail_with("first", "words"),
    }

    ends[first]()
    for end in ends.values():
        end()

    found = (kept.one().attributes or {}).get(c.ERROR_TYPE)
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


def test_operation_context_holds_its_span_and_is_not_current(kept: Kept) -> None:
    """What is done within it is its child; nothing else is."""
    outer = begin()
    with capture.attached(outer.context):
        inner = begin()
    beside = begin()

    for operation in (inner, beside, outer):
        operation.stop()

    (first, _), (second, _), (third, _) = kept.spans
    assert first.parent is not None
    assert first.parent.span_id == third.context.span_id
    assert second.parent is None


def test_failure_is_told_by_type_and_words(kept: Kept) -> None:
    """An exception's class goes to ``error.type``, its words to the status, its secrets nowhere."""
    begin().fail(ConnectionError(f"no route for {KEY}"))

    span = kept.one()
    assert (span.attributes or {})[c.ERROR_TYPE] == "ConnectionError"
    assert span.status.status_code.name == "ERROR"
    assert span.status.description == "no route for [redacted:api_key]"


class Silent(Exception):  # noqa: N818  # named for what it does
    """Has no words."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Touching(Exception):  # noqa: N818  # named for what it does
    """Speaks by touching the span."""

    span: Any = None

    def __str__(self) -> str:
        self.span.set_attribute("touched", True)
        trace.get_current_span().add_event("touched")
        return "touched"


def test_failure_without_words_is_no_fault_of_ours(kept: Kept, no_faults_yet: None) -> None:
    """An exception whose ``__str__`` raises fails the span by its type alone."""
    begin().fail(Silent())

    assert str((kept.one().attributes or {})[c.ERROR_TYPE]).endswith("Silent")
    assert not kept.one().status.description
    assert capture.process.faults == 0


def test_failure_that_touches_its_own_span_ends_it(kept: Kept) -> None:
    """The SDK holds a lock that is not re-entrant: words are asked for outside of it."""
    operation = begin()
    exc = Touching()
    exc.span = operation.span

    with capture.attached(operation.context):
        operation.fail(exc)

    assert (kept.one().attributes or {})["touched"] is True
    assert kept.one().status.description == "touched"


def test_long_words_of_an_exception_keep_no_part_of_a_secret() -> None:
    """A secret that would be cut in two is redacted before the cut."""
    text = "x " * 4090 + KEY

    found = capture.message_of(ValueError(text + "y" * 1_000_000))

    assert KEY[:8] not in found
    assert len(found) <= 8192


def test_attributes_are_valid_text(kept: Kept) -> None:
    """A lone surrogate in a model's name or a stop sequence would cost other exporters a batch."""
    operation = begin(attributes={"model": "to\ud800y", "stop": ["\ud800", "é"], "n": 2})
    operation.attributes["id"] = "\udfff"

    operation.stop()

    found = dict(kept.one().attributes or {})
    assert found["model"] == "to?y"
    assert found["stop"] == ("?", "é")
    assert (found["id"], found["n"]) == ("?", 2)


def test_content_is_scrubbed_but_numbers_are_not(kept: Kept) -> None:
    """Base64 of token ids can look like a key by chance; changing it would change the ids."""
    lookalike = "/AKIA" + "A" * 16 + "+"
    operation = begin(body={c.INPUT_MESSAGES: KEY, c.RESPONSE_TOKEN_IDS: lookalike})

    operation.stop()

    ((_, body),) = kept.spans
    assert body == {c.INPUT_MESSAGES: "[redacted:api_key]", c.RESPONSE_TOKEN_IDS: lookalike}


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


def test_frame_without_a_sink_records_nothing(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process can be told to hold its own spans back."""
    monkeypatch.setattr(capture.process, "frame", Frame(None))

    with capture.attached(capture.in_frame(Frame(None))):
        begin().stop()

    assert kept.spans == []


def test_frames_parent_is_taken_where_no_span_is_current(kept: Kept) -> None:
    """A process started by a traced one goes on in its trace, unless a span of its own is open."""
    remote = SpanContext(7, 8, is_remote=True, trace_flags=trace.TraceFlags(1))
    parent = trace.set_span_in_context(NonRecordingSpan(remote), otel_context.Context())
    frame = Frame(kept, {}, parent)

    with capture.attached(capture.in_frame(frame, otel_context.set_value("mine", 1))):
        outer = begin()
        with capture.attached(outer.context):
            inner = begin()
            mine = otel_context.get_value("mine")
    inner.stop()
    outer.stop()

    (first, _), (second, _) = kept.spans
    assert second.parent is not None
    assert second.parent.span_id == 8
    assert second.context.trace_id == 7
    assert first.parent is not None
    assert first.parent.span_id == second.context.span_id
    assert mine == 1


@pytest.fixture
def framework() -> Iterator[list[Operation]]:
    """A framework whose innermost open operation is the last of the list."""
    open_operations: list[Operation] = []

    def innermost() -> Operation | None:
        return open_operations[-1] if open_operations else None

    before = capture.process.frameworks
    capture.process.frameworks = {**before, innermost: None}
    yield open_operations
    capture.process.frameworks = before


def parent_id(operation: Operation) -> int | None:
    """The id of the parent of an operation's span."""
    parent = operation.span.parent  # type: ignore[attr-defined]  # the SDK's
    return parent.span_id if parent is not None else None


def test_framework_gives_the_parent_where_the_context_knows_nothing(
    kept: Kept, framework: list[Operation]
) -> None:
    """What starts in a context that the framework did not make stands under its operation."""
    node = begin()
    framework.append(node)

    call = begin()

    assert parent_id(call) == node.span.get_span_context().span_id
    assert call.outer is node


def test_span_within_the_frameworks_operation_is_nearer_than_it(
    kept: Kept, framework: list[Operation]
) -> None:
    """A span made by hand inside a tool is the parent of the call made inside it."""
    tool = begin()
    framework.append(tool)

    with (
        capture.attached(tool.context),
        trace.get_tracer("user").start_as_current_span("by hand") as hand,
    ):
        call = begin()

    assert parent_id(call) == hand.get_span_context().span_id


def test_framework_of_another_rollout_encloses_nothing(
    kept: Kept, framework: list[Operation]
) -> None:
    """What is recorded for another rollout stays out of the framework's tree."""
    framework.append(begin())
    elsewhere = capture.in_frame(Frame(kept, {c.ROLLOUT_ID: "other"}))

    with capture.attached(elsewhere):
        call = begin()

    assert parent_id(call) is None


def test_framework_that_raises_is_a_fault_of_ours_alone(
    kept: Kept, no_faults_yet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation stands where the context says."""

    def innermost() -> Operation | None:
        raise RuntimeError("broken")

    monkeypatch.setattr(capture.process, "frameworks", frozenset({innermost}))

    call = begin()

    assert parent_id(call) is None
    assert capture.process.faults == 1
