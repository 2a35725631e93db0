"""The context of whoever consumes a stream or a generator is never touched, however it is left.

Nothing of ours holds a context across a ``yield``: a span made between two items is no child of
what yields them, and closing a generator in another task detaches nothing there.
"""

import asyncio
import contextvars
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import openai
import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace

from lightning_otel import Store, auto_trace, capture, operation
from lightning_otel import conventions as c
from lightning_otel.demo.server import DemoServer
from lightning_otel.tracing import Recording
from lightning_otel.types import Span

ASK: Any = {"model": "big", "messages": [{"role": "user", "content": "x"}], "stream": True}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing is logged of contexts that could not be detached."""
    yield
    assert "detach" not in caplog.text


def between() -> None:
    """A span of the program's own."""
    trace.get_tracer("the program").start_span("between").end()


def parents(recording: Recording, name: str) -> list[str | None]:
    """The ids of what stands above each span of that name."""
    return [span.parent_span_id for span in recording.spans() if span.name == name]


def only(recording: Recording, name: str) -> Span:
    """The one span of that name, which has ended."""
    (found,) = [span for span in recording.spans() if span.name == name]
    assert found.end_ns is not None
    return found


@operation
def numbers() -> Iterator[int]:
    """Three numbers, with a span before each."""
    for number in range(3):
        trace.get_tracer("the program").start_span("inside").end()
        yield number


@operation
async def numbers_async() -> AsyncIterator[int]:
    """As above, and it waits."""
    for number in range(3):
        trace.get_tracer("the program").start_span("inside").end()
        await asyncio.sleep(0)
        yield number


def test_generator_is_not_around_what_its_consumer_does(store: Store) -> None:
    """Its own spans are below it, those between two items beside it; the context is as before."""
    with auto_trace(store=store) as recording:
        before = otel_context.get_current()
        for _ in numbers():
            between()
            assert otel_context.get_current() is before
        assert otel_context.get_current() is before

    root, work = only(recording, c.SPAN_ROLLOUT), only(recording, c.SPAN_OPERATION)
    assert parents(recording, "between") == [root.span_id] * 3
    assert parents(recording, "inside") == [work.span_id] * 3


def test_generators_interleaved_keep_apart(store: Store) -> None:
    """Two at once, step by step in turn, left in the order they came."""
    with auto_trace(store=store) as recording:
        for _ in zip(numbers(), numbers(), strict=True):
            between()

    first, second = [span for span in recording.spans() if span.name == c.SPAN_OPERATION]
    assert parents(recording, "inside") == [first.span_id, second.span_id] * 3
    assert set(parents(recording, "between")) == {only(recording, c.SPAN_ROLLOUT).span_id}


@pytest.mark.parametrize("leave", ["close", "drop", "throw", "another thread", "another context"])
def test_generator_left_early_ends_once(store: Store, leave: str) -> None:
    """However, and wherever: its span has ended, the context is as before."""
    with auto_trace(store=store) as recording:
        before = otel_context.get_current()
        running = numbers()
        next(running)
        if leave == "close":
            running.close()  # type: ignore[attr-defined]  # it is a generator
        elif leave == "throw":
            with pytest.raises(KeyError):
                running.throw(KeyError("x"))  # type: ignore[attr-defined]  # as above
        elif leave == "another thread":
            thread = threading.Thread(target=running.close)  # type: ignore[attr-defined]  # as above
            thread.start()
            thread.join()
        elif leave == "another context":
            contextvars.Context().run(running.close)  # type: ignore[attr-defined]  # as above
        del running
        gc.collect()
        between()
        assert otel_context.get_current() is before

    work = only(recording, c.SPAN_OPERATION)
    assert work.status == ("ERROR" if leave == "throw" else "UNSET")
    assert parents(recording, "between") == [only(recording, c.SPAN_ROLLOUT).span_id]


@pytest.mark.parametrize("leave", ["exhaust", "close", "close elsewhere", "drop", "cancel"])
def test_async_generator_left_early_ends_once(store: Store, leave: str) -> None:
    """As a plain one; closed by another task as the event loop itself does with a dropped one."""

    async def consume(running: Any) -> None:
        async for _ in running:
            between()
            await asyncio.sleep(0)

    async def work() -> None:
        before = otel_context.get_current()
        running: Any = numbers_async()
        if leave == "cancel":
            task = asyncio.create_task(consume(running))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await running.aclose()
        elif leave == "exhaust":
            await consume(running)
        else:
            await anext(running)
            between()
            if leave == "close":
                await running.aclose()
            elif leave == "close elsewhere":
                await asyncio.create_task(running.aclose())
        del running
        gc.collect()
        await asyncio.sleep(0.01)
        assert otel_context.get_current() is before

    with auto_trace(store=store) as recording:
        asyncio.run(work())

    only(recording, c.SPAN_OPERATION)
    assert set(parents(recording, "between")) <= {only(recording, c.SPAN_ROLLOUT).span_id}


@pytest.mark.pain(4)
def test_async_generator_stepped_by_many_tasks_keeps_its_place(store: Store) -> None:
    """Each item asked for by a task of its own, with a context of its own."""

    async def work() -> None:
        running: Any = numbers_async()
        for _ in range(3):
            await asyncio.create_task(anext(running))
        async with aclosing(running):
            between()

    with auto_trace(store=store) as recording:
        asyncio.run(work())

    assert parents(recording, "inside") == [only(recording, c.SPAN_OPERATION).span_id] * 3
    assert parents(recording, "between") == [only(recording, c.SPAN_ROLLOUT).span_id]


def halves() -> Iterator[str]:
    """A generator whose own ``with`` block is open while it waits."""
    with operation("block") as block:
        yield "first"
        block.output = "done"
        yield "second"


def test_yield_within_an_operation_block_ends_clean(store: Store) -> None:
    """A block that is open over a ``yield`` ends once and quietly, wherever it is left.

    Python gives a generator no context of its own: while it waits in the block, its consumer is in
    the block too, and remains there if the generator is closed in another context.
    """

    def consume() -> None:
        before = otel_context.get_current()
        assert list(halves()) == ["first", "second"]
        assert otel_context.get_current() is before
        left = halves()
        next(left)
        contextvars.Context().run(left.close)  # type: ignore[attr-defined]  # it is a generator

    with auto_trace(store=store) as recording:
        contextvars.copy_context().run(consume)
        between()

    first, second = [span for span in recording.spans() if span.name == c.SPAN_OPERATION]
    assert first.attributes[c.OPERATION_OUTPUT] == '"done"'
    assert second.end_ns is not None
    assert parents(recording, "between") == [only(recording, c.SPAN_ROLLOUT).span_id]


@pytest.mark.parametrize("leave", ["exhaust", "close", "drop", "another thread"])
def test_stream_is_not_around_what_its_reader_does(
    store: Store, client: openai.OpenAI, leave: str
) -> None:
    """A span between two chunks is no child of the call, which ends once."""
    with auto_trace(store=store) as recording:
        before = otel_context.get_current()
        stream = client.chat.completions.create(**ASK)
        for number, _ in enumerate(stream):
            between()
            assert otel_context.get_current() is before
            if leave != "exhaust" and number == 2:
                break
        if leave == "close":
            stream.close()
        elif leave == "another thread":
            thread = threading.Thread(target=stream.close)
            thread.start()
            thread.join()
        stream.response.close()
        del stream
        gc.collect()

    call = only(recording, "chat big")
    assert bool(call.attributes.get(c.ABANDONED)) == (leave != "exhaust")
    assert set(parents(recording, "between")) == {only(recording, c.SPAN_ROLLOUT).span_id}


def test_stream_closed_by_another_task_ends_once(store: Store, server: DemoServer) -> None:
    """And so do two that are read in turn by one task, each beside the other."""

    async def work() -> None:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="k") as client:
            one = await client.chat.completions.create(**ASK)
            other = await client.chat.completions.create(**ASK)
            for _ in range(3):
                await anext(one)
                between()
                await anext(other)
            await asyncio.create_task(one.close())
            await asyncio.create_task(other.close())

    with auto_trace(store=store) as recording:
        asyncio.run(work())

    calls = [span for span in recording.spans() if span.name == "chat big"]
    root = only(recording, c.SPAN_ROLLOUT)
    assert [(span.parent_span_id, span.end_ns is not None) for span in calls] == [
        (root.span_id, True)
    ] * 2
    assert parents(recording, "between") == [root.span_id] * 3


def test_rollout_of_an_async_generator_closed_elsewhere_ends(store: Store) -> None:
    """A traced async generator that another task closes; what that task does is not in it."""
    recordings: list[str] = []

    @auto_trace(store=store)
    async def agent() -> AsyncIterator[int]:
        frame = capture.current_frame()
        assert frame is not None
        recordings.append(str(frame.stamps[c.ROLLOUT_ID]))
        between()
        yield 1
        yield 2

    async def close(running: Any) -> None:
        await running.aclose()
        assert capture.current_frame() is None

    async def work() -> None:
        running: Any = agent()
        await anext(running)
        assert capture.current_frame() is None
        await asyncio.create_task(close(running))

    asyncio.run(work())

    spans = store.spans(rollout_id=recordings[0]).rows()
    assert [span.name for span in spans] == [c.SPAN_ROLLOUT, "between"]
    assert all(span.end_ns is not None for span in spans)
