"""A ClickHouse server, or its engine within this process, that holds spans in a Collector's table.

``clickhouse://user:password@host:8123/database?table=otel_traces``, ``clickhouses://`` with TLS,
``clickhouse+chdb:///folder?database=default``. Needs ``clickhouse-connect`` (extra ``clickhouse``).
"""

import contextlib
import functools
import importlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from lightning_otel.errors import ConfigError, NotInstalledError, StoreError
from lightning_otel.store.engines import collector
from lightning_otel.store.engines.remote import RemoteSource, list_columns
from lightning_otel.store.snapshot import SAME_SPAN_NS
from lightning_otel.store.source import MemorySource, Selection, SpanSource
from lightning_otel.store.sql import quote_text
from lightning_otel.types import Span

if TYPE_CHECKING:
    import duckdb

SCHEMES: Final = ("clickhouse", "clickhouses", "clickhouse+chdb")
LOAD_SPANS: Final = 20_000
"""Spans written at once: what is being loaded lies in the memory of both sides."""
_WINDOWS: Final = """
SELECT min(start_ns), max(start_ns) FROM (
  SELECT start_ns, (sum(spans) OVER (ORDER BY start_ns) - 1) // ? AS part
  FROM (SELECT start_ns, count(*) AS spans FROM spans GROUP BY start_ns)
) GROUP BY part ORDER BY part"""
"""Times, first and last, between which about so many spans begin; together they hold all."""
_PORTS: Final = {"clickhouse": 8123, "clickhouses": 8443}
_OPTIONS: Final = frozenset({"table", "database"})
_READING: Final = {
    "max_query_size": 64 << 20,  # a batch names thousands of ids
    "output_format_parquet_string_as_string": 1,
    "output_format_parquet_compression_method": "zstd",
    "output_format_parquet_row_group_size": 10_000,
}
_WRITING: Final = {"max_partitions_per_insert_block": 0}
"""Spans of a year lie in 365 partitions."""


class ClickHouse(RemoteSource):
    """One table, read with one view."""

    def __init__(self, url: str) -> None:
        """Name a table, as in the module's description; nothing is opened yet."""
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if unknown := sorted(options.keys() - _OPTIONS):
            raise ConfigError(
                f"{parts.scheme}://… does not know {', '.join(unknown)}; "
                f"it knows {', '.join(sorted(_OPTIONS))}, since and until"
            )
        is_local = parts.scheme == "clickhouse+chdb"
        if not (parts.path.strip("/") if is_local else parts.hostname):
            form = "clickhouse+chdb:///folder" if is_local else "clickhouse://host:8123/database"
            raise ConfigError(f"{parts.scheme}://… names no place; write {form}")
        try:
            port = parts.port or _PORTS.get(parts.scheme, 0)
        except ValueError as exc:
            raise ConfigError(f"{parts.scheme}://…: {exc}; name a port such as 8123") from exc
        path = unquote(parts.path)
        named = "" if is_local else path.strip("/")
        database = options.get("database") or named or "default"
        table = options.get("table") or "otel_traces"
        self._connection: dict[str, Any] = {"interface": "chdb", "path": path}
        self.name = f"{parts.scheme}://{path}?database={database}&table={table}"
        if not is_local:
            self._connection = {
                "host": parts.hostname,
                "port": port,
                "username": unquote(parts.username or "") or None,
                "password": unquote(parts.password or ""),
                "secure": parts.scheme == "clickhouses",
                # Two threads may ask at once, which a session forbids.
                "autogenerate_session_id": False,
            }
            self.name = f"{parts.scheme}://{parts.hostname}:{port}/{database}?table={table}"
        self._database = _quote_name(database)
        self._table = f"{self._database}.{_quote_name(table)}"
        self._times = f"{self._database}.{_quote_name(table + '_trace_id_ts')}"

    def send(self, selection: Selection, path: Path) -> None:
        """Write the selected spans to a Parquet file."""
        if not list_columns(selection.columns):
            raise ConfigError("a selection without columns selects nothing; name some")
        query = collector.select(self._table, self._add_times(selection))
        with (
            self._translate_errors(),
            self._client.raw_stream(query, fmt="Parquet", settings=_READING) as body,
            path.open("wb") as file,
        ):
            shutil.copyfileobj(body, file)

    def add(self, spans: Iterable[Span]) -> None:
        """Keep spans that are not there yet."""
        held = MemorySource()
        held.add(spans)
        self.load(held)

    def load(self, source: SpanSource) -> int:
        """Write the spans of a source that are not there yet; the table is made if it is missing.

        Returns:
            How many were written.
        """
        with self._translate_errors():
            # One who may write spans into a table may not be allowed to make one.
            if not self._is_there(self._table):
                self._client.command(f"CREATE DATABASE IF NOT EXISTS {self._database}")
                for statement in collector.table_statements(self._table):
                    self._client.command(statement)
        with source.connect(("spans",)) as con, tempfile.TemporaryDirectory() as folder:
            for macro in collector.MACROS:
                con.execute(macro)
            path = Path(folder) / "spans.parquet"
            windows = con.execute(_WINDOWS, [LOAD_SPANS]).fetchall()
            return sum(self._load_spans(con, since, until, path) for since, until in windows)

    def _load_spans(
        self, con: "duckdb.DuckDBPyConnection", since_ns: int, until_ns: int, path: Path
    ) -> int:
        """Write the spans that begin between two times and are not there."""
        within = f"start_ns BETWEEN {since_ns} AND {until_ns}"
        there = Selection(
            only=con.execute(f"SELECT trace_id, span_id FROM spans WHERE {within}").fetchall(),
            since_ns=since_ns - SAME_SPAN_NS,
            until_ns=until_ns + SAME_SPAN_NS,
            columns=("trace_id", "span_id"),
        )
        self.send(there, path)
        con.execute(
            f"CREATE OR REPLACE TEMP TABLE there AS FROM read_parquet({quote_text(str(path))})"
        )
        rows = f"(SELECT * FROM spans ANTI JOIN there USING (trace_id, span_id) WHERE {within})"
        ((count,),) = con.execute(
            f"COPY ({collector.load_query(rows)}) TO {quote_text(str(path))} "
            "(FORMAT parquet, COMPRESSION zstd)"
        ).fetchall()
        if count:
            with self._translate_errors():
                self._client.raw_insert(
                    self._table,
                    list(collector.LOADED),
                    path.read_bytes(),
                    settings=_WRITING,
                    fmt="Parquet",
                )
        return int(count)

    def _is_there(self, table: str) -> bool:
        return bool(int(self._client.command(f"EXISTS TABLE {table}")))

    def _add_times(self, selection: Selection) -> Selection:
        """The selection with the time of its traces, from the table that knows it.

        Without it a look for one trace reads some of every granule: the key begins with names.
        """
        ids = set(selection.trace_ids)
        if not ids or selection.since_ns is not None:
            return selection
        listed = ", ".join(map(collector.quoted, sorted(ids)))
        query = (
            "SELECT uniqExact(TraceId), toUnixTimestamp(min(Start)), toUnixTimestamp(max(End)) "
            f"FROM {self._times} WHERE TraceId IN ({listed})"
        )
        with self._translate_errors():
            if not self._is_there(self._times):
                return selection
            ((known, start_s, end_s),) = self._client.query(query, settings=_READING).result_rows
        # A trace it does not know may be older than that table.
        if known != len(ids):
            return selection
        return replace(selection, since_ns=start_s * 10**9, until_ns=(end_s + 1) * 10**9)

    @functools.cached_property
    def _client(self) -> Any:
        try:
            library = importlib.import_module("clickhouse_connect")
        except ImportError as exc:
            raise NotInstalledError(
                "clickhouse:// needs clickhouse-connect; pip install 'lightning-otel[clickhouse]'"
            ) from exc
        return library.get_client(**self._connection)

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate into our error what the server or the way to it says within a block."""
        try:
            yield
        except (ConfigError, StoreError):
            raise
        except Exception as exc:
            errors = importlib.import_module("clickhouse_connect.driver.exceptions")
            if not isinstance(exc, errors.ClickHouseError | OSError):
                raise
            hint = "is it up, and are the user, the password and the database right?"
            if "UNKNOWN_TABLE" in str(exc) or "UNKNOWN_DATABASE" in str(exc):
                hint = "point a Collector's ClickHouse exporter at it, or load a store into it"
            reason = str(exc).partition("\n")[0]
            raise StoreError(f"{self.name}: {reason}; {hint}") from exc


def _quote_name(name: str) -> str:
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"
