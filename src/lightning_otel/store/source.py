"""Where spans are read from: what an engine implements, and the local files as the first one."""

import contextlib
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
from lightning_otel.store.layout import (
    EMPTY_DATA,
    EMPTY_LIVE,
    MEMORY,
    DataFile,
    Layout,
    total_bytes,
    write_private,
)
from lightning_otel.store.live import living
from lightning_otel.store.moment import moment_of
from lightning_otel.store.rebuild import mend_manifest
from lightning_otel.store.schema import COLUMNS, NARROW_COLUMNS
from lightning_otel.store.spans import listed_query, spans_query
from lightning_otel.store.sql import ROLLOUT, keep_quiet, listed, quoted
from lightning_otel.store.table import Query
from lightning_otel.store.writer import SpanWriter, writer_for
from lightning_otel.types import Span

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

STAMP: Final = "catalogue.stamp"
REWARD_ATTRIBUTES: Final = "reward_attributes"
"""Stands for ``attributes`` of spans that are a reward and nothing else; empty on the others."""
INDEX_COLUMNS: Final = (*NARROW_COLUMNS, REWARD_ATTRIBUTES)
"""What tells rollouts, and the rewards given to them from elsewhere: no content."""
_FEW: Final = 16
_MANY: Final = 64
_SMALL_BYTES: Final = 128 << 10
"""To read a larger segment takes longer than to open it."""

Wanted = Collection[str] | Callable[["duckdb.DuckDBPyConnection"], Collection[str]]
"""Names of views, or what tells them from a connection that has none yet."""
Columns = Collection[str] | Callable[["duckdb.DuckDBPyConnection"], Collection[str]]
"""Names of columns of ``spans``, or what tells them from a connection with the views, but no row"""
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
        columns: Which columns; ``REWARD_ATTRIBUTES`` may be among them.
    """

    rollout_ids: Sequence[str] = ()
    trace_ids: Sequence[str] = ()
    since_ns: int | None = None
    until_ns: int | None = None
    only: Sequence[SpanName] = ()
    without: Sequence[SpanName] = ()
    also: "Selection | None" = None
    is_ordered: bool = False
    columns: Collection[str] = tuple(COLUMNS)

    def query(self) -> tuple[str, list[Any]]:
        """The selection as a SQL query and its parameters."""
        parts = [self] if self.also is None else [self, self.also]
        found = [part._where() for part in parts]
        # Not one condition with OR: that would keep DuckDB from leaving out whole row groups.
        select = f"SELECT {projection(self.columns)} FROM spans"
        text = " UNION ALL ".join(f"{select} WHERE {where}" for where, _ in found)
        if self.is_ordered:
            text = f"SELECT * FROM ({text}) ORDER BY start_ns, process, sequence"
        return text, [value for _, values in found for value in values]

    def _where(self) -> tuple[str, list[Any]]:
        terms: list[str] = ["true"]
        values: list[Any] = []
        for column, ids in ((ROLLOUT, self.rollout_ids), ("trace_id", self.trace_ids)):
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


def projection(columns: Collection[str]) -> str:
    """What a SELECT from ``spans`` gives for the columns, in the store's order, in plain SQL."""
    chosen = [name for name in COLUMNS if name in columns]
    if REWARD_ATTRIBUTES in columns and "attributes" not in columns:
        chosen.append(f"CASE WHEN {views.BARE} THEN attributes END AS attributes")
    return ", ".join(chosen)


class SpanSource(Protocol):
    """An engine that holds spans."""

    @property
    def name(self) -> str:
        """Where the spans are, as a person wrote it, without a password."""

    @property
    def layout(self) -> Layout | None:
        """Its paths, where it keeps files on this machine."""

    def fetch(self, selection: Selection, con: "duckdb.DuckDBPyConnection | None" = None) -> Query:
        """The selected spans, Arrow-capable, with the store's columns.

        Args:
            selection: Which spans.
            con: A connection of this source to read on; by default a new one.
        """

    def connect(
        self, names: Wanted = views.NAMES, columns: Columns | None = None
    ) -> "duckdb.DuckDBPyConnection":
        """A connection of one's own in which the views named stand, ``spans`` always.

        Args:
            names: Which views.
            columns: Those of ``spans`` that will be looked at; all by default. An engine elsewhere
                leaves the others empty; one whose data DuckDB reads where it lies has them all.
        """

    def add(self, spans: Iterable[Span]) -> None:
        """Keep spans that are complete already, durably when this returns."""

    def writer(self) -> SpanWriter:
        """This process's writer into the engine.

        Raises:
            ConfigError: A traced process cannot write into it without waiting for it.
        """


class LocalSource:
    """A catalogue with its segments and Parquet files on this machine's disk."""

    def __init__(self, layout: Layout, *, is_brief: bool = False) -> None:
        """Name the files.

        Args:
            layout: The store's paths.
            is_brief: Whether every connection is read at once, and shows what counted when it was
                opened: that takes half of the time, and a third of the memory.
        """
        self.layout = layout
        self.name = str(layout.catalogue)
        self._is_brief = is_brief

    def connect(
        self, names: Wanted = views.NAMES, columns: Columns | None = None
    ) -> "duckdb.DuckDBPyConnection":
        """An in-memory DuckDB over the files.

        Raises:
            StoreMissingError: There is no store.
            StoreVersionError: A newer version wrote it.
            StoreError: It cannot be read.
        """
        import duckdb

        prepare(self.layout)
        con = new_connection()
        names = names(con) if callable(names) else names
        try:
            self._define(con, names)
        except duckdb.Error as exc:
            if not damage.mend(con, exc, self.layout):
                raise StoreError(
                    f"cannot read {self.layout.catalogue}: {exc}; see: lightning-otel doctor"
                ) from exc
            self._define(con, names)
        damage.tell(self.layout)
        return con

    def _define(self, con: "duckdb.DuckDBPyConnection", names: Collection[str]) -> None:
        layout = self.layout
        alive = living(layout) if "rollouts" in names else ()
        if self._is_brief:
            now = moment_of(layout)
            is_small = are_small(now.segments)
            query = listed_query(layout, now.files, now.segments, are_small=is_small)
            con.execute(f"CREATE OR REPLACE VIEW spans AS {query}")
            statements = views.derived_view_statements(names, alive)
        else:
            settled, avoided = damage.settled(layout), damage.avoided(layout)
            waiting = [path for path in layout.segments() if path.name not in settled]
            statements = views.view_statements(
                layout, settled, names, avoided, alive, are_small=are_small(waiting)
            )
        for statement in statements:
            con.execute(statement)

    def fetch(self, selection: Selection, con: "duckdb.DuckDBPyConnection | None" = None) -> Query:
        """The selected spans."""
        if con is None and selection.trace_ids and selection.also is None:
            con = self._near(selection.trace_ids)
        con = con or self.connect(("spans",))
        return Query(con, *selection.query(), layout=self.layout)

    def add(self, spans: Iterable[Span]) -> None:
        """Keep complete spans in this process's segment."""
        _add(self.writer(), spans)

    def _near(self, trace_ids: Sequence[str]) -> "duckdb.DuckDBPyConnection":
        """A connection whose ``spans`` are those of a few traces: all other files stay shut.

        What counts is decided here and not by the query, which must come soon; see
        :mod:`moment`.
        """
        import duckdb

        layout = self.layout
        prepare(layout)
        now = moment_of(layout)
        con = new_connection()
        try:
            query = listed_query(
                layout,
                _holding(con, layout, now.files, trace_ids),
                [path for path in now.segments if _mentions(path, trace_ids)],
                f"trace_id IN ({', '.join(map(quoted, trace_ids))})",
            )
            con.execute(f"CREATE VIEW spans AS {query}")
        except duckdb.Error as exc:
            if damage.damage_of(exc, layout) is None:
                raise StoreError(
                    f"cannot read {layout.catalogue}: {exc}; see: lightning-otel doctor"
                ) from exc
            return self.connect(("spans",))
        damage.tell(layout)
        return con

    def writer(self) -> SpanWriter:
        """This process's writer of the store, made if it is not there."""
        return writer_for(self.layout)


def _add(writer: SpanWriter, spans: Iterable[Span]) -> None:
    for span in spans:
        writer.add(span)


def new_connection(path: str = ":memory:") -> "duckdb.DuckDBPyConnection":
    """A DuckDB connection that keeps stdout clean."""
    import duckdb

    con = duckdb.connect(path)
    keep_quiet(con)
    return con


def prepare(layout: Layout) -> None:
    """See that a store can be read: its manifest, its catalogue, and without what is damaged.

    Raises:
        StoreMissingError: There is no store.
        StoreVersionError: A newer version wrote it.
        StoreError: It cannot be read.
    """
    layout.require()
    mend_manifest(layout)
    avoid(layout, look(layout, layout.read_manifest()))
    ensure_catalogue(layout)


def ensure_catalogue(layout: Layout) -> None:
    """Make ``X.duckdb`` and the files without rows, unless they stand there and are up to date.

    Where they cannot be made, as on a disk one may only read, what is there is read without them.

    Raises:
        StoreError: The manifest cannot be read.
    """
    import duckdb

    with contextlib.suppress(OSError):
        if not (layout.live / EMPTY_LIVE).exists():  # somebody emptied the folder, or removed it
            layout.make_folders()
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


def are_small(segments: Sequence[Path]) -> bool:
    """Whether segments are so many and so small that opening them takes longest."""
    return len(segments) > _MANY and total_bytes(segments) < _SMALL_BYTES * len(segments)


def _holding(
    con: "duckdb.DuckDBPyConnection",
    layout: Layout,
    files: Sequence[DataFile],
    trace_ids: Sequence[str],
) -> list[DataFile]:
    """The files that hold spans of some traces, told by one narrow column: the others cost less."""
    if len(files) <= _FEW:
        return list(files)
    ids = ", ".join(map(quoted, trace_ids))
    paths = [layout.data / file.name for file in files]
    rows = con.execute(
        f"SELECT DISTINCT parse_filename(filename) FROM read_parquet({listed(paths)}, "
        f"filename=true) WHERE trace_id IN ({ids})"
    ).fetchall()
    names = {name for (name,) in rows}
    return [file for file in files if file.name in names]


def _mentions(path: Path, texts: Iterable[str]) -> bool:
    """Whether a segment holds one of some ids, which are never escaped in JSON."""
    try:
        content = path.read_bytes()
    except OSError:
        return True  # DuckDB shall say what is wrong with it
    return any(text.encode() in content for text in texts)


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
    con.execute(f"ATTACH {quoted(str(made))} AS catalogue (STORAGE_VERSION 'v1.4.0')")
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
        self.name = MEMORY
        self._writer = SpanWriter(None)

    def connect(
        self, names: Wanted = views.NAMES, columns: Columns | None = None
    ) -> "duckdb.DuckDBPyConnection":
        """An in-memory DuckDB with the spans recorded so far."""
        con = new_connection()
        names = names(con) if callable(names) else names
        with tempfile.TemporaryDirectory(prefix="lightning-otel-") as folder:
            # The files' own views, read once into a table: one definition of what a span is.
            layout = Layout(Path(folder) / "memory.duckdb")
            layout.create()
            damage.write_empty_data(layout)
            (layout.live / "memory.ndjson").write_bytes(b"".join(self._writer.lines))
            con.execute(f"CREATE TABLE spans AS {spans_query(layout)}")
        for statement in views.derived_view_statements(names, (self._writer.process,)):
            con.execute(statement)
        return con

    def fetch(self, selection: Selection, con: "duckdb.DuckDBPyConnection | None" = None) -> Query:
        """The selected spans."""
        return Query(con or self.connect(("spans",)), *selection.query())

    def add(self, spans: Iterable[Span]) -> None:
        """Keep complete spans in this process's memory."""
        _add(self._writer, spans)

    def writer(self) -> SpanWriter:
        """The writer all recordings into this source share."""
        return self._writer
