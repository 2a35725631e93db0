"""A batch of segments as one sorted Parquet file, each span once; the rest is counted."""

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.store.checksums import checksum_of
from lightning_otel.store.layout import (
    SCHEMA_VERSION,
    DataFile,
    Layout,
    Manifest,
    SettledSegment,
)
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.views import (
    IS_SPAN,
    SAME_SPAN_NS,
    SEGMENT_COLUMNS,
    quoted,
    read_ndjson,
    same_span,
)

if TYPE_CHECKING:
    import duckdb

SPILL: Final = "spill"
"""Folder under ``new/`` for what does not fit into the memory allowed."""
_MEMORY: Final = "400MB"
_CONTENT: Final = "hash(name, start_ns, end_ns, status, status_message, attributes::VARCHAR)"
"""Tells whether two spans with one id are the same one, kept twice."""


def make_parquet(
    layout: Layout, manifest: Manifest, paths: Sequence[Path]
) -> tuple[DataFile | None, list[SettledSegment]]:
    """Write the segments' spans into one file under ``new/``; None if they hold no new one."""
    with packing(layout) as con:
        return _pack(con, layout, manifest, paths)


@contextlib.contextmanager
def packing(layout: Layout) -> "Iterator[duckdb.DuckDBPyConnection]":
    """A connection that packs spans within the memory allowed."""
    import duckdb

    con = duckdb.connect(config={"threads": "1"})
    try:
        con.execute("SET enable_progress_bar = false")
        con.execute(f"SET memory_limit = '{_MEMORY}'")
        con.execute(f"SET temp_directory = {quoted(str(layout.new / SPILL))}")
        con.execute("SET preserve_insertion_order = false")
        yield con
    finally:
        con.close()


def new_name() -> str:
    """A data file's name; in order of their names files are in order of their making."""
    return f"spans-{time.time_ns():019d}-{secrets.token_hex(4)}.parquet"


def described(
    path: Path, rows: int, low: int, high: int, *, schema: int = SCHEMA_VERSION
) -> DataFile:
    """The manifest's entry of a data file that is whole, with its checksum (0.03 s for 14 MB).

    Args:
        path: The file.
        rows: Its spans.
        low: The earliest start of one, Unix nanoseconds.
        high: The latest one.
        schema: The version of its columns.
    """
    status = path.stat()
    return DataFile(
        path.name,
        0,
        int(rows),
        status.st_size,
        int(low),
        int(high),
        schema=schema,
        checksum=checksum_of(path),
        mtime_ns=status.st_mtime_ns,
    )


def _pack(
    con: "duckdb.DuckDBPyConnection", layout: Layout, manifest: Manifest, paths: Sequence[Path]
) -> tuple[DataFile | None, list[SettledSegment]]:
    """Write the batch's Parquet under ``new/`` and count what was in each segment."""
    listed = "[" + ", ".join(quoted(str(path)) for path in paths) + "]"
    con.execute(
        "CREATE TABLE raw AS SELECT *, parse_filename(filename) AS segment "
        f"FROM {read_ndjson(listed, SEGMENT_COLUMNS)}"
    )
    # Which line of each span counts. The start of a span is written anew when a segment rotates,
    # so in a rotated segment it means nothing.
    con.execute(
        f"""
        CREATE TABLE chosen AS
        SELECT rowid AS line, trace_id, span_id, start_ns FROM raw
        WHERE {IS_SPAN} AND (record = 'span' OR segment NOT IN
          (SELECT segment FROM raw WHERE record = 'seal' AND rotated))
        QUALIFY row_number() OVER
          (PARTITION BY trace_id, span_id ORDER BY record = 'start', segment, rowid) = 1
        """
    )
    _leave_out_settled(con, layout, manifest)
    segments = _counted(con, paths)
    rows, low, high = row_of(con, "SELECT count(*), min(start_ns), max(start_ns) FROM chosen")
    if not rows:
        return None, segments
    made = layout.new / new_name()
    con.execute(
        f"""
        COPY (
          SELECT {", ".join(COLUMNS)} FROM raw SEMI JOIN chosen ON raw.rowid = chosen.line
          ORDER BY trace_id, agent, start_ns, sequence
        ) TO {quoted(str(made))}
        (FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 3, ROW_GROUP_SIZE 20480,
         KV_METADATA {{schema: '{SCHEMA_VERSION}'}})
        """
    )
    made.chmod(0o600)
    sync(made)
    held = [replace(each, file=made.name if each.rows else "") for each in segments]
    return described(made, rows, low, high), held


def _leave_out_settled(
    con: "duckdb.DuckDBPyConnection", layout: Layout, manifest: Manifest
) -> None:
    """Drop chosen spans that a settled file holds already; ``held`` has what stands there."""
    con.execute("CREATE TABLE held (trace_id VARCHAR, span_id VARCHAR, content UBIGINT)")
    low, high = row_of(con, "SELECT min(start_ns), max(start_ns) FROM chosen")
    if low is None:
        return
    near = [
        quoted(str(layout.data / file.name))
        for file in manifest.live_files
        if (layout.data / file.name).exists()
        and file.min_start_ns <= high + SAME_SPAN_NS
        and file.max_start_ns >= low - SAME_SPAN_NS
    ]
    if not near:
        return
    files = f"read_parquet([{', '.join(near)}], union_by_name=true)"
    # Ids first: what else stands in the files is only read for a span that is there twice.
    con.execute(
        f"""
        CREATE TABLE twice AS
        SELECT f.trace_id, f.span_id FROM {files} f SEMI JOIN chosen
          ON f.trace_id = chosen.trace_id AND f.span_id = chosen.span_id
         AND {same_span("f", "chosen")}
        """
    )
    if row_of(con, "SELECT count(*) FROM twice") == (0,):
        return
    con.execute(
        f"INSERT INTO held SELECT trace_id, span_id, {_CONTENT} FROM {files} "
        "SEMI JOIN twice USING (trace_id, span_id)"
    )
    con.execute(
        "DELETE FROM chosen USING held "
        "WHERE chosen.trace_id = held.trace_id AND chosen.span_id = held.span_id"
    )


def _counted(con: "duckdb.DuckDBPyConnection", paths: Sequence[Path]) -> list[SettledSegment]:
    """Each segment with what was damaged, in conflict and lost."""
    con.execute(
        f"""
        CREATE TABLE refused AS SELECT segment, trace_id, span_id, {_CONTENT} AS content
        FROM raw ANTI JOIN chosen ON raw.rowid = chosen.line
        WHERE record = 'span' AND {IS_SPAN}
        """
    )
    con.execute(
        f"INSERT INTO held SELECT trace_id, span_id, {_CONTENT} FROM raw "
        "SEMI JOIN chosen ON raw.rowid = chosen.line SEMI JOIN refused USING (trace_id, span_id)"
    )
    counted = con.execute(
        f"""
        SELECT segment,
          count(*) FILTER (NOT coalesce({IS_SPAN} OR record IN ('seal', 'count'), false)),
          any_value(coalesce(conflicts, 0)),
          coalesce(sum(lost), 0), any_value(coalesce(kept, 0))
        FROM raw LEFT JOIN (
          SELECT segment, count(*) AS kept FROM raw SEMI JOIN chosen ON raw.rowid = chosen.line
          GROUP BY segment
        ) USING (segment) LEFT JOIN (
          SELECT segment, count(*) AS conflicts FROM refused JOIN held USING (trace_id, span_id)
          WHERE refused.content <> held.content GROUP BY segment
        ) USING (segment) GROUP BY segment
        """
    ).fetchall()
    counts = {name: tuple(map(int, numbers)) for name, *numbers in counted}
    found = []
    for path in paths:
        damaged, conflicts, lost, rows = counts.get(path.name, (0, 0, 0, 0))
        found.append(SettledSegment(path.name, 0, damaged, conflicts, lost, rows=rows))
    return found


def row_of(con: "duckdb.DuckDBPyConnection", query: str) -> tuple[Any, ...]:
    """The one row of a result."""
    row = con.execute(query).fetchone()
    assert row is not None
    return tuple(row)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
