"""Sources of spans: the protocol of engines, and the local files as the first of them."""

import copy
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from lightning_otel.store.catalogue import catalogue_statements
from lightning_otel.store.damage import exclude_damage, list_excluded
from lightning_otel.store.facts import USUAL, CreditOptions, delete_facts, make_cache
from lightning_otel.store.files import escape_glob
from lightning_otel.store.layout import (
    EMPTY_FACTS,
    MEMORY,
    Layout,
    is_settling_due,
    now_us,
    read_facts_mark,
)
from lightning_otel.store.manifest import DataFile
from lightning_otel.store.reader import Moment, Reader
from lightning_otel.store.recovery import ensure_manifest
from lightning_otel.store.renewal import has_unwritten_facts, renew_facts
from lightning_otel.store.schema import COLUMNS, NARROW_COLUMNS
from lightning_otel.store.selection import INDEX_COLUMNS, Selection, SpanReader
from lightning_otel.store.settle import settle_for_reader, wait_until_visible
from lightning_otel.store.snapshot import (
    Snapshot,
    list_nearby_files,
    rows_sql,
    same_span_sql,
)
from lightning_otel.store.sql import new_connection, quote_text
from lightning_otel.store.table import Query
from lightning_otel.store.template import ensure_catalogue
from lightning_otel.store.views import (
    FACT_VIEWS,
    NAMES,
    alive_macro_sql,
    create_views,
    list_views,
)
from lightning_otel.store.writer import SpanWriter, writer_for, writers_by_catalogue
from lightning_otel.types import Span

if TYPE_CHECKING:
    import duckdb

    from lightning_otel.store import SpanStore

    Con = duckdb.DuckDBPyConnection

S = TypeVar("S", bound="SpanStore")
_SUMMARIES: Final = FACT_VIEWS - {"calls", "breakdown"}
"""Views that read no content, and are bound soon."""
_COMPUTED: Final = FACT_VIEWS - {"attempts"}
_FETCH: Final = 2048
_SUMMARY: Final = ", ".join((*NARROW_COLUMNS, "attributes"))
_HELD_BYTES: Final = 32 << 20
"""Segments up to this size are parsed once for a connection, whatever is read of them."""
_SUMMARY_COLUMNS: Final = frozenset({*INDEX_COLUMNS, "attributes"})

Names = Collection[str]
Statement = tuple[str, Sequence[object]]
"""A query, empty if several will be put, and what stands for its question marks."""


class SpanSource(ABC):
    """An engine that holds spans, named as a person wrote it, without a password.

    ``layout`` are its paths, if on this machine; ``moment`` is what counts there for every reader;
    by ``credit`` rewards reach calls in its facts.
    """

    name: str
    layout: Layout | None = None
    moment: Moment | None = None
    credit: CreditOptions = USUAL
    is_passive = False
    """Whether facts are read as they were last computed, all by one connection."""

    def connect(
        self,
        names: Collection[str] = NAMES,
        columns: Collection[str] | None = None,
        *,
        query: str | None = None,
        parameters: Sequence[object] = (),
        page: Statement | None = None,
    ) -> Reader:
        """Return a connection of one's own in which the views named stand, ``spans`` always.

        Args:
            names: Which views.
            columns: Those of ``spans`` that will be looked at; all by default. An engine elsewhere
                leaves the others empty.
            query: The one query that will be put, if it is one: it tells the views and columns.
            parameters: What stands for its question marks.
            page: A query for the rollouts that will be looked at, if they are few.
        """
        if self.is_passive:
            return self._overview
        con = self._open()
        names = list_views(con, query) if query is not None else names
        return self._read(con, names, columns, (query or "", parameters), page)

    def connect_overview(self) -> Reader:
        """Return a connection for several questions over facts and spans without content.

        Of a source at one moment, or with its last facts, all questions are put to the same one.
        """
        is_shared = self.moment is not None or self.is_passive
        return self._overview if is_shared else self._open_overview()

    @cached_property
    def _overview(self) -> Reader:
        return self._open_overview()

    def _open_overview(self) -> Reader:
        names, columns = ("spans", *_SUMMARIES), tuple(_SUMMARY_COLUMNS)
        return self._read(self._open(), names, columns, ("", ()), None)

    def at_moment(self) -> "SpanSource":
        """Return the source as it is when first read; an engine is asked as usual."""
        return self

    def with_credit(self, credit: CreditOptions) -> Self:
        """Return the source with facts by a credit."""
        if credit == self.credit:
            return self
        source = copy.copy(self)
        source.credit = credit
        source.__dict__.pop("_overview", None)  # that one has facts by this credit
        return source

    def fetch(self, selection: Selection, con: "duckdb.DuckDBPyConnection | None" = None) -> Query:
        """Return the selected spans, read on a connection of this source, by default a new one."""
        return Query(con or self.connect(("spans",)), *selection.query())

    def make_reader(self, con: "duckdb.DuckDBPyConnection") -> SpanReader:
        """Return the ways to the spans, as a connection of this source shows them."""
        look = partial(self.connect, ("spans",), (*INDEX_COLUMNS, "attributes"))
        return SpanReader(con, lambda selection: self.fetch(selection, con).dicts(), look)

    def add(self, spans: Iterable[Span]) -> None:
        """Keep spans that are complete already, durably when this returns."""
        writer = self.writer()
        for span in spans:
            writer.add(span)

    @abstractmethod
    def writer(self) -> SpanWriter:
        """Return this process's writer into the engine."""

    @abstractmethod
    def _open(self) -> "Con":
        """Return a connection on which ``spans`` can be defined, or is."""

    def delete_facts(self) -> None:
        """Delete the facts that are kept on this machine for a store elsewhere."""
        delete_facts(self._find_facts())

    def _find_facts(self) -> Path:
        """Return the folder of facts: in the user's cache, or one that goes with the source."""
        cache = make_cache(self._identity) if self.name != MEMORY else None
        return cache or self._temporary_folder

    @property
    def _identity(self) -> str:
        """Tell the spans that the source shows from those of all others."""
        return self.name

    @cached_property
    def _temporary_folder(self) -> Path:
        folder = tempfile.TemporaryDirectory(prefix="lightning-otel-")
        weakref.finalize(self, folder.cleanup)
        return Path(folder.name)

    def _read(
        self, con: "Con", names: Names, columns: Names | None, statement: Statement,
        page: Statement | None,
    ) -> Reader:  # fmt: skip
        self._define_views(con, names, page=page)
        return Reader(con)

    def _define_views(
        self, con: "Con", names: Names, alive: Names = (), *, may_compute: bool = True,
        page: Statement | None = None,
    ) -> None:  # fmt: skip
        con.execute(alive_macro_sql(alive))
        if not FACT_VIEWS.isdisjoint(names):
            may_compute = may_compute and not set(names).isdisjoint(_COMPUTED)
            may_compute = may_compute and not self.is_passive
            folder = self._find_facts()
            mark = read_facts_mark(folder)
            reader = self.make_reader(con)
            renew_facts(reader, folder, mark, may_compute=may_compute, page=page)
        create_views(con, names)


class LocalSource(SpanSource):
    """A catalogue with its segments and Parquet files on this machine's disk."""

    layout: Layout

    def __init__(self, layout: Layout, moment: Moment | None = None) -> None:
        self.layout = layout
        self.name = str(layout.catalogue)
        self.moment = moment

    def at_moment(self) -> SpanSource:
        """Return the source with a moment of its own, unless it has one."""
        is_fixed = self.moment is not None
        moment = Moment(self.layout, prepare, is_shared=True)
        return self if is_fixed else LocalSource(self.layout, moment)

    def _find_facts(self) -> Path:
        return self.layout.facts

    def writer(self) -> SpanWriter:
        """Return this process's writer of the store, made if it is not there."""
        return writer_for(self.layout)

    def _open(self) -> "Con":
        self.layout.require()  # a store that is missing is told before a query that is wrong
        return new_connection()

    def _read(
        self, con: "Con", names: Names, columns: Names | None, statement: Statement,
        page: Statement | None,
    ) -> Reader:  # fmt: skip
        def define(con: "duckdb.DuckDBPyConnection", snapshot: Snapshot) -> None:
            if snapshot.is_small:
                con.execute("SET threads = 1")
            may = not self.is_passive
            define_views(
                con, snapshot, names, columns, may_compute=may, page=page, credit=self.credit
            )

        return Reader(con, self.moment or Moment(self.layout, prepare), define)


def prepare(layout: Layout) -> Snapshot:
    """Restore the manifest, update the catalogue, exclude damage; settle a batch of segments.

    Returns:
        What counts then.
    """
    layout.require()
    writer = writers_by_catalogue.get(layout.catalogue)
    if writer is not None:
        writer.flush()  # what this process recorded is found, however slow the disk
    manifest = ensure_manifest(layout)
    ensure_catalogue(layout)
    snapshot = Snapshot.take(layout, manifest)
    # To open thousands of segments takes longer than to read them, each time.
    if is_settling_due(snapshot.unsettled) and settle_for_reader(layout, 1).segments:
        wait_until_visible(layout)
        snapshot = Snapshot.take(layout)
    damaged = exclude_damage(layout, manifest=snapshot.manifest)
    if damaged or snapshot.excluded != list_excluded(layout):
        snapshot = Snapshot.take(layout)
    return snapshot


def open_live_connection(layout: Layout) -> "duckdb.DuckDBPyConnection":
    """Return a connection that may stay open: what counts is decided at each of its queries."""

    def define(con: "duckdb.DuckDBPyConnection", snapshot: Snapshot) -> None:
        define_views(con, snapshot, _SUMMARIES, may_compute=True)
        is_kept = (layout.facts / EMPTY_FACTS).exists() and not has_unwritten_facts(con)
        excluded = snapshot.manifest.settled_by(now_us()) | snapshot.excluded
        folder, manifest = quote_text(escape_glob(layout.root)), layout.find_manifest()[0]
        statements = catalogue_statements(folder, manifest.name, excluded, snapshot.alive)
        for name, statement in statements.items():
            if name != "prices" and (is_kept or name != "facts"):
                con.execute(statement)
        for table in ("spans", "live", "attempts"):
            con.execute(f"DROP TABLE IF EXISTS reading.{table}")

    return Reader(new_connection(), Moment(layout, prepare), define).con


def define_views(
    con: "duckdb.DuckDBPyConnection",
    snapshot: Snapshot,
    names: Collection[str],
    columns: Collection[str] | None = None,
    *,
    may_compute: bool = False,
    page: Statement | None = None,
    credit: CreditOptions = USUAL,
) -> None:
    """Define ``spans`` over a snapshot, and the views named; arguments as ``connect`` has them.

    Facts that are not current are computed if that is allowed.
    """
    con.execute("CREATE SCHEMA IF NOT EXISTS reading")
    layout, files = snapshot.layout, snapshot.files
    is_summary = bool(_SUMMARIES & set(names)) and not _is_wide(names, columns)
    is_narrow = False
    # Columns that nobody asks for are not read from files.
    if snapshot.is_small and snapshot.segments:
        con.execute(f"CREATE OR REPLACE TABLE reading.spans AS {snapshot.spans_sql()}")
        spans = "FROM reading.spans"
    elif snapshot.segments and (is_summary or snapshot.live_bytes <= _HELD_BYTES):
        fields = _SUMMARY if is_summary else ", ".join(COLUMNS)
        _hold_rows(con, snapshot.live_sql(fields), layout, files)
        spans = f"SELECT {fields} FROM {rows_sql(layout, files)} UNION ALL FROM reading.live"
        is_narrow = is_summary
        if is_summary:
            names = set(names) - {"calls"}  # which would show content
    else:
        spans = snapshot.spans_sql()
    con.execute(f"CREATE OR REPLACE VIEW spans AS {spans}")
    if derived := set(names) - {"spans"}:
        con.execute(alive_macro_sql(snapshot.alive))
        if not FACT_VIEWS.isdisjoint(derived):
            reader = _make_reader(con, snapshot, is_narrow=is_narrow)
            may_compute = may_compute and not derived.isdisjoint(_COMPUTED)
            mark = snapshot.facts_mark
            renew_facts(
                reader, layout.facts, mark, may_compute=may_compute, page=page, credit=credit
            )
        create_views(con, derived)


def _make_reader(
    con: "duckdb.DuckDBPyConnection", snapshot: Snapshot, *, is_narrow: bool
) -> SpanReader:
    @cache
    def open_whole() -> "duckdb.DuckDBPyConnection":
        if not is_narrow:
            return con
        whole = new_connection()
        whole.execute(f"CREATE VIEW spans AS {snapshot.spans_sql()}")
        return whole

    def fetch(selection: Selection) -> Iterator[Mapping[str, Any]]:
        cursor = open_whole().cursor()
        cursor.execute(*selection.query())
        names = [column[0] for column in cursor.description or ()]
        while rows := cursor.fetchmany(_FETCH):
            for row in rows:
                yield dict(zip(names, row, strict=True))

    return SpanReader(con, fetch, lambda: con)


def _is_wide(names: Collection[str], columns: Collection[str] | None) -> bool:
    if columns is None:
        return not set(names) <= _SUMMARIES
    return not set(columns) <= _SUMMARY_COLUMNS


def _hold_rows(
    con: "duckdb.DuckDBPyConnection",
    query: str,
    layout: Layout,
    files: Sequence[DataFile],
) -> None:
    """Hold a query's spans, but those in files, in ``live``: views read segments eight times."""
    create = "CREATE OR REPLACE TABLE reading.live AS"
    con.execute(f"{create} {query}")
    times = con.execute("SELECT min(start_ns), max(start_ns) FROM reading.live").fetchall()
    ((low, high),) = times
    peers = list_nearby_files(files, low, high) if low is not None else []
    if peers:  # as a sender does that heard no answer, some may have come once more
        con.execute(
            f"{create} SELECT live.* FROM reading.live AS live "
            f"ANTI JOIN {rows_sql(layout, peers)} AS settled ON {same_span_sql('settled', 'live')}"
        )


def at_moment(store: S) -> S:
    """Return a store of which all is read as it is at one moment, as one answer must show it."""
    fixed = copy.copy(store)
    fixed.source = store.source.at_moment()
    return fixed


def with_last_facts(store: S) -> S:
    """Return a store for several questions, of which facts are read as they were last computed."""
    passive = at_moment(store)
    source = passive.source = copy.copy(passive.source)
    source.is_passive = True
    return passive


def read_overview(
    source: SpanSource, query: str, parameters: Sequence[object] = (), page: Statement | None = None
) -> list[dict[str, Any]]:
    """Return the rows of a query over ``rewards``, ``rollouts`` and ``spans`` without content."""
    columns = None if source.layout is None else tuple(_SUMMARY_COLUMNS)
    con = source.connect(columns=columns, query=query, parameters=parameters, page=page)
    return list(Query(con, query, parameters).dicts())
