"""Damaged files: spans that can be got back are, the others are counted."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_otel.errors import StoreError
from lightning_otel.store import quarantine
from lightning_otel.store.catalogue import STAMP, ensure_catalogue
from lightning_otel.store.checksums import Wounds, checksum_of, wounds_of
from lightning_otel.store.damage import look, missing, remove
from lightning_otel.store.election import settler_elected
from lightning_otel.store.layout import DataFile, Layout, now_us
from lightning_otel.store.parquet import SPILL, RowGroup, near_files, packing_connection
from lightning_otel.store.quarantine import Note
from lightning_otel.store.rebuild import HELD, IS_HELD, restore
from lightning_otel.store.rewrite import Copy, TooWideError
from lightning_otel.store.settle import await_effect
from lightning_otel.store.spans import rows_of

if TYPE_CHECKING:
    import duckdb

_WAIT_S = 10.0
_HAS_IDS = "regexp_full_match(f.trace_id || f.span_id, '[0-9a-f]+') AND f.start_ns IS NOT NULL"
_EVER = 1 << 62


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
            done = [
                _resolve_note(layout, note) for note in quarantine.notes(layout) if note.is_open
            ]
            _renew_checksums(layout)
            (layout.root / STAMP).unlink(missing_ok=True)
            await_effect(layout)
    except OSError as exc:
        raise StoreError(f"cannot repair {layout.catalogue}: {exc}; is there room?") from exc
    ensure_catalogue(layout)
    return [*done, *lines]


def _resolve_note(layout: Layout, note: Note) -> Note:
    recovered = _salvage_rows(layout, note) if (layout.quarantine / note.name).exists() else 0
    resolved = replace(
        note,
        recovered=recovered,
        missing=0,
        gone=max(0, note.missing - recovered),
        resolved_us=now_us(),
    )
    quarantine.write_note(layout, resolved)
    return resolved


class Salvage(Copy):
    """A damaged file's whole row groups, without spans that other files hold."""

    def __init__(
        self, con: "duckdb.DuckDBPyConnection", layout: Layout, file: DataFile, path: Path
    ) -> None:
        """Name the file and where it lies now."""
        super().__init__(con, layout, file, keep=f"{_HAS_IDS} AND NOT {IS_HELD}")
        self._folder = path.parent
        self._wounds = wounds_of(path, file.checksum) if file.checksum else Wounds()

    def _has_copied(self, part: RowGroup, path: Path) -> bool:
        import duckdb

        blocks = self._wounds.blocks
        if any(first < part.end_byte and end > part.first_byte for first, end in blocks):
            return False
        try:
            return super()._has_copied(part, path)
        except duckdb.OutOfMemoryException:
            raise
        except duckdb.Error:
            return False


def _salvage_rows(layout: Layout, note: Note) -> int:
    """Write what is whole of a file into a new one; gives its number of spans."""
    import duckdb

    file = note.file or DataFile(note.name, 0, 0, 0, 0, _EVER)
    near = near_files(layout, layout.read_manifest(), file.min_start_ns, file.max_start_ns)
    with packing_connection(layout.new / SPILL) as con:
        con.execute(f"CREATE TABLE {HELD}")
        con.execute(
            "INSERT INTO held SELECT trace_id, span_id, start_ns, true "
            f"FROM {rows_of(layout, near)}"
        )
        try:
            made = Salvage(con, layout, file, layout.quarantine / note.name).rewrite()
        except (duckdb.Error, TooWideError):  # its footer is gone, and the places of everything
            return 0
    return made.rows if made else 0


def _renew_checksums(layout: Layout) -> None:
    """Take the checksum of files that have none, and the time of change of those copied here."""
    manifest = layout.read_manifest()
    files = tuple(
        file if file.dropped_us is not None else _renew_file(layout.data / file.name, file)
        for file in manifest.files
    )
    if files != manifest.files:
        layout.write_manifest(replace(manifest, files=files))


def _renew_file(path: Path, file: DataFile) -> DataFile:
    changed = path.stat().st_mtime_ns
    return replace(file, checksum=file.checksum or checksum_of(path), mtime_ns=changed)
