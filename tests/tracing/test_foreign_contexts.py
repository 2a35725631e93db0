"""A recording goes on where a library attaches a context of its own within it."""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lightning_otel import Recording, Store, auto_trace, context, emit_message, operation
from lightning_otel.types import conventions as c

Work = Callable[[], object]

tracer = trace.get_tracer("a.workflow")


@contextmanager
def attached(foreign: Context) -> Iterator[None]:
    token = otel_context.attach(foreign)
    try:
        yield
    finally:
        otel_context.detach(token)


def carried_by_message(span: trace.Span | None = None) -> Context:
    """What a library reads from a message that was sent in a span, by default the current one."""
    headers: dict[str, str] = {}
    around = otel_context.get_current() if span is None else trace.set_span_in_context(span)
    TraceContextTextMapPropagator().inject(headers, around)
    return TraceContextTextMapPropagator().extract(headers, Context())


def of_ended_span() -> Context:
    with tracer.start_as_current_span("sends") as span:
        pass
    return carried_by_message(span)


CONTEXTS: dict[str, Callable[[], Context]] = {
    "empty": Context,
    "message": carried_by_message,
    "ended": of_ended_span,
    "local span": lambda: trace.set_span_in_context(trace.get_current_span(), Context()),
}


async def in_task(work: Work) -> None:
    await asyncio.create_task(asyncio.to_thread(work))


def in_thread(work: Work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


PLACES: dict[str, Callable[[Work], object]] = {
    "thread": in_thread,
    "pool": lambda work: ThreadPoolExecutor(1).submit(work).result(),
    "task": lambda work: asyncio.run(in_task(work)),
    "same place": lambda work: work(),
}


def messages_of(recording: Recording) -> list[Any]:
    bodies = (span.attributes.get(c.MESSAGE_BODY) for span in recording.spans())
    return [body for body in bodies if body is not None]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", CONTEXTS)
def test_recording_outlives_the_context(kind: str, place: str, store: Store) -> None:
    """Wherever the work is done from within it, and in a part of it by the part's agent."""

    def work() -> None:
        emit_message("said")
        with operation("inner"), tracer.start_as_current_span("theirs"):
            emit_message("deeper")

    with auto_trace(store=store) as recording, context(agent="planner"), operation("step"):
        with attached(CONTEXTS[kind]()):
            PLACES[place](work)
        emit_message("back")

    assert messages_of(recording) == ["said", "deeper", "back"]
    spans = {span.name: span for span in recording.spans()}
    assert {span.attributes.get(c.AGENT_NAME) for span in recording.spans()} == {None, "planner"}
    assert spans["theirs"].attributes[c.AGENT_NAME] == "planner"
    assert len({span.trace_id for span in recording.spans()}) == 1


def test_worker_that_began_before_finds_the_recording_of_each_message(store: Store) -> None:
    """Several rollouts at once in one trace, each message sent from a span within its own."""
    jobs: SimpleQueue[tuple[Context, str] | None] = SimpleQueue()

    def work() -> None:
        while (job := jobs.get()) is not None:
            with attached(job[0]):
                emit_message(job[1])

    # Started where nothing records, so that the worker's own context knows of nothing.
    worker = threading.Thread(target=contextvars.Context().run, args=(work,))
    worker.start()
    with tracer.start_as_current_span("evaluation"):
        blocks = [auto_trace(store=store, rollout_id=f"r{index}") for index in range(3)]
        places = [(contextvars.copy_context(), block) for block in blocks]
        recordings = [place.run(block.__enter__) for place, block in places]
        for index, (place, _) in enumerate(places):
            jobs.put((carried_by_message(place.run(tracer.start_span, "sends")), f"to {index}"))
        jobs.put(None)
        worker.join()
        for place, block in places:
            place.run(block.__exit__, None, None, None)

    assert [messages_of(recording) for recording in recordings] == [["to 0"], ["to 1"], ["to 2"]]


def test_what_a_block_leaves_behind_is_its_own(store: Store) -> None:
    """Once it is closed nothing is taken for it by its trace, nor by a context left on top."""
    with auto_trace(store=store) as recording:
        message = carried_by_message()
        otel_context.attach(Context())  # never detached
    with attached(Context()):
        after = emit_message("after")
    with attached(message):
        late = emit_message("late")

    assert (after, late, messages_of(recording)) == (None, None, [])


def test_span_from_before_the_block_does_not_lead_out_of_it(store: Store) -> None:
    """A block is open around it all the same."""
    before = tracer.start_span("before")
    with auto_trace(store=store) as recording, attached(carried_by_message(before)):
        emit_message("within")

    assert messages_of(recording) == ["within"]
