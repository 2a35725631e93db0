"""Text that is to leave the disk: in segments that processes write, and in replaced files.

Only its process may close a segment. It is asked by a bit of the file's mode, which a writer sees
with its next line at no cost. Replaced files are unlinked after a grace period.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from lightning_otel.store import settle
from lightning_otel.store.files import is_own_file, list_names, total_bytes
from lightning_otel.store.layout import Layout, elect_settler, now_us
from lightning_otel.store.manifest import DATA_NAME, Manifest
from lightning_otel.store.quarantine import read_notes
from lightning_otel.store.segment import request_rotation
from lightning_otel.store.writer import writers_by_catalogue

CLOSING_S: Final = 1.0
"""How long processes that write are waited for, at least, until their segments are closed."""
_CLOSING_STEP_S: Final = 0.02
_FINISH_STEP_S: Final = 0.5
_LEAST_STEP_S: Final = 0.1

Callback = Callable[[float], None]
"""Called with the seconds that are left to wait, at most."""


class Leftover(NamedTuple):
    """Size of replaced files and segments on the disk, and how long readers may need them."""

    size_bytes: int
    wait_s: float


def measure_disk(layout: Layout) -> int:
    """Return the size of everything that the store has on the disk."""
    return total_bytes([layout.catalogue, *filter(is_own_file, layout.root.rglob("*"))])


def measure_leftover(layout: Layout, manifest: Manifest, *, is_removed: bool = False) -> Leftover:
    """Measure what was replaced and is not unlinked yet, or those of it that hold removed text."""
    paths = _list_replaced(layout, manifest)
    if is_removed:
        whole = {file.name for file in manifest.files if file.successor}
        whole |= {segment.name for segment in manifest.segments if segment.file}
        paths = {path for path in paths if path.name not in whole}
    return Leftover(total_bytes(paths), _wait_of(manifest) if paths else 0.0)


def count_unknown_parts(layout: Layout) -> int:
    """Count the damaged parts in quarantine, which may hold any text of the store."""
    notes = [note for note in read_notes(layout) if note.noun != "manifest"]
    return sum((layout.quarantine / note.name).exists() for note in notes)


def list_open_segments(layout: Layout) -> list[Path]:
    """List segments that other processes still write to; this one's can be closed at any time."""
    own_segments = list_own_segments(layout)
    return [path for path in settle.list_unsealed(layout) if path not in own_segments]


def list_own_segments(layout: Layout) -> list[Path]:
    """List the segment that this process writes to, if there is one."""
    writer = writers_by_catalogue.get(layout.catalogue)
    segment = writer.segment if writer is not None else None
    return [segment.path] if segment is not None else []


def close_own_segment(layout: Layout, is_wanted: Callable[[Path], object]) -> None:
    """Have this process go on in a new segment, if its own one is wanted closed."""
    if any(map(is_wanted, list_own_segments(layout))):
        writers_by_catalogue[layout.catalogue].rotate()


def close_segments(
    layout: Layout, paths: Iterable[Path], wait_s: float = 0.0, callback: Callback | None = None
) -> list[Path]:
    """Ask other processes to close segments, and wait a little; return those that stay open.

    A model call may take a minute in which its process writes nothing.
    """
    segments = set(paths).intersection(list_open_segments(layout))
    for path in segments:
        request_rotation(path)
    began_s, limit_s = time.monotonic(), max(CLOSING_S, min(wait_s, settle.GRACE_US / 1e6))
    while segments := segments.intersection(list_open_segments(layout)):
        past_s = time.monotonic() - began_s
        if past_s >= limit_s:
            break
        if callback is not None and past_s > CLOSING_S:
            callback(limit_s - past_s)
        time.sleep(_CLOSING_STEP_S if past_s < CLOSING_S else _FINISH_STEP_S)
    return sorted(segments)


def wait_for_unlink(layout: Layout, wait_s: float, callback: Callback | None) -> bool:
    """Unlink what was replaced so far, after the readers' grace period; False if it took longer."""
    deadline = time.monotonic() + wait_s
    # With what dead processes began: it is unlinked when it is as old.
    drafts = (layout.new / name for name in list_names(layout.new) if not DATA_NAME.fullmatch(name))
    old = {*_list_replaced(layout, layout.read_manifest()), *drafts}
    while True:
        with elect_settler(layout) as is_elected:
            if is_elected:
                settle.sweep(layout, is_asked=True)
        old = {path for path in old if path.exists()}
        if not old:
            return True
        if time.monotonic() >= deadline:
            return False
        rest_s = _wait_of(layout.read_manifest())
        if callback is not None and rest_s > 0:
            callback(rest_s)
        time.sleep(min(_FINISH_STEP_S, max(_LEAST_STEP_S, rest_s)))


def _list_replaced(layout: Layout, manifest: Manifest) -> set[Path]:
    names = {file.name for file in manifest.live_files}
    names.update(note.name for note in read_notes(layout))
    segments = (layout.live / segment.name for segment in manifest.segments)
    return {
        *(path for path in layout.data_files() if path.name not in names),
        *(path for path in segments if path.exists()),
    }


def _wait_of(manifest: Manifest) -> float:
    """Return how long readers may still need what was replaced last, seconds."""
    times = [segment.settled_us for segment in manifest.segments]
    times += [file.dropped_us or 0 for file in manifest.files]
    return max(0.0, (max(times, default=0) + settle.GRACE_US - now_us()) / 1e6)
