"""The recording of one rollout: its ids, spans and results."""

import json
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from opentelemetry.trace import SpanContext

from lightning_otel.adapter.attempts import AttemptKey, sort_attempts
from lightning_otel.adapter.attributes import read_links
from lightning_otel.dataset import Store
from lightning_otel.store.live import read_others_records
from lightning_otel.store.schema import build_span
from lightning_otel.store.transforms import remove_dropped
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

if TYPE_CHECKING:
    from lightning_otel.adapter import Adaptation
    from lightning_otel.types import Credit, CreditRule, Report, Trajectory

_DRAWN: Final = 60
"""Spans in the picture of a notebook."""


class Recording:
    """One rollout: its ids, and its spans as far as they were recorded.

    Where nothing could or should be recorded its ids are empty and it holds no spans.

    Attributes:
        trace_id: The trace of its root span; empty if it has none.
        span_id: Its root span; empty if it has none.
        result: The traced function's result; None for a ``with`` block.
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
        self._since_ns = time.time_ns()
        if store is not None:
            writer = store.writer()
            self._since = writer.process, writer.position()

    def __repr__(self) -> str:
        if self._store is None:
            return "<Recording of nothing>"
        return f"<Recording of {self.rollout_id} in {self._store.name}>"

    def _repr_html_(self) -> str:
        from lightning_otel.types.html import escape
        from lightning_otel.views.picture import draw_trace
        from lightning_otel.views.trace import make_trace

        if self._store is None:
            return escape(repr(self))
        return draw_trace(make_trace(self.spans()), limit=_DRAWN)

    @property
    def is_part(self) -> bool:
        """True if it is a part of a rollout that goes on."""
        return self._is_part

    @property
    def store(self) -> Store:
        """The store of its spans; an empty one in memory if nothing is recorded."""
        if self._store is None:
            self._store = Store(":memory:")
        return self._store

    def root_is(self, root: SpanContext, *, is_part: bool) -> None:
        """Name the root span; ``is_part`` limits the recording to what lies below it."""
        if root.is_valid:  # a provider that records nothing hands out no ids
            self.trace_id = format(root.trace_id, "032x")
            self.span_id = format(root.span_id, "016x")
            self._is_part = is_part

    def span_processes(self) -> None:
        """Read the spans of every process from the store, not only those recorded here."""
        self._since = None

    def spans(self) -> list[Span]:
        """The rollout's spans so far, in order of their start; of a nested recording its own part.

        They are those of any process since it began, with rewards from elsewhere or later. DuckDB
        is asked only where live segments cannot tell them all.
        """
        if not self.rollout_id:
            return []
        spans = self._live_spans()
        if spans is None:
            spans = self.store.spans(rollout_id=self.rollout_id).rows()
        # A reward that names no attempt, or something of another one, belongs to what it judges.
        key = AttemptKey(self.rollout_id, self.attempt_id)
        spans = sort_attempts(spans).members.get(key, [])
        spans.sort(key=lambda span: (span.start_ns, span.process, span.sequence))
        return _part_below(spans, self.span_id) if self._is_part else spans

    def _live_spans(self) -> list[Span] | None:
        writer = self.store.writer()
        # A forked child's lines are not those of the process that began the recording.
        if self._since is None or self._since[0] != writer.process:
            return None
        as_written = json.dumps(self.rollout_id, ensure_ascii=False)[1:-1]
        mentions = (as_written, f"{c.LINK_PREFIX}.0.key_match")
        records = writer.records(self._since[1], *mentions)
        if records is None:
            return None
        if writer.layout is not None:
            others = read_others_records(writer.layout, writer.process, self._since_ns, mentions)
            if others is None:
                return None
            records += others
        records = remove_dropped(records)
        by_id: dict[tuple[str, str], Span] = {}
        for span in map(build_span, records):
            entry = by_id.get((span.trace_id, span.span_id))
            if entry is None or entry.is_incomplete:  # an end counts more than a start, and once
                by_id[span.trace_id, span.span_id] = span
        spans = list(by_id.values())
        return None if self._is_link_open(spans) else spans

    def _is_link_open(self, spans: list[Span]) -> bool:
        members = [span for span in spans if span.rollout_id == self.rollout_id]
        ids = _linkable_ids(members)
        return any(
            not ids.issuperset(target)
            for span in members
            if c.REWARD_VALUE in span.attributes and (target := _link_targets(span))
        )

    def trajectories(
        self, *, credit: "Credit | CreditRule" = "previous", gamma: float = 0.99
    ) -> "list[Trajectory]":
        """The rollout's trajectories so far."""
        return self._adapt_spans(credit, gamma).trajectories

    def report(
        self, *, credit: "Credit | CreditRule" = "previous", gamma: float = 0.99
    ) -> "Report":
        """Report on the rollout's calls and rewards, with a reason for each left out."""
        return self._adapt_spans(credit, gamma).report

    def _adapt_spans(self, credit: "Credit | CreditRule", gamma: float) -> "Adaptation":
        from lightning_otel.adapter import TripletAdapter

        return TripletAdapter(credit, gamma).explain(self.spans())


def _part_below(spans: list[Span], root_id: str) -> list[Span]:
    children: dict[str | None, list[str]] = {}
    for span in spans:
        children.setdefault(span.parent_span_id, []).append(span.span_id)
    inside = {root_id}
    pending = [root_id]
    while pending:
        new = [child for child in children.get(pending.pop(), ()) if child not in inside]
        inside.update(new)
        pending += new
    ids = _linkable_ids(span for span in spans if span.span_id in inside)
    return [span for span in spans if span.span_id in inside or ids & _link_targets(span)]


def _linkable_ids(spans: Iterable[Span]) -> set[tuple[str, str]]:
    ids = set()
    for span in spans:
        ids.add((c.LINK_SPAN_ID, span.span_id))
        ids.add((c.RESPONSE_ID, span.attributes.get(c.RESPONSE_ID, "")))
    return ids


def _link_targets(span: Span) -> set[tuple[str, str]]:
    links = read_links(span.attributes)
    return {(key, links[key]) for key in (c.LINK_SPAN_ID, c.RESPONSE_ID) if links.get(key)}
