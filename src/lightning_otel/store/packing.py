"""Write a batch of segments into one sorted data file, each span once, and account for every span.

Spans that are left out are counted as they are left out; stored spans are counted in the files.
"""

import contextlib
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from lightning_otel.store import counts as n
from lightning_otel.store.damage import (
    exclude_damage,
    list_readable_files,
    translate_errors,
)
from lightning_otel.store.layout import Layout
from lightning_otel.store.manifest import DataFile, Manifest, SettledSegment
from lightning_otel.store.parquet import (
    SPILL,
    Origin,
    bounded_connection,
    fetch_row,
    find_settled_ns,
    write_file,
)
from lightning_otel.store.reader import Moment, Reader
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.sieve import segment_lines_sql
from lightning_otel.store.snapshot import (
    IS_SPAN,
    Snapshot,
    lines_sql,
    list_nearby_files,
    rows_sql,
    same_span_sql,
)
from lightning_otel.store.sql import ROLLOUT, quote_paths
from lightning_otel.store.writer import writers_by_catalogue

if TYPE_CHECKING:
    import duckdb

_COUNTABLE: Final = range(1 << 53)
"""What a process may have counted: a manifest holds no more, and nothing below zero."""
_CONTENT_COLUMNS: Final = ("name", "status", "status_message", "attributes")
_COUNTED_COLUMNS: Final = (
    "record", "trace_id", "span_id", "start_ns", "end_ns", "rotated", "lost", "counts", "process",
    "sequence", "end_sequence", "segment",
)  # fmt: skip
ORDER: Final = f"{ROLLOUT}, agent, start_ns, sequence"
"""Within a rollout's time: a conversation's calls stand one after the other, and each holds what
the one before it held, which zstd then stores once. Rollouts stand in the order they began in, so
that a window of time is a range of rows."""
CONTENT: Final = "hash(name, start_ns, end_ns, status, status_message, attributes::VARCHAR)"
"""Tells whether two spans with one id are the same one, kept twice."""

_BEGUN: Final = f"""raw JOIN (
  SELECT rowid AS line, min(start_ns) OVER (PARTITION BY {ROLLOUT}) AS began
  FROM raw SEMI JOIN chosen ON raw.rowid = chosen.line
) ON raw.rowid = line"""
"""The lines that count, each with the time its rollout began."""
_REFUSED: Final = f"""raw ANTI JOIN chosen ON raw.rowid = chosen.line
WHERE record = 'span' AND {IS_SPAN}"""
"""Lines of spans that others hold; of these alone the content is looked at."""


def make_parquet(
    con: "duckdb.DuckDBPyConnection",
    layout: Layout,
    manifest: Manifest,
    paths: Sequence[Path],
    lines: str,
) -> tuple[DataFile | None, list[SettledSegment]]:
    """Write the segments' spans into one file under ``new/``; None if they hold no new one.

    ``lines`` is the query for their lines, each with its segment.
    """
    _choose_lines(con, layout, manifest, lines)
    segments = _count_segments(con, paths)
    # Later than all before it, though the clock was set back: consumers know what they have by it.
    times = [find_settled_ns(layout.data, file) for file in manifest.files]
    settled_ns = max([time.time_ns(), *(time_ns + 1 for time_ns in times)])
    query = (
        f"SELECT {', '.join(COLUMNS)}, {settled_ns} AS settled_ns FROM {_BEGUN} "
        f"ORDER BY began, {ORDER}"
    )
    counts = n.sum_counts(*(segment.counts for segment in segments))
    origin = Origin({segment.name: segment.rows for segment in segments}, counts=counts)
    file = write_file(con, layout, query, origin, stamp=f"{settled_ns:019d}")
    con.execute("DROP TABLE raw")  # not beside the next one
    name = file.name if file else ""
    return file, [replace(segment, file=name if segment.rows else "") for segment in segments]


def _choose_lines(
    con: "duckdb.DuckDBPyConnection",
    layout: Layout,
    manifest: Manifest,
    lines: str,
    columns: Sequence[str] = ("*",),
) -> None:
    """Read lines into ``raw``; ``chosen`` has those that count, ``held`` their rivals."""
    con.execute(f"CREATE OR REPLACE TABLE raw AS SELECT {', '.join(columns)} FROM ({lines})")
    # Which line of each span counts. The start of a span is written anew when a segment rotates,
    # so in a rotated segment it means nothing.
    con.execute(
        f"""
        CREATE OR REPLACE TABLE chosen AS
        SELECT rowid AS line, trace_id, span_id, start_ns FROM raw SEMI JOIN (
          SELECT first(rowid ORDER BY record <> 'span', record <> 'drop', segment, rowid) AS line
          FROM raw WHERE {IS_SPAN} AND (record = 'span' OR segment NOT IN
            (SELECT segment FROM raw WHERE record = 'seal' AND rotated))
          GROUP BY trace_id, span_id
        ) AS first_lines ON raw.rowid = first_lines.line WHERE record <> 'drop'
        """
    )
    con.execute("CREATE OR REPLACE TABLE held (trace_id VARCHAR, span_id VARCHAR, content UBIGINT)")
    low, high = fetch_row(con, "SELECT min(start_ns), max(start_ns) FROM chosen")
    if low is None or not (
        neighbours := list_nearby_files(list_readable_files(layout, manifest), low, high)
    ):
        return
    # Spans that a settled file holds already are not chosen.
    files = rows_sql(layout, neighbours)
    # Ids first: what else stands in the files is only read for a span that is there twice.
    con.execute(
        f"""
        CREATE OR REPLACE TABLE twice AS
        SELECT f.trace_id, f.span_id FROM {files} f SEMI JOIN chosen
          ON {same_span_sql("f", "chosen")}
        """
    )
    if fetch_row(con, "SELECT count(*) FROM twice") == (0,):
        return
    con.execute(
        f"INSERT INTO held SELECT trace_id, span_id, {CONTENT} FROM {files} "
        "SEMI JOIN twice USING (trace_id, span_id)"
    )
    con.execute(
        "DELETE FROM chosen USING held "
        "WHERE chosen.trace_id = held.trace_id AND chosen.span_id = held.span_id"
    )


def _count_segments(
    con: "duckdb.DuckDBPyConnection", paths: Sequence[Path]
) -> list[SettledSegment]:
    con.execute(
        f"""
        CREATE OR REPLACE TABLE refused AS
        SELECT raw.rowid AS line, segment, trace_id, span_id, end_ns, {CONTENT} AS content
        FROM {_REFUSED}
        """
    )
    con.execute(
        f"INSERT INTO held SELECT trace_id, span_id, {CONTENT} FROM raw "
        "SEMI JOIN chosen ON raw.rowid = chosen.line SEMI JOIN refused USING (trace_id, span_id)"
    )
    cursor = con.execute(
        f"""
        SELECT segment,
          count(*) FILTER (NOT coalesce({IS_SPAN} OR record IN ('seal', 'count'), false))
            AS damaged,
          coalesce(sum(lost), 0)::BIGINT AS lost, -- as older versions noted it
          any_value(coalesce(conflicts, 0)) AS conflicts,
          any_value(coalesce(refused, 0)) AS refused, -- conflicts among them
          count(*) FILTER (record = 'span' AND {IS_SPAN} AND end_ns IS NOT NULL) AS ended,
          list(counts::VARCHAR) FILTER (record IN ('seal', 'count') AND counts IS NOT NULL)
            AS notes, -- what its process counted
          any_value(coalesce(kept, 0)) AS kept
        FROM raw LEFT JOIN (
          SELECT segment, count(end_ns) FILTER (is_other) AS conflicts, count(end_ns) AS refused
          FROM (
            SELECT refused.segment, refused.end_ns, bool_or(refused.content <> held.content)
              AS is_other FROM refused JOIN held USING (trace_id, span_id)
            GROUP BY refused.line, refused.segment, refused.end_ns
          ) GROUP BY segment
        ) USING (segment) LEFT JOIN (
          SELECT segment, count(*) AS kept FROM raw SEMI JOIN chosen ON raw.rowid = chosen.line
          GROUP BY segment
        ) USING (segment) GROUP BY segment
        """
    )
    names = [column[0] for column in cursor.description]
    counted = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    gaps = _find_gaps(con) if any(row["damaged"] for row in counted) else {}
    by_name = {row["segment"]: _settle_counts(row, gaps.get(row["segment"], 0)) for row in counted}
    return [by_name.get(path.name, SettledSegment(path.name, 0)) for path in paths]


def _find_gaps(con: "duckdb.DuckDBPyConnection") -> dict[str, int]:
    """Count the ended spans that each segment lacks, by its process's numbers.

    A lost end lacks one number where its start stands there still, else both.
    """
    rows = con.execute(
        f"""
        WITH own AS (
          SELECT segment, record, sequence, end_sequence FROM raw
          WHERE {IS_SPAN} AND sequence >= 0 AND starts_with(segment, process || '-')
        ), numbers AS (
          SELECT segment, sequence AS number FROM own
          UNION SELECT segment, end_sequence FROM own WHERE record = 'span'
        ), lows AS (
          -- Starts that are written anew as a segment rotates are older than what stands in it.
          SELECT segment, CASE WHEN segment LIKE '%-000000.%' THEN 1 ELSE min(end_sequence) END
            AS low, count(*) FILTER (record = 'start') - count(*) FILTER (record = 'span') AS open
          FROM own WHERE record IN ('start', 'span') GROUP BY segment
        )
        SELECT segment, max(number) - low + 1 - count(*), any_value(greatest(open, 0))
        FROM numbers JOIN lows USING (segment) WHERE number >= low GROUP BY segment, low
        """
    ).fetchall()
    return {name: min(opened, n) + (n - min(opened, n) + 1) // 2 for name, n, opened in rows}


def _settle_counts(row: Mapping[str, Any], gaps: int) -> SettledSegment:
    damaged, lost, refused = row["damaged"], max(0, row["lost"]), row["refused"]
    notes = [value for note in row["notes"] or () if isinstance(value := orjson.loads(note), dict)]
    whole = [
        {k: v for k, v in note.items() if type(v) is int and v in _COUNTABLE} for note in notes
    ]
    totals = n.sum_counts({n.DISK: lost}, *whole)
    certain = row["ended"] + n.count_unstored(totals)
    # A sealed segment says how many ended; of one whose process was killed, each line counts. A
    # damaged line may have been a span's start: then nothing is missing.
    noted = totals.pop(n.ENDED, None)
    ended = certain + (max(damaged, gaps) if damaged else 0) if noted is None else noted + lost
    counts = n.sum_counts(
        totals,
        {
            n.ENDED: ended,
            n.STORED: row["ended"] - refused,
            n.CONFLICT: row["conflicts"],
            n.DUPLICATE: refused - row["conflicts"],
            n.DAMAGED: max(0, ended - certain) if damaged else 0,
        },
    )
    return SettledSegment(row["segment"], 0, damaged, counts=counts, rows=row["kept"])


def read_accounting(layout: Layout, moment: Moment | None = None) -> n.Accounting:
    """Return what became of every span of the store, or of those that were there at a moment."""
    manifest, segments, stored = _read_counts(moment or Moment(layout, _look_around))
    counts = n.sum_counts(
        manifest.counts, *(segment.counts for segment in (*manifest.segments, *segments))
    )
    stored += sum(segment.counts.get(n.STORED, 0) for segment in segments)
    writer = writers_by_catalogue.get(layout.catalogue)
    unwritten = writer.unwritten_counts() if writer is not None else {}
    return n.make_accounting(n.sum_counts(counts, unwritten), stored=stored)


def accounting_by_process(layout: Layout, since_ns: int = 0) -> dict[str, n.Accounting]:
    """Return the same for each process since then with a loss or a segment settled lately."""
    manifest, segments, _ = _read_counts(Moment(layout, _look_around))
    parts = [(segment.process, segment.counts) for segment in (*manifest.segments, *segments)]
    writer = writers_by_catalogue.get(layout.catalogue)
    if writer is not None:
        parts.append((writer.process, writer.unwritten_counts()))
    totals: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for process, counts in parts:
        totals[process] = n.sum_counts(totals[process], counts)
    return {
        process: n.make_accounting(counts, stored=counts.get(n.STORED, 0))
        for process, counts in sorted(totals.items())
        if int(process.split("-")[1]) >= since_ns
    }


def _look_around(layout: Layout) -> Snapshot:
    """Return what counts, without damage; what this process holds in memory stays there."""
    layout.require()
    exclude_damage(layout)
    return Snapshot.take(layout)


def _read_counts(moment: Moment) -> tuple[Manifest, list[SettledSegment], int]:
    layout = moment.layout

    def count() -> tuple[Manifest, list[SettledSegment], int]:
        snapshot = moment.snapshot()
        manifest, paths = snapshot.manifest, snapshot.unsettled
        segments: list[SettledSegment] = []
        if paths:
            rows = segment_lines_sql(lines_sql(paths, snapshot.lines))
            nothing = (f"NULL AS {name}" for name in _CONTENT_COLUMNS)
            _choose_lines(con, layout, manifest, rows, (*_COUNTED_COLUMNS, *nothing))
            if con.execute(f"SELECT 1 FROM {_REFUSED} LIMIT 1").fetchall():
                columns = (*_COUNTED_COLUMNS, *_CONTENT_COLUMNS)
                _choose_lines(con, layout, manifest, rows, columns)
            segments = _count_segments(con, paths)
        # Of a file that was taken out the spans are missing, which is what is to be found.
        files = [layout.data / file.name for file in list_readable_files(layout, manifest)]
        query = f"SELECT count(end_ns) FROM read_parquet({quote_paths(files)})"
        return manifest, segments, fetch_row(con, query)[0] if files else 0

    with translate_errors(layout, "account for"), contextlib.ExitStack() as stack:
        folder = layout.new / SPILL
        if moment.snapshot().unsettled:
            # A folder of its own, as a settler clears its own away. A full disk has room for none.
            spill = tempfile.TemporaryDirectory(prefix="lightning-otel-")
            folder = Path(stack.enter_context(spill))
        con = stack.enter_context(bounded_connection(folder))
        return Reader(con, moment, lambda con, snapshot: None).run(count)
