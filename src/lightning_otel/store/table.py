"""A query's result, handed out in whatever form the reader works with.

Nothing is computed until it is asked for, and pandas, polars and pyarrow are imported only by the
method that is named after them.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import orjson

from lightning_otel.errors import ConfigError, LightningOtelError, QueryError, StoreError
from lightning_otel.store.damage import damage_of, mend
from lightning_otel.store.layout import Layout
from lightning_otel.store.views import NAMES, quoted
from lightning_otel.types import Report, Transition

if TYPE_CHECKING:
    import duckdb

T = TypeVar("T")
_FETCH = 2048
_EXPLAIN = re.compile(r"\s*explain\s+(analyze\s+)?(\([^()]*\)\s*)?", re.IGNORECASE)


class Query:
    """One SELECT on a connection of its own: Arrow for whoever reads that, rows for us."""

    def __init__(
        self,
        con: "duckdb.DuckDBPyConnection",
        text: str,
        parameters: Sequence[object] = (),
        *,
        layout: Layout | None = None,
    ) -> None:
        """Hold a query.

        Args:
            con: A connection for this query alone.
            text: One SELECT.
            parameters: What stands for its question marks.
            layout: The paths of the store, if it reads files.
        """
        self._con = con
        self._text = text
        self._parameters = list(parameters)
        self._layout = layout

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The Arrow C stream interface."""
        return self.take(lambda relation: relation.__arrow_c_stream__(requested_schema))

    def take(self, get: "Callable[[duckdb.DuckDBPyRelation], T]") -> T:
        """What a function makes of the result, which is a DuckDB relation.

        Raises:
            QueryError: DuckDB refuses the query.
            StoreError: A file cannot be read.
        """
        return self._again(lambda: get(self._con.sql(self._text, params=self._parameters or None)))

    def dicts(self) -> Iterator[dict[str, Any]]:
        """Each row as a dict of columns, fetched a few thousand at a time.

        Raises:
            QueryError: DuckDB refuses the query.
            StoreError: A file cannot be read.
        """
        # A cursor of its own: DuckDB 2 refuses a connection whose result is half read.
        cursor = self._con.cursor()

        def first() -> list[Any]:
            cursor.execute(self._text, self._parameters)
            return cursor.fetchmany(_FETCH)

        rows = self._again(first)
        names = [column[0] for column in cursor.description or ()]
        while rows:
            for row in rows:
                yield dict(zip(names, row, strict=True))
            rows = self._again(lambda: cursor.fetchmany(_FETCH), times=0)

    def _again(self, act: Callable[[], T], times: int = 5) -> T:
        """What reading gives, tried again if a settler took a file away that was listed already."""
        import duckdb

        while True:
            times -= 1
            try:
                return act()
            except duckdb.Error as exc:
                if times > 0 and isinstance(exc, duckdb.IOException):
                    continue
                if times >= 0 and self._is_mended(exc):
                    times = max(times, 1)
                    continue
                raise self._error(exc) from exc

    def _is_mended(self, exc: "duckdb.Error") -> bool:
        return self._layout is not None and mend(self._con, exc, self._layout)

    def _error(self, exc: "duckdb.Error") -> LightningOtelError:
        import duckdb

        found = damage_of(exc, self._layout) if self._layout is not None else None
        if found is None and isinstance(exc, duckdb.IOException):
            return StoreError(f"cannot read the store ({exc}); see: lightning-otel doctor")
        return found or QueryError(f"DuckDB refused the query: {exc}")


class Table(Generic[T]):
    """Rows of one kind: iterate over them, or take them as Arrow, a frame or a file."""

    def __init__(
        self,
        query: Callable[[], Query],
        rows: Callable[[], Iterable[T]],
        noun: str,
    ) -> None:
        """Describe a result.

        Args:
            query: Opens the result in DuckDB, on a connection of its own.
            rows: Opens the result as Python objects.
            noun: What a row is, for ``repr``.
        """
        self._query = query
        self._rows = rows
        self._noun = noun

    def __iter__(self) -> Iterator[T]:
        """Each row as an object."""
        return iter(self._rows())

    def __repr__(self) -> str:
        return f"<Table of {self._noun}: iterate, or .df() .pl() .arrow() .to_parquet(path)>"

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The Arrow C stream interface, which polars, pyarrow, pandas and others read as it is."""
        return self._query().__arrow_c_stream__(requested_schema)

    @property
    def columns(self) -> list[str]:
        """Names of the columns, in order."""
        return self._query().take(lambda relation: list(relation.columns))

    def rows(self) -> list[T]:
        """Every row, in memory."""
        return list(self)

    def dicts(self) -> Iterator[dict[str, Any]]:
        """Each row as a dict of columns."""
        return self._query().dicts()

    def df(self) -> Any:
        """A pandas data frame.

        Raises:
            ConfigError: pandas is not installed.
        """
        _require("pandas")
        return self._query().take(lambda relation: relation.df())

    def pl(self) -> Any:
        """A polars data frame.

        Raises:
            ConfigError: polars is not installed.
        """
        polars = _require("polars")
        return polars.DataFrame(self)

    def arrow(self) -> Any:
        """A pyarrow table.

        Raises:
            ConfigError: pyarrow is not installed.
        """
        pyarrow = _require("pyarrow")
        return pyarrow.table(self)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a zstd Parquet file; needs no other library."""
        copy = f"COPY result TO {quoted(os.fspath(path))} (FORMAT parquet, COMPRESSION zstd)"
        self._query().take(lambda relation: relation.query("result", copy))


class Transitions(Table[Transition]):
    """Transitions, and the funnel that led to them."""

    _report: Report | None = None

    def report(self) -> Report:
        """The funnel from spans to these rows, of every agent, with every reason for a loss.

        It is that of the latest whole pass over the rows, in whatever form; if there was none, they
        are gone through for it.
        """
        if self._report is None:
            for _ in self:
                pass
        assert self._report is not None
        return self._report

    def keep(self, report: Report) -> None:
        """Keep the funnel of a pass that came to its end."""
        self._report = report


def query_of(
    con: "duckdb.DuckDBPyConnection", rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]
) -> Query:
    """Python rows as a query, through a temporary file: memory does not grow with them.

    Args:
        con: The connection that will hold the temporary table.
        rows: Values that JSON knows.
        columns: DuckDB type of each column.
    """
    with tempfile.NamedTemporaryFile(suffix=".ndjson") as file:
        for row in rows:
            file.write(_line(row))
        file.flush()
        described = "{" + ", ".join(f"{quoted(k)}: {quoted(v)}" for k, v in columns.items()) + "}"
        con.execute(
            f"CREATE OR REPLACE TABLE held AS SELECT * FROM read_json({quoted(file.name)}, "
            f"format='newline_delimited', columns={described}, maximum_object_size=268435456)"
        )
    return Query(con, "SELECT * FROM held")


def check_read_only(con: "duckdb.DuckDBPyConnection", query: str) -> None:
    """Check that a text is one statement that reads.

    Raises:
        QueryError: It is not.
    """
    import duckdb

    try:
        statements = con.extract_statements(query)
        if len(statements) != 1:
            raise QueryError(f"one statement is expected, {len(statements)} were given")
        (statement,) = statements
        if statement.type == duckdb.StatementType.EXPLAIN:
            # EXPLAIN ANALYZE executes what it explains.
            statements = con.extract_statements(_EXPLAIN.sub("", statement.query, count=1))
        found = [each.type for each in statements]
    except duckdb.Error as exc:
        raise QueryError(f"DuckDB refused the query: {exc}") from exc
    if found != [duckdb.StatementType.SELECT]:
        raise QueryError(
            f"only SELECT, DESCRIBE and EXPLAIN of these read; this is {statement.type.name}; "
            "use connect() for a database of your own over the same views"
        )


def views_of(con: "duckdb.DuckDBPyConnection", query: str) -> Collection[str]:
    """Names of the views that a query reads; of all of them where that cannot be told.

    Args:
        con: A connection without views: with them DuckDB looks into these.
        query: The query.
    """
    import duckdb

    try:
        names = {name.lower() for name in con.get_table_names(query)}
    except duckdb.Error:
        return NAMES
    # Whoever names no view of ours, or asks DuckDB for a list of them, shall find them all.
    is_told = names and names <= NAMES and "duckdb_" not in query.lower()
    return names if is_told else NAMES


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
    except (TypeError, ValueError):
        # An integer beyond 64 bits, or half a surrogate pair, in what a model said.
        text = json.dumps(row, ensure_ascii=False, default=list)
        return text.encode("utf-8", "replace") + b"\n"


def _require(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise ConfigError(f"this needs {name}; install it with: pip install {name}") from exc
