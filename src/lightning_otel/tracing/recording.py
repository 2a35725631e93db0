"""What is known of one rollout: its ids, its spans, and what they come to."""

import json

from opentelemetry.trace import SpanContext

from lightning_otel.adapter import Adaptation, TripletAdapter
from lightning_otel.store import Store
from lightning_otel.store.schema import span_of
from lightning_otel.types import Credit, Report, Span, Trajectory


class Recording:
    """One rollout: its ids, and its spans as far as they were recorded.

    Where nothing could or should be recorded its ids are empty and it holds no spans.

    Attributes:
        rollout_id: The rollout.
        attempt_id: The attempt.
        trace_id: The trace of its root span; empty if it has none.
        span_id: Its root span; empty if it has none.
        task: The rollout's task, if one was given.
        result: What the traced function gave back; None for a ``with`` block.
        error: The exception it failed with, if it did.
    """

    def __init__(
        self,
        store: Store | None = None,
        rollout_id: str = "",
        attempt_id: str = "1",
        task: object = None,
    ) -> None:
        self._store = store
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self.trace_id = ""
        self.span_id = ""
        self.task = task
        self.result: object = None
        self.error: BaseException | None = None
        self._is_part = False
        # The process that recorded it and where its lines begin; None if they are not to be used.
        self._since: tuple[str, tuple[int, int]] | None = None
        if store is not None:
            writer = store.writer()
            self._since = writer.process, writer.position()

    def __repr__(self) -> str:
        if self._store is None:
            return "<Recording of nothing>"
        return f"<Recording of {self.rollout_id} in {self._store.name}>"

    @property
    def store(self) -> Store:
        """Where its spans are; an empty store in memory if nothing is recorded."""
        if self._store is None:
            self._store = Store(":memory:")
        return self._store

    def root_is(self, root: SpanContext, *, is_part: bool) -> None:
        """Name the root span.

        Args:
            root: The span's ids.
            is_part: Whether only what lies below it is this recording's, not the whole rollout.
        """
        if root.is_valid:  # a provider that records nothing hands out no ids
            self.trace_id = format(root.trace_id, "032x")
            self.span_id = format(root.span_id, "016x")
            self._is_part = is_part

    def span_processes(self) -> None:
        """Read the spans of every process from the store, not only those recorded here."""
        self._since = None

    def spans(self) -> list[Span]:
        """The rollout's spans so far, in order of their start; of a nested recording its own part.

        What this process recorded is read without DuckDB; ``store.spans(rollout_id=…)`` also has
        what other processes recorded for the same rollout.
        """
        if not self.rollout_id:
            return []
        found = self._own_spans()
        if found is None:
            found = self.store.spans(rollout_id=self.rollout_id).rows()
        found = [span for span in found if span.attempt_id == self.attempt_id]
        return _below(found, self.span_id) if self._is_part else found

    def _own_spans(self) -> list[Span] | None:
        writer = self.store.writer()
        # A forked child's lines are not those of the process that began the recording.
        if self._since is None or self._since[0] != writer.process:
            return None
        as_written = json.dumps(self.rollout_id, ensure_ascii=False)[1:-1]
        records = writer.records(self._since[1], as_written)
        if records is None:
            return None
        found: dict[tuple[str, str], Span] = {}
        for record in records:
            span = span_of(record)
            known = found.get((span.trace_id, span.span_id))
            if known is None or known.is_incomplete:  # an end counts more than a start, and once
                found[span.trace_id, span.span_id] = span
        own = [span for span in found.values() if span.rollout_id == self.rollout_id]
        return sorted(own, key=lambda span: span.sequence)

    def trajectories(self, *, credit: Credit = "next", gamma: float = 0.99) -> list[Trajectory]:
        """The rollout's trajectories so far."""
        return self._adapt(credit, gamma).trajectories

    def report(self, *, credit: Credit = "next", gamma: float = 0.99) -> Report:
        """What became of the rollout's calls and rewards, with a reason for each left behind."""
        return self._adapt(credit, gamma).report

    def _adapt(self, credit: Credit, gamma: float) -> Adaptation:
        return TripletAdapter(credit, gamma).explain(self.spans())


def _below(spans: list[Span], root_id: str) -> list[Span]:
    """The root and everything below it, in the order given."""
    children: dict[str | None, list[str]] = {}
    for span in spans:
        children.setdefault(span.parent_span_id, []).append(span.span_id)
    inside = {root_id}
    waiting = [root_id]
    while waiting:
        new = [child for child in children.get(waiting.pop(), ()) if child not in inside]
        inside.update(new)
        waiting += new
    return [span for span in spans if span.span_id in inside]
