"""The files and segments of a store that count at one moment, and the SQL that reads their spans.

What ceases to count stays for a period of grace. Of a growing segment only the lines that were
there are read. Only the catalogue decides inside its SQL (:mod:`catalogue`).
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from lightning_otel.errors import StoreError
from lightning_otel.store.damage import count_lines, list_excluded
from lightning_otel.store.files import list_names, total_bytes
from lightning_otel.store.layout import SEGMENT_SUFFIX, Layout, now_us, read_facts_mark
from lightning_otel.store.lines import MAX_RECORD_BYTES
from lightning_otel.store.manifest import DataFile, Manifest, is_in_effect
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.sql import quote_paths, quote_text, struct_sql

_SMALL_BYTES: Final = 1 << 20
"""A store up to this size is read into memory: to plan a query over files takes longer."""
_MANY: Final = 64
_SMALL_SEGMENT_BYTES: Final = 128 << 10
ALL_LINES: Final[Mapping[str, int]] = MappingProxyType({})
"""Lines that count by segment that grows, where none does."""
NO_COLUMNS: Final = ", ".join(f"NULL::{kind} AS {name}" for name, kind in COLUMNS.items())
SAME_SPAN_NS: Final = 86_400_000_000_000
"""Of two spans with one id that start within a day the first wins; older files are not asked."""
SEGMENT_COLUMNS: Final = {
    "record": "VARCHAR",
    **COLUMNS,
    "rotated": "BOOLEAN",
    "lost": "BIGINT",
    "counts": "JSON",
}

IS_SPAN: Final = (
    "(record IN ('span', 'start', 'drop') AND trace_id IS NOT NULL AND span_id IS NOT NULL "
    "AND start_ns IS NOT NULL)"
)
"""Whether a line of a segment is a span that can be told from others, or takes a start back."""


_RANK: Final = "record <> 'span', record <> 'drop', filename, sequence"
"""Of the lines of segments about one span: its end, unless it was dropped, else its start."""
FIRST_LINE_ONLY: Final = f"""QUALIFY row_number() OVER (
    PARTITION BY trace_id, span_id ORDER BY {_RANK}) = 1 AND record <> 'drop'"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files and segments that count.

    Attributes:
        files: Data files that are there and not known to be damaged.
        segments: Segments whose spans none of these holds, oldest first.
        excluded: Names of damaged files and segments that lie where they always lay.
        live_bytes: Size of the segments.
        lines: How many lines count of each segment that its process still writes, by name.
        alive: The processes that may still end what they began.
        facts_mark: The last deletion of facts before the look.
        manifest: The manifest that says so.
    """

    layout: Layout
    files: tuple[DataFile, ...]
    segments: tuple[Path, ...]
    excluded: frozenset[str]
    live_bytes: int
    lines: Mapping[str, int] = field(default_factory=dict, compare=False)
    alive: frozenset[str] = field(default=frozenset(), compare=False)
    facts_mark: bytes = field(default=b"", compare=False)
    manifest: Manifest = field(default=Manifest(), compare=False)

    @classmethod
    def take(cls, layout: Layout, manifest: Manifest | None = None) -> Self:
        """Return what counts now, or by a manifest that was read just now."""
        mark = read_facts_mark(layout.facts)  # before all that may be deleted
        paths = layout.segments()  # first: what is settled meanwhile stands in the manifest
        manifest = manifest or layout.read_manifest()
        now, excluded = now_us(), list_excluded(layout)
        try:
            names = list_names(layout.data) - excluded
        except OSError as exc:
            raise StoreError(
                f"cannot read {layout.catalogue}: {exc}; see: lightning-otel doctor"
            ) from exc
        out = manifest.settled_by(now) | excluded
        files = tuple(
            file
            for file in manifest.files
            if is_in_effect(file.added_us, now)
            and (file.dropped_us is None or not is_in_effect(file.dropped_us, now))
            and file.name in names
        )
        segments = tuple(path for path in paths if path.name not in out)
        size = total_bytes(segments)
        return cls(layout, files, segments, excluded, size, facts_mark=mark, manifest=manifest)

    @property
    def unsettled(self) -> list[Path]:
        """The segments that its manifest does not call settled."""
        settled = self.manifest.settled
        return [path for path in self.segments if path.name not in settled]

    def fix(self) -> Self:
        """Return the snapshot with the lengths that its growing segments have now."""
        lines: dict[str, int] = {}
        for path in filter(_is_written, self.segments):
            with contextlib.suppress(FileNotFoundError):
                lines[path.name] = count_lines(self.layout, path)
        damaged = [name for name in self.excluded if name.endswith(SEGMENT_SUFFIX)]
        growing = [*lines, *(name for name in damaged if _is_written(self.layout.live / name))]
        alive = frozenset(name.rpartition("-")[0] for name in growing)
        return replace(self, lines=lines, alive=alive)

    @property
    def is_small(self) -> bool:
        """True if all spans fit into a little memory."""
        return self.live_bytes + sum(file.size_bytes for file in self.files) <= _SMALL_BYTES

    def live_sql(self, columns: str = "") -> str:
        """SELECT the spans of the segments, each once; a file may hold some of them too."""
        return segments_sql(
            self.segments, live_bytes=self.live_bytes, lines=self.lines, columns=columns
        )

    def spans_sql(self) -> str:
        """SELECT every span once, an unended one with an empty ``end_ns``."""
        names = ", ".join(COLUMNS)
        settled = f"SELECT {names} FROM {rows_sql(self.layout, self.files)}"
        if not self.segments:
            return settled
        return f"""
WITH settled AS NOT MATERIALIZED ({settled}), live AS NOT MATERIALIZED ({self.live_sql()})
{union_sql(names)}"""

    def without(self, segments: Iterable[str]) -> Self:
        """Return the snapshot without some segments, by name."""
        names = frozenset(segments)
        paths = tuple(path for path in self.segments if path.name not in names)
        return replace(self, segments=paths, live_bytes=total_bytes(paths))


def ndjson_sql(paths: str, columns: dict[str, str]) -> str:
    """Return a ``read_json`` call that skips damaged lines; ``paths`` is SQL."""
    # The buffer is twice the object size and one stands open per thread: the default of 16 MiB fits
    # our 8 MiB records.
    return (
        f"read_json({paths}, format='newline_delimited', columns={struct_sql(columns)}, "
        f"ignore_errors=true, filename=true, maximum_object_size={2 * MAX_RECORD_BYTES})"
    )


def small_ndjson_sql(paths: str, columns: dict[str, str]) -> str:
    """Return the SQL of :func:`ndjson_sql` for thousands of small files.

    ``read_json`` takes a millisecond a file to bind columns; this none, and thrice as long a
    megabyte.
    """
    shape = quote_text(json.dumps(columns))
    return (
        f"(SELECT unnest(json_transform(json, {shape})), filename "
        f"FROM read_ndjson_objects({paths}, "
        f"ignore_errors=true, filename=true, maximum_object_size={2 * MAX_RECORD_BYTES}))"
    )


def same_span_sql(one: str, other: str) -> str:
    """Return the condition that rows of two tables are one span: same ids, begun together."""
    return (
        f"{one}.trace_id = {other}.trace_id AND {one}.span_id = {other}.span_id "
        f"AND {one}.start_ns BETWEEN {other}.start_ns - {SAME_SPAN_NS} "
        f"AND {other}.start_ns + {SAME_SPAN_NS}"
    )


def list_nearby_files(files: Iterable[DataFile], low_ns: int, high_ns: int) -> list[DataFile]:
    """Return the files that may hold a span that starts between two times, or the same span."""
    return [
        file
        for file in files
        if file.min_start_ns <= high_ns + SAME_SPAN_NS
        and file.max_start_ns >= low_ns - SAME_SPAN_NS
    ]


def union_sql(columns: str) -> str:
    """End a query in which ``settled`` and ``live`` hold the spans of files and of segments."""
    return f"""SELECT {columns} FROM settled
UNION ALL BY NAME
SELECT {columns} FROM live ANTI JOIN settled ON {same_span_sql("settled", "live")}"""


def segments_sql(
    segments: Sequence[Path],
    *,
    live_bytes: int,
    lines: Mapping[str, int] = ALL_LINES,
    columns: str = "",
) -> str:
    """Return a query for the spans of segments, each once; a data file may hold some too.

    With ``columns`` it is for a table of these: two thirds of the time, for some more memory.
    """
    # To open many small ones takes longer than to read them.
    are_small = len(segments) > _MANY and live_bytes < _SMALL_SEGMENT_BYTES * len(segments)
    rows = lines_sql(segments, lines, are_small=are_small)
    if not columns:
        return f"SELECT {', '.join(COLUMNS)} FROM {rows} WHERE {IS_SPAN} {FIRST_LINE_ONLY}"
    return f"""
WITH lines AS MATERIALIZED (
  SELECT {columns}, record, filename, row_number() OVER () AS line FROM {rows} WHERE {IS_SPAN})
SELECT {columns} FROM lines SEMI JOIN (
  SELECT first(line ORDER BY {_RANK}) AS line FROM lines GROUP BY trace_id, span_id) USING (line)
WHERE record <> 'drop'"""


def lines_sql(
    segments: Sequence[Path], lines: Mapping[str, int] = ALL_LINES, *, are_small: bool = False
) -> str:
    """Return a subquery over the lines of segments, of those that grow over the first ones."""
    read = small_ndjson_sql if are_small else ndjson_sql
    closed = [path for path in segments if path.name not in lines]
    growing = [path for path in segments if path.name in lines]
    parts = [f"FROM {read(quote_paths(closed), SEGMENT_COLUMNS)}"] if closed else []
    if growing:
        rows = read(quote_paths(growing), SEGMENT_COLUMNS)
        parts.append(_first_lines_sql(rows, {path.name: lines[path.name] for path in growing}))
    return f"({' UNION ALL '.join(parts)})"


def _first_lines_sql(rows: str, lines: Mapping[str, int]) -> str:
    """SELECT the first lines of each file: DuckDB's windows count while the rows flow past."""
    names = ", ".join(map(quote_text, lines))
    count = f"{list(lines.values())}[list_position([{names}], parse_filename(filename))]"
    return f"""SELECT * EXCLUDE (line, before, bound) FROM (
    SELECT *, max(CASE WHEN before IS DISTINCT FROM filename THEN line + {count} END)
      OVER (ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS bound
    FROM (SELECT *, row_number() OVER () AS line, lag(filename) OVER () AS before FROM {rows})
  ) WHERE line < bound"""


def rows_sql(layout: Layout, files: Sequence[DataFile], folder: Path | None = None) -> str:
    """Return a subquery over the rows of data files, if any, and the place of each row.

    ``folder`` is where they lie, if not where they belong.
    """
    if not files:
        return f"(SELECT {NO_COLUMNS}, ''::VARCHAR AS filename, 0 AS file_row_number LIMIT 0)"
    paths = quote_paths((folder or layout.data) / file.name for file in files)
    return (
        f"(SELECT {', '.join(COLUMNS)}, filename, file_row_number "
        f"FROM read_parquet({paths}, filename=true, file_row_number=true))"
    )


def _is_written(path: Path) -> bool:
    """Return whether a process holds the lock of a segment, and so may still write it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
