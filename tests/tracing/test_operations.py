"""``operation``: pieces of work as spans, with what went in and what came out."""

import asyncio
import json
from collections.abc import Callable, Generator
from typing import Any

import pytest

from lightning_otel import Span, Store, auto_trace, emit_message, emit_reward, operation
from lightning_otel import conventions as c
from lightning_otel.tracing import Recording

Warnings = Callable[[], list[str]]


def operations(recording: Recording) -> list[Span]:
    """The operations of a recording, in order."""
    return [span for span in recording.spans() if span.name == c.SPAN_OPERATION]


def inputs(span: Span) -> Any:
    """What an operation worked on."""
    return json.loads(span.attributes[c.OPERATION_INPUT])


def output(span: Span) -> Any:
    """What came of an operation."""
    return json.loads(span.attributes[c.OPERATION_OUTPUT])


def test_operation_block_keeps_inputs_and_output(store: Store) -> None:
    """A block is one span with Agent Lightning's keys, the parent of what happens inside."""
    with auto_trace(store=store) as recording:
        with operation("retrieve", top_k=5) as found:
            emit_message("searching")
            found.output = ["a", "b"]
        emit_reward(0.5, span_id=found.span_id)

    (span,) = operations(recording)
    message, reward = recording.spans()[2:]
    assert span.name == "agentlightning.operation"
    assert span.attributes["agentlightning.operation.name"] == "retrieve"
    assert span.attributes["agentlightning.operation.input"] == '{"top_k": 5}'
    assert span.attributes["agentlightning.operation.output"] == '["a", "b"]'
    assert (span.status, span.is_incomplete) == ("UNSET", False)
    assert message.parent_span_id == span.span_id == found.span_id
    assert reward.attributes[f"{c.LINK_PREFIX}.0.value_match"] == span.span_id


class Tool:
    """Has methods."""

    @operation
    def use(self, text: str) -> str:
        """Give it back."""
        return text

    @operation
    @classmethod
    def make(cls, size: int) -> int:
        """Give it back."""
        return size


@operation
def join(first: str, *rest: str, sep: str = ", ", **options: int) -> str:
    """Join them."""
    return sep.join([first, *rest])


@operation("search", engine="toy")
async def find(query: str) -> list[str]:
    """Find it."""
    await asyncio.sleep(0)
    return [query]


@operation
def count(to: int) -> Generator[int, None, str]:
    """Count."""
    yield from range(to)
    return "counted"


DECORATED: list[tuple[Callable[[], Any], str, Any, Any]] = [
    (lambda: join("a", "b", sep="-", size=3), "join",
     {"first": "a", "rest": ["b"], "sep": "-", "options": {"size": 3}}, "a-b"),
    (lambda: asyncio.run(find("x")), "search", {"engine": "toy", "query": "x"}, ["x"]),
    (lambda: list(count(2)), "count", {"to": 2}, "counted"),
    (lambda: Tool().use("x"), "Tool.use", {"text": "x"}, "x"),
    (lambda: Tool.make(3), "Tool.make", {"size": 3}, 3),
    (lambda: operation("largest")(max)(3, 4), "largest", {"args": [3, 4]}, 4),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "name", "given", "result"), DECORATED, ids=[case[1] for case in DECORATED]
)
def test_decorated_function_keeps_arguments_and_result(
    call: Callable[[], Any], name: str, given: Any, result: Any, store: Store
) -> None:
    """By name, of functions of every kind; ``self`` and ``cls`` are no inputs."""
    with auto_trace(store=store) as recording:
        call()

    (span,) = operations(recording)
    assert span.attributes[c.OPERATION_NAME] == name
    assert (inputs(span), output(span)) == (given, result)


@pytest.mark.parametrize("result", [0, "", False, [], {}, 0.0])
def test_operation_keeps_an_output_that_is_empty(result: object, store: Store) -> None:
    """Nought and empty are outputs; only None is none."""
    with auto_trace(store=store) as recording:
        operation(lambda: result)()

    (span,) = operations(recording)
    assert output(span) == result


@pytest.mark.parametrize("is_async", [False, True])
def test_operation_records_an_exception_once_and_lets_it_through(
    is_async: bool, store: Store
) -> None:
    """The span fails with the exception's name and text; the very exception goes on."""
    exc = LookupError("nothing found")

    @operation
    def find() -> None:
        raise exc

    @operation
    async def find_async() -> None:
        raise exc

    with (
        auto_trace(store=store) as recording,
        pytest.raises(LookupError) as caught,
    ):
        asyncio.run(find_async()) if is_async else find()

    (span,) = operations(recording)
    assert caught.value is exc
    assert (span.status, span.status_message) == ("ERROR", "nothing found")
    assert span.attributes[c.ERROR_TYPE] == "LookupError"
    assert span.events == ()
    assert recording.spans()[0].status == "UNSET"


def test_operation_outside_a_recording_only_runs(warnings_in: Warnings) -> None:
    """Without a recording blocks and functions run as they are, and nothing is said."""

    @operation
    def double(number: int) -> int:
        return number * 2

    with operation("free") as free:
        free.output = double(2)

    assert free.output == 4
    assert free.span_id is None
    assert warnings_in() == []
    assert not Store().layout.exists()  # type: ignore[union-attr]  # the default store is local


class Awkward:
    """An object that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no text for this")


def test_operation_with_inputs_json_does_not_know_still_runs(store: Store) -> None:
    """What JSON cannot hold becomes text; what has no text at all costs only itself."""
    circle: list[Any] = []
    circle.append(circle)
    awkward = Awkward()

    @operation
    def use(value: object) -> object:
        return value

    with auto_trace(store=store) as recording:
        results = [use(value) for value in ({1, 2}, circle, {(1, 2): 3}, awkward)]

    spans = operations(recording)
    assert results[1] is circle
    assert results[3] is awkward
    assert inputs(spans[0]) == {"value": "{1, 2}"}
    assert "[[...]]" in inputs(spans[1])
    assert "(1, 2): 3" in inputs(spans[2])
    assert output(spans[3]) == "<Awkward>"
