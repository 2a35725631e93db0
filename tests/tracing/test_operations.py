"""``operation``: pieces of work as spans, with what went in and what came out."""

import asyncio
import json
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
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


def test_operation_block_without_anything_keeps_nothing_but_itself(store: Store) -> None:
    """No inputs and no output are no attributes."""
    with auto_trace(store=store) as recording, operation():
        pass

    (span,) = operations(recording)
    assert span.attributes[c.OPERATION_NAME] == "operation"
    assert c.OPERATION_INPUT not in span.attributes
    assert c.OPERATION_OUTPUT not in span.attributes


def test_operation_block_works_async(store: Store) -> None:
    """``async with`` works as ``with`` does."""

    async def main() -> Recording:
        async with auto_trace(store=store) as recording, operation("wait") as waiting:
            await asyncio.sleep(0)
            waiting.output = "done"
        return recording

    (span,) = operations(asyncio.run(main()))

    assert output(span) == "done"


def test_operation_as_bare_decorator_keeps_arguments_and_result(store: Store) -> None:
    """A decorated function's arguments are kept by name, its result as output."""

    @operation
    def join(first: str, *rest: str, sep: str = ", ", **options: int) -> str:
        return sep.join([first, *rest])

    with auto_trace(store=store) as recording:
        result = join("a", "b", "c", sep="-", size=3)

    (span,) = operations(recording)
    assert result == "a-b-c"
    assert span.attributes[c.OPERATION_NAME] == join.__qualname__
    assert inputs(span) == {"first": "a", "rest": ["b", "c"], "sep": "-", "options": {"size": 3}}
    assert output(span) == "a-b-c"


def test_operation_as_named_decorator_adds_its_own_inputs(store: Store) -> None:
    """A name and further inputs can be given to the decorator."""

    @operation("search", engine="toy")
    def find(query: str) -> list[str]:
        return [query]

    with auto_trace(store=store) as recording:
        find("x")

    (span,) = operations(recording)
    assert span.attributes[c.OPERATION_NAME] == "search"
    assert inputs(span) == {"engine": "toy", "query": "x"}


@pytest.mark.parametrize("result", [0, "", False, [], {}, 0.0])
def test_operation_keeps_an_output_that_is_empty(result: object, store: Store) -> None:
    """Nought and empty are outputs; only None is none."""
    with auto_trace(store=store) as recording:
        operation(lambda: result)()

    (span,) = operations(recording)
    assert output(span) == result


def test_operation_on_methods_leaves_the_object_out(store: Store) -> None:
    """``self`` and ``cls`` are no inputs."""

    class Tool:
        @operation
        def use(self, text: str) -> str:
            return text

        @operation
        @classmethod
        def make(cls, size: int) -> int:
            return size

    with auto_trace(store=store) as recording:
        Tool().use("x")
        Tool.make(3)

    assert [inputs(span) for span in operations(recording)] == [{"text": "x"}, {"size": 3}]


def test_operation_on_a_coroutine_function_lasts_until_it_is_done(store: Store) -> None:
    """The span of an async function ends with it, and holds its result."""

    @operation
    async def fetch(url: str) -> str:
        await asyncio.sleep(0)
        emit_message("inside")
        return url.upper()

    with auto_trace(store=store) as recording:
        result = asyncio.run(fetch("x"))

    (span,) = operations(recording)
    assert result == "X"
    assert (inputs(span), output(span)) == ({"url": "x"}, "X")
    assert recording.spans()[-1].parent_span_id == span.span_id


def test_operation_on_a_generator_function_lasts_until_it_is_done(store: Store) -> None:
    """The span of a generator ends with it, and holds what it returns."""

    @operation
    def count(to: int) -> Generator[int, None, str]:
        yield from range(to)
        return "counted"

    with auto_trace(store=store) as recording:
        items = list(count(2))

    (span,) = operations(recording)
    assert items == [0, 1]
    assert (inputs(span), output(span)) == ({"to": 2}, "counted")


def test_operation_on_a_function_without_a_signature_works(store: Store) -> None:
    """Built-in functions that do not tell their parameters are recorded with what they got."""
    with auto_trace(store=store) as recording:
        result = operation("largest")(max)(3, 4)

    (span,) = operations(recording)
    assert result == 4
    assert inputs(span) == {"args": [3, 4]}
    assert output(span) == 4


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


def test_operation_left_by_a_clean_exit_is_no_failure(store: Store) -> None:
    """``sys.exit(0)`` inside an operation is a way of leaving."""
    with (
        auto_trace(store=store) as recording,
        pytest.raises(SystemExit),
        operation("leave"),
    ):
        raise SystemExit(0)

    assert operations(recording)[0].status == "UNSET"


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


def test_operation_object_entered_in_twenty_threads_ends_each_span(store: Store) -> None:
    """One object serves many threads at once; each gets its own span and output."""
    shared = operation("shared")
    everyone_is_in = threading.Barrier(20)

    def work(number: int) -> str | None:
        with shared as mine:
            everyone_is_in.wait(timeout=30)
            mine.output = number
        return mine.span_id

    with auto_trace(store=store) as recording, ThreadPoolExecutor(20) as pool:
        ids = list(pool.map(work, range(20)))

    found = {span.span_id: output(span) for span in operations(recording)}
    assert found == dict(zip(ids, range(20), strict=True))
    assert all(not span.is_incomplete for span in recording.spans())
