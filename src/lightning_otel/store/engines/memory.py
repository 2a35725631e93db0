"""Spans in the memory of this process."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_otel.store.layout import MEMORY
from lightning_otel.store.reader import Reader
from lightning_otel.store.snapshot import segments_sql
from lightning_otel.store.source import Names, SpanSource, Statement
from lightning_otel.store.sql import new_connection
from lightning_otel.store.writer import SpanWriter

if TYPE_CHECKING:
    from lightning_otel.store.source import Con


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
