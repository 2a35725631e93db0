"""Where spans are read from: what an engine implements, and the local files as the first one."""

import hashlib
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from lightning_otel.errors import StoreError
from lightning_otel.store import damage, views
from lightning_otel.store.damage import avoid, look
from lightning_otel.store.layout import EMPTY_DATA, Layout, write_private
from lightning_otel.store.live import living
from lightning_otel.store.rebuild import mend_manifest
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.table import Query
from lightning_otel.store.writer import SpanWriter, writer_for

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

STAMP: Final = "catalogue.stamp"
_SELECT: Final = f"SELECT {', '.join(COLUMNS)} FROM spans"

Wanted = Collection[str] | Callable[["duckdb.DuckDBPyConnection"], Collection[str]]
"""Names of views, or what tells them from a connection that has none yet."""
SpanName = tuple[str, str]
"""Trace and span id."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which spans to fetch; an empty tuple or None selects all.

    Attributes:
        rollout_ids: Whole ids.
        trace_ids: Whole ids.
        since_ns: Spans that start at this time or later.
        until_ns: Spans that start at this time or earlier.
        only: Names of the spans wanted.
        without: Names of spans not wanted.
        also: What is fetched besides.
        is_ordered: Whether order matters; sorting wide rows costs more than reading them.
    """

    rollout_ids: Sequence[str] = ()
    trace_ids: Sequence[str] = ()
    since_ns: int | None = None
    until_ns: int | None = None
    only: Sequence[SpanName] = ()
    without: Sequence[SpanName] = ()
    also: "Selection | None" = None
    is_ordered: bool = False

    def query(self) -> tuple[str, list[Any]]:
        """The selection as a SQL query and its parameters."""
        parts = [self] if self.also is None else [self, self.also]
        found = [part._where() for part in parts]
        # Not one condition with OR: that would keep DuckDB from leaving out whole row groups.
        text = " UNION ALL ".join(f"{_SELECT} WHERE {where}" for where, _ in found)
        if self.is_ordered:
            text = f"SELECT * FROM ({text}) ORDER BY start_ns, process, sequence"
        return text, [value for _, values in found for value in values]

    def _where(self) -> tuple[str, list[Any]]:
        terms: list[str] = ["true"]
        values: list[Any] = []
        for column, ids in ((views.ROLLOUT, self.rollout_ids), ("trace_id", self.trace_ids)):
            if ids:
                terms.append(f"{column} IN (SELECT unnest(?))")
                values.append(list(ids))
        for word, names in (("IN", self.only), ("NOT IN", self.without)):
            if names:
                terms.append(f"(trace_id, span_id) {word} (SELECT unnest(?), unnest(?))")
                values += [list(ids) for ids in zip(*names, strict=True)]
        if self.since_ns is not None:
            terms.append("start_ns >= ?")
            values.append(self.since_ns)
        if self.until_ns is not None:
            terms.append("start_ns <= ?")
            values.append(self.until_ns)
        return " AND ".join(terms), values


class SpanSource(Protocol):
    """An engine that holds spans."""

    @property
    def layout(self) -> Layout | None:
        """Its paths, where it keeps files on this machine."""

    def fetch(self, selection: Selection, con: "duckdb.DuckDBPyConnection | None" = None) -> Query:
        """The selected spans, Arrow-capable, with the store's columns.

        Args:
            selection: Which spans.
            con: A connection of this source to read on; by default a new one.
        """

    def connect(self, names: Wanted = views.NAMES) -> "duckdb.DuckDBPyConnection":
        """A connection of one's own in which the views named stand, ``spans`` always."""

    def writer(self) -> SpanWriter:
        """This process's writer into the engine."""


class LocalSource:
    """A catalogue with its segments and Parquet files on this machine's disk."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def connect(self, names: Wanted = views.NAMES) -> "duckdb.DuckDBPyConnection":
        """An in-memory DuckDB over the files.

        Raises:
            StoreMissingError: There is no store.
            StoreVersionError: A newer version wrote it.
            StoreError: It cannot be read.
        """
        import duckdb

        self.layout.require()
        mend_manifest(self.layout)
        avoid(self.layout, look(self.layout, self.layout.read_manifest()))
        settled = damage.settled(self.layout)
        ensure_catalogue(self.layout)
        con = new_connection()
        names = names(con) if callable(names) else names
        try:
            self._define(con, settled, names)
        except duckdb.Error as exc:
            if not damage.mend(con, exc, self.layout):
                raise StoreError(
                    f"cannot read {self.layout.catalogue}: {exc}; see: lightning-otel doctor"
                ) from exc
            self._define(con, damage.settled(self.layout), names)
        damage.tell(self.layout)
        return con

    def _define(
        self, con: "duckdb.DuckDBPyConnection", settled: list[str], names: Collection[str]
    ) -> None:
        avoided = damage.avoided(self.layout)
        alive = living(self.layout) if "rollouts" in names else ()
        for statement in views.view_statements(self.layout, settled, names, avoided, alive):
            con.execute(statement)

    def fetch(self, selection: Selection, con: "duckdb.DuckDBPyConnection | None" = None) -> Query:
        """The selected spans."""
        con = con or self.connect(("spans",))
        return Query(con, *selection.query(), layout=self.layout)

    def writer(self) -> SpanWriter:
        """This process's writer of the store, made if it is not there."""
        return writer_for(self.layout)


def new_connection(path: str = ":memory:") -> "duckdb.DuckDBPyConnection":
    """A DuckDB connection that keeps stdout clean."""
    import duckdb

    con = duckdb.connect(path)
    con.execute("SET enable_progress_bar = false")
    return con


def ensure_catalogue(layout: Layout) -> None:
    """Make ``X.duckdb`` and the file without rows, unless they stand there and are up to date.

    Where they cannot be made, as on a disk one may only read, what is there is read without them.

    Raises:
        StoreError: The manifest cannot be read.
    """
    import duckdb

    statements = views.view_statements(layout, damage.settled(layout))
    text = hashlib.sha256("\n".join(statements).encode()).hexdigest()
    has_data = (layout.data / EMPTY_DATA).exists()
    if has_data and _stamp(layout) == f"{text} {_state(layout.catalogue)}":
        return
    try:
        damage.write_empty_data(layout)  # anew: it names every column of this schema
        with new_connection() as con:
            _write_catalogue(con, layout, statements)
        made = _made(layout, STAMP)
        write_private(made, f"{text} {_state(layout.catalogue)}".encode())
        _put(made, layout.root / STAMP)
    except (OSError, duckdb.Error):
        log.debug("%s has no catalogue, or an old one", layout.root, exc_info=True)


def _state(catalogue: Path) -> str:
    """Size and time of change, which tell whether somebody else wrote into it or damaged it."""
    try:
        found = catalogue.stat()
    except OSError:
        return "missing"
    return f"{found.st_size} {found.st_mtime_ns}"


def _stamp(layout: Layout) -> str:
    """What the catalogue was written for, and how it looked then."""
    try:
        return (layout.root / STAMP).read_text()
    except OSError:
        return ""


def _write_catalogue(
    con: "duckdb.DuckDBPyConnection", layout: Layout, statements: Iterable[str]
) -> None:
    """Put ``X.duckdb`` there by rename: a reader of the old one is not disturbed."""
    made = _made(layout, "catalogue.duckdb")
    # In a format that older DuckDB shells read too.
    con.execute(f"ATTACH {views.quoted(str(made))} AS catalogue (STORAGE_VERSION 'v1.4.0')")
    con.execute("USE catalogue")
    for statement in statements:
        con.execute(statement)
    con.execute("USE memory")
    con.execute("DETACH catalogue")
    _put(made, layout.catalogue)


def _made(layout: Layout, name: str) -> Path:
    """A path of one's own for a file being made: others may be at it too."""
    return layout.new / f"{os.getpid()}-{secrets.token_hex(4)}-{name}"


def _put(made: Path, final: Path) -> None:
    made.chmod(0o600)
    os.replace(made, final)


class MemorySource:
    """Spans kept in this process and gone with it, for tests and short looks."""

    def __init__(self) -> None:
        self.layout = None
        self._writer = SpanWriter(None)

    def connect(self, names: Wanted = views.NAMES) -> "duckdb.DuckDBPyConnection":
        """An in-memory DuckDB with the spans recorded so far."""
        con = new_connection()
        names = names(con) if callable(names) else names
        with tempfile.TemporaryDirectory(prefix="lightning-otel-") as folder:
            # The files' own views, read once into a table: one definition of what a span is.
            layout = Layout(Path(folder) / "memory.duckdb")
            layout.create()
            damage.write_empty_data(layout)
            (layout.live / "memory.ndjson").write_bytes(b"".join(self._writer.lines))
            con.execute(f"CREATE TABLE spans AS {views.spans_query(layout)}")
        for statement in views.derived_view_statements(names, (self._writer.process,)):
            con.execute(statement)
        return con

    def fetch(self, selection: Selection, con: "duckdb.DuckDBPyConnection | None" = None) -> Query:
        """The selected spans."""
        return Query(con or self.connect(("spans",)), *selection.query())

    def writer(self) -> SpanWriter:
        """The writer all recordings into this source share."""
        return self._writer
