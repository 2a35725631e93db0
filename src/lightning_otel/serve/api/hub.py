"""The event hub: one producer of events for all listeners, with a replay buffer.

One task looks at the store and at the training runs while anybody listens, and some time longer.
What it saw lies in one ring; a listener is a place in it, so a slow one costs nothing.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from lightning_otel import conventions as c
from lightning_otel.dataset import Store
from lightning_otel.errors import LightningOtelError
from lightning_otel.serve.answers import RefusalError
from lightning_otel.serve.api.rooms import Rooms
from lightning_otel.store.follow import Follower
from lightning_otel.store.schema import Record, record_of_span

if TYPE_CHECKING:
    from lightning_otel.state.runs import TrainingRun

log = logging.getLogger(__name__)

MOST_LISTENERS: Final = 64
LOOK_S: Final = 0.25
RUNS_S: Final = 1.0
LINGER_S: Final = 60.0
"""How long events are still made after the last listener left: it may come back for them."""
_HELD: Final = 10_000


class Event(NamedTuple):
    """Something that happened.

    Attributes:
        number: Its place in the order of all.
        kind: ``trace``, ``rollout``, ``reward``, ``run``; or ``ready`` and ``reset``, which tell a
            listener where it stands.
        data: As JSON.
    """

    number: int
    kind: str
    data: bytes


class Listener:
    """A place in the ring."""

    def __init__(self, number: int, greeting: str) -> None:
        """Begin.

        Args:
            number: Of the next event it hears.
            greeting: The kind of event that tells it where it stands.
        """
        self.number = number
        self.greeting = greeting


class Hub:
    """Makes events while somebody listens."""

    def __init__(self, store: Store, rooms: Rooms) -> None:
        """Name what is looked at; nothing is until somebody listens."""
        self._store = store
        self._rooms = rooms
        self._ring: deque[Event] = deque(maxlen=_HELD)
        self._next = 1
        self._epoch = secrets.token_hex(4)
        self._listeners: set[Listener] = set()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """True once no further event comes."""
        return self._is_closed

    async def listen(self, last_event_id: str = "") -> Listener:
        """A listener: from now on, or from behind the last event it knows.

        Where what came after that is not held any more, its first event is a ``reset``: it is to
        read anew what it shows.

        Raises:
            RefusalError: Too many listen, or the server ends.
        """
        if self._is_closed or len(self._listeners) >= MOST_LISTENERS:
            raise RefusalError(
                503, "too many listen, or the server ends; come again", {"Retry-After": "5"}
            )
        if self._task is None or self._task.done():
            await self._start_thread()
        oldest = self._ring[0].number if self._ring else self._next
        epoch, _, given = last_event_id.partition("-")
        number = int(given) + 1 if given.isascii() and given.isdecimal() else 0
        is_held = epoch == self._epoch and oldest <= number <= self._next
        greeting = "ready" if is_held or not last_event_id else "reset"
        listener = Listener(number if is_held else self._next, greeting)
        self._listeners.add(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        """Let go of a listener."""
        self._listeners.discard(listener)

    def id_of(self, number: int) -> str:
        """Return the id that clients send to resume after an event."""
        return f"{self._epoch}-{number}"

    async def next(self, listener: Listener, wait_s: float) -> list[Event]:
        """Wait for events that a listener has not had; return none when the time is up."""
        if listener.number >= self._next and not self._is_closed:
            try:
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
            except TimeoutError:
                return []
        oldest = self._ring[0].number if self._ring else self._next
        if listener.number < oldest:  # it was too slow, and what it missed is not held
            listener.number = self._next
            return [Event(self._next - 1, "reset", b"{}")]
        found = [each for each in self._ring if each.number >= listener.number]
        listener.number = self._next
        return found

    def close(self) -> None:
        """End what listens, and make no event any more."""
        self._is_closed = True
        self._wake_listeners()
        if self._task is not None:
            self._task.cancel()

    async def _start_thread(self) -> None:
        self._epoch = secrets.token_hex(4)
        self._ring.clear()
        follower, known = await asyncio.to_thread(self._open_sources)
        if self._task is None or self._task.done():  # another listener may have come first
            self._task = asyncio.create_task(self._make_events(follower, known))

    def _open_sources(self) -> tuple[Follower | None, dict[str, "TrainingRun"]]:
        layout = self._store.layout
        follower = None if layout is None else Follower(layout, None)
        if follower is not None:
            follower.skip()
        return follower, self._read_runs()

    async def _make_events(
        self, follower: Follower | None, known: dict[str, "TrainingRun"]
    ) -> None:
        """Look, again and again, until nobody has listened for a while."""
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
                made = await asyncio.to_thread(
                    self._find_events, follower, known if has_runs else None
                )
            except (LightningOtelError, OSError) as exc:
                log.warning("%s could not be looked at: %s", self._store.name, exc)
                made = [("reset", {})]
            if made:
                self._put_events(made)
            await asyncio.sleep(LOOK_S)

    def _find_events(
        self, follower: Follower | None, known: "dict[str, TrainingRun] | None"
    ) -> list[tuple[str, Mapping[str, Any]]]:
        found: list[tuple[str, Mapping[str, Any]]] = []
        if follower is not None:
            found += _events_of([record_of_span(span) for span in follower.batch()])
        if known is not None:
            runs = self._read_runs()
            for run_id, run in runs.items():
                before = known.get(run_id)
                if before is None or (before.status, before.step) != (run.status, run.step):
                    found.append(("run", _describe_run(run)))
            known.clear()
            known.update(runs)
        return found

    def _read_runs(self) -> "dict[str, TrainingRun]":
        if not self._rooms.is_made:
            return {}
        return {run.run_id: run for run in self._rooms.runs.all()}

    def _put_events(self, made: list[tuple[str, Mapping[str, Any]]]) -> None:
        for kind, data in made:
            self._ring.append(Event(self._next, kind, orjson.dumps(data)))
            self._next += 1
        self._wake_listeners()

    def _wake_listeners(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def _events_of(records: list[Record]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The events that ended spans are: each trace once, and what is more than a span of it."""
    traces: dict[str, dict[str, Any]] = {}
    for record in records:
        trace_id, rollout_id = record["trace_id"], record.get("rollout_id") or record["trace_id"]
        if record.get("reward") is not None:
            yield (
                "reward",
                {
                    "rollout_id": rollout_id,
                    "trace_id": trace_id,
                    "span_id": record["span_id"],
                    "name": record["attributes"].get(c.REWARD_NAME, c.PRIMARY_REWARD),
                    "value": record["reward"],
                },
            )
            if record.get("name") == c.SPAN_ANNOTATION and not record.get("parent_span_id"):
                continue  # a reward given later stands in a trace of its own, which is none
        if record.get("name") == c.SPAN_ROLLOUT:
            yield (
                "rollout",
                {
                    "rollout_id": rollout_id,
                    "attempt_id": record.get("attempt_id") or "1",
                    "trace_id": trace_id,
                    "status": "failed" if record.get("status") == "ERROR" else "succeeded",
                },
            )
        told = traces.setdefault(
            trace_id,
            {"trace_id": trace_id, "rollout_id": rollout_id, "spans": 0, "has_ended": False},
        )
        told["spans"] += 1
        told["has_ended"] = told["has_ended"] or not record.get("parent_span_id")
    for told in traces.values():
        yield "trace", told


def _describe_run(run: "TrainingRun") -> Mapping[str, Any]:
    names = ("run_id", "algorithm", "status", "step", "reason")
    return {name: getattr(run, name) for name in names}
