"""Rollouts that are not to be kept: by their age, by their id, or the oldest until the rest fits.

Whole rollouts go, never parts of a tree. What has no rollout goes by trace.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_otel.errors import NotFoundError
from lightning_otel.store import counts as n
from lightning_otel.store.layout import DataFile, Layout, total_bytes
from lightning_otel.store.parquet import row_of, row_weights
from lightning_otel.store.snapshot import Snapshot
from lightning_otel.store.spans import rows_of
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


@dataclass(frozen=True, slots=True)
class Expired:
    """Rollouts and spans that go for one reason."""

    rollouts: int
    spans: int


def live_files(layout: Layout) -> tuple[DataFile, ...]:
    """Return the files that count, without those that somebody took away: they may come back."""
    live = layout.read_manifest().live_files
    return tuple(file for file in live if (layout.data / file.name).exists())


def store_bytes(layout: Layout) -> int:
    """Return the size of all files and segments that count."""
    manifest = layout.read_manifest()
    files = [layout.data / file.name for file in manifest.live_files]
    return total_bytes([*files, *layout.unsettled(manifest)])


def expire(
    con: "duckdb.DuckDBPyConnection",
    layout: Layout,
    retention: Retention,
    open_names: Iterable[str] = (),
) -> Mapping[str, Expired]:
    """Fill the table ``expired`` with rollouts and the reason for each; count them by reason.

    Spans in segments that a process still writes to stay, but keep their rollout young.

    Args:
        con: A connection of :func:`parquet.packing_connection`.
        layout: The store's paths.
        retention: What is to be kept.
        open_names: Names of segments that cannot be settled.

    Raises:
        NotFoundError: A rollout that is to go is not there.
    """
    con.execute("CREATE OR REPLACE TABLE expired (rollout VARCHAR, reason VARCHAR)")
    if retention == Retention():
        return {}
    snapshot = Snapshot.take(layout)
    con.execute(
        f"""
        CREATE OR REPLACE TABLE held AS
        SELECT {ROLLOUT} AS rollout, max(coalesce(end_ns, start_ns)) AS newest
        FROM ({snapshot.spans_sql()}) GROUP BY 1
        """
    )
    for rollout_id in retention.without:
        if not _add(con, n.ROLLOUT, f"rollout = {quoted(rollout_id)}"):
            raise NotFoundError(f"no rollout {rollout_id!r}, so nothing was dropped")
    if retention.since_ns is not None:
        _add(con, n.AGE, f"newest < {retention.since_ns}")
    if retention.max_bytes is not None:
        _add_oldest(con, layout, retention.max_bytes)
    spans = snapshot.without(open_names).spans_sql()
    rows = con.execute(
        f"""
        SELECT reason, count(DISTINCT rollout), count(rollout) FROM (
          SELECT {ROLLOUT} AS rollout FROM ({spans})
        ) JOIN expired USING (rollout) GROUP BY 1 ORDER BY 1
        """
    ).fetchall()
    return {reason: Expired(int(rollouts), int(spans)) for reason, rollouts, spans in rows}


def _add(con: "duckdb.DuckDBPyConnection", reason: str, where: str) -> int:
    """Have rollouts expire that do not yet; gives how many meet the condition."""
    con.execute(
        f"INSERT INTO expired SELECT rollout, {quoted(reason)} FROM held "
        f"ANTI JOIN expired USING (rollout) WHERE {where}"
    )
    return int(row_of(con, f"SELECT count(*) FROM held WHERE {where}")[0])


def _add_oldest(con: "duckdb.DuckDBPyConnection", layout: Layout, max_bytes: int) -> None:
    """Have the rollouts expire that ended first, until what is left is small enough.

    What a rollout takes is told by the row groups its rows stand in: they hold few rollouts each.
    """
    files, excess = live_files(layout), store_bytes(layout) - max_bytes
    if excess <= 0 or not files:
        return
    weights = row_weights([layout.data / file.name for file in files], "total_compressed_size")
    con.execute(
        f"""
        CREATE OR REPLACE TABLE sized AS
        SELECT {ROLLOUT} AS rollout, sum(weight) AS size FROM {rows_of(layout, files)}
        ASOF JOIN ({weights}) ON filename = path AND file_row_number >= begins GROUP BY 1
        """
    )
    _add(
        con,
        n.SIZE,
        f"""rollout IN (SELECT rollout FROM (
          SELECT rollout, size, sum(size) OVER (ORDER BY newest, rollout) AS freed
          FROM held JOIN sized USING (rollout) ANTI JOIN expired USING (rollout)
        ) WHERE freed - size < {excess} - (
          SELECT coalesce(sum(size), 0) FROM sized SEMI JOIN expired USING (rollout)))""",
    )
