"""A query's result, handed out in whatever form the reader works with.

Nothing is computed until it is asked for, and pandas, polars and pyarrow are imported only by the
method that is named after them.
"""

import atexit
import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import orjson

from lightning_otel import markup
from lightning_otel.errors import (
    ConfigError,
    NotInstalledError,
    QueryError,
    StoreDamagedError,
)
from lightning_otel.store import zones
from lightning_otel.store.layout import write_private
from lightning_otel.store.reader import Reader
from lightning_otel.store.schema import span_of
from lightning_otel.store.sql import keep_quiet, quoted
from lightning_otel.store.views import NAMES
from lightning_otel.types import Report, Span, Transition
from lightning_otel.types.wording import step_row

if TYPE_CHECKING:
    import duckdb

T = TypeVar("T")
_FETCH = 2048
_LINE_BYTES = 1 << 20
_PART_BYTES = 16 << 20
"""Of rows in a temporary file at once."""
_MEMORY = "128MB"
"""Of DuckDB's for rows made here, before it spills to the disk."""
_MORE = ("512MB", "2GB")
"""What it is given where that is too little: it works on 2,048 rows at once, however long."""
_ROW_GROUP = 2048
"""Rows of a Parquet file that are in memory at once; with their bodies these are 10 MB."""
_PAGE = 20
"""Rows that a notebook shows."""
_COUNTING_S = 5.0
"""How long it counts the others."""
_DRAWN = 60
"""Spans in the picture of a trace in a notebook."""
_MOST_OUTLINED = 5_000
"""Spans that such a picture is made of: a second's work."""
_EXPLAIN = re.compile(r"\s*explain\s+(analyze\s+)?(\([^()]*\)\s*)?", re.IGNORECASE)


class Query:
    """One SELECT on a connection of its own: Arrow for whoever reads that, rows for us."""

    def __init__(
        self,
        con: "duckdb.DuckDBPyConnection",
        text: str,
        parameters: Sequence[object] = (),
        *,
        is_spilled: bool = False,
    ) -> None:
        """Hold a query.

        Args:
            con: A connection for this query alone.
            text: One SELECT.
            parameters: What stands for its question marks.
            is_spilled: Whether the connection is one of :func:`query_of`.
        """
        self._con = con if isinstance(con, Reader) else Reader(con)
        self._is_spilled = is_spilled
        self._text = text
        self._parameters = list(parameters)
        self._is_used = False

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The Arrow C stream interface."""
        return self.take(lambda relation: relation.__arrow_c_stream__(requested_schema))

    def take(self, get: "Callable[[duckdb.DuckDBPyRelation], T]") -> T:
        """Return what a function makes of the result, which is a DuckDB relation.

        Raises:
            QueryError: DuckDB refuses the query.
            StoreError: A file cannot be read.
        """
        con = self._con.con

        def act() -> T:
            return get(con.sql(self._text, params=self._parameters or None))

        return self._answer_again(lambda: spill(con, act) if self._is_spilled else act())

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a zstd Parquet file.

        Raises:
            QueryError: DuckDB refuses the query.
            StoreError: A file cannot be read.
        """
        options = f"COMPRESSION zstd, USE_TMP_FILE false, ROW_GROUP_SIZE {_ROW_GROUP}"
        copy = f"COPY result TO {quoted(str(path))} (FORMAT parquet, {options})"
        # Each thread would hold the rows that it read before their turn comes.
        self._con.con.execute("SET threads = 1")
        self.take(lambda relation: relation.query("result", copy))

    def count(self) -> int:
        """Count the rows."""
        return self.take(lambda found: int(found.aggregate("count(*)").fetchall()[0][0]))

    def head(self, count: int) -> list[dict[str, Any]]:
        """Return the first rows, each a dict of columns; only these are sorted or read whole."""

        def get(found: "duckdb.DuckDBPyRelation") -> list[dict[str, Any]]:
            columns = zones.as_text(found.types)
            rows = (found.project(columns) if columns else found).limit(count).fetchall()
            return [dict(zip(found.columns, row, strict=True)) for row in rows]

        return self.take(get)

    def dicts(self) -> Iterator[dict[str, Any]]:
        """Yield each row as a dict of columns, fetched a few thousand at a time."""
        names, batches = self.batches()
        for batch in batches:
            for row in batch:
                yield dict(zip(names, row, strict=True))

    def batches(self, size: int = _FETCH) -> tuple[list[str], Iterator[list[Any]]]:
        """Return the columns' names, and the rows as tuples, so many at a time.

        A time with a zone comes as text.
        """
        # A cursor of its own: DuckDB 2 refuses a connection whose result is half read.
        cursor = self._con.con.cursor()
        names: list[str] = []

        def first() -> list[Any]:
            cursor.execute(self._text, self._parameters)
            described = cursor.description or []
            names[:] = [name for name, *_ in described]
            if columns := zones.as_text(kind for _, kind, *_ in described):
                cursor.execute(zones.selecting(columns, self._text), self._parameters)
            return cursor.fetchmany(size)

        def following(rows: list[Any]) -> Iterator[list[Any]]:
            while rows:
                yield rows
                rows = self._fetch_again(lambda: cursor.fetchmany(size))

        return names, following(self._answer_again(first))

    def _answer_again(self, act: Callable[[], T]) -> T:
        """Read what counts now, again where a part of the store turns out to be damaged or gone."""
        if self._is_used:
            self._con.refresh()
        self._is_used = True
        return self._fetch_again(lambda: self._con.attempt(act))

    def _fetch_again(self, act: Callable[[], T]) -> T:
        import duckdb

        try:
            return act()
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
        """Describe a result.

        Args:
            query: Opens the result in DuckDB, on a connection of its own.
            rows: Opens the result as Python objects.
            noun: What a row is, for ``repr``.
            counts: Counts the rows, some at a time, sooner than by making them, if that can be.
        """
        self._query = query
        self._rows = rows
        self._noun = noun
        self._counts = counts

    def __iter__(self) -> Iterator[T]:
        """Each row as an object."""
        return iter(self._rows())

    def __repr__(self) -> str:
        return f"<Table of {self._noun}: iterate, or .df() .pl() .arrow() .to_parquet(path)>"

    def _repr_html_(self) -> str:
        """The first rows, and how many there are, for notebooks."""
        rows = [self._as_columns(row) for row in self._first(_PAGE + 1)]
        columns = list(rows[0]) if rows else []
        count = str(len(rows))
        if len(rows) > _PAGE:
            count = f"the first {_PAGE} of {self._count_in_words()}"
        shown = [[row.get(name) for name in columns] for row in rows[:_PAGE]]
        return markup.table(columns, shown, f"{count} {self._noun}")

    def _first(self, count: int) -> Iterable[T]:
        return itertools.islice(self, count)

    def _count_in_words(self) -> str:
        """Count the rows; where that takes long, tell how many there are at least."""
        until_s, found = time.monotonic() + _COUNTING_S, 0
        for number in self._counts() if self._counts is not None else (1 for _ in self):
            if found and time.monotonic() > until_s:
                return f"more than {max(found, _PAGE):,}"
            found += number
        return f"{found:,}"

    def _as_columns(self, row: T) -> Mapping[str, object]:
        """A row by column, for people."""
        if isinstance(row, Mapping):
            return row
        held = dataclasses.fields(row) if dataclasses.is_dataclass(row) else ()
        return {each.name: getattr(row, each.name) for each in held}

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
        _import_optional("pandas")
        return self._query().take(lambda relation: relation.df())

    def pl(self) -> Any:
        """A polars data frame.

        Raises:
            ConfigError: polars is not installed.
        """
        polars = _import_optional("polars")
        return polars.DataFrame(self)

    def arrow(self) -> Any:
        """A pyarrow table.

        Raises:
            ConfigError: pyarrow is not installed.
        """
        pyarrow = _import_optional("pyarrow")
        return pyarrow.table(self)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a zstd Parquet file, the user's alone unless a shared one stands there.

        Needs no other library.

        Raises:
            ConfigError: No file can be made there; what stood there is as it was.
        """
        with private_file(path) as made:
            self._query().to_parquet(made)


class Spans(Table[Span]):
    """Spans: of one rollout or trace a notebook shows the picture."""

    def __init__(
        self, query: Callable[[], Query], rows: Callable[[], Iterable[Span]], *, is_one: bool
    ) -> None:
        """Describe a result.

        Args:
            query: Opens the result in DuckDB, on a connection of its own.
            rows: Opens the result as Python objects.
            is_one: Whether they are those of one rollout or trace.
        """
        super().__init__(query, rows, "spans", counts=lambda: [query().count()])
        self._is_one = is_one

    def _repr_html_(self) -> str:
        """The picture of a rollout or trace, or the first rows, for notebooks."""
        from lightning_otel.adapter.outline import outline
        from lightning_otel.picture import picture

        found = list(itertools.islice(self, _MOST_OUTLINED + 1)) if self._is_one else []
        if not 0 < len(found) <= _MOST_OUTLINED:
            return super()._repr_html_()
        return picture(outline(found), limit=_DRAWN)

    def _first(self, count: int) -> Iterable[Span]:
        return map(span_of, self._query().head(count))

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
        noun: str,
        records: Callable[[], Iterable[Mapping[str, Any]]],
        *,
        counts: Callable[[], Iterable[int]],
    ) -> None:
        """Describe a result; ``records`` opens it as JSON values by column."""
        super().__init__(query, rows, noun, counts=counts)
        self._records = records

    def lines(self) -> Iterator[bytes]:
        """Each row as a line of JSON, by column, as it is adapted: memory does not grow with them.

        Raises:
            StoreError: A file cannot be read.
        """
        return map(line, self._records())

    def _as_columns(self, row: Transition) -> Mapping[str, object]:
        return step_row(row)

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


@contextlib.contextmanager
def private_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file to write that stands at the path once the block has ended well, else nothing does.

    Until then nobody else can read it; after that only those who could read what stood there.

    Raises:
        ConfigError: It cannot be made there.
    """
    final = Path(os.path.realpath(path))
    made = final.with_name(f".{final.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        rights = stat.S_IMODE(final.stat().st_mode) if final.exists() else 0o600
        write_private(made, b"")
    except OSError as exc:
        raise ConfigError(
            f"cannot write {path}: {exc.strerror or exc}; name a writable place"
        ) from exc
    try:
        yield made
        made.chmod(rights)
        made.replace(final)
    finally:
        made.unlink(missing_ok=True)


def query_of(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> Query:
    """Return Python rows as a query on a connection of bounded memory, which spills to the disk.

    Args:
        rows: Values that JSON knows.
        columns: DuckDB type of each column.
    """
    import duckdb

    folder = Path(tempfile.mkdtemp(prefix="lightning-otel-"))
    con = duckdb.connect()
    keep_quiet(con)
    con.execute(f"SET temp_directory = {quoted(str(folder))}")
    con.execute(f"SET memory_limit = '{_MEMORY}'")
    con.execute("SET threads = 1")
    hold(con, "held", columns)
    insert(con, "held", rows, columns)
    found = Query(con, "SELECT * FROM held", is_spilled=True)
    weakref.finalize(found, remove_folder, folder)
    return found


def spill(con: "duckdb.DuckDBPyConnection", act: Callable[[], T]) -> T:
    """Result of an act on a connection of little memory, with more of it where it needs more."""
    import duckdb

    for limit in _MORE:
        try:
            return act()
        except duckdb.OutOfMemoryException:
            con.execute(f"SET memory_limit = '{limit}'")
    return act()


def remove_folder(folder: Path) -> None:
    """Take a folder away; at the end of the process if a result still being read lies in it."""
    try:
        folder.rmdir()
    except OSError:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def hold(con: "duckdb.DuckDBPyConnection", table: str, columns: Mapping[str, str]) -> None:
    """Make a table with some columns and no rows, in place of the one before."""
    kinds = ", ".join(f'"{name}" {kind}' for name, kind in columns.items())
    con.execute(f"CREATE OR REPLACE TABLE {table} ({kinds})")


def insert(
    con: "duckdb.DuckDBPyConnection",
    table: str,
    rows: Iterable[Mapping[str, Any]],
    columns: Mapping[str, str],
) -> None:
    """Append Python rows to a table, through a temporary file.

    Args:
        con: The connection that has the table.
        table: Its name.
        rows: Values that JSON knows.
        columns: DuckDB type of each column, in the table's order.
    """
    # DuckDB takes twice as much as a line may be long for each thread, be a line that long or not.
    described = "{" + ", ".join(f"{quoted(k)}: {quoted(v)}" for k, v in columns.items()) + "}"
    lines, is_over = map(line, rows), False
    while not is_over:
        with tempfile.NamedTemporaryFile(suffix=".ndjson") as file:
            size = longest = 0
            while size < _PART_BYTES and (text := next(lines, b"")):
                size += file.write(text)
                longest = max(longest, len(text))
            is_over = size < _PART_BYTES
            file.flush()
            if size:
                statement = (
                    f"INSERT INTO {table} SELECT * FROM read_json({quoted(file.name)}, "
                    f"format='newline_delimited', columns={described}, "
                    f"maximum_object_size={max(_LINE_BYTES, 2 * longest)})"
                )
                spill(con, partial(con.execute, statement))


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
        # EXPLAIN ANALYZE executes what it explains.
        found = [_statement_kind(each) for each in con.extract_statements(explained(con, query))]
        kind = _statement_kind(statements[0])
    except duckdb.Error as exc:
        raise QueryError(f"DuckDB refused the query: {exc}") from exc
    if found != ["SELECT"]:
        raise QueryError(
            f"only SELECT, DESCRIBE and EXPLAIN of these read; this is {kind}; "
            "use connect() for a database of your own over the same views"
        )


def _statement_kind(statement: "duckdb.Statement") -> str:
    try:
        return statement.type.name
    except ValueError:
        # DuckDB's Python does not know every kind of statement that DuckDB does.
        return "of an unknown kind"


def explained(con: "duckdb.DuckDBPyConnection", query: str) -> str:
    """The statement that an EXPLAIN explains; any other statement as it is."""
    (statement,) = con.extract_statements(query)
    is_explain = _statement_kind(statement) == "EXPLAIN"
    return _EXPLAIN.sub("", statement.query, count=1) if is_explain else query


def views_of(con: "duckdb.DuckDBPyConnection", query: str) -> Collection[str]:
    """Return the names of the views that a query reads; all of them where that cannot be told.

    Args:
        con: A connection without views: with them DuckDB looks into these.
        query: The query.

    Raises:
        QueryError: It is not one statement that reads.
    """
    import duckdb

    check_read_only(con, query)
    try:
        names = {name.lower() for name in con.get_table_names(query)}
    except duckdb.Error:
        return NAMES
    # Whoever names no view of ours, or asks DuckDB for a list of them, shall find them all.
    is_told = names and names <= NAMES and "duckdb_" not in query.lower()
    return names if is_told else NAMES


def windows(starts: Query, spans: int) -> list[tuple[int, int]]:
    """Times, first and last, between which about so many spans begin; together they hold all.

    Args:
        starts: A query with the column ``start_ns``.
        spans: How many; spans that begin at the same time are never parted.
    """
    parted = (
        "SELECT min(start_ns), max(start_ns) FROM (SELECT start_ns, "
        f"(sum(spans) OVER (ORDER BY start_ns) - 1) // {spans} AS part "
        "FROM (SELECT start_ns, count(*) AS spans FROM chosen GROUP BY start_ns)) "
        "GROUP BY part ORDER BY part"
    )

    def get(relation: "duckdb.DuckDBPyRelation") -> list[tuple[int, int]]:
        found = relation.query("chosen", parted)
        return found.fetchall() if found is not None else []

    return starts.take(get)


def line(row: Mapping[str, Any]) -> bytes:
    """A row as one line of JSON."""
    try:
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
    except (TypeError, ValueError):
        # An integer beyond 64 bits, or half a surrogate pair, in what a model said.
        text = json.dumps(row, ensure_ascii=False, default=list)
        if "NaN" in text or "Infinity" in text:  # which is no JSON; the quick way writes null too
            held = json.loads(text, parse_constant=lambda constant: None)
            text = json.dumps(held, ensure_ascii=False)
        return text.encode("utf-8", "replace") + b"\n"


def _import_optional(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise NotInstalledError(f"this needs {name}; install it with: pip install {name}") from exc
