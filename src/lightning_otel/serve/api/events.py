"""The event broker: one producer of events for all listeners, with a replay buffer.

One task looks at the store and the runs while anybody listens. A listener is a place in its ring,
so a slow one costs nothing.

Source: HTML Living Standard, 9.2 "Server-sent events".
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import orjson

from lightning_otel.dataset import Store
from lightning_otel.errors import LightningOtelError
from lightning_otel.serve.api.repositories import Repositories
from lightning_otel.serve.responses import RefusalError
from lightning_otel.serve.streaming import StreamedResponse
from lightning_otel.store.follow import Follower
from lightning_otel.store.schema import Record, build_record
from lightning_otel.types import conventions as c

if TYPE_CHECKING:
    from lightning_otel.state.runs import TrainingRun

log = logging.getLogger(__name__)

EVENTS: Final = "text/event-stream"
MOST_LISTENERS: Final = 64
HEARTBEAT_S: Final = 10.0
"""How long a listener hears nothing at most: a proxy may close what is silent."""
LOOK_S: Final = 0.25
RUNS_S: Final = 1.0
LINGER_S: Final = 60.0
"""How long events are still made after the last listener left: it may come back for them."""
_HELD: Final = 10_000


class EventBroker:
    """Makes events while somebody listens."""

    def __init__(self, store: Store, repositories: Repositories) -> None:
        self._store = store
        self._repositories = repositories
        self._ring: deque[bytes] = deque(maxlen=_HELD)
        self._next = 1
        self._epoch = secrets.token_hex(4)
        self._listeners = 0
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    async def answer(self, last_event_id: str = "") -> StreamedResponse:
        """Return an answer of events: from now on, or from behind the last one that was heard.

        Where those are not held any more, the first event is a ``reset``: read anew what is shown.
        """
        if self._is_closed or self._listeners >= MOST_LISTENERS:
            raise RefusalError(
                503, "too many listen, or the server ends; come again", {"Retry-After": "5"}
            )
        self._listeners += 1
        try:
            if self._task is None or self._task.done():
                await self._start_task()
        except BaseException:
            self._leave()
            raise
        epoch, _, sequence = last_event_id.partition("-")
        number = int(sequence) + 1 if sequence.isascii() and sequence.isdecimal() else 0
        is_held = epoch == self._epoch and self._next - len(self._ring) <= number <= self._next
        greeting = "ready" if is_held or not last_event_id else "reset"
        parts = self._send_events(number if is_held else self._next, greeting)
        return StreamedResponse(parts, self._leave, EVENTS, {"X-Accel-Buffering": "no"})

    def close(self) -> None:
        """End what listens, and make no event any more."""
        self._is_closed = True
        self._wake_listeners()
        if self._task is not None:
            self._task.cancel()

    def _leave(self) -> None:
        self._listeners -= 1

    async def _send_events(self, number: int, greeting: str) -> AsyncIterator[bytes]:
        yield b"retry: 2000\n\n" + self._write_event(number - 1, greeting, {})
        while not self._is_closed:
            if number == self._next:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._news.wait()
                except TimeoutError:
                    yield b": still here\n\n"
                continue
            oldest, is_held = self._next - len(self._ring), number >= self._next - len(self._ring)
            missed = islice(self._ring, number - oldest, None) if is_held else ()
            number = self._next
            # A listener that was too slow missed what is not held.
            yield b"".join(missed) if is_held else self._write_event(number - 1, "reset", {})

    def _write_event(self, number: int, kind: str, data: Mapping[str, Any]) -> bytes:
        place = f"id: {self._epoch}-{number}\nevent: {kind}\ndata: "
        return place.encode() + orjson.dumps(data) + b"\n\n"

    async def _start_task(self) -> None:
        self._epoch = secrets.token_hex(4)
        self._ring.clear()
        follower, runs = await asyncio.to_thread(self._open_sources)
        if self._task is None or self._task.done():  # another listener may have come first
            self._task = asyncio.create_task(self._make_events(follower, runs))

    def _open_sources(self) -> tuple[Follower | None, dict[str, "TrainingRun"]]:
        layout = self._store.layout
        follower = None if layout is None else Follower(layout, None)
        if follower is not None:
            follower.skip()
        return follower, self._read_runs()

    async def _make_events(self, follower: Follower | None, runs: dict[str, "TrainingRun"]) -> None:
        left_s, runs_s = time.monotonic(), 0.0
        while not self._is_closed:
            now_s = time.monotonic()
            if self._listeners:
                left_s = now_s
            elif now_s - left_s > LINGER_S:
                return
            has_runs = now_s - runs_s >= RUNS_S
            runs_s = now_s if has_runs else runs_s
            try:
                events = await asyncio.to_thread(
                    self._find_events, follower, runs, has_runs=has_runs
                )
            except (LightningOtelError, OSError) as exc:
                log.warning("%s could not be looked at: %s", self._store.name, exc)
                events = [("reset", {})]
            self._put_events(events)
            await asyncio.sleep(LOOK_S)

    def _find_events(
        self, follower: Follower | None, runs: "dict[str, TrainingRun]", *, has_runs: bool
    ) -> list[tuple[str, Mapping[str, Any]]]:
        events: list[tuple[str, Mapping[str, Any]]] = []
        if follower is not None:
            events += _events_of([build_record(span) for span in follower.batch()])
        for run_id, run in self._read_runs().items() if has_runs else ():
            before = runs.get(run_id)
            if before is None or (before.status, before.step) != (run.status, run.step):
                names = ("run_id", "algorithm", "status", "step", "reason")
                events.append(("run", {name: getattr(run, name) for name in names}))
            runs[run_id] = run
        return events

    def _read_runs(self) -> "dict[str, TrainingRun]":
        if not self._repositories.is_made:
            return {}
        return {run.run_id: run for run in self._repositories.runs.all()}

    def _put_events(self, events: list[tuple[str, Mapping[str, Any]]]) -> None:
        for kind, data in events:
            self._ring.append(self._write_event(self._next, kind, data))
            self._next += 1
        if events:
            self._wake_listeners()

    def _wake_listeners(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def _events_of(records: list[Record]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the events that ended spans are: each trace once, and what is more than a span."""
    traces: dict[str, dict[str, Any]] = {}
    for record in records:
        trace_id = record["trace_id"]
        ids = {"rollout_id": record.get("rollout_id") or trace_id, "trace_id": trace_id}
        if record.get("reward") is not None:
            name = record["attributes"].get(c.REWARD_NAME, c.PRIMARY_REWARD)
            reward = {"span_id": record["span_id"], "name": name, "value": record["reward"]}
            yield "reward", {**ids, **reward}
            if record.get("name") == c.SPAN_ANNOTATION and not record.get("parent_span_id"):
                continue  # a reward given later stands in a trace of its own, which is none
        if record.get("name") == c.SPAN_ROLLOUT:
            status = "failed" if record.get("status") == "ERROR" else "succeeded"
            attempt_id = record.get("attempt_id") or "1"
            yield "rollout", {**ids, "attempt_id": attempt_id, "status": status}
        trace = traces.setdefault(trace_id, {**ids, "spans": 0, "has_ended": False})
        trace["spans"] += 1
        trace["has_ended"] = trace["has_ended"] or not record.get("parent_span_id")
    for trace in traces.values():
        yield "trace", trace
