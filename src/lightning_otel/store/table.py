"""A query's result, handed out in whatever form the reader works with.

Nothing is computed until it is asked for; pandas, polars and pyarrow are imported by the method
named after them.
"""

import contextlib
import dataclasses
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import orjson

from lightning_otel.errors import NotInstalledError, QueryError, StoreDamagedError
from lightning_otel.messages.media import to_json
from lightning_otel.store.files import private_file
from lightning_otel.store.reader import Reader
from lightning_otel.store.schema import build_span
from lightning_otel.store.sql import quote_text
from lightning_otel.types import Report, Span, Transition, html
from lightning_otel.types.text import step_row

if TYPE_CHECKING:
    import duckdb

T = TypeVar("T")
_FETCH: Final = 2048
_ROW_GROUP_BYTES: Final = 8 << 20
"""Of a Parquet file, in memory at once: few long rows, or many short ones, which pack better."""
_PAGE: Final = 20
"""Rows that a notebook shows."""
_COUNTING_S: Final = 5.0
"""Time in which a notebook's rows are counted."""
_DRAWN: Final = 60
"""Spans in the picture of a trace in a notebook."""
_MOST_OUTLINED: Final = 5_000
"""Spans that such a picture is made of: a second's work."""
_ZONED: Final = "TIMESTAMP WITH TIME ZONE"
_END: Final = re.compile(r";\s*(--[^\n]*\s*)*\Z")
"""What may follow a statement, and not one in brackets."""


class Query:
    """One SELECT on a connection: its result as Arrow, rows or a file."""

    def __init__(
        self,
        con: "duckdb.DuckDBPyConnection",
        text: str,
        parameters: Sequence[object] = (),
    ) -> None:
        self._con = con if isinstance(con, Reader) else Reader(con)
        self._text = text
        self._parameters = list(parameters)
        self._is_used = False

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.take(lambda relation: relation.__arrow_c_stream__(requested_schema))

    def select(self, columns: str) -> "Query":
        """Return a query for other columns, in SQL, of the same rows."""
        return Query(self._con, f"SELECT {columns} FROM ({self._text})", self._parameters)

    def take(self, get: "Callable[[duckdb.DuckDBPyRelation], T]") -> T:
        """Return what a function makes of the result, which is a DuckDB relation."""
        con = self._con.con
        return self._answer(lambda: get(con.sql(self._text, params=self._parameters or None)))

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a zstd Parquet file."""
        options = f"COMPRESSION zstd, USE_TMP_FILE false, ROW_GROUP_SIZE_BYTES {_ROW_GROUP_BYTES}"
        copy = f"COPY result TO {quote_text(str(path))} (FORMAT parquet, {options})"
        # Each thread would hold the rows that it read before their turn comes; one keeps the order.
        self._con.con.execute("SET threads = 1")
        self._con.con.execute("SET preserve_insertion_order = false")
        self.take(lambda relation: relation.query("result", copy))

    def count(self) -> int:
        """Count the rows."""
        return self.take(_count_rows)

    def head(self, count: int) -> list[dict[str, Any]]:
        """Return the first rows, each a dict of columns; only these are sorted or read whole."""
        return self.take(lambda rows: _rows_of(rows.limit(count)))

    def page(self, order: str, limit: int, offset: int) -> tuple[list[dict[str, Any]], int]:
        """Return some rows in an order, which is no user's text, and how many there are in all."""
        return self.take(
            lambda rows: (_rows_of(rows.order(order).limit(limit, offset)), _count_rows(rows))
        )

    def dicts(self) -> Iterator[dict[str, Any]]:
        """Yield each row as a dict of columns, fetched a few thousand at a time."""
        names, batches = self.batches()
        for batch in batches:
            for row in batch:
                yield dict(zip(names, row, strict=True))

    def batches(self, size: int = _FETCH) -> tuple[list[str], Iterator[list[Any]]]:
        """Return the columns' names, and rows as tuples, so many at a time; zoned times as text."""
        # A cursor of its own: DuckDB 2 refuses a connection whose result is half read.
        cursor = self._con.con.cursor()
        names: list[str] = []

        def first() -> list[Any]:
            cursor.execute(self._text, self._parameters)
            described = cursor.description or []
            names[:] = [name for name, *_ in described]
            if columns := _zoned_as_text(kind for _, kind, *_ in described):
                text = f"SELECT {columns} FROM ({_END.sub('', self._text)}\n)"
                cursor.execute(text, self._parameters)
            return cursor.fetchmany(size)

        def following(rows: list[Any]) -> Iterator[list[Any]]:
            while rows:
                yield rows
                with self._naming_refusals():
                    rows = cursor.fetchmany(size)

        return names, following(self._answer(first))

    def _answer(self, act: Callable[[], T]) -> T:
        if self._is_used:
            self._con.refresh()
        self._is_used = True
        with self._naming_refusals():
            return self._con.attempt(act)

    @contextlib.contextmanager
    def _naming_refusals(self) -> Iterator[None]:
        import duckdb

        try:
            yield
        except duckdb.Error as exc:
            error = self._con.error(exc)
            if isinstance(exc, duckdb.IOException) or isinstance(error, StoreDamagedError):
                raise error from exc
            raise QueryError(f"DuckDB refused the query: {exc}") from exc


class Table(Generic[T]):
    """Rows of one kind: iterate over them, or take them as Arrow, a frame or a file."""

    def __init__(
        self,
        query: Callable[[], Query],
        rows: Callable[[], Iterable[T]],
        noun: str,
        *,
        counts: Callable[[], Iterable[int]] | None = None,
    ) -> None:
        self._query = query
        self._rows = rows
        self._noun = noun
        self._counts = counts

    def __iter__(self) -> Iterator[T]:
        return iter(self._rows())

    def __repr__(self) -> str:
        return f"<Table of {self._noun}: iterate, or .df() .pl() .arrow() .to_parquet(path)>"

    def _repr_html_(self) -> str:
        rows = [self._as_columns(row) for row in self._first(_PAGE + 1)]
        columns = list(rows[0]) if rows else []
        count = str(len(rows))
        if len(rows) > _PAGE:
            count = f"the first {_PAGE} of {self._count_in_words()}"
        cells = [[row.get(name) for name in columns] for row in rows[:_PAGE]]
        return html.render_table(columns, cells, f"{count} {self._noun}")

    def _first(self, count: int) -> Iterable[T]:
        return itertools.islice(self, count)

    def _count_in_words(self) -> str:
        """Count the rows; where that takes long, tell how many there are at least."""
        until_s, count = time.monotonic() + _COUNTING_S, 0
        for number in self._counts() if self._counts is not None else (1 for _ in self):
            if count and time.monotonic() > until_s:
                return f"more than {max(count, _PAGE):,}"
            count += number
        return f"{count:,}"

    def _as_columns(self, row: T) -> Mapping[str, object]:
        if isinstance(row, Mapping):
            return row
        fields = dataclasses.fields(row) if dataclasses.is_dataclass(row) else ()
        return {field.name: getattr(row, field.name) for field in fields}

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._query().__arrow_c_stream__(requested_schema)

    def page(self, order: str, limit: int, offset: int) -> tuple[list[dict[str, Any]], int]:
        """Return some rows, as :meth:`Query.page`; the table is gone through once."""
        return self._query().page(order, limit, offset)

    @property
    def columns(self) -> list[str]:
        """Names of the columns, in order."""
        return self._query().take(lambda relation: list(relation.columns))

    def rows(self) -> list[T]:
        """Return all rows as a list."""
        return list(self)

    def dicts(self) -> Iterator[dict[str, Any]]:
        """Yield each row as a dict of columns."""
        return self._query().dicts()

    def df(self) -> Any:
        """Return a pandas data frame; ConfigError if pandas is not installed."""
        _import_optional("pandas")
        return self._query().take(lambda relation: relation.df())

    def pl(self) -> Any:
        """Return a polars data frame; ConfigError if polars is not installed."""
        return _import_optional("polars").DataFrame(self)

    def arrow(self) -> Any:
        """Return a pyarrow table; ConfigError if pyarrow is not installed."""
        return _import_optional("pyarrow").table(self)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a zstd Parquet file, the user's alone unless a shared one stands there.

        Raises:
            ConfigError: No file can be made there; what stood there is as it was.
        """
        with private_file(path) as draft:
            self._query().to_parquet(draft)


class Spans(Table[Span]):
    """Spans: of one rollout or trace a notebook shows the picture."""

    def __init__(self, query: Callable[[], Query], *, is_one: bool) -> None:
        super().__init__(
            query,
            lambda: map(build_span, query().dicts()),
            "spans",
            counts=lambda: [query().count()],
        )
        self._is_one = is_one

    def _repr_html_(self) -> str:
        from lightning_otel.views.picture import draw_trace
        from lightning_otel.views.trace import make_trace

        spans = list(itertools.islice(self, _MOST_OUTLINED + 1)) if self._is_one else []
        if not 0 < len(spans) <= _MOST_OUTLINED:
            return super()._repr_html_()
        return draw_trace(make_trace(spans), limit=_DRAWN)

    def _first(self, count: int) -> Iterable[Span]:
        return map(build_span, self._query().head(count))

    def _as_columns(self, row: Span) -> Mapping[str, object]:
        lasted = None if row.end_ns is None else f"{(row.end_ns - row.start_ns) / 1e6:,.1f}"
        return {
            "trace": row.trace_id,
            "span": row.span_id,
            "name": row.name,
            "ms": lasted,
            "status": "incomplete" if row.is_incomplete else row.status,
        }


class Transitions(Table[Transition]):
    """Transitions, and the funnel that led to them."""

    _report: Report | None = None

    def __init__(
        self,
        query: Callable[[], Query],
        rows: Callable[[], Iterable[Transition]],
        records: Callable[[], Iterable[Mapping[str, Any]]],
        *,
        counts: Callable[[], Iterable[int]],
        report: Callable[[], Report] | None = None,
    ) -> None:
        """Describe a result: functions that open its rows in DuckDB, as objects and as JSON values.

        ``counts`` counts its rows part by part; ``report`` reads its funnel, by default by a pass.
        """
        super().__init__(query, rows, "transitions", counts=counts)
        self._records = records
        self._read_report = report

    def lines(self) -> Iterator[bytes]:
        """Yield each row as a line of JSON, by column, in constant memory.

        Raises:
            StoreError: A file cannot be read.
        """
        return map(json_line, self._records())

    def _as_columns(self, row: Transition) -> Mapping[str, object]:
        return step_row(row)

    def report(self) -> Report:
        """Return the funnel from spans to these rows, of every agent, with every reason for a loss.

        It is kept from the latest whole pass over the rows; without one, this makes a pass.
        """
        if self._read_report is not None:
            return self._read_report()
        if self._report is None:
            for _ in self:
                pass
        assert self._report is not None
        return self._report

    def keep(self, report: Report) -> None:
        """Keep the funnel of a pass that came to its end."""
        self._report = report


def _rows_of(relation: "duckdb.DuckDBPyRelation") -> list[dict[str, Any]]:
    columns = _zoned_as_text(relation.types)
    rows = (relation.project(columns) if columns else relation).fetchall()
    return [dict(zip(relation.columns, row, strict=True)) for row in rows]


def _count_rows(relation: "duckdb.DuckDBPyRelation") -> int:
    return int(relation.aggregate("count(*)").fetchall()[0][0])


def _zoned_as_text(kinds: Iterable[object]) -> str:
    """List a SELECT's columns, zoned times as text: DuckDB needs pytz for Python's own."""
    names = [str(kind) for kind in kinds]
    if not any(_ZONED in kind for kind in names):
        return ""
    # Within lists, structs and maps as well: only the name of that type is another one.
    return ", ".join(
        f"CAST(#{place} AS {kind.replace(_ZONED, 'VARCHAR')})" if _ZONED in kind else f"#{place}"
        for place, kind in enumerate(names, 1)
    )


def json_line(row: Mapping[str, Any]) -> bytes:
    """Return a row as one line of JSON."""
    try:
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
    except (TypeError, ValueError):
        # An integer beyond 64 bits, half a surrogate pair or much nesting in what a model said.
        columns = (f"{to_json(name)}:{to_json(value)}" for name, value in row.items())
        return f"{{{','.join(columns)}}}\n".encode("utf-8", "replace")


def _import_optional(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as exc:
        raise NotInstalledError(f"this needs {name}; install it with: pip install {name}") from exc
