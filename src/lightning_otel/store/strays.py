"""Data files that the manifest does not name: adopted, dropped or put aside, never just deleted.

A settler that dies leaves one, and a copy made while the store is in use may hold many: its
manifest was copied before files were made that its ``data/`` has, and segments are gone whose spans
only these files hold. A file's footer tells what its commit would have written, so the commit is
done again. What does not fit is compared, span by span, with all else that the store holds.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_otel.store.counts import ENDED, STORED
from lightning_otel.store.damage import list_readable_files
from lightning_otel.store.layout import Layout, elect_settler, list_names, now_us, put_file
from lightning_otel.store.manifest import DATA_NAME, DataFile, SettledSegment
from lightning_otel.store.parquet import (
    SPILL,
    Origin,
    bounded_connection,
    describe_file,
    fetch_row,
    read_origin,
    sync,
)
from lightning_otel.store.quarantine import Note, read_notes, write_note
from lightning_otel.store.snapshot import list_nearby_files, rows_sql, same_span_sql, segments_sql

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

_UNNAMED = "the manifest does not name it"
_REPLACED = "it was replaced, and nothing else holds some of its spans"


@dataclass(frozen=True, slots=True)
class _Stray:
    path: Path
    file: DataFile
    origin: Origin


def list_strays(layout: Layout) -> list[Path]:
    """Return data files, whole or being made, that the manifest does not name."""
    named = {file.name for file in layout.read_manifest().files}
    made = map(layout.new.joinpath, filter(DATA_NAME.fullmatch, list_names(layout.new)))
    strays = [path for path in (*layout.data_files(), *made) if path.name not in named]
    # What was given up and came back is left where it is.
    noted = {note.name for note in read_notes(layout)} if strays else set()
    return [path for path in strays if path.name not in noted]


def ensure_adopted(layout: Layout) -> None:
    """Adopt strays, unless a settler is at work, whose files they may be."""
    if list_strays(layout):
        try:
            with elect_settler(layout) as is_elected:
                if is_elected:
                    adopt_strays(layout)
        except OSError as exc:
            log.warning(
                "%s holds data files that its manifest does not name, and cannot be written (%s): "
                "their spans are not read; read a copy that can",
                layout.catalogue,
                exc,
            )


def adopt_strays(layout: Layout) -> None:
    """Have every data file named by the manifest, or put aside; settler only."""
    if paths := list_strays(layout):
        with bounded_connection(layout.new / SPILL) as con:
            _Adoption(con, layout).run(paths)


class _Adoption:
    def __init__(self, con: "duckdb.DuckDBPyConnection", layout: Layout) -> None:
        self._con, self._layout = con, layout
        self._manifest = layout.read_manifest()

    def run(self, paths: list[Path]) -> None:
        before, layout = self._manifest, self._layout
        strays = [stray for path in paths if (stray := self._describe(path)) is not None]
        origins = [
            read_origin(self._con, layout.data / file.name)
            for file in list_readable_files(layout, before)
        ]
        superseded = {name for origin in origins for name in origin.old}
        replayed = {name for stray in strays for name in stray.origin.old}
        origins += [stray.origin for stray in strays]
        claimed = {name for origin in origins for name in origin.files} - replayed
        claimed.update(before.spent)
        for stray in _sort_by_history(strays):
            if stray.file.name in superseded:
                self._drop(stray)
            else:
                self._place(stray, is_claimed=stray.file.name in claimed)
        if self._manifest != before:
            sync(layout.data)
            layout.write_manifest(self._manifest)

    def _describe(self, path: Path) -> _Stray | None:
        import duckdb

        try:
            return _Stray(path, describe_file(self._con, path), read_origin(self._con, path))
        except duckdb.Error as exc:
            if isinstance(exc, duckdb.IOException):
                log.debug("%s cannot be read just now", path, exc_info=True)
            elif path.parent == self._layout.new:
                path.unlink()  # it was never whole
            else:
                self._put_aside(path, Note(path.name, "data file", str(exc), now_us()))
        return None

    def _place(self, stray: _Stray, *, is_claimed: bool) -> None:
        """Decide about a file by what it replaces, and by which of its spans stand elsewhere."""
        file, origin = stray.file, stray.origin
        live = {entry.name for entry in self._manifest.live_files}
        if origin.old and live.issuperset(origin.old) and not is_claimed:
            self._adopt(stray, origin.counts)
            return
        spans, ended = self._count_new(stray)
        note = Note(file.name, "data file", _UNNAMED, now_us(), file.rows, file=file)
        if not spans:
            self._drop(stray)
        elif is_claimed:
            note = replace(note, why=_REPLACED, gone=spans, resolved_us=note.found_us)
            self._put_aside(stray.path, note)
        elif self._count_new(stray, is_replacing=True)[0] < file.rows:
            self._put_aside(stray.path, replace(note, missing=spans))
        else:
            is_known = ENDED in origin.counts
            self._adopt(stray, origin.counts if is_known else {ENDED: ended, STORED: ended})
            log.warning(
                "%s: %s was made while the store was copied, or by a settler that died; "
                "its %d spans count again",
                self._layout.catalogue,
                file.name,
                file.rows,
            )

    def _count_new(self, stray: _Stray, *, is_replacing: bool = False) -> tuple[int, int]:
        """Count spans, and those ended, that nothing else holds, or nothing that is to stay."""
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
            size = sum(path.stat().st_size for path in segments)
            lines = segments_sql(segments, live_bytes=size)
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
        """Do again the commit that the file was made for."""
        layout, manifest, name = self._layout, self._manifest, stray.file.name
        put_file(stray.path, layout.data / name, [stray.path])
        known = {path.name for path in layout.list_unsettled(manifest)}
        self._manifest = manifest.replace_files(
            {entry.name for entry in manifest.live_files} & set(stray.origin.old),
            stray.file,
            counts,
            [
                SettledSegment(segment, 0, file=name if rows else "", rows=rows)
                for segment, rows in stray.origin.segments.items()
                if segment in known
            ],
            is_whole=stray.origin.is_whole,
            commit_us=now_us(),
        )

    def _drop(self, stray: _Stray) -> None:
        """Have a file taken away after the readers' grace period; nothing is lost by it."""
        if stray.path.parent == self._layout.new:
            stray.path.unlink()
            return
        dropped = replace(stray.file, dropped_us=now_us())
        self._manifest = replace(self._manifest, files=(*self._manifest.files, dropped))

    def _put_aside(self, path: Path, note: Note) -> None:
        write_note(self._layout, note)
        os.replace(path, self._layout.quarantine / path.name)


def _sort_by_history(strays: Sequence[_Stray]) -> list[_Stray]:
    """Return files in an order in which each comes after those that it was made from."""
    history: list[_Stray] = []
    waiting = {stray.file.name: stray for stray in strays}
    while waiting:
        first = [stray for stray in waiting.values() if not waiting.keys() & set(stray.origin.old)]
        # Of a circle, which nobody of ours made, any comes first.
        history += first or waiting.values()
        waiting = {name: stray for name, stray in waiting.items() if stray not in history}
    return history
