"""A ClickHouse server that holds spans in a Collector's table.

``clickhouse://user:password@host:8123/database?table=otel_traces``, ``clickhouses://`` with TLS.

Source: ClickHouse's manual, "HTTP Interface".
"""

import base64
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from lightning_otel.errors import ConfigError, StoreError
from lightning_otel.store.engines import MemorySource, collector
from lightning_otel.store.engines.http import HttpSource
from lightning_otel.store.engines.remote import list_columns
from lightning_otel.store.selection import Selection
from lightning_otel.store.snapshot import SAME_SPAN_NS
from lightning_otel.store.source import SpanSource
from lightning_otel.store.sql import quote_text
from lightning_otel.types import Span

if TYPE_CHECKING:
    import duckdb

SCHEMES: Final = ("clickhouse", "clickhouses")
LOAD_SPANS: Final = 20_000
"""Spans written at once: what is being loaded lies in the memory of both sides."""
_WINDOWS: Final = """
SELECT min(start_ns), max(start_ns) FROM (
  SELECT start_ns, (sum(spans) OVER (ORDER BY start_ns) - 1) // ? AS part
  FROM (SELECT start_ns, count(*) AS spans FROM spans GROUP BY start_ns)
) GROUP BY part ORDER BY part"""
"""Times, first and last, between which about so many spans begin; together they hold all."""
_SETTINGS: Final = {
    "max_query_size": 64 << 20,  # a batch names thousands of ids
    "output_format_parquet_string_as_string": 1,
    "output_format_parquet_compression_method": "zstd",
    "output_format_parquet_row_group_size": 10_000,
    "max_partitions_per_insert_block": 0,  # spans of a year lie in 365 partitions
}
_QUERY_PATH: Final = f"/?{urlencode(_SETTINGS)}"


class ClickHouse(HttpSource):
    """One table, read with one view."""

    hint = "is it up, and are the user, the password and the database right?"

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        table = options.pop("table", "") or "otel_traces"
        if options:
            raise ConfigError(
                f"{parts.scheme}://… does not know {', '.join(sorted(options))}; "
                "it knows table, since and until"
            )
        if not parts.hostname:
            raise ConfigError(
                f"{parts.scheme}://… names no host; write clickhouse://host:8123/database"
            )
        is_tls = parts.scheme == "clickhouses"
        super().__init__(parts, is_tls=is_tls, port=8443 if is_tls else 8123)
        database = unquote(parts.path).strip("/") or "default"
        self._login = f"{unquote(parts.username or 'default')}:{unquote(parts.password or '')}"
        self.name = f"{parts.scheme}://{self._host}/{database}?table={table}"
        self._database = _quote_name(database)
        self._table = f"{self._database}.{_quote_name(table)}"
        self._times = f"{self._database}.{_quote_name(table + '_trace_id_ts')}"

    def send(self, selection: Selection, path: Path) -> None:
        """Write the selected spans to a Parquet file."""
        if not list_columns(selection.columns):
            raise ConfigError("a selection without columns selects nothing; name some")
        query = collector.select(self._table, self._add_times(selection))
        self._download(_QUERY_PATH, f"{query} FORMAT Parquet".encode(), path)

    def add(self, spans: Iterable[Span]) -> None:
        """Keep spans that are not there yet."""
        source = MemorySource()
        source.add(spans)
        self.load(source)

    def load(self, source: SpanSource) -> int:
        """Write the missing spans, in a table made if need be; return their number."""
        # One who may write spans into a table may not be allowed to make one.
        if not self._is_there(self._table):
            self.run(f"CREATE DATABASE IF NOT EXISTS {self._database}")
            for statement in collector.table_statements(self._table):
                self.run(statement)
        with source.connect(("spans",)) as con, tempfile.TemporaryDirectory() as folder:
            for macro in collector.MACROS:
                con.execute(macro)
            path = Path(folder) / "spans.parquet"
            windows = con.execute(_WINDOWS, [LOAD_SPANS]).fetchall()
            return sum(self._load_spans(con, since, until, path) for since, until in windows)

    def _load_spans(
        self, con: "duckdb.DuckDBPyConnection", since_ns: int, until_ns: int, path: Path
    ) -> int:
        within = f"start_ns BETWEEN {since_ns} AND {until_ns}"
        remote = Selection(
            only=con.execute(f"SELECT trace_id, span_id FROM spans WHERE {within}").fetchall(),
            since_ns=since_ns - SAME_SPAN_NS,
            until_ns=until_ns + SAME_SPAN_NS,
            columns=("trace_id", "span_id"),
        )
        self.send(remote, path)
        con.execute(
            f"CREATE OR REPLACE TEMP TABLE there AS FROM read_parquet({quote_text(str(path))})"
        )
        rows = f"(SELECT * FROM spans ANTI JOIN there USING (trace_id, span_id) WHERE {within})"
        ((count,),) = con.execute(
            f"COPY ({collector.load_query(rows)}) TO {quote_text(str(path))} "
            "(FORMAT parquet, COMPRESSION zstd)"
        ).fetchall()
        if count:
            names = ", ".join(map(_quote_name, collector.LOADED))
            self.run(f"INSERT INTO {self._table} ({names})", path)
        return int(count)

    def _is_there(self, table: str) -> bool:
        return self.run(f"EXISTS TABLE {table}") == "1"

    def _add_times(self, selection: Selection) -> Selection:
        """Add the time of a selection's traces: the table's key begins with names."""
        ids = set(selection.trace_ids)
        if not ids or selection.since_ns is not None:
            return selection
        listed = ", ".join(map(collector.quoted, sorted(ids)))
        query = (
            "SELECT uniqExact(TraceId), toUnixTimestamp(min(Start)), toUnixTimestamp(max(End)) "
            f"FROM {self._times} WHERE TraceId IN ({listed})"
        )
        if not self._is_there(self._times):
            return selection
        count, start_s, end_s = map(int, self.run(query).split())
        # A trace it does not know may be older than that table.
        if count != len(ids):
            return selection
        return replace(selection, since_ns=start_s * 10**9, until_ns=(end_s + 1) * 10**9)

    def run(self, statement: str, parquet: Path | None = None) -> str:
        """Run a statement, an INSERT with the rows of a file; return its answer as text."""
        rows = b"" if parquet is None else b" FORMAT Parquet\n" + parquet.read_bytes()
        with self._post(_QUERY_PATH, statement.encode() + rows) as answer:
            return answer.read().decode("utf-8", "replace").strip()

    def _make_headers(self) -> dict[str, str]:
        return {"Authorization": f"Basic {base64.b64encode(self._login.encode()).decode()}"}

    def _make_error(self, status: int, text: bytes) -> StoreError:
        reason, hint = text.decode("utf-8", "replace").strip(), self.hint
        if "UNKNOWN_TABLE" in reason or "UNKNOWN_DATABASE" in reason:
            hint = "point a Collector's ClickHouse exporter at it, or load a store into it"
        return StoreError(f"{self.name} answers {status} {reason.partition(chr(10))[0]}; {hint}")


def _quote_name(name: str) -> str:
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"
