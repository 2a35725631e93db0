"""Rollouts that are not to be kept: which go, what goes with them, and what of it could not go yet.

Retention drops whole rollouts, never parts of a tree; a span without a rollout goes with its trace,
and a reward that was given elsewhere with the rollout it judges.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_otel.errors import NotFoundError
from lightning_otel.store import counts as n
from lightning_otel.store.files import total_bytes
from lightning_otel.store.layout import Layout
from lightning_otel.store.parquet import fetch_row, list_live_files, row_groups_sql
from lightning_otel.store.removal import list_open_segments
from lightning_otel.store.settle import list_sealed
from lightning_otel.store.snapshot import (
    IS_SPAN,
    SEGMENT_COLUMNS,
    Snapshot,
    ndjson_sql,
    rows_sql,
)
from lightning_otel.store.sql import ROLLOUT, new_connection, quote_paths, quote_text
from lightning_otel.store.views import IS_ANNOTATION, MAY_MOVE, REWARD_TARGETS

if TYPE_CHECKING:
    import duckdb


@dataclass(frozen=True, slots=True)
class Retention:
    """Limits of age, size and failures; by default everything is kept.

    Attributes:
        since_ns: Rollouts whose last span ended before this go, Unix nanoseconds.
        max_bytes: The oldest rollouts go until files and segments take no more than this.
        without: Ids of rollouts that go.
    """

    since_ns: int | None = None
    max_bytes: int | None = None
    without: tuple[str, ...] = ()

    @property
    def is_deletion(self) -> bool:
        """True if it is asked for that text goes, and not only that there is room."""
        return self.since_ns is not None or bool(self.without)


@dataclass(frozen=True, slots=True)
class Expired:
    """Rollouts and spans that go for one reason."""

    rollouts: int
    spans: int


def measure_store(layout: Layout) -> int:
    """Return the size of all files and segments that count."""
    manifest = layout.read_manifest()
    files = [layout.data / file.name for file in manifest.live_files]
    return total_bytes([*files, *layout.list_unsettled(manifest)])


def list_holders(layout: Layout, retention: Retention) -> list[Path]:
    """List the segments of other processes that hold spans which are to be deleted."""
    with new_connection() as con:
        find_expired(con, layout, retention)
        lines = _lines_sql(paths) if (paths := list_open_segments(layout)) else ""
        query = f"SELECT DISTINCT filename FROM {lines} SEMI JOIN expired USING (rollout)"
        return [Path(path) for (path,) in con.execute(query).fetchall()] if lines else []


def _lines_sql(paths: Sequence[Path]) -> str:
    """Return a subquery over the spans in segments, begun or ended, each with its rollout."""
    rows = ndjson_sql(quote_paths(paths), SEGMENT_COLUMNS)
    return f"(SELECT *, {ROLLOUT} AS rollout FROM {rows} WHERE {IS_SPAN} AND record <> 'drop')"


def list_deleted(
    con: "duckdb.DuckDBPyConnection", layout: Layout, *, is_dry_run: bool = False
) -> tuple[tuple[str, ...], int]:
    """Return the rollouts that are deleted, and how many of their spans are not.

    Those are open, in segments that processes write to, or in files that could not be written anew.
    A size limit deletes nothing: what goes by it is not waited for.
    """
    con.execute("DELETE FROM expired WHERE reason = ?", [n.SIZE])
    rollouts = con.execute("SELECT DISTINCT rollout FROM expired ORDER BY 1").fetchall()
    if not rollouts:
        return (), 0
    manifest, closed = layout.read_manifest(), list_sealed(layout) if is_dry_run else []
    files = [] if is_dry_run else list_live_files(layout, manifest)
    spans = f"SELECT trace_id, span_id, {ROLLOUT} AS rollout FROM {rows_sql(layout, files)}"
    if paths := [path for path in layout.list_unsettled(manifest) if path not in closed]:
        spans += (
            f" UNION SELECT trace_id, span_id, rollout FROM {_lines_sql(paths)} GROUP BY ALL "
            f"HAVING count(end_ns) = 0 OR NOT {is_dry_run}"
        )
    (count,) = fetch_row(con, f"SELECT count(*) FROM ({spans}) SEMI JOIN expired USING (rollout)")
    return tuple(rollout for (rollout,) in rollouts), int(count)


def find_expired(
    con: "duckdb.DuckDBPyConnection",
    layout: Layout,
    retention: Retention,
    *,
    is_dry_run: bool = False,
) -> Mapping[str, Expired]:
    """Fill the table ``expired`` with rollouts and the reason for each; count them by reason.

    Spans in segments that a process still writes to stay, but keep their rollout young. Foretold
    is what goes once they are closed.
    """
    con.execute("CREATE TABLE expired (rollout VARCHAR, reason VARCHAR)")
    if retention == Retention():
        return {}
    snapshot = Snapshot.take(layout)
    con.execute(
        f"CREATE TABLE held AS SELECT {ROLLOUT} AS rollout, max(coalesce(end_ns, start_ns)) "
        f"AS newest, 0 AS size FROM ({snapshot.spans_sql()}) GROUP BY 1"
    )
    expire = "INSERT INTO expired SELECT rollout, '{}' FROM held ANTI JOIN expired USING (rollout)"
    for rollout_id in set(retention.without):
        where = f"WHERE rollout = {quote_text(rollout_id)}"
        if fetch_row(con, f"SELECT count(*) FROM held {where}") == (0,):
            raise NotFoundError(f"no rollout {rollout_id!r}, so nothing was dropped")
        con.execute(f"{expire.format(n.ROLLOUT)} {where}")
    if retention.since_ns is not None:
        con.execute(f"{expire.format(n.AGE)} WHERE newest < {retention.since_ns}")
    files = list_live_files(layout, layout.read_manifest())
    if files and retention.max_bytes is not None:
        excess = measure_store(layout) - retention.max_bytes
        # What a rollout takes is told by the row groups its rows stand in: they hold few each.
        groups = row_groups_sql([layout.data / file.name for file in files])
        con.execute(
            f"""
            CREATE OR REPLACE TABLE held AS SELECT rollout, newest, coalesce(sum(packed), 0) AS size
            FROM held LEFT JOIN (
              SELECT {ROLLOUT} AS rollout, packed FROM {rows_sql(layout, files)}
              ASOF JOIN ({groups}) ON filename = path AND file_row_number >= begins
            ) USING (rollout) GROUP BY ALL
            """
        )
        con.execute(
            f"""
            {expire.format(n.SIZE)} WHERE rollout IN (SELECT rollout FROM (
              SELECT rollout, size, sum(size) OVER (ORDER BY newest, rollout) AS freed
              FROM held ANTI JOIN expired USING (rollout) WHERE size > 0
            ) WHERE freed - size < {excess} - (
              SELECT coalesce(sum(size), 0) FROM held SEMI JOIN expired USING (rollout)))
            """
        )
    _add_rewards(con, snapshot)
    # Not those of the snapshot: what was settled just now counts a moment later for readers.
    closed, waiting = list_sealed(layout), layout.list_unsettled(layout.read_manifest())
    still_open = [path.name for path in waiting if path not in closed]
    counted = snapshot if is_dry_run else snapshot.without(still_open)
    alive = [quote_text(name.rpartition("-")[0]) for name in still_open] or ["''"]
    rows = con.execute(
        f"""
        SELECT reason, count(DISTINCT rollout), count(rollout) FROM (
          SELECT {ROLLOUT} AS rollout FROM ({counted.spans_sql()})
          WHERE end_ns IS NOT NULL OR process NOT IN ({", ".join(alive)})
        ) JOIN expired USING (rollout) GROUP BY 1 ORDER BY 1
        """
    ).fetchall()
    return {reason: Expired(int(rollouts), int(spans)) for reason, rollouts, spans in rows}


def _add_rewards(con: "duckdb.DuckDBPyConnection", snapshot: Snapshot) -> None:
    """Let rewards that were given elsewhere go with the rollout they judge.

    A reward that stands within another rollout is a part of that, and stays.
    """
    if fetch_row(con, "SELECT count(*) FROM expired") == (0,):
        return
    con.execute(f"CREATE TEMP VIEW spans AS {snapshot.spans_sql()}")
    if fetch_row(con, f"SELECT count(*) FROM spans WHERE {MAY_MOVE}") != (0,):
        con.execute(
            f"""
            INSERT INTO expired WITH {REWARD_TARGETS}
            SELECT own_rollout, any_value(reason) FROM placements
            JOIN expired ON target_rollout = rollout
            WHERE own_rollout NOT IN (SELECT rollout FROM expired) AND own_rollout NOT IN
              (SELECT {ROLLOUT} FROM spans WHERE NOT {IS_ANNOTATION})
            GROUP BY 1
            """
        )
    con.execute("DROP VIEW spans")
