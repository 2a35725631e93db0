"""Settled files as one: each span once, in order, without what is to go, in bounded memory.

DuckDB sorts wide rows in memory only: 500 MB of a long conversation did not fit into 1 GB. So only
where each row belongs is sorted; the rows follow a slice at a time, each into a small file of its
own, and these are written one after the other into the new one.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel.store import counts as n
from lightning_otel.store.gist import GIST, with_gist
from lightning_otel.store.layout import SCHEMA_VERSION, DataFile, Layout
from lightning_otel.store.parquet import CONTENT, SPILL, described, row_of, sync
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.spans import rows_of
from lightning_otel.store.sql import ROLLOUT, quoted

if TYPE_CHECKING:
    import duckdb

SLICE_BYTES: Final = 32 << 20
"""What is sorted at once, uncompressed."""
ROW_GROUP: Final = 122_880
ROW_GROUP_BYTES: Final = 64 << 20
"""A conversation that goes on in the next row group is stored once more: 200 turns of 1 KB cost
0.76 of their unique text with this, 0.87 with half of it, and 96 MiB do not fit into the memory."""
LEVEL: Final = 9

TANGLE: Final = 16
"""How often, at most, the files may be read over for all slices to be gathered."""

STORED: Final = ", ".join((*COLUMNS, *GIST))

Step = Callable[[int], None]
"""Told how many more rows are done."""


class TangledError(Exception):
    """The rollouts of these files lie so mixed that fewer files should be merged at once."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What became of some files.

    Attributes:
        file: The one file made of them; None if nothing was left.
        counts: Ended spans that were left out, by reason.
    """

    file: DataFile | None
    counts: Mapping[str, int]


def merge(
    con: "duckdb.DuckDBPyConnection",
    layout: Layout,
    files: Sequence[DataFile],
    step: Step,
    *,
    thrift: int = 1,
) -> Merged:
    """Write what some files hold into one under ``new/``.

    Args:
        con: A connection of :func:`parquet.packing_connection`, with a table ``doomed`` of rollouts
            to leave out and the reason of each.
        layout: The store's paths.
        files: The files, in any order.
        step: Told of the progress; every row is told of twice, when it is read and written.
        thrift: By how much slices and row groups are smaller than they should be.

    Raises:
        TangledError: It would take too long; half of the files each will do.
        duckdb.OutOfMemoryException: Their rows are too wide to be merged in the memory allowed.
    """
    try:
        _index(con, layout, files)
        counts = _leave_out(con, layout, files)
        _place(con, SLICE_BYTES // thrift)
        rows, low, high = row_of(con, "SELECT count(*), min(start_ns), max(start_ns) FROM placed")
        if not rows:
            return Merged(None, counts)
        if len(files) > 1 and _tangle(con) > TANGLE:
            raise TangledError
        slices = _gather(con, layout, files, step)
        # Named as the oldest: of two spans with one id the first still comes first.
        stamp = min(file.name for file in files).split("-")[1]
        name = f"spans-{stamp}-{secrets.token_hex(4)}.parquet"
        write_slices(con, layout.new / name, slices, group_bytes=ROW_GROUP_BYTES // thrift)
        step(int(rows))
    finally:
        for table in ("files", "weights", "spot", "placed"):
            con.execute(f"DROP TABLE IF EXISTS {table}")
    return Merged(described(layout.new / name, rows, low, high, is_compact=True), counts)


def _index(con: "duckdb.DuckDBPyConnection", layout: Layout, files: Sequence[DataFile]) -> None:
    """``spot``: where each row stands, what it is ordered by, and about how large it is."""
    con.execute("CREATE TABLE files (file INTEGER, path VARCHAR)")
    names = sorted(file.name for file in files)
    con.executemany(
        "INSERT INTO files VALUES (?, ?)",
        [(number, str(layout.data / name)) for number, name in enumerate(names)],
    )
    paths = _paths(con)
    # Where a row group holds one long conversation its rows are a thousand times as wide as others.
    con.execute(
        f"""
        CREATE TABLE weights AS
        SELECT file, sum(rows) OVER (PARTITION BY file ORDER BY row_group_id) - rows AS begins,
          rows, size / rows AS weight
        FROM (SELECT file_name AS path, row_group_id, any_value(row_group_num_rows) AS rows,
          sum(total_uncompressed_size) AS size FROM parquet_metadata({paths}) GROUP BY ALL)
        JOIN files USING (path)
        """
    )
    con.execute(
        f"""
        CREATE TABLE spot AS
        SELECT files.file, number, rollout, agent, start_ns, sequence, trace_id, span_id, is_ended,
          weight FROM (
          SELECT filename AS path, file_row_number AS number, {ROLLOUT} AS rollout, agent, start_ns,
            sequence, trace_id, span_id, end_ns IS NOT NULL AS is_ended
          FROM {rows_of(layout, files)}
        ) JOIN files USING (path) ASOF JOIN weights
          ON files.file = weights.file AND number >= begins
        """
    )


def _leave_out(
    con: "duckdb.DuckDBPyConnection", layout: Layout, files: Sequence[DataFile]
) -> dict[str, int]:
    """Take doomed rollouts and second spans of one id out of ``spot``; gives the ended ones."""
    counts = dict(
        con.execute(
            "SELECT reason, count(*) FROM spot JOIN doomed USING (rollout) "
            "WHERE is_ended GROUP BY 1"
        ).fetchall()
    )
    con.execute("DELETE FROM spot USING doomed WHERE spot.rollout = doomed.rollout")
    con.execute(
        """
        CREATE TABLE twice AS
        SELECT file, number, trace_id, span_id, is_ended, row_number() OVER
          (PARTITION BY trace_id, span_id ORDER BY NOT is_ended, file, number) AS rank
        FROM spot SEMI JOIN
          (SELECT trace_id, span_id FROM spot GROUP BY ALL HAVING count(*) > 1)
          USING (trace_id, span_id)
        """
    )
    conflicts, seconds = row_of(
        con,
        f"""
        WITH read AS (
          SELECT twice.*, {CONTENT} AS content
          FROM {rows_of(layout, files)} AS data JOIN files ON path = filename JOIN twice
              ON files.file = twice.file AND file_row_number = number
        )
        SELECT count(*) FILTER (content <> first_content), count(*) FROM (
          SELECT *, first_value(content) OVER
            (PARTITION BY trace_id, span_id ORDER BY rank) AS first_content
          FROM read) WHERE rank > 1 AND is_ended
        """
        if row_of(con, "SELECT count(*) FROM twice") != (0,)
        else "SELECT 0, 0",
    )
    con.execute(
        "DELETE FROM spot USING twice "
        "WHERE spot.file = twice.file AND spot.number = twice.number AND rank > 1"
    )
    con.execute("DROP TABLE twice")
    found = {**counts, n.CONFLICT: int(conflicts), n.DUPLICATE: int(seconds - conflicts)}
    return {name: count for name, count in found.items() if count}


def _place(con: "duckdb.DuckDBPyConnection", slice_bytes: int) -> None:
    """``placed``: each row's position in the new file, and the slice it comes with."""
    con.execute(
        f"""
        CREATE TABLE placed AS
        SELECT file, number, start_ns, position,
          (sum(weight) OVER (ORDER BY position) / {slice_bytes})::INTEGER AS slice
        FROM (
          SELECT file, number, start_ns, weight, row_number() OVER
            (ORDER BY began, rollout, agent, start_ns, sequence) AS position
          FROM (SELECT *, min(start_ns) OVER (PARTITION BY rollout) AS began FROM spot))
        """
    )
    con.execute("DROP TABLE spot")


def _tangle(con: "duckdb.DuckDBPyConnection") -> float:
    """How often the files are read over, on average, if each slice reads those it stands in."""
    (times,) = row_of(
        con,
        """
        WITH raw AS (SELECT file, sum(weight * rows) AS size FROM weights GROUP BY 1)
        SELECT (SELECT sum(size) FROM (SELECT DISTINCT slice, file FROM placed)
          JOIN raw USING (file)) / (SELECT sum(size) FROM raw)
        """,
    )
    return float(times)


def _gather(
    con: "duckdb.DuckDBPyConnection", layout: Layout, files: Sequence[DataFile], step: Step
) -> list[Path]:
    """The rows themselves in their new order, a file under the spill folder for each slice."""
    slices = con.execute(
        "SELECT slice, list(DISTINCT path), min(start_ns), max(start_ns), count(*) "
        "FROM placed JOIN files USING (file) GROUP BY 1 ORDER BY 1"
    ).fetchall()
    gathered = []
    for number, paths, low, high, rows in slices:
        held = [file for file in files if str(layout.data / file.name) in paths]
        gathered.append(layout.new / SPILL / f"slice-{number}.parquet")
        spans = f"""(
          SELECT {", ".join(f"data.{name}" for name in COLUMNS)}, position
          FROM {rows_of(layout, sorted(held, key=lambda file: file.name))} AS data
          JOIN files ON path = filename JOIN placed
            ON files.file = placed.file AND file_row_number = number AND slice = {number}
          WHERE data.start_ns BETWEEN {low} AND {high})"""
        con.execute(
            f"""
            COPY (
              SELECT {STORED} FROM ({with_gist(spans, (*COLUMNS, "position"))})
              ORDER BY position
            ) TO {quoted(str(gathered[-1]))} (FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1)
            """
        )
        step(rows)
    return gathered


def write_slices(
    con: "duckdb.DuckDBPyConnection",
    made: Path,
    slices: Sequence[Path],
    *,
    level: int = LEVEL,
    group_rows: int = ROW_GROUP,
    group_bytes: int = ROW_GROUP_BYTES,
) -> None:
    """Write the rows of some files one after the other into a new one; the old ones go.

    Args:
        con: A connection of :func:`parquet.packing_connection`.
        made: The new file.
        slices: Files with our columns and their gist, in order.
        level: Of zstd.
        group_rows: Rows in a group.
        group_bytes: Bytes in a group, uncompressed.
    """
    listed = ", ".join(quoted(str(path)) for path in slices)
    con.execute(
        f"""
        COPY (SELECT {STORED} FROM read_parquet([{listed}])) TO {quoted(str(made))}
        (FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL {level}, ROW_GROUP_SIZE {group_rows},
         ROW_GROUP_SIZE_BYTES {group_bytes}, KV_METADATA {{schema: '{SCHEMA_VERSION}'}})
        """
    )
    made.chmod(0o600)
    sync(made)
    for path in slices:
        path.unlink()


def _paths(con: "duckdb.DuckDBPyConnection") -> str:
    rows = con.execute("SELECT path FROM files ORDER BY file").fetchall()
    return "[" + ", ".join(quoted(path) for (path,) in rows) + "]"
