"""Read spans of a remote engine with a DuckDB of this process.

An engine only sends the selected spans and columns; views and queries run here, so every engine
gives the same rows.
"""

import re
import tempfile
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel.errors import ConfigError, StoreError
from lightning_otel.store.reader import Reader
from lightning_otel.store.schema import COLUMNS, NARROW_COLUMNS, WIDE_COLUMNS
from lightning_otel.store.selection import REWARD_ATTRIBUTES, Selection
from lightning_otel.store.source import Names, SpanSource, Statement
from lightning_otel.store.sql import ROLLOUT, new_connection, quote_text
from lightning_otel.store.table import Query
from lightning_otel.store.writer import SpanWriter

if TYPE_CHECKING:
    import duckdb

    from lightning_otel.store.source import Con

_EMPTY: Final = "CREATE TABLE spans (" + ", ".join(f"{n} {k}" for n, k in COLUMNS.items()) + ")"


class RemoteSource(SpanSource):
    """The spans of an engine, as much of them as is asked for, never beyond ``window``."""

    window = Selection()

    @property
    def _identity(self) -> str:
        return f"{self.name} {self.window.since_ns} {self.window.until_ns}"

    @abstractmethod
    def send(self, selection: Selection, path: Path) -> None:
        """Write the selected spans and columns to a Parquet file, each span once, in any order.

        Raises:
            StoreError: The engine cannot be reached, or refuses.
        """

    def fetch(self, selection: Selection, con: "duckdb.DuckDBPyConnection | None" = None) -> Query:
        """Return the selected spans; a connection tells when the rollouts wanted took place."""
        connection = self._open()
        for part in (replace(selection, also=None), selection.also):
            if part is not None:
                self._load_selection(connection, add_time_bounds(part, con))
        ordered = Selection(is_ordered=selection.is_ordered, columns=selection.columns)
        return Query(connection, *ordered.query())

    def writer(self) -> SpanWriter:
        """Refuse: there is none."""
        raise ConfigError(
            f"{self.name} is read, not recorded into: a traced program never waits for a network; "
            "record into a local path and send the spans on by OTLP"
        )

    def _open(self) -> "duckdb.DuckDBPyConnection":
        con = new_connection()
        con.execute(_EMPTY)
        return con

    def _read(
        self, con: "Con", names: Names, columns: Names | None, statement: Statement,
        page: Statement | None,
    ) -> Reader:  # fmt: skip
        if columns is None and statement[0]:
            self._define_views(con, names, may_compute=False)
            columns = _columns_of(con, *statement)
        columns = tuple(COLUMNS) if columns is None else (*columns, REWARD_ATTRIBUTES)
        self._load_selection(con, Selection(columns=columns))
        return super()._read(con, names, columns, statement, page)

    def _load_selection(self, con: "duckdb.DuckDBPyConnection", selection: Selection) -> None:
        import duckdb

        both = (selection, self.window)
        since = [part.since_ns for part in both if part.since_ns is not None]
        until = [part.until_ns for part in both if part.until_ns is not None]
        selection = replace(
            selection,
            is_ordered=False,
            since_ns=max(since, default=None),
            until_ns=min(until, default=None),
        )
        names = ", ".join(list_columns(selection.columns))
        with tempfile.TemporaryDirectory(prefix="lightning-otel-") as folder:
            path = Path(folder, "spans.parquet")
            self.send(selection, path)
            try:
                # A Parquet file that breaks off has no footer, and is never read as a shorter one.
                con.execute(
                    f"INSERT INTO spans ({names}) SELECT {names} FROM "
                    f"read_parquet({quote_text(str(path))})"
                )
            except duckdb.Error as exc:
                raise StoreError(f"cannot read spans from {self.name}: {exc}; try again") from exc


def list_columns(columns: Collection[str]) -> list[str]:
    """Return the columns that an answer has, in the store's order."""
    has_attributes = REWARD_ATTRIBUTES in columns or "attributes" in columns
    return [
        name for name in COLUMNS if name in columns or (name == "attributes" and has_attributes)
    ]


def add_time_bounds(selection: Selection, con: "duckdb.DuckDBPyConnection | None") -> Selection:
    """Return the selection with the time of its rollouts, if a connection knows it."""
    if con is None or not selection.rollout_ids or selection.since_ns is not None:
        return selection
    row = con.execute(
        f"SELECT min(start_ns), max(start_ns) FROM spans WHERE {ROLLOUT} IN (SELECT unnest(?))",
        [list(selection.rollout_ids)],
    ).fetchone()
    if row is None or row[0] is None:
        return selection
    return replace(selection, since_ns=row[0], until_ns=row[1])


def _columns_of(
    con: "duckdb.DuckDBPyConnection", query: str, parameters: Sequence[object]
) -> Collection[str]:
    """Return the columns of ``spans`` that a query reads, and maybe more; its views are there."""
    import duckdb

    try:
        # That there is no row must not make the plan shorter.
        con.execute("SET disabled_optimizers = 'statistics_propagation,empty_result_pullup'")
        rows = con.execute(f"EXPLAIN (FORMAT JSON) {query}", list(parameters)).fetchall()
    except duckdb.Error:
        return tuple(COLUMNS)
    finally:
        con.execute("RESET disabled_optimizers")
    # Whatever is read is named in the plan; what is named there by chance is read too.
    words = set(re.findall(r"\w+", " ".join(map(str, rows))))
    return (*NARROW_COLUMNS, *(name for name in WIDE_COLUMNS if name in words))
