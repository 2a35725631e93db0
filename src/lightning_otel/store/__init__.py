"""The store: spans of any number of processes, readable by DuckDB while they are written.

Names are imported when they are used: the traced process pays for no DuckDB.
"""

import os
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from lightning_otel import config
from lightning_otel.errors import ConfigError
from lightning_otel.store.lake import EXAMPLE, is_lake
from lightning_otel.store.layout import Layout
from lightning_otel.types import Span
from lightning_otel.types.values import check_types

if TYPE_CHECKING:
    import duckdb

    from lightning_otel.store.compact import CompactResult
    from lightning_otel.store.counts import Accounting
    from lightning_otel.store.engines.publish import PublishResult
    from lightning_otel.store.follow import Follower
    from lightning_otel.store.quarantine import Note
    from lightning_otel.store.redact import RedactResult
    from lightning_otel.store.settle import SettleResult
    from lightning_otel.store.source import SpanSource
    from lightning_otel.store.table import Table
    from lightning_otel.store.writer import SpanWriter


class SpanStore:
    """A place that holds spans, written and read by any number of processes at once."""

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, data: str | None = None
    ) -> None:
        """Name a store; nothing is opened or made yet.

        Args:
            path: ``X.duckdb``, a folder, or ``:memory:``; or a URL: ``http://host:4318``
                (``lightning-otel serve``),
                ``clickhouse://user:password@host:8123/database?table=otel_traces``, or a lake,
                ``ducklake:postgres://user@host/db?data=s3://bucket/prefix``. ``since=2026-11-01``
                and ``until=…`` behind the ``?`` bound when spans began. By default
                ``LIGHTNING_OTEL_STORE``, else ``.lightning/traces.duckdb``.
            data: Where a lake's files lie, if the path does not say.

        Raises:
            ConfigError: The URL is of an unknown engine, or cannot be understood.
        """
        check_types({"path": path, "data": data}, SpanStore.__init__.__annotations__)
        self._given = os.fspath(path) if path is not None else config.STORE.read()
        self._data = data
        # A path's source is made when the store is read: the traced process never does.
        self._files = Layout(self._given) if ":" not in self._given else None
        self.layout: Layout | None = self._files or self.source.layout

    @cached_property
    def source(self) -> "SpanSource":
        """Return the engine that holds the spans."""
        if self._files is not None:
            from lightning_otel.store.source import LocalSource

            return LocalSource(self._files)
        from lightning_otel.store.engines import make_source

        return make_source(self._given, data=self._data)

    def __repr__(self) -> str:
        return f"Store({self.name!r})"

    @property
    def name(self) -> str:
        """The catalogue's absolute path, ``:memory:``, or the URL without its password."""
        return str(self._files.catalogue) if self._files is not None else self.source.name

    def writer(self) -> "SpanWriter":
        """This process's writer into the store, which is made if it is not there.

        Raises:
            StoreError: The store cannot be made.
        """
        from lightning_otel.store.writer import writer_for

        return writer_for(self._files) if self._files is not None else self.source.writer()

    def add(self, spans: Iterable[Span]) -> None:
        """Keep spans that are complete already; of two with one id the first one wins."""
        self.source.add(spans)

    def connect(self) -> "duckdb.DuckDBPyConnection":
        """Return an in-memory DuckDB connection with views: spans, calls, rewards, rollouts, steps.

        Raises:
            StoreMissingError: There is no store.
            StoreVersionError: A newer version wrote it.
        """
        from lightning_otel.store.source import open_live_connection

        if self.layout is None:
            return self.source.connect().con
        return open_live_connection(self.layout)

    def sql(self, query: str, parameters: Iterable[object] = ()) -> "Table[dict[str, Any]]":
        """Run one read-only statement over the views; times with a zone come as text.

        Raises:
            ConfigError: The query is no text, or the parameters are no list.
            QueryError: It is not one SELECT, DESCRIBE or EXPLAIN, or DuckDB refuses it.
        """
        check_types(locals(), SpanStore.sql.__annotations__)
        from lightning_otel.store.table import Query, Table

        values = list(parameters)
        result = Query(self.source.connect(query=query, parameters=values), query, values)
        result.take(lambda relation: relation.columns)
        return Table(lambda: result, result.dicts, "rows", counts=lambda: [result.count()])

    def rollouts(self) -> "Table[dict[str, Any]]":
        """Return one row per attempt: status, times, counts, tokens, final reward, task."""
        return self.sql("SELECT * FROM rollouts ORDER BY start_ns")

    def settle(self) -> "SettleResult":
        """Pack every sealed segment into Parquet now; nothing if another process is at it.

        Raises:
            StoreMissingError: There is no store.
            StoreError: The disk is full, or a file is damaged; what waited goes on waiting.
        """
        from lightning_otel.store.damage import translate_errors
        from lightning_otel.store.recovery import ensure_manifest
        from lightning_otel.store.settle import SettleResult, settle
        from lightning_otel.store.template import ensure_catalogue

        if self.layout is None:
            return SettleResult()
        self.layout.require()
        ensure_manifest(self.layout)
        ensure_catalogue(self.layout)
        with translate_errors(self.layout, "settle"):
            return settle(self.layout)

    def accounting(self) -> "Accounting":
        """Account for every span that ended: stored, pending, rejected or dropped, and why.

        Raises:
            StoreMissingError: There is no store.
            StoreError: A file of it cannot be read.
        """
        from lightning_otel.store.packing import read_accounting

        if self.layout is None:
            return self.writer().accounting()
        return read_accounting(self.layout, self.source.moment)

    def accounting_by_process(self, *, since_ns: int = 0) -> "dict[str, Accounting]":
        """Account for each process that lost spans or has segments not settled long ago.

        Only for processes that began to record at ``since_ns`` or later.

        Raises:
            StoreMissingError: There is no store.
            StoreError: A file of it cannot be read.
        """
        check_types(locals(), SpanStore.accounting_by_process.__annotations__)
        from lightning_otel.store.packing import accounting_by_process

        if self.layout is None:
            writer = self.writer()
            return {writer.process: writer.accounting()}
        return accounting_by_process(self.layout, since_ns)

    def publish(
        self, lake: "SpanStore | str | None" = None, *, is_rest_included: bool = False
    ) -> "PublishResult":
        """Settle, and put the spans that a lake has not got yet into it, exactly once.

        Args:
            lake: By default this store itself, if it is a lake.
            is_rest_included: Whether spans too few for a file of their own go in as well.

        Raises:
            ConfigError: It is no lake, or its DuckDB extensions are not installed.
            StoreMissingError: Nothing was recorded.
            StoreError: Another process publishes this store, or the lake cannot be reached or
                written.
        """
        from lightning_otel.store.engines.ducklake import DuckLakeSource
        from lightning_otel.store.engines.publish import publish

        to = self if lake is None else lake if isinstance(lake, SpanStore) else SpanStore(lake)
        if not isinstance(to.source, DuckLakeSource):
            raise ConfigError(f"{to.name} is no lake; name one as in {EXAMPLE}")
        layout = self.local.layout
        if layout is None:
            raise ConfigError(f"{self.name} has no files to publish; name a store on disk")
        return publish(layout, to.source.address, is_rest_included=is_rest_included)

    @property
    def local(self) -> Self:
        """Return the store on this machine that recordings go to: this one, or a lake's."""
        if not is_lake(self.name):
            return self
        from lightning_otel.store.engines.ducklake import DuckLakeSource

        assert isinstance(self.source, DuckLakeSource)
        return type(self)(self.source.local.catalogue)

    def compact(
        self,
        *,
        older_than_s: float | None = None,
        max_bytes: int | None = None,
        rollout_ids: Iterable[str] = (),
        is_dry_run: bool = False,
        wait_s: float = 0.0,
        progress: "Callable[[int, int], None] | None" = None,
        waiting: "Callable[[float], None] | None" = None,
    ) -> "CompactResult":
        """Pack the files as tightly as they can be, and drop what is not to be kept any more.

        Readers are not disturbed, and whatever cuts it off, no span is lost by it.

        Args:
            older_than_s: Drop rollouts whose last span ended longer ago than this, seconds.
            max_bytes: Drop the oldest rollouts until the store takes no more than this.
            rollout_ids: Drop these rollouts.
            is_dry_run: Only say what would happen.
            wait_s: Wait at most so long until no file holds rollouts dropped by age or id: a minute
                for readers of old files, and as long before for processes that write.
            progress: Told how many of how many rows are done.
            waiting: Told how many seconds are left until then.

        Raises:
            StoreMissingError: There is no store.
            NotFoundError: A rollout to drop is not there; nothing was dropped.
            StoreError: Another process is at it, there is no room, or a file is damaged.
        """
        check_types(locals(), SpanStore.compact.__annotations__)
        from lightning_otel.store.compact import CompactResult, Retention, compact
        from lightning_otel.store.damage import translate_errors
        from lightning_otel.store.source import prepare

        if self.layout is None:
            if not is_dry_run:
                self.source.delete_facts()
            return CompactResult()
        prepare(self.layout)
        retention = Retention(
            since_ns=None if older_than_s is None else time.time_ns() - int(older_than_s * 1e9),
            max_bytes=max_bytes,
            without=tuple(rollout_ids),
        )
        with translate_errors(self.layout, "compact"):
            return compact(
                self.layout, retention, is_dry_run=is_dry_run, wait_s=wait_s, progress=progress,
                callback=waiting,
            )  # fmt: skip

    def redact(
        self,
        *,
        patterns: Iterable[str] = (),
        keys: Iterable[str] = (),
        secrets: bool = False,
        ids: Iterable[str] = (),
        reason: str = "",
        is_dry_run: bool = False,
        wait_s: float = 0.0,
        progress: "Callable[[int, int], None] | None" = None,
        waiting: "Callable[[float], None] | None" = None,
    ) -> "RedactResult":
        """Mask content in what is stored, and have it gone from the files; see docs/capture.md.

        Args:
            patterns: Regular expressions; what they match in any text becomes ``[redacted]``.
            keys: Attributes, or fields in them and in messages, whose values go; globs work.
            secrets: Also mask keys and tokens of the shapes that capture knows.
            ids: Look only at these rollouts, traces, spans or responses; without a rule, all that
                was said in them goes.
            reason: Kept with the record of the redaction.
            is_dry_run: Only count.
            wait_s: Wait at most so long, as :meth:`compact` does.
            progress: Told how many of how many rows were looked at.
            waiting: Told how many seconds are left until then, or for a process to write on.

        Raises:
            ConfigError: Nothing is named, a pattern is none, or the store is not on this disk.
            NotFoundError: An id is not there, or begins several.
            StoreError: Another process is at it, there is no room, or a file is damaged.
        """
        check_types(locals(), SpanStore.redact.__annotations__)
        from lightning_otel.redact import Rules
        from lightning_otel.store.redact import redact

        rules = Rules(tuple(patterns), tuple(keys), secrets)
        scope = [self.find(prefix) for prefix in ids]
        return redact(
            self.layout, rules, scope, reason=reason, is_dry_run=is_dry_run,
            wait_s=wait_s, progress=progress, waiting=waiting,
        )  # fmt: skip

    def repair(self) -> "list[Note]":
        """Verify every file, get back what can be, and give up the rest; return what came of it.

        Raises:
            StoreMissingError: There is no store.
            StoreError: Another process is settling, or the store cannot be written.
        """
        from lightning_otel.store.repair import repair

        if self.layout is None:
            return []
        self.settle()  # what segments still hold need not be got out of a damaged file
        return repair(self.layout)

    def pack(self, path: str | os.PathLike[str]) -> int:
        """Write everything into one self-contained DuckDB database; return the number of spans.

        Args:
            path: The new database; or ``clickhouse://…`` to load missing spans into the table of an
                OpenTelemetry Collector.

        Raises:
            StoreError: Something stands at the path already, or it cannot be written.
        """
        from lightning_otel.store.catalogue import pack
        from lightning_otel.store.engines.clickhouse import SCHEMES, ClickHouse

        text = os.fspath(path)
        if text.partition("://")[0] in SCHEMES:
            return ClickHouse(text).load(self.source)
        with self.source.connect(("spans", "facts")) as con:
            return pack(con, path)

    def follow(self, name: str, *, idle_s: float | None = None, since_ns: int = 0) -> "Follower":
        """Follow every ended span once, as it ends or in batches, from a durable position.

        ``for span in store.follow("trainer")`` waits for what comes; ``.batch()`` takes what is
        there.

        Args:
            name: The consumer's name; a new one begins with the oldest span.
            idle_s: Seconds without a new span after which an iteration ends; None for never.
            since_ns: Only spans that start at this time or later, Unix nanoseconds.

        Raises:
            ConfigError: The name or a time cannot be used, or the store is not on this disk.
            StoreMissingError: There is no store.
            StoreError: The consumer is at work already, or its position cannot be kept.
        """
        check_types(locals(), SpanStore.follow.__annotations__)
        from lightning_otel.store.follow import Follower

        if self.layout is None:
            raise ConfigError(f"{self.name} cannot be followed; name a store on this disk")
        return Follower(self.layout, name, idle_s=idle_s, since_ns=since_ns)

    def find(self, prefix: str) -> tuple[str, str]:
        """Return the noun (``rollout``, ``trace``, ``span``, ``response``) and id of a prefix.

        Raises:
            NotFoundError: No id begins so, or several do; ``@last~2`` is the third newest rollout.
        """
        from lightning_otel.store.lookup import find_id
        from lightning_otel.store.selection import INDEX_COLUMNS

        return find_id(self.source.connect(("spans",), INDEX_COLUMNS), prefix)

    def rollout_of(self, noun: str, whole_id: str) -> str:
        """Return the rollout that a found trace, span or response belongs to; or itself.

        Raises:
            ConfigError: The noun is none that :meth:`find` gives, or the id is no text.
            NotFoundError: The store has none of that id.
        """
        check_types(locals(), SpanStore.rollout_of.__annotations__)
        if noun == "rollout":
            return whole_id
        from lightning_otel.store.lookup import find_rollout
        from lightning_otel.store.selection import INDEX_COLUMNS

        con = self.source.connect(("spans",), INDEX_COLUMNS)
        return find_rollout(con, noun, whole_id)
