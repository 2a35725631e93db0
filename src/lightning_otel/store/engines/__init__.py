"""Engines of stores, chosen by the store's name; the one in this process's memory."""

import tempfile
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urlsplit

from lightning_otel.store.lake import is_lake, lake_address
from lightning_otel.store.layout import MEMORY, Layout
from lightning_otel.store.reader import Reader
from lightning_otel.store.selection import Selection
from lightning_otel.store.snapshot import segments_sql
from lightning_otel.store.source import LocalSource, Names, SpanSource, Statement
from lightning_otel.store.sql import new_connection
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types.instants import instant_ns

if TYPE_CHECKING:
    from lightning_otel.store.source import Con

_BOUNDS = ("since", "until")


def make_source(address: str, *, data: str | None = None) -> SpanSource:
    """Return the source that a path, ``:memory:`` or a URL names; nothing is opened or made yet.

    Raises:
        ConfigError: The URL is of an engine this version does not know, or cannot be understood.
    """
    if address == MEMORY:
        return MemorySource()
    if is_lake(address):
        from lightning_otel.store.engines.ducklake import DuckLakeSource

        return DuckLakeSource(lake_address(address, data))
    if "://" not in address:
        return LocalSource(Layout(address))
    from lightning_otel.store.engines import clickhouse, http

    scheme = address.partition("://")[0].lower()
    if scheme not in (*clickhouse.SCHEMES, *http.SCHEMES):
        return LocalSource(Layout(address))  # which names the engines there are
    parts = urlsplit(address)
    options = parse_qsl(parts.query, keep_blank_values=True)
    # UTC where it names no zone: a URL means the same on every machine.
    bounds = {name: instant_ns(value, name, zone=UTC) for name, value in options if name in _BOUNDS}
    query = urlencode([option for option in options if option[0] not in _BOUNDS])
    # Not urlunsplit, which of the path //x makes the host x.
    url = address.partition("?")[0] + f"?{query}"
    source = http.ServedStore(url) if scheme in http.SCHEMES else clickhouse.ClickHouse(url)
    source.window = Selection(since_ns=bounds.get("since"), until_ns=bounds.get("until"))
    return source


class MemorySource(SpanSource):
    """Spans kept in this process and gone with it, for tests and short looks."""

    def __init__(self) -> None:
        self.name = MEMORY
        self._writer = SpanWriter(None)

    def writer(self) -> SpanWriter:
        """Return the writer that all recordings into this source share."""
        return self._writer

    def _open(self) -> "Con":
        con = new_connection()
        with tempfile.NamedTemporaryFile(suffix=".ndjson") as file:
            size = file.write(b"".join(self._writer.lines))
            file.flush()
            spans = segments_sql([Path(file.name)], live_bytes=size)
            con.execute(f"CREATE TABLE spans AS {spans}")
        return con

    def _read(
        self, con: "Con", names: Names, columns: Names | None, statement: Statement,
        page: Statement | None,
    ) -> Reader:  # fmt: skip
        self._define_views(con, names, (self._writer.process,), page=page)
        return Reader(con)
