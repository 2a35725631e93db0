"""Which rollouts are to go: by their age, by their id, or the oldest ones until the rest fits.

Whole rollouts go, never parts of a tree. What has no rollout goes by trace.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_otel.errors import NotFoundError
from lightning_otel.store import counts as n
from lightning_otel.store.damage import avoided
from lightning_otel.store.layout import Layout, total_bytes
from lightning_otel.store.parquet import row_of
from lightning_otel.store.spans import rows_of, spans_query
from lightning_otel.store.sql import ROLLOUT, quoted

if TYPE_CHECKING:
    import duckdb


@dataclass(frozen=True, slots=True)
class Retention:
    """What is to be kept; by default everything.

    Attributes:
        since_ns: Rollouts whose last span ended before this go, Unix nanoseconds.
        max_bytes: The oldest rollouts go until files and segments take no more than this.
        without: Ids of rollouts that go.
    """

    since_ns: int | None = None
    max_bytes: int | None = None
    without: tuple[str, ...] = ()

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is to go."""
        return self.since_ns is None and self.max_bytes is None and not self.without


@dataclass(frozen=True, slots=True)
class Doom:
    """What goes for one reason."""

    rollouts: int
    spans: int


def doom(
    con: "duckdb.DuckDBPyConnection",
    layout: Layout,
    retention: Retention,
    open_names: Iterable[str],
) -> Mapping[str, Doom]:
    """Fill the table ``doomed`` with rollouts and the reason for each; what goes, by reason.

    Spans in segments that a process still writes to stay, but keep their rollout young.

    Args:
        con: A connection of :func:`parquet.packing_connection`.
        layout: The store's paths.
        retention: What is to be kept.
        open_names: Names of segments that cannot be settled.

    Raises:
        NotFoundError: A rollout that is to go is not there.
    """
    con.execute("CREATE OR REPLACE TABLE doomed (rollout VARCHAR, reason VARCHAR)")
    if retention.keeps_all:
        return {}
    con.execute(
        f"""
        CREATE OR REPLACE TABLE held AS
        SELECT {ROLLOUT} AS rollout, max(coalesce(end_ns, start_ns)) AS newest
        FROM ({spans_query(layout, (), avoided(layout))}) GROUP BY 1
        """
    )
    _doom_named(con, retention.without)
    if retention.since_ns is not None:
        _doom(con, n.AGE, f"newest < {retention.since_ns}")
    if retention.max_bytes is not None:
        _doom_oldest(con, layout, retention.max_bytes)
    left_out = [*layout.read_manifest().settled, *open_names]
    spans = spans_query(layout, left_out, avoided(layout))
    rows = con.execute(
        f"""
        SELECT reason, count(DISTINCT rollout), count(rollout) FROM (
          SELECT {ROLLOUT} AS rollout FROM ({spans})
        ) JOIN doomed USING (rollout) GROUP BY 1 ORDER BY 1
        """
    ).fetchall()
    return {reason: Doom(int(rollouts), int(spans)) for reason, rollouts, spans in rows}


def store_bytes(layout: Layout) -> int:
    """Size of all files and segments that count."""
    manifest = layout.read_manifest()
    return total_bytes(_files(layout)) + total_bytes(layout.unsettled(manifest))


def _files(layout: Layout) -> list[Path]:
    return [layout.data / file.name for file in layout.read_manifest().live_files]


def _doom(con: "duckdb.DuckDBPyConnection", reason: str, where: str) -> None:
    con.execute(
        f"INSERT INTO doomed SELECT rollout, {quoted(reason)} FROM held "
        f"ANTI JOIN doomed USING (rollout) WHERE {where}"
    )


def _doom_named(con: "duckdb.DuckDBPyConnection", rollout_ids: Iterable[str]) -> None:
    for rollout_id in rollout_ids:
        if row_of(con, f"SELECT count(*) FROM held WHERE rollout = {quoted(rollout_id)}") == (0,):
            raise NotFoundError(f"no rollout {rollout_id!r}, so nothing was dropped")
        _doom(con, n.ROLLOUT, f"rollout = {quoted(rollout_id)}")


def _doom_oldest(con: "duckdb.DuckDBPyConnection", layout: Layout, max_bytes: int) -> None:
    """Doom the rollouts that ended first, until what is left is small enough.

    What a rollout takes is told by the row groups its rows stand in: they hold few rollouts each.
    """
    live = layout.read_manifest().live_files
    files = [file for file in live if (layout.data / file.name).exists()]
    excess = store_bytes(layout) - max_bytes
    if excess <= 0 or not files:
        return
    paths = "[" + ", ".join(quoted(str(layout.data / file.name)) for file in files) + "]"
    con.execute(
        f"""
        CREATE OR REPLACE TABLE sized AS
        WITH groups AS (
          SELECT file, sum(rows) OVER (PARTITION BY file ORDER BY id) - rows AS begins,
            size / rows AS weight
          FROM (SELECT file_name AS file, row_group_id AS id, sum(total_compressed_size) AS size,
            any_value(row_group_num_rows) AS rows FROM parquet_metadata({paths}) GROUP BY ALL)
        )
        SELECT {ROLLOUT} AS rollout, sum(weight) AS size
        FROM {rows_of(layout, files)}
        ASOF JOIN groups ON filename = file AND file_row_number >= begins GROUP BY 1
        """
    )
    (doomed,) = row_of(
        con, "SELECT coalesce(sum(size), 0) FROM sized SEMI JOIN doomed USING (rollout)"
    )
    con.execute(
        f"""
        INSERT INTO doomed SELECT rollout, {quoted(n.SIZE)} FROM (
          SELECT rollout, size, sum(size) OVER (ORDER BY newest, rollout) AS freed
          FROM held JOIN sized USING (rollout) ANTI JOIN doomed USING (rollout)
        ) WHERE freed - size < {excess - float(doomed)}
        """
    )
