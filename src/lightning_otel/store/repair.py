"""Damaged files: spans that can be got back are, the others are counted."""

from dataclasses import replace
from typing import Final

from lightning_otel.store.damage import (
    list_missing_files,
    list_readable_files,
    quarantine_damage,
    translate_errors,
)
from lightning_otel.store.files import is_own_file
from lightning_otel.store.layout import Layout, hold_settler_lock, now_us
from lightning_otel.store.manifest import DATA_NAME, DataFile
from lightning_otel.store.parquet import EVER, SPILL, bounded_connection
from lightning_otel.store.quarantine import (
    Note,
    find_corrupt_ranges,
    quarantine_files,
    read_notes,
    write_note,
)
from lightning_otel.store.recovery import restore_manifest
from lightning_otel.store.rewrite import Rewrite, TooWideError
from lightning_otel.store.settle import wait_until_visible
from lightning_otel.store.snapshot import list_nearby_files, rows_sql, same_span_sql
from lightning_otel.store.template import STAMP, ensure_catalogue

_HAS_IDS: Final = (
    "regexp_full_match(f.trace_id || f.span_id, '[0-9a-f]+') AND f.start_ns IS NOT NULL"
)


def repair(layout: Layout) -> list[Note]:
    """Verify every file, get back what can be, give up the rest; return the notes as they are."""
    with translate_errors(layout, "repair"), hold_settler_lock(layout):
        restore_manifest(layout)
        if not layout.is_copy_whole():
            layout.write_manifest(layout.read_manifest())
        names = {note.name for note in read_notes(layout) if not note.is_open}
        quarantine_damage(layout)
        absent = list_missing_files(layout, layout.read_manifest())
        quarantine_files(layout, {file.name: "it is missing" for file in absent})
        for note in read_notes(layout):
            if note.is_open:
                is_file = is_own_file(layout.quarantine / note.name)
                has_rows = is_file and DATA_NAME.fullmatch(note.name) is not None
                got = _recover_rows(layout, note) if has_rows else 0
                gone = max(0, note.missing - got)
                resolved = replace(note, recovered=got, missing=0, gone=gone, resolved_us=now_us())
                write_note(layout, resolved)
        (layout.root / STAMP).unlink(missing_ok=True)
        wait_until_visible(layout)
    ensure_catalogue(layout)
    return [note for note in read_notes(layout) if note.name not in names]


def _recover_rows(layout: Layout, note: Note) -> int:
    """Write a file's whole row groups into a new one, without spans that other files hold."""
    import duckdb

    file = note.file or DataFile(note.name, 0, 0, 0, 0, EVER)
    path = layout.quarantine / note.name
    others = list_readable_files(layout, layout.read_manifest())
    peers = list_nearby_files(others, file.min_start_ns, file.max_start_ns)
    twin = f"SELECT 1 FROM {rows_sql(layout, peers)} AS other WHERE {same_span_sql('other', 'f')}"
    with bounded_connection(layout.new / SPILL) as con:
        rewrite = Rewrite(
            con,
            layout,
            [file],
            keep=f"{_HAS_IDS} AND NOT EXISTS ({twin})",
            corrupt=find_corrupt_ranges(path, file.checksum) if note.file else (),
        )
        try:
            copy = rewrite.run()
        except (duckdb.Error, TooWideError):  # its footer is gone, and the places of everything
            return 0
    return copy.rows if copy else 0
