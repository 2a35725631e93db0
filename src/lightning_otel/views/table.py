"""Lists of what a store holds: a view a noun, from which every door takes rows and filters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_otel.types.instants import SINCE_HELP, UNTIL_HELP

if TYPE_CHECKING:
    from lightning_otel.dataset import Store
    from lightning_otel.store.reader import Reader

_ALL: Final[Mapping[str, Any]] = MappingProxyType({})


class Filter(NamedTuple):
    """A condition on rows; options, parameters and the fields of forms are made of it.

    Attributes:
        condition: SQL, with a ``?`` for the value; empty where the store takes it as a keyword.
        help: Description for users.
        kind: The type of the value; ``date`` is a time in Unix nanoseconds, ``tuple`` several
            texts.
        choices: The words that a text is one of; none if it is any.
        hint: An example, for a form; of choices the usual one.
        label: The name in a form; by default the filter's own.
        has_bodies: The condition reads content of spans.
        views: The store's views that it reads besides those of every row.
    """

    condition: str
    help: str
    kind: type = str
    choices: tuple[str, ...] = ()
    hint: str = ""
    label: str = ""
    has_bodies: bool = False
    views: tuple[str, ...] = ()


SINCE: Final = Filter("start_ns >= ?", SINCE_HELP, date, hint="2h")
WHEN: Final[Mapping[str, Filter]] = {
    "since": SINCE,
    "until": Filter("start_ns < ?", UNTIL_HELP, date),
}
"""Filters by the time that something began."""


class Listing(NamedTuple):
    """Rows of a view, of ``total`` that match; ``following`` is the place of the next, if any."""

    rows: list[dict[str, Any]]
    total: int
    following: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class View:
    """Rows of one noun.

    Attributes:
        columns: Columns for programs, in order.
        query: SQL of all rows, over ``spans``, ``rewards`` and ``rollouts`` without content.
        filters: Conditions by name.
        order: SQL terms of columns that tell rows apart; all ``DESC`` where ``after`` is used.
        sorts: Columns that rows can be sorted by; ``duration`` is from start to end.
        add: Adds what only the rows of a page need, by the store, the rows and the connection.
        names: The store's views that it reads on that connection; a live store is parsed once.
        light: SQL of the same rows by ``spans`` and ``attempts`` alone: ``rollout_id``, and what
            their order and filters without ``views`` need; empty where facts alone tell them.
    """

    columns: tuple[str, ...]
    query: str
    filters: Mapping[str, Filter]
    order: tuple[str, ...]
    sorts: tuple[str, ...] = ()
    add: "Callable[[Store, list[dict[str, Any]], Reader | None], None] | None" = None
    names: tuple[str, ...] = ()
    light: str = ""

    def match(self, filters: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the filters that are set, and the condition of their rows."""
        active = {name: value for name, value in filters.items() if value is not None}
        return active, " AND ".join(["true", *(self.filters[name].condition for name in active)])

    def read(
        self,
        store: "Store",
        filters: Mapping[str, Any] = _ALL,
        *,
        limit: int | None = None,
        offset: int = 0,
        after: Sequence[Any] | None = None,
        sort: str = "",
    ) -> Listing:
        """Read the rows that match, as of one moment.

        Args:
            store: The store.
            filters: Values by filter; None is any.
            limit: The number of rows; None for all.
            offset: The number of rows before the first.
            after: The place behind which they begin, as ``following`` says.
            sort: One of ``sorts``, after a ``-`` the largest first; by default ``order``.
        """
        from lightning_otel.store.selection import INDEX_COLUMNS
        from lightning_otel.store.source import at_moment, read_overview
        from lightning_otel.store.table import Query

        store = at_moment(store)
        active, where = self.match(filters)
        keys, order = [term.split()[0] for term in self.order], ", ".join(self.order)
        if (column := sort.removeprefix("-")) in self.sorts:
            term = "end_ns - start_ns" if column == "duration" else column
            order = f"{term} {'DESC' if sort[0] == '-' else 'ASC'} NULLS LAST, {order}"
        condition = f"({', '.join(keys)}) < ({', '.join('?' * len(keys))})"
        bound = "" if limit is None else f"LIMIT {limit + 1}"
        # One look at the spans for both: a view costs as much as it reads.
        query = f"""
WITH matching AS MATERIALIZED (SELECT * FROM ({self.query}) WHERE {where})
SELECT total, page.* FROM (SELECT count(*) AS total FROM matching) LEFT JOIN (
  SELECT *, true AS is_row FROM matching WHERE {"true" if after is None else condition}
  ORDER BY {order} {bound} OFFSET {offset}
) AS page ON true ORDER BY {order}"""
        values = [*active.values(), *(after or ())]
        page = None
        is_by_facts = any(self.filters[name].views for name in active) or not self.light
        if limit is not None and not sort and not is_by_facts:
            chosen = f"{where} AND {'true' if after is None else condition}"
            rollouts = f"SELECT rollout_id FROM ({self.light}) WHERE {chosen}"
            page = f"{rollouts} ORDER BY {order} {bound} OFFSET {offset}", values
        con = None
        if self.names:
            has_bodies = any(self.filters[name].has_bodies for name in active)
            is_wide = has_bodies or store.source.layout is not None
            names = {*self.names, *(view for name in active for view in self.filters[name].views)}
            con = store.source.connect(names, None if is_wide else INDEX_COLUMNS, page=page)
            records = list(Query(con, query, values).dicts())
        else:
            records = read_overview(store.source, query, values, page)
        total = max(row.pop("total") for row in records)
        rows = [row for row in records if row.pop("is_row")][:limit]
        is_more = limit is not None and len(records) > limit
        following = tuple(rows[-1][name] for name in keys) if is_more else None
        if self.add is not None and rows:
            self.add(store, rows, con)
        return Listing(rows, total, following)
