"""What can be got back out of what is damaged, and a count of what cannot."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lightning_otel.errors import StoreError
from lightning_otel.store import quarantine
from lightning_otel.store.checksums import Wounds, checksum_of, wounds_of
from lightning_otel.store.damage import look, missing, remove
from lightning_otel.store.election import settler_elected
from lightning_otel.store.layout import DataFile, Layout, now_us
from lightning_otel.store.parquet import (
    ROW_GROUP,
    SPILL,
    described,
    new_name,
    packing_connection,
    row_of,
    sync,
)
from lightning_otel.store.quarantine import Note
from lightning_otel.store.rebuild import restore
from lightning_otel.store.source import STAMP, ensure_catalogue
from lightning_otel.store.spans import SAME_SPAN_NS, rows_of, same_span
from lightning_otel.store.sql import quoted

if TYPE_CHECKING:
    import duckdb

_WAIT_S = 10.0
_HAS_IDS = "regexp_full_match(trace_id || span_id, '[0-9a-f]+') AND start_ns IS NOT NULL"


class _Part(NamedTuple):
    """A row group: its rows' numbers and its bytes, each first and one past the last."""

    first_row: int
    end_row: int
    first_byte: int
    end_byte: int


def repair(layout: Layout) -> list[Note]:
    """Verify every file, get back what can be, and give up the rest.

    Returns:
        What was open or corrupt, as it is now: how many spans came back, and how many are gone.

    Raises:
        StoreError: Another process is settling, or the store cannot be written.
    """
    try:
        with settler_elected(layout, wait_s=_WAIT_S) as is_elected:
            if not is_elected:
                raise StoreError(f"{layout.catalogue} is being settled just now; try again")
            restore(layout)
            lines = [
                note
                for path in layout.segments()
                for note in quarantine.put_aside_lines(layout, path)
            ]
            remove(layout, look(layout, layout.read_manifest(), is_thorough=True))
            absent = missing(layout, layout.read_manifest())
            if absent:
                quarantine.put_aside(layout, {file.name: "it is missing" for file in absent})
            done = [_resolved(layout, note) for note in quarantine.notes(layout) if note.is_open]
            _renew_checksums(layout)
            (layout.root / STAMP).unlink(missing_ok=True)
    except OSError as exc:
        raise StoreError(f"cannot repair {layout.catalogue}: {exc}; is there room?") from exc
    ensure_catalogue(layout)
    return [*done, *lines]


def _resolved(layout: Layout, note: Note) -> Note:
    path = layout.quarantine / note.name
    recovered = _salvaged(layout, path, note.file) if path.exists() else 0
    resolved = replace(
        note,
        recovered=recovered,
        missing=0,
        gone=max(0, note.missing - recovered),
        resolved_us=now_us(),
    )
    quarantine.write_note(layout, resolved)
    return resolved


def _salvaged(layout: Layout, path: Path, file: DataFile | None) -> int:
    """Write the rows of a file's whole row groups into a new data file, without those kept twice.

    Returns:
        How many rows there were.
    """
    import duckdb

    wounds = wounds_of(path, file.checksum) if file and file.checksum else None
    with packing_connection(layout.new / SPILL) as con:
        try:
            parts = _parts(con, path)
        except duckdb.Error:  # its footer is gone, and with it the places of everything
            return 0
        source = f"read_parquet({quoted(str(path))}, file_row_number=true)"
        con.execute(
            f"CREATE TABLE good AS SELECT * EXCLUDE (file_row_number) FROM {source} LIMIT 0"
        )
        for part in parts:
            if not _is_whole(part, wounds):
                continue
            try:
                con.execute(
                    f"INSERT INTO good SELECT * EXCLUDE (file_row_number) FROM {source} WHERE "
                    f"file_row_number BETWEEN {part.first_row} AND {part.end_row - 1} "
                    f"AND {_HAS_IDS}"
                )
            except duckdb.Error:
                continue
        _leave_out_held(con, layout)
        return _kept(con, layout, file)


def _parts(con: "duckdb.DuckDBPyConnection", path: Path) -> list[_Part]:
    found = con.execute(
        "SELECT any_value(row_group_num_rows), "
        "min(least(data_page_offset, coalesce(dictionary_page_offset, data_page_offset))), "
        f"sum(total_compressed_size) FROM parquet_metadata({quoted(str(path))}) "
        "GROUP BY row_group_id ORDER BY row_group_id"
    ).fetchall()
    parts, row = [], 0
    for rows, offset, size in found:
        parts.append(_Part(row, row + rows, offset, offset + int(size)))
        row += rows
    return parts


def _is_whole(part: _Part, wounds: Wounds | None) -> bool:
    return wounds is None or not any(
        first < part.end_byte and end > part.first_byte for first, end in wounds.blocks
    )


def _leave_out_held(con: "duckdb.DuckDBPyConnection", layout: Layout) -> None:
    low, high = row_of(con, "SELECT min(start_ns), max(start_ns) FROM good")
    near = [
        file
        for file in layout.read_manifest().live_files
        if low is not None
        and file.min_start_ns <= high + SAME_SPAN_NS
        and file.max_start_ns >= low - SAME_SPAN_NS
    ]
    if near:
        con.execute(
            f"DELETE FROM good USING {rows_of(layout, near)} AS f "
            "WHERE f.trace_id = good.trace_id AND f.span_id = good.span_id "
            f"AND {same_span('f', 'good')}"
        )


def _kept(con: "duckdb.DuckDBPyConnection", layout: Layout, old: DataFile | None) -> int:
    schema = old.schema if old else 1
    rows, low, high = row_of(con, "SELECT count(*), min(start_ns), max(start_ns) FROM good")
    if not rows:
        return 0
    made = layout.new / new_name()
    con.execute(
        "COPY (FROM good ORDER BY trace_id, start_ns) "
        f"TO {quoted(str(made))} (FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 3, "
        f"ROW_GROUP_SIZE {ROW_GROUP}, KV_METADATA {{schema: '{schema}'}})"
    )
    made.chmod(0o600)
    sync(made)
    file = described(made, rows, low, high, schema=schema)
    os.replace(made, layout.data / made.name)
    sync(layout.data)
    manifest = layout.read_manifest()
    # What is in a lake already, or is to go there, is so with these rows too.
    added = replace(file, added_us=now_us(), publication=old.publication if old else "")
    layout.write_manifest(replace(manifest, files=(*manifest.files, added)))
    return file.rows


def _renew_checksums(layout: Layout) -> None:
    """Take the checksum of files that have none, and the time of change of those copied here."""
    manifest = layout.read_manifest()
    files = tuple(
        file if file.dropped_us is not None else _renewed(layout.data / file.name, file)
        for file in manifest.files
    )
    if files != manifest.files:
        layout.write_manifest(replace(manifest, files=files))


def _renewed(path: Path, file: DataFile) -> DataFile:
    changed = path.stat().st_mtime_ns
    return replace(file, checksum=file.checksum or checksum_of(path), mtime_ns=changed)
