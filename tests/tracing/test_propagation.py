"""What is handed to another process, thread or time goes on in the rollout it comes from."""

import asyncio
import functools
import json
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace

from lightning_otel import Store, auto_trace, carried, emit_message, operation, uninstrument
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import conventions as c

PROGRAM = Path(__file__).with_name("propagation_program.py")
WAYS = [
    ("fork", "pool"),
    ("fork", "run_in_executor"),
    ("fork", "multiprocessing"),
    ("fork", "process"),
    ("spawn", "pool"),
    ("spawn", "process"),
    ("forkserver", "multiprocessing"),
]


@pytest.mark.parametrize(("start", "way"), WAYS)
def test_carried_work_of_other_processes_is_in_the_tree(
    server: DemoServer, tmp_path: Path, start: str, way: str
) -> None:
    """Each request of a worker is one call of the same rollout, below who handed it out."""
    store = tmp_path / "traces.duckdb"

    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, start, way, str(store), server.base_url],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    spans = {span.span_id: span for span in Store(store).spans(rollout_id="r1")}
    calls = [span for span in spans.values() if span.operation == c.CHAT]
    assert found["said"] == [f"You said: number {number}" for number in range(4)]
    assert {span.attributes[c.RESPONSE_ID] for span in calls} == {
        exchange.response_id for exchange in server.log
    }
    assert len(calls) == len(server.log) == 4
    assert found["spans"] == len(spans) == 2 + 4 + 4
    assert len({span.trace_id for span in spans.values()}) == 1
    for span in calls:
        task = spans[str(span.parent_span_id)]
        assert (task.name, task.parent_span_id) == (c.SPAN_OPERATION, found["outer"])
        assert not span.is_incomplete
        assert span.process != spans[found["outer"]].process
        assert (span.attempt_id, span.attributes[c.AGENT_NAME]) == ("2", "worker")
        assert span.attributes[c.RESOURCES] == '{"*":{"prompt":"v3"}}'
    assert set(found["agents"]) == {"worker"}


def test_carried_work_of_one_worker_belongs_to_who_handed_it_over(store: Store) -> None:
    """A worker that was started in one rollout does the work of the next one as well."""
    with ProcessPoolExecutor(1) as pool:
        for number in range(3):
            with auto_trace(store=store, rollout_id=f"r{number}"):
                pool.submit(carried(emit_message), f"of {number}").result()
        with auto_trace(store=store, rollout_id="bare"):
            pass

    for number in range(3):
        (message,) = [
            span for span in store.spans(rollout_id=f"r{number}") if span.name == c.SPAN_MESSAGE
        ]
        assert message.attributes[c.MESSAGE_BODY] == f"of {number}"
    assert len(store.spans(rollout_id="bare").rows()) == 1


def test_carried_function_fails_as_it_would(store: Store) -> None:
    """In another process and here."""
    with (
        auto_trace(store=store),
        ProcessPoolExecutor(1) as pool,
        pytest.raises(ValueError, match="invalid literal"),
    ):
        pool.submit(carried(int), "x").result()
    error = LookupError("here")

    def fail() -> None:
        raise error

    with pytest.raises(LookupError) as raised:
        carried(fail)()
    assert raised.value is error


def test_carried_function_of_a_store_in_memory_runs_untraced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Elsewhere; here it is recorded. That is said once."""
    with auto_trace(store=Store(":memory:")) as recording:
        handed = carried(emit_message)
        taken = pickle.loads(pickle.dumps(handed))
        handed("here")
    taken("elsewhere")
    taken("elsewhere")

    bodies = [span.attributes.get(c.MESSAGE_BODY) for span in recording.spans()]
    assert bodies == [None, "here"]
    assert caplog.text.count("the store is in memory") == 1


class OneThread(Executor):
    """An executor of a framework's own, which carries nothing."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run it at once, in an empty context."""
        done: Future[Any] = Future()
        token = otel_context.attach(otel_context.Context())
        try:
            done.set_result(fn(*args, **kwargs))
        finally:
            otel_context.detach(token)
        return done


def test_carried_work_of_a_foreign_executor_is_in_the_tree(store: Store) -> None:
    """Whatever context it runs its work in; a foreign span's parent is right, too.

    What is not carried is recorded all the same, as the block is still open around it.
    """
    uninstrument()

    def work() -> None:
        trace.get_tracer("somebody").start_span("theirs").end()

    with auto_trace(store=store) as recording, operation("outer") as outer:
        OneThread().submit(carried(work)).result()
        OneThread().submit(work).result()

    parents = [span.parent_span_id for span in recording.spans() if span.name == "theirs"]
    assert parents == [outer.span_id, None]


def test_carried_callback_runs_where_it_was_made(store: Store) -> None:
    """Later, when its rollout is over and another one is under way."""

    async def work() -> list[Any]:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        with auto_trace(store=store) as first:
            callback = carried(functools.partial(emit_message, "called back"))
        with auto_trace(store=store) as second:
            loop.call_later(0.01, lambda: done.set_result(callback()))
            await done
        return [first, second]

    first, second = asyncio.run(work())

    assert [span.name for span in first.spans()] == [c.SPAN_ROLLOUT, c.SPAN_MESSAGE]
    assert [span.name for span in second.spans()] == [c.SPAN_ROLLOUT]


async def coroutine() -> str:
    await asyncio.sleep(0)
    emit_message("inside")
    return "done"


def generator() -> Iterator[int]:
    yield 1
    emit_message("inside")
    yield 2


async def async_generator() -> AsyncIterator[int]:
    yield 1
    emit_message("inside")
    yield 2


def test_carried_functions_of_every_kind_stay_in_it(store: Store) -> None:
    """What their caller does between two steps does not."""
    with auto_trace(store=store) as recording:
        handed = [carried(each) for each in (coroutine, generator, async_generator)]

    async def consume() -> None:
        await handed[0]()
        for _ in handed[1]():
            assert not trace.get_current_span().get_span_context().is_valid
        async for _ in handed[2]():
            assert not trace.get_current_span().get_span_context().is_valid

    asyncio.run(consume())

    spans = recording.spans()
    assert [span.name for span in spans] == [c.SPAN_ROLLOUT, *[c.SPAN_MESSAGE] * 3]
    assert {span.parent_span_id for span in spans[1:]} == {recording.span_id}
