"""The SQL that reads files and segments as spans, each once.

What counts is decided at each query by the manifest, as of the start of the query's own
transaction; so a catalogue, once written, stays right whatever is recorded or settled after.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from lightning_otel.store.layout import (
    EMPTY_DATA,
    FURTHEST_AHEAD_US,
    SCHEMA_VERSION,
    DataFile,
    Layout,
)
from lightning_otel.store.lines import MAX_RECORD_BYTES
from lightning_otel.store.schema import COLUMNS, SOURCES
from lightning_otel.store.sql import attribute, listed, quoted

SAME_SPAN_NS: Final = 86_400_000_000_000
"""Of two spans with one id that start within a day the first wins; older files are not asked."""

MANIFEST_COLUMNS: Final = {
    "kind": "VARCHAR",
    "name": "VARCHAR",
    "schema": "BIGINT",
    "added_us": "BIGINT",
    "dropped_us": "BIGINT",
    "settled_us": "BIGINT",
    "rows": "BIGINT",
    "size_bytes": "BIGINT",
    "damaged": "BIGINT",
    "conflicts": "BIGINT",
    "lost": "BIGINT",
}
UNKNOWN: Final = {"kind": "'INTERNAL'", "status": "'UNSET'", "sequence": "-1", "end_sequence": "-1"}
"""What stands in a column that a file of an older schema lacks and no attribute tells."""
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


_ONE_LINE_EACH: Final = """QUALIFY row_number() OVER (
    PARTITION BY trace_id, span_id
    ORDER BY record <> 'span', record <> 'drop', filename, sequence) = 1 AND record <> 'drop'"""
"""Of the lines of segments about one span: its end, unless it was dropped, else its start."""


def _is_ahead(time_us: str) -> str:
    """As ``layout.is_in_effect``, the other way round."""
    return f"({time_us} - epoch_us(now()) BETWEEN 1 AND {FURTHEST_AHEAD_US})"


def _struct(columns: dict[str, str]) -> str:
    return (
        "{" + ", ".join(f"{quoted(name)}: {quoted(kind)}" for name, kind in columns.items()) + "}"
    )


def read_ndjson(paths: str, columns: dict[str, str]) -> str:
    """A ``read_json`` call that steps over damaged lines; ``paths`` is SQL."""
    # The buffer is twice the object size and one stands open per thread: the default of 16 MiB fits
    # our 8 MiB records.
    return (
        f"read_json({paths}, format='newline_delimited', columns={_struct(columns)}, "
        f"ignore_errors=true, filename=true, maximum_object_size={2 * MAX_RECORD_BYTES})"
    )


def read_many_ndjson(paths: str, columns: dict[str, str]) -> str:
    """As :func:`read_ndjson`, for thousands of small files.

    ``read_json`` takes a millisecond a file to bind our columns; this takes none, and three times
    as long for each megabyte.
    """
    shape = quoted(json.dumps(columns))
    return (
        f"(SELECT unnest(json_transform(json, {shape})), filename "
        f"FROM read_ndjson_objects({paths}, "
        f"ignore_errors=true, filename=true, maximum_object_size={2 * MAX_RECORD_BYTES}))"
    )


def same_span(one: str, other: str) -> str:
    """Whether two rows with the same ids are taken for one span; see ``SAME_SPAN_NS``."""
    return (
        f"{one}.start_ns BETWEEN {other}.start_ns - {SAME_SPAN_NS} "
        f"AND {other}.start_ns + {SAME_SPAN_NS}"
    )


def _settled_and_live() -> str:
    """What the two queries for spans end with: those settled, and those that only segments hold."""
    columns = ", ".join(COLUMNS)
    return f"""SELECT {columns} FROM settled
UNION ALL BY NAME
SELECT {columns} FROM live ANTI JOIN settled ON settled.trace_id = live.trace_id
  AND settled.span_id = live.span_id AND {same_span("settled", "live")}"""


def spans_query(
    layout: Layout,
    settled: Iterable[str] = (),
    avoided: Iterable[str] = (),
    *,
    are_small: bool = False,
) -> str:
    """The ``spans`` view: every span once, an unended one with an empty ``end_ns``.

    The manifest is read where it is needed, not materialized: with that, DuckDB 2.0 reads every
    column of every file for a mere count.

    Args:
        layout: The store's paths.
        settled: Names of segments known to be settled, which DuckDB then does not even open.
        avoided: Names of damaged files and segments, which it shall not open.
        are_small: Whether the segments are many and small; see :func:`read_many_ndjson`.
    """
    manifest = read_ndjson(quoted(str(layout.whole_manifest())), MANIFEST_COLUMNS)
    read = read_many_ndjson if are_small else read_ndjson
    segments = read(quoted(str(layout.live / "*.ndjson")), SEGMENT_COLUMNS)
    data = quoted(str(layout.data / "*.parquet"))
    columns = ", ".join(COLUMNS)
    # One text, not a list of values: DuckDB looks into that for each file, a list takes it longer.
    known = quoted("/".join(["", *settled, *avoided, ""]))
    damaged = [name for name in avoided if name.endswith(".parquet")]
    is_mixed = any(file.schema < SCHEMA_VERSION for file in layout.read_manifest().live_files)
    return f"""
WITH manifest AS NOT MATERIALIZED (
  SELECT kind, name, coalesce(schema, 1) AS schema FROM {manifest}
  WHERE NOT {_is_ahead("coalesce(added_us, settled_us)")}
    AND (dropped_us IS NULL OR {_is_ahead("dropped_us")})
),
settled AS NOT MATERIALIZED (
  {_settled(data, damaged, is_mixed=is_mixed)}
),
live AS NOT MATERIALIZED (
  SELECT {columns} FROM {segments}
  WHERE {IS_SPAN} AND NOT contains({known}, '/' || parse_filename(filename) || '/')
    AND parse_filename(filename) NOT IN (SELECT name FROM manifest WHERE kind = 'segment')
  {_ONE_LINE_EACH}
)
{_settled_and_live()}"""


def live_query(segments: Iterable[Path], where: str = "true", *, are_small: bool = False) -> str:
    """A query for the spans of some segments, each once; one that a file holds may be among them.

    Args:
        segments: At least one.
        where: A condition on the spans.
        are_small: Whether the segments are many and small; see :func:`read_many_ndjson`.
    """
    read = read_many_ndjson if are_small else read_ndjson
    return f"""SELECT {", ".join(COLUMNS)} FROM {read(listed(segments), SEGMENT_COLUMNS)}
  WHERE {where} AND {IS_SPAN}
  {_ONE_LINE_EACH}"""


def listed_query(
    layout: Layout,
    files: Sequence[DataFile],
    segments: Collection[Path],
    where: str = "",
    *,
    are_small: bool = False,
) -> str:
    """What :func:`spans_query` gives while these are the files and segments that count.

    It costs a third of the memory and half of the time: nothing is compared with a manifest, and
    spans of files with those of segments only where there are any.

    Args:
        layout: The store's paths.
        files: Data files.
        segments: Segments that are not settled.
        where: Which spans, if they are few; they are then read once.
        are_small: As :func:`live_query` takes it.
    """
    settled = f"SELECT {', '.join(COLUMNS)} FROM {rows_of(layout, files)}"
    if where:
        settled += f" WHERE {where}"
    if not segments:
        return settled
    return f"""
WITH settled AS {"" if where else "NOT "}MATERIALIZED (
  {settled}
),
live AS NOT MATERIALIZED (
  {live_query(segments, where or "true", are_small=are_small)}
)
{_settled_and_live()}"""


def _settled(data: str, damaged: Collection[str], *, is_mixed: bool) -> str:
    """Spans of the files listed; with ``is_mixed`` those of older schemas are made into ours.

    Apart from the others: what a column lacks is looked for in the attributes, which cost 150 times
    more to read than a narrow column.
    """
    is_whole = ""
    if damaged:
        names = quoted("/".join(["", *damaged, ""]))
        is_whole = f"NOT contains({names}, '/' || parse_filename(filename) || '/') AND "
    options = "filename=true, union_by_name=true" if is_mixed else "filename=true"
    listed = f"""FROM read_parquet({data}, {options})
  WHERE {is_whole}parse_filename(filename) IN (SELECT name FROM manifest WHERE kind = 'file'"""
    ours = f"SELECT {', '.join(COLUMNS)} {listed}"
    if not is_mixed:
        return f"{ours})"
    older = f"SELECT {', '.join(map(_rebuilt, COLUMNS))} {listed}"
    return (
        f"{ours} AND schema >= {SCHEMA_VERSION})\n  UNION ALL\n"
        f"  {older} AND schema < {SCHEMA_VERSION})"
    )


def rows_of(layout: Layout, files: Sequence[DataFile], folder: Path | None = None) -> str:
    """A subquery over the rows of some data files, in our columns, and where each row stands.

    Args:
        layout: The store's paths.
        files: Which; where there is none, there is no row.
        folder: Where they lie, if not where they belong.
    """
    options = "filename=true, file_row_number=true"
    # The file without rows names every column.
    empty = layout.data / EMPTY_DATA
    folder = folder or layout.data
    ours = [folder / file.name for file in files if file.schema >= SCHEMA_VERSION]
    older = [folder / file.name for file in files if file.schema < SCHEMA_VERSION]
    parts = []
    if not files:
        ours = [empty]
    if ours:
        parts.append(
            f"SELECT {', '.join(COLUMNS)}, filename, file_row_number "
            f"FROM read_parquet({listed(ours)}, {options})"
        )
    if older:
        parts.append(
            f"SELECT {', '.join(map(_rebuilt, COLUMNS))}, filename, file_row_number "
            f"FROM read_parquet({listed([*older, empty])}, {options}, union_by_name=true)"
        )
    return f"({' UNION ALL '.join(parts)})"


def _rebuilt(column: str) -> str:
    """A column of an older file: from the attributes, or a value that says it is not known."""
    found = [f"TRY_CAST({attribute(key)} AS {COLUMNS[column]})" for key in SOURCES.get(column, ())]
    if column in UNKNOWN:
        found.append(UNKNOWN[column])
    return f"coalesce({', '.join([column, *found])}) AS {column}" if found else column


def empty_data_statement(path: Path) -> str:
    """Writes the data file without rows that keeps the glob from matching nothing."""
    columns = ", ".join(f"NULL::{kind} AS {name}" for name, kind in COLUMNS.items())
    return f"COPY (SELECT {columns} LIMIT 0) TO {quoted(str(path))} (FORMAT parquet)"
