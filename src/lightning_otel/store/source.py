"""Where spans are read from: one method an engine implements, and the local files as the first one."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lightning_otel.store import views
from lightning_otel.store.layout import EMPTY_DATA, Layout, now_us
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.segment import SpanWriter, writer_for
from lightning_otel.store.table import Query

if TYPE_CHECKING:
    import duckdb


@dataclass(frozen=True, slots=True)
class Selection:
    """Which spans to fetch; an empty tuple or None selects all.

    Attributes:
        rollout_ids: Whole ids.
        trace_ids: Whole ids.
        since_ns: Spans that start at this time or later.
        until_ns: Spans that start at this time or earlier.
        is_ordered: Whether order matters; sorting wide rows costs more than reading them.
    """

    rollout_ids: Sequence[str] = ()
    trace_ids: Sequence[str] = ()
    since_ns: int | None = None
    until_ns: int | None = None
    is_ordered: bool = False

    def where(self) -> tuple[str, list[Any]]:
        """The selection as a SQL condition and its parameters."""
        terms: list[str] = ["true"]
        values: list[Any] = []
        for column, ids in ((views.ROLLOUT, self.rollout_ids), ("trace_id", self.trace_ids)):
            if ids:
                terms.append(f"{column} IN (SELECT unnest(?))")
                values.append(list(ids))
        if self.since_ns is not None:
            terms.append("start_ns >= ?")
            values.append(self.since_ns)
        if self.until_ns is not None:
            terms.append("start_ns <= ?")
            values.append(self.until_ns)
        return " AND ".join(terms), values


class SpanSource(Protocol):
    """An engine that holds spans."""

    def fetch(self, selection: Selection) -> Query:
        """The selected spans, Arrow-capable, with the store's columns."""

    def connect(self) -> "duckdb.DuckDBPyConnection":
        """A connection of one's own in which the four views stand."""

    def writer(self) -> SpanWriter:
        """This process's writer into the engine."""


class LocalSource:
    """A catalogue with its segments and Parquet files on this machine's disk."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def connect(self) -> "duckdb.DuckDBPyConnection":
        """An in-memory DuckDB over the files.

        Raises:
            StoreMissingError: There is no store.
            StoreVersionError: A newer version wrote it.
        """
        self.layout.require()
        self.layout.read_manifest()
        ensure_catalogue(self.layout)
        return self._views()

    def fetch(self, selection: Selection) -> Query:
        """The selected spans."""
        return _selected(self.connect(), selection)

    def writer(self) -> SpanWriter:
        """This process's writer of the store, made if it is not there."""
        return writer_for(self.layout)

    def _views(self) -> "duckdb.DuckDBPyConnection":
        con = new_connection()
        for statement in views.view_statements(self.layout):
            con.execute(statement)
        return con


def _selected(con: "duckdb.DuckDBPyConnection", selection: Selection) -> Query:
    where, values = selection.where()
    order = "ORDER BY start_ns, process, sequence" if selection.is_ordered else ""
    return Query(con, f"SELECT {', '.join(COLUMNS)} FROM spans WHERE {where} {order}", values)


def new_connection(path: str = ":memory:") -> "duckdb.DuckDBPyConnection":
    """A DuckDB connection that keeps stdout clean."""
    import duckdb

    con = duckdb.connect(path)
    con.execute("SET enable_progress_bar = false")
    return con


def ensure_catalogue(layout: Layout) -> None:
    """Make ``X.duckdb`` and the file without rows, unless they stand there for this very place."""
    if not (layout.data / EMPTY_DATA).exists():
        con = new_connection()
        con.execute(views.empty_data_statement(layout))
        con.close()
        _put(layout.new / EMPTY_DATA, layout.data / EMPTY_DATA)
    if not layout.catalogue.exists() or not _is_for(layout):
        write_catalogue(layout)


def write_catalogue(layout: Layout) -> None:
    """Make ``X.duckdb`` with the views, by rename: a reader of the old one is not disturbed."""
    made = layout.new / f"catalogue-{os.getpid()}-{now_us()}.duckdb"
    con = new_connection(str(made))
    for statement in views.view_statements(layout):
        con.execute(statement)
    con.execute("CHECKPOINT")
    con.close()
    _put(made, layout.catalogue)
    _stamp(layout).write_text(_place(layout))


def _put(made: Path, final: Path) -> None:
    made.chmod(0o600)
    os.replace(made, final)


def _stamp(layout: Layout) -> Path:
    return layout.root / "catalogue.place"


def _place(layout: Layout) -> str:
    """What the catalogue depends on: the place its views name, and the text of the views."""
    import hashlib

    text = "\n".join(views.view_statements(layout))
    return hashlib.sha256(text.encode()).hexdigest()


def _is_for(layout: Layout) -> bool:
    try:
        return _stamp(layout).read_text() == _place(layout)
    except OSError:
        return False


class MemorySource:
    """Spans kept in this process and gone with it, for tests and short looks."""

    def __init__(self) -> None:
        self._writer = SpanWriter(None)

    def connect(self) -> "duckdb.DuckDBPyConnection":
        """An in-memory DuckDB with the spans recorded so far."""
        import tempfile

        con = new_connection()
        with tempfile.TemporaryDirectory(prefix="lightning-otel-") as folder:
            # The files' own views, read once into a table: one definition of what a span is.
            layout = Layout(Path(folder) / "memory.duckdb")
            layout.create()
            ensure_catalogue(layout)
            (layout.live / "memory.ndjson").write_bytes(b"".join(self._writer.lines))
            con.execute(f"CREATE TABLE spans AS {views.spans_query(layout)}")
        for statement in views.derived_view_statements():
            con.execute(statement)
        return con

    def fetch(self, selection: Selection) -> Query:
        """The selected spans."""
        return _selected(self.connect(), selection)

    def writer(self) -> SpanWriter:
        """The writer all recordings into this source share."""
        return self._writer
