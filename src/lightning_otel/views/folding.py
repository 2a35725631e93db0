"""The choice of rows that are shown, and the count of those that are not. Pure."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from lightning_otel.adapter.ordering import NO_PARENT
from lightning_otel.types.text import count_noun
from lightning_otel.views.trace import Row


class Gap(NamedTuple):
    """Rows that are not shown, all below one parent and between two of its shown children."""

    rows: list[Row]

    def __str__(self) -> str:
        rows = self.rows
        counts = [
            (sum(row.kind == "call" for row in rows), "call"),
            (sum(row.kind == "reward" for row in rows), "reward"),
            (sum(row.is_fault for row in rows), "error"),
            (sum(row.span.is_incomplete for row in rows), "incomplete span"),
        ]
        words = ", ".join(count_noun(count, noun) for count, noun in counts if count)
        return f"⋯ {count_noun(len(rows), 'more span')}{': ' if words else ''}{words}"


def children_of(rows: Sequence[Row], is_shown: Sequence[bool] | None) -> dict[int, list[int | Gap]]:
    """Return the children of each shown row: shown ones, and gaps for the hidden."""
    children: dict[int, list[int | Gap]] = {}
    above: list[int] = []  # for each row the shown one nearest above or at it
    for position, row in enumerate(rows):
        nearest = NO_PARENT if row.parent == NO_PARENT else above[row.parent]
        if is_shown is None or is_shown[position]:
            children.setdefault(nearest, []).append(position)
            above.append(position)
            continue
        above.append(nearest)
        siblings = children.setdefault(nearest, [])
        if siblings and isinstance(siblings[-1], Gap):
            siblings[-1].rows.append(row)
        else:
            siblings.append(Gap([row]))
    return children


def select_rows(rows: Sequence[Row], limit: int) -> list[bool]:
    """Choose a tree of rows to show where too many would not fit.

    Those near a root come first, and of many siblings the first and the last ones.
    """
    if len(rows) <= limit:
        return [True] * len(rows)
    siblings: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        siblings.setdefault(row.parent, []).append(position)
    costs = [0] * (len(rows) + 1)  # the last one, index -1, stands for what is above the roots
    for parent, children in siblings.items():  # in order of the first child: parents come first
        for rank, child in enumerate(children):
            costs[child] = costs[parent] + 1 + min(rank, len(children) - 1 - rank)
    is_shown = [False] * len(rows)
    for position in sorted(range(len(rows)), key=costs.__getitem__)[:limit]:
        is_shown[position] = True
    return is_shown


class VisibleRow(NamedTuple):
    """A row that is shown; ``folded`` counts the spans right below it that are folded away."""

    row: Row
    folded: int
    is_closed: bool


class Folded(NamedTuple):
    """The rows to show, and how many spans of other instrumentors are folded away."""

    shown: list[VisibleRow]
    others: int


def fold(
    rows: Sequence[Row],
    closed: Iterable[str] = (),
    *,
    others: bool = False,
    only: Collection[str] | None = None,
) -> Folded:
    """Choose the rows of a trace to show, each after its parent.

    Requests, queries and messages of other instrumentors are folded away where nothing else lies
    below them, unless there is nothing else at all, or ``others`` are shown. Nothing is shown below
    ``closed`` spans; ``only`` these are, with what is above them.
    """
    is_other = _keep_above(rows, [row.kind == "plumbing" for row in rows])
    count = sum(is_other)
    if others or count == len(rows):
        is_other = [False] * len(rows)
        count = count if others else 0
    shut = frozenset(closed)
    is_hidden = list(is_other)
    if only is not None:
        is_other, count = [False] * len(rows), 0
        is_hidden = _keep_above(rows, [row.span.span_id not in only for row in rows])
    folded = [0] * len(rows)
    for position, row in enumerate(rows):
        parent = row.parent
        if parent != NO_PARENT and (is_hidden[parent] or rows[parent].span.span_id in shut):
            is_hidden[position] = True
        elif is_other[position] and parent != NO_PARENT:
            folded[parent] += row.size + 1
    lines = [
        VisibleRow(row, folded[at], is_closed=row.span.span_id in shut and row.size > 0)
        for at, row in enumerate(rows)
        if not is_hidden[at]
    ]
    return Folded(lines, count)


def _keep_above(rows: Sequence[Row], is_left_out: list[bool]) -> list[bool]:
    for position in range(len(rows) - 1, -1, -1):
        if not is_left_out[position] and rows[position].parent != NO_PARENT:
            is_left_out[rows[position].parent] = False
    return is_left_out
