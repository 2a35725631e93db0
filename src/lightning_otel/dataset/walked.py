"""Attempts that a walk over their rows shows to be straight: their attributes are read, no message.

For what SQL alone does not tell: exact tokens, several rewards, tools beside each other.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from lightning_otel.adapter import quick, straight
from lightning_otel.adapter.attempts import AttemptKey
from lightning_otel.dataset.exact import FETCH, flowing
from lightning_otel.store.gist import KIND, ODD, RECEIVED
from lightning_otel.store.layout import Layout
from lightning_otel.store.reader import Reader

_ROWS: Final = f"""
SELECT number, chosen.sequence, chosen.end_sequence, chosen.span_id, chosen.parent_span_id,
  chosen.trace_id, chosen.agent,
  CASE WHEN ? AND gist_kind & {RECEIVED} > 0 THEN {ODD}
    WHEN {KIND} = {straight.OTHER} AND is_tool THEN {straight.TOOL} ELSE {KIND} END AS found,
  CASE WHEN found IN ({straight.CALL}, {straight.REWARD}) THEN spans.attributes::VARCHAR END,
  chosen.start_ns, chosen.end_ns, gist_after, gist_before, spans.otel_resource::VARCHAR,
  prompt_token_ids, response_token_ids, response_logprobs
FROM spans JOIN (
    FROM chosen WHERE number BETWEEN ? AND ? AND number IN (SELECT unnest(?::BIGINT[]))
  ) AS chosen
  ON chosen.trace_id = spans.trace_id AND chosen.span_id = spans.span_id
    AND chosen.start_ns = spans.start_ns
WHERE spans.start_ns BETWEEN ? AND ?"""


class Group(NamedTuple):
    """A rollout of one attempt, or of more, as it is planned.

    Attributes:
        number: Its number in the plan.
        name: Its id.
        attempt: Id of its attempt, if there is only one.
        spans: How many it has.
        low: When the first of them starts, Unix nanoseconds.
        high: When the last one does.
    """

    number: int
    name: str
    attempt: str
    spans: int
    low: int
    high: int


def walked(
    con: Reader, layout: Layout, groups: Sequence[Group], *, received: bool
) -> dict[str, straight.Straight]:
    """What straight ones of some rollouts come to, by their ids; the others are not among them.

    Args:
        con: A connection with the view ``spans`` and the table ``chosen``.
        layout: The store's paths.
        groups: The rollouts, in order of their numbers: of one attempt, trace and process each.
        received: Whether spans count that came over the network or were imported.
    """
    numbers = [group.number for group in groups]
    low, high = min(group.low for group in groups), max(group.high for group in groups)
    given = [not received, numbers[0], numbers[-1], numbers, low, high]

    import duckdb

    def fetched() -> dict[int, list[straight.Row]]:
        found: dict[int, list[straight.Row]] = {number: [] for number in numbers}
        cursor = con.cursor()
        with flowing(con):
            try:
                cursor.execute(_ROWS, given)
                while rows := cursor.fetchmany(FETCH):
                    for row in rows:
                        found[row[0]].append(row)
            except duckdb.OutOfMemoryException:
                # Their attributes are too wide for the memory allowed here: they are adapted.
                found = {number: [] for number in numbers}
        return found

    made: dict[str, straight.Straight] = {}
    rows = con.answered(fetched)
    with quick.unswept():
        for group in groups:
            own = rows.pop(group.number)
            if len(own) != group.spans:
                continue  # retention may have taken some of them meanwhile
            found = straight.adapt(AttemptKey(group.name, group.attempt), own)
            if found is not None:
                made[group.name] = found
    return made
