"""The manifest restored, and data files that it does not name adopted, dropped or put aside.

A settler that dies leaves such files, and so does a copy made while the store is in use. A file's
footer tells what its commit would have written, so the commit is done again; what does not fit is
compared, span by span, with all else that the store holds.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel.errors import StoreDamagedError, warn_once
from lightning_otel.store import quarantine
from lightning_otel.store.counts import ENDED, STORED
from lightning_otel.store.damage import list_readable_files
from lightning_otel.store.files import list_names, put_file, total_bytes
from lightning_otel.store.layout import Layout, elect_settler, now_us
from lightning_otel.store.manifest import DATA_NAME, DataFile, Manifest, SettledSegment
from lightning_otel.store.parquet import (
    SPILL,
    Origin,
    bounded_connection,
    describe_file,
    fetch_row,
    read_origin,
    sync,
)
from lightning_otel.store.quarantine import Note, put_aside, read_notes
from lightning_otel.store.snapshot import list_nearby_files, rows_sql, same_span_sql, segments_sql

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

_MENDING_S: Final = 2.0
_ONLY_COPY: Final = "the manifest was damaged or missing"
_UNNAMED: Final = "the manifest does not name it, and other files hold some of its spans"
_REPLACED: Final = "it was replaced, and nothing else holds some of its spans"


def ensure_manifest(layout: Layout) -> Manifest:
    """Return the manifest, restored if no other process settles; else readers use it, or its copy.

    Raises:
        StoreDamagedError: It is damaged, so is its copy, and neither can be restored now.
    """
    try:
        damage, manifest, strays = _look(layout)
    except FileNotFoundError:  # a folder is gone, as whoever reads it is told
        return layout.read_manifest()
    if damage or strays:
        try:
            # A settler at work has files that its next manifest names: it is not waited for.
            with elect_settler(layout, wait_s=_MENDING_S if damage else 0) as is_elected:
                if is_elected:
                    restore_manifest(layout)
        except OSError as exc:
            warn_once(f"{layout.catalogue} cannot be mended ({exc}): some spans may not be read")
        return layout.read_manifest()
    return manifest


def restore_manifest(layout: Layout) -> None:
    """Write a damaged manifest anew, and have it name every data file; settler only."""
    damage, manifest, strays = _look(layout)
    changed, adopted = manifest, 0
    if strays:
        with bounded_connection(layout.new / SPILL) as con:
            adoption = _Adoption(con, layout, manifest)
            changed, adopted = adoption.run(strays), adoption.adopted
    if damage:
        old = layout.manifest_path.read_bytes() if layout.manifest_path.exists() else b""
        quarantine.keep_copy(layout, f"manifest-{now_us()}.ndjson", "manifest", damage, old)
        source = "its copy" if damage == _ONLY_COPY else "the data files"
        log.warning("%s: %s; it was written anew from %s", layout.catalogue, damage, source)
    elif adopted:
        log.warning(
            "%s: %d data files count again that its manifest did not name, as in a copy made while "
            "the store was in use",
            layout.catalogue,
            adopted,
        )
    if damage or changed != manifest:
        sync(layout.data)
        layout.write_manifest(changed)


def _look(layout: Layout) -> tuple[str, Manifest, list[Path]]:
    """Return the damage of the manifest, if any, its content, and the files it does not name."""
    damage = ""
    try:
        path, manifest = layout.find_manifest()
        if path != layout.manifest_path:
            damage = _ONLY_COPY
    except StoreDamagedError as exc:
        damage, manifest = exc.what, Manifest()
    names = {file.name for file in manifest.files}
    drafts = map(layout.new.joinpath, filter(DATA_NAME.fullmatch, list_names(layout.new)))
    strays = [path for path in (*layout.data_files(), *drafts) if path.name not in names]
    # What was given up and came back is left where it is.
    noted = {note.name for note in read_notes(layout)} if strays else set()
    return damage, manifest, [path for path in strays if path.name not in noted]


@dataclass(frozen=True, slots=True)
class _Stray:
    path: Path
    file: DataFile
    origin: Origin


class _Adoption:
    """Unnamed data files on their way into a manifest; only ``adopted`` hold their spans."""

    def __init__(
        self, con: "duckdb.DuckDBPyConnection", layout: Layout, manifest: Manifest
    ) -> None:
        self._con, self._layout, self._manifest = con, layout, manifest
        self.adopted = 0

    def run(self, paths: Sequence[Path]) -> Manifest:
        strays = [stray for path in paths if (stray := self._describe(path)) is not None]
        live = list_readable_files(self._layout, self._manifest)
        origins = [read_origin(self._con, self._layout.data / file.name) for file in live]
        superseded = {name for origin in origins for name in origin.old}
        replayed = {name for stray in strays for name in stray.origin.old}
        origins += [stray.origin for stray in strays]
        claimed = {name for origin in origins for name in origin.files} - replayed
        claimed.update(self._manifest.spent)
        for stray in _sort_by_history(strays):
            if stray.file.name in superseded:
                self._drop(stray)
            else:
                self._place(stray, is_claimed=stray.file.name in claimed)
        if live:
            return self._manifest
        gone = claimed - {file.name for file in self._manifest.files}
        return replace(self._manifest, spent=tuple(sorted(gone)))  # as the lost manifest said

    def _describe(self, path: Path) -> _Stray | None:
        import duckdb

        try:
            return _Stray(path, describe_file(self._con, path), read_origin(self._con, path))
        except duckdb.IOException as exc:
            log.warning("%s cannot be read now (%s); its spans are left out", path, exc)
        except duckdb.Error as exc:
            if path.parent == self._layout.new:
                path.unlink()  # it was never whole
            else:
                put_aside(self._layout, path, Note(path.name, "data file", str(exc), now_us()))
        return None

    def _place(self, stray: _Stray, *, is_claimed: bool) -> None:
        """Decide by what a file replaces, and by which of its spans stand elsewhere."""
        file, origin = stray.file, stray.origin
        live = {entry.name for entry in self._manifest.live_files}
        if origin.old and live.issuperset(origin.old) and not is_claimed:
            self._adopt(stray, origin.counts)
            return
        note = Note(file.name, "data file", _UNNAMED, now_us(), file.rows, file=file)
        spans, ended = self._count_new(stray)
        fitting, fitting_ended = self._count_new(stray, is_replacing=True)
        if fitting == file.rows and not is_claimed:
            # Also where segments hold all of it: what was masked later was masked in files.
            ended = ended if origin.old else fitting_ended
            is_known = ENDED in origin.counts
            self._adopt(stray, origin.counts if is_known else {ENDED: ended, STORED: ended})
            self.adopted += spans > 0
        elif not spans:
            self._drop(stray)
        elif is_claimed:
            note = replace(note, why=_REPLACED, gone=spans, resolved_us=note.found_us)
            put_aside(self._layout, stray.path, note)
        else:
            put_aside(self._layout, stray.path, replace(note, missing=spans))

    def _count_new(self, stray: _Stray, *, is_replacing: bool = False) -> tuple[int, int]:
        layout, file, origin = self._layout, stray.file, stray.origin
        files = list_nearby_files(
            list_readable_files(layout, self._manifest), file.min_start_ns, file.max_start_ns
        )
        segments = layout.list_unsettled(self._manifest)
        if is_replacing:
            files = [entry for entry in files if entry.name not in origin.old]
            segments = [path for path in segments if path.name not in origin.segments]
        others = f"SELECT trace_id, span_id, start_ns, end_ns FROM {rows_sql(layout, files)}"
        if segments:
            lines = segments_sql(segments, live_bytes=total_bytes(segments))
            others += f" UNION ALL SELECT trace_id, span_id, start_ns, end_ns FROM ({lines})"
        spans, ended = fetch_row(
            self._con,
            f"""
            SELECT count(*), count(end_ns) FROM {rows_sql(layout, [file], stray.path.parent)} AS f
            WHERE NOT EXISTS (SELECT 1 FROM ({others}) AS other WHERE {same_span_sql("other", "f")}
              AND (other.end_ns IS NOT NULL OR f.end_ns IS NULL))
            """,
        )
        return int(spans), int(ended)

    def _adopt(self, stray: _Stray, counts: Mapping[str, int]) -> None:
        layout, manifest, name = self._layout, self._manifest, stray.file.name
        put_file(stray.path, layout.data / name, [stray.path])
        names = {path.name for path in layout.list_unsettled(manifest)}
        self._manifest = manifest.replace_files(
            {entry.name for entry in manifest.live_files} & set(stray.origin.old),
            stray.file,
            counts,
            [
                SettledSegment(segment, 0, file=name if rows else "", rows=rows)
                for segment, rows in stray.origin.segments.items()
                if segment in names
            ],
            is_whole=stray.origin.is_whole,
            commit_us=now_us(),
        )

    def _drop(self, stray: _Stray) -> None:
        if stray.path.parent == self._layout.new:
            stray.path.unlink()
            return
        dropped = replace(stray.file, dropped_us=now_us())
        self._manifest = replace(self._manifest, files=(*self._manifest.files, dropped))


def _sort_by_history(strays: Sequence[_Stray]) -> list[_Stray]:
    """Return files in an order in which each comes after those that it was made from."""
    history: list[_Stray] = []
    queue = {stray.file.name: stray for stray in strays}
    while queue:
        first = [name for name in queue if not queue.keys() & {*queue[name].origin.old}]
        # Of a circle, which nobody of ours made, any comes first.
        history += [queue.pop(name) for name in first or [*queue]]
    return history
