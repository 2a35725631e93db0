"""The order of an attempt's spans: what caused what, then what a process counted, then the clocks.

A clock that contradicts a cause or a count is set forward, by as much as it takes. Where rules
contradict one another, the earliest by the clock goes first. docs/transitions.md has the rules.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import Final

from lightning_otel.adapter.attempts import NEVER, Ordered
from lightning_otel.types import Span

NO_PARENT: Final = -1


def is_counted_before(first: Span, second: Span) -> bool:
    """Return whether one process counted both, one's end before the other's start."""
    return (
        first.process == second.process
        and second.sequence >= 0
        and 0 <= first.end_sequence < second.sequence
    )


def is_enclosed(inner: Span, outer: Span) -> bool:
    """Return whether a span ended before its parent did, by more than a clock."""
    if inner.end_ns is None or outer.end_ns is None:
        return False
    if inner.process == outer.process:
        return 0 <= inner.end_sequence < outer.end_sequence
    return inner.kind == "SERVER" and outer.kind == "CLIENT"


def needs_causes(order: Ordered, parents: Sequence[int]) -> bool:
    """Return whether something but the clocks decides the order."""
    spans, starts, ends, is_counted = order
    if is_counted:
        return False
    return any(span.sequence >= 0 or span.end_sequence >= 0 for span in spans) or any(
        starts[parent] > starts[child]
        or (ends[child] > ends[parent] and is_enclosed(spans[child], spans[parent]))
        for child, parent in enumerate(parents)
        if parent != NO_PARENT
    )


def order_by_cause(
    order: Ordered, parents: Sequence[int], after: Iterable[tuple[int, int]] = ()
) -> tuple[Ordered, list[int]]:
    """Return spans and parents in a new order, with clocks of that order.

    Of each two positions in ``after`` the first span ended before the second began.
    """
    spans, size = order.spans, len(order.spans)
    starts, ends = [0] * size, order.ends.copy()
    for rank, event in enumerate(_Merge(spans, parents, after).run()):
        (ends if event & 1 else starts)[event >> 1] = rank
    moved = sorted(range(size), key=starts.__getitem__)
    places = [NO_PARENT] * (size + 1)  # the last place, index -1, stands for no parent
    for new, old in enumerate(moved):
        places[old] = new
    ordered = Ordered(
        [spans[old] for old in moved],
        [starts[old] for old in moved],
        [ends[old] for old in moved],
        is_counted=False,
    )
    return ordered, [places[parents[old]] for old in moved]


_Key = tuple[int, int, str, int, int]
"""Time, kind, process, count and event: what comes first of what may come next."""


class _Merge:
    """Starts and ends of spans, sorted by what must come before what, and then by their clocks.

    Event 2i is the start of the span at i, 2i+1 its end. An event waits for those that must come
    before it, and expects others as long as that leads anywhere. ``_floor`` is the latest time of
    what had to come before; ``_ahead`` how far each process's clock was set forward.
    """

    def __init__(
        self, spans: Sequence[Span], parents: Sequence[int], after: Iterable[tuple[int, int]]
    ) -> None:
        events = 2 * len(spans)
        self._spans = spans
        self._followers: dict[int, list[int]] = {}
        self._expecting: dict[int, list[int]] = {}
        self._waits = [0] * events
        self._expects = [0] * events
        self._floor = [-NEVER] * events
        self._ahead: dict[str, int] = {}
        self._ready: list[_Key] = []
        self._held: list[_Key] = []
        self._done = bytearray(events)
        self._is_requeued = bytearray(events)
        counted: list[tuple[str, int, bool, int]] = []
        for position, span in enumerate(spans):
            if span.sequence >= 0:
                counted.append((span.process, span.sequence, False, 2 * position))
            if span.end_sequence >= 0 and span.end_ns is not None:
                counted.append((span.process, span.end_sequence, True, 2 * position + 1))
        for before, following in pairwise(sorted(counted)):
            if before[0] == following[0]:
                self._need(before[3], following[3])
        for child, parent in enumerate(parents):
            if parent == NO_PARENT:
                continue
            inner, outer = spans[child], spans[parent]
            is_remote = inner.process != outer.process
            if is_remote or inner.sequence < 0 or outer.sequence < 0:
                self._need(2 * parent, 2 * child)
            if is_remote and is_enclosed(inner, outer):
                self._expecting.setdefault(2 * child + 1, []).append(2 * parent + 1)
                self._expects[2 * parent + 1] += 1
        for position, span in enumerate(spans):  # last: what lies in a span sets its clock first
            if span.end_ns is not None and (span.sequence < 0 or span.end_sequence < 0):
                self._need(2 * position, 2 * position + 1)
        for first, second in after:
            if spans[first].end_ns is not None:
                self._need(2 * first + 1, 2 * second)

    def _need(self, first: int, second: int) -> None:
        self._followers.setdefault(first, []).append(second)
        self._waits[second] += 1

    def run(self) -> list[int]:
        events = []
        for position, span in enumerate(self._spans):
            events += [2 * position] if span.end_ns is None else [2 * position, 2 * position + 1]
        for event in events:
            self._queue_event(event)
        by_clock: list[int] | None = None  # for when all wait for one another
        order: list[int] = []
        while len(order) < len(events):
            heap = self._ready or self._held
            if not heap and by_clock is None:
                by_clock = sorted(events, key=self._event_key, reverse=True)
            event = self._take_first(heap) if heap else (by_clock or []).pop()
            if self._done[event]:
                continue
            self._done[event] = 1
            order.append(event)
            time = self._event_key(event)[0]
            for waits, followers in (
                (self._waits, self._followers),
                (self._expects, self._expecting),
            ):
                for follower in followers.get(event, ()):
                    waits[follower] -= 1
                    self._floor[follower] = max(self._floor[follower], time)
                    self._queue_event(follower)
        return order

    def _queue_event(self, event: int) -> None:
        if self._waits[event] > 0 or self._done[event]:
            return
        late = self._floor[event] - self._event_key(event)[0]
        if late > 0:
            process = self._spans[event >> 1].process
            self._ahead[process] = self._ahead.get(process, 0) + late
        heap = self._ready if self._expects[event] <= 0 else self._held
        heappush(heap, self._event_key(event))

    def _take_first(self, heap: list[_Key]) -> int:
        """Take the first event; one whose clock was set forward since queues once more."""
        while True:
            key = heappop(heap)
            event = key[4]
            late = self._event_key(event)
            if late == key or self._is_requeued[event]:
                return event
            self._is_requeued[event] = 1
            heappush(heap, late)

    def _event_key(self, event: int) -> _Key:
        span = self._spans[event >> 1]
        is_end = event & 1
        count = span.end_sequence if is_end else span.sequence
        time = (span.end_ns if is_end else span.start_ns) or 0
        ahead = self._ahead.get(span.process, 0)
        if count >= 0:
            return time + ahead, 0, span.process, count, event
        return time + ahead, -1 if is_end else 1, "", -1, event
