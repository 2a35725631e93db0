"""Outlines of what an id names: a rollout, or the part of it that is meant."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_otel.adapter import readers
from lightning_otel.adapter.differences import MOST_LINES, Difference, compare_outlines
from lightning_otel.adapter.outline import Outline, outline
from lightning_otel.dataset.batches import list_incomplete, read_rollouts
from lightning_otel.store.lookup import find_rollout
from lightning_otel.store.schema import build_span
from lightning_otel.store.source import INDEX_COLUMNS, Selection, SpanSource, at_moment
from lightning_otel.store.sql import ROLLOUT
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

if TYPE_CHECKING:
    from lightning_otel.dataset import Store


def outline_of(source: SpanSource, noun: str, whole_id: str) -> Outline:
    """Return the outline of a rollout, or of its part in a trace, span or response."""
    source = source.at_moment()
    if noun == "trace":
        return _trace_outline(source, whole_id)
    rollout_id = whole_id if noun == "rollout" else _rollout_of(source, noun, whole_id)
    found = _make_outline(source, _rollout_spans(source, rollout_id))
    if noun == "rollout":
        return found if found.nodes else _outline_elsewhere(source, whole_id, ROLLOUT)
    if (position := _find_position(found, noun, whole_id)) is None:
        found = _outline_elsewhere(source, whole_id, "span_id")
        position = _find_position(found, noun, whole_id)
    return found.below(position or 0)


def compare_ids(
    store: "Store", a: str, b: str, most_lines: int | None = MOST_LINES
) -> tuple[tuple[str, str], tuple[str, str], Difference]:
    """Return what two ids name, each its noun and whole id, and how these differ."""
    store = at_moment(store)
    one, other = store.find(a), store.find(b)
    a_outline, b_outline = (outline_of(store.source, *each) for each in (one, other))
    return one, other, compare_outlines(a_outline, b_outline, most_lines)


def _trace_outline(source: SpanSource, trace_id: str) -> Outline:
    """A trace, within the rollout that it is part of."""
    selection = Selection(trace_ids=(trace_id,), is_ordered=True)
    own = list(map(build_span, source.fetch(selection).dicts()))
    rollout_ids = {span.rollout_id for span in readers.read(own)}
    if len(rollout_ids) > 1:
        return _make_outline(source, own)
    (rollout_id,) = rollout_ids or {_rollout_of(source, "trace", trace_id)}
    found = _make_outline(source, _rollout_spans(source, rollout_id))
    is_own = [node.span.trace_id == trace_id for node in found.nodes]
    if not any(is_own):
        return _outline_elsewhere(source, trace_id, "trace_id")
    return found.part(found.with_rewards(is_own))


def _rollout_spans(source: SpanSource, rollout_id: str) -> list[Span]:
    selection = Selection(rollout_ids=(rollout_id,), is_ordered=True)
    return list(map(build_span, read_rollouts(source, selection).dicts()))


def _rollout_of(source: SpanSource, noun: str, whole_id: str) -> str:
    con = source.connect(("spans",), INDEX_COLUMNS)
    return find_rollout(con, noun, whole_id)


def _outline_elsewhere(source: SpanSource, whole_id: str, column: str) -> Outline:
    """Rewards that judge another rollout than their own, with the steps they were given to."""
    con = source.connect(("spans", "rewards"), INDEX_COLUMNS)
    own = f"SELECT trace_id, span_id FROM spans WHERE {column} = ?"
    names = set(con.execute(own, [whole_id]).fetchall())
    homes = con.execute(
        "SELECT DISTINCT rollout_id FROM rewards WHERE span_id IN (SELECT unnest(?))",
        [[span_id for _, span_id in names]],
    ).fetchall()
    found = _make_outline(
        source, [span for (home,) in homes for span in _rollout_spans(source, home)]
    )
    kept = {i for i, n in enumerate(found.nodes) if (n.span.trace_id, n.span.span_id) in names}
    kept.update([target for i in kept for target in found.nodes[i].credited])
    return found.part([i in kept for i in range(len(found.nodes))])


def _make_outline(source: SpanSource, spans: Sequence[Span]) -> Outline:
    has_open = any(span.end_ns is None for span in spans)
    return outline(spans, incomplete=list_incomplete(source) if has_open else frozenset())


def _find_position(found: Outline, noun: str, whole_id: str) -> int | None:
    for position, node in enumerate(found.nodes):
        span = node.span
        if (span.span_id if noun == "span" else span.attributes.get(c.RESPONSE_ID)) == whole_id:
            return position
    return None
