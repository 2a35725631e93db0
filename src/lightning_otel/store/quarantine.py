"""What is damaged is put aside, with a note of what it was and why; the rest stays readable.

``quarantine/`` holds the damaged parts and beside each a note, ``NAME.json``. A note is open while
spans are missing that it may be possible to get back. Nothing in here imports DuckDB.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Final, Literal

import orjson

from lightning_otel.store.layout import DataFile, Layout, now_us, write_private
from lightning_otel.store.lines import MAX_RECORD_BYTES, control_line, is_corrupt, parsed

DAMAGED: Final = "damaged"
"""The record that stands where a damaged line stood, so that it is counted."""
_MARKER: Final = control_line(DAMAGED)
_FILLER: Final = (b" " * 1023 + b"\n") * (1 << 10)
"""Over damaged bytes: lines that every reader steps over, and not a million of them."""
_SPAN: Final = b'{"record":"span"'
_NOTE: Final = ".json"
_LONGEST_LINE: Final = 2 * MAX_RECORD_BYTES
_CHUNK: Final = 1 << 20
_RECORDS: Final = frozenset({"span", "start", "seal", "count"})


@dataclass(frozen=True, slots=True)
class Note:
    """What is known of something damaged.

    Attributes:
        name: Its file's name, here and where it was.
        why: How it shows.
        rows: Spans it held; 0 if it held none, or that is not known.
        missing: Spans that no reader sees for want of it.
        recovered: Spans taken out of it by a repair.
        gone: Spans that a repair could not get back.
        size_bytes: Its size as it was found.
        file: The manifest's entry of a data file.
        resolved_us: When nothing more was to be got out of it; None while something may be.
    """

    name: str
    noun: Literal["data file", "manifest", "lines"]
    why: str
    found_us: int
    rows: int = 0
    missing: int = 0
    recovered: int = 0
    gone: int = 0
    size_bytes: int = 0
    file: DataFile | None = None
    resolved_us: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether spans are missing that a repair may get back."""
        return self.resolved_us is None


def notes(layout: Layout) -> list[Note]:
    """Every note, the oldest first.

    Raises:
        OSError: They cannot be read.
    """
    try:
        paths = sorted(layout.quarantine.glob(f"*{_NOTE}"))
    except FileNotFoundError:
        return []
    return sorted(map(_read, paths), key=lambda note: note.found_us)


def write_note(layout: Layout, note: Note) -> None:
    """Keep a note on disk, in place of an older one of that name.

    Raises:
        OSError: It cannot be written.
    """
    _make_folder(layout)
    made = layout.new / f"note-{os.getpid()}-{os.urandom(4).hex()}"
    write_private(made, orjson.dumps(asdict(note), option=orjson.OPT_INDENT_2), is_synced=True)
    os.replace(made, layout.quarantine / (note.name + _NOTE))


def put_aside(layout: Layout, damaged: Mapping[str, str]) -> list[Note]:
    """Move data files into quarantine; what segments still hold of their spans counts from there.

    Only for the elected settler. It may die at any point: a file that is listed and already moved
    is taken out of the manifest by whoever comes next.

    Args:
        layout: The store's paths.
        damaged: Names of data files, and why each is damaged.

    Raises:
        OSError: The store cannot be written.
    """
    _make_folder(layout)
    manifest = layout.read_manifest()
    listed = {file.name: file for file in manifest.live_files}
    waiting = {path.name for path in layout.segments()}
    known = {note.name: note.why for note in notes(layout)}
    found = []
    for name, why in damaged.items():
        file = listed.get(name)
        kept = [each for each in manifest.segments if each.name in waiting and each.file == name]
        rows = file.rows if file else 0
        missing = max(0, rows - sum(each.rows for each in kept))
        size = 0
        with contextlib.suppress(FileNotFoundError):
            size = (layout.data / name).stat().st_size
        note = Note(
            name,
            "data file",
            known.get(name, why),  # whoever moved it knew it better
            now_us(),
            rows=rows,
            missing=missing,
            size_bytes=size,
            file=file,
            resolved_us=None if missing else now_us(),
        )
        write_note(layout, note)
        with contextlib.suppress(FileNotFoundError):
            os.replace(layout.data / name, layout.quarantine / name)
        found.append(note)
    left = listed.keys() - damaged.keys()
    layout.write_manifest(
        replace(
            manifest,
            files=tuple(file for file in manifest.files if file.name not in damaged),
            # The spans of the others stand in a file: none of them is read or settled twice.
            segments=tuple(
                each
                for each in manifest.segments
                if each.name not in waiting or each.file in left or not (each.rows or each.file)
            ),
        )
    )
    return found


def find_corrupt_lines(path: Path, start: int = 0) -> tuple[list[tuple[int, int]], int]:
    """Find lines that are not as their checksum says, or too long for a reader's query.

    Args:
        path: A segment.
        start: Where to begin: at the beginning of a line.

    Returns:
        First byte and one past the last of each, and where the last whole line ends.

    Raises:
        OSError: It cannot be read.
    """
    found: list[tuple[int, int]] = []
    first = start
    with path.open("rb") as file:
        file.seek(start)
        while line := file.readline(_LONGEST_LINE + 1):
            end = first + len(line)
            is_overlong = len(line) > _LONGEST_LINE
            while not line.endswith(b"\n") and (line := file.readline(_CHUNK)):
                end += len(line)
            if is_overlong or (len(line) > len(_MARKER) and is_corrupt(line[:-1])):
                found.append((first, end - line.endswith(b"\n")))
            elif not line.endswith(b"\n"):
                break  # its process is still writing it
            first = end
    return found, first


def put_aside_lines(layout: Layout, path: Path) -> list[Note]:
    """Move the corrupt lines of a segment into quarantine, and say in their place that one was.

    The segment is changed where it is, in place: its process may go on appending to it.

    Args:
        layout: The store's paths.
        path: The segment.

    Raises:
        OSError: The store cannot be read or written.
    """
    ranges, _ = find_corrupt_lines(path)
    made = []
    for first, end in ranges:
        _make_folder(layout)
        name = f"{path.name}-{first}.line"
        kept = layout.quarantine / name
        _copy_range(path, kept, first, end)
        with kept.open("rb") as file:
            is_span = file.read(len(_SPAN)) == _SPAN
        why = f"a line of {end - first} bytes, at byte {first} of {path.name}, is not as written"
        now = now_us()
        note = Note(
            name, "lines", why, now, rows=is_span, gone=is_span, size_bytes=end - first,
            resolved_us=now,
        )  # fmt: skip
        write_note(layout, note)
        _blank(path, first, end)
        made.append(note)
    return made


def keep_damaged_lines(layout: Layout, path: Path) -> None:
    """Copy the lines of a segment that are no records into quarantine, before it is taken away.

    Raises:
        OSError: The store cannot be read or written.
    """
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip() and _is_damaged(line)]
    text = b"\n".join(lines)
    _make_folder(layout)
    kept = layout.quarantine / f"{path.name}.lines"
    kept.unlink(missing_ok=True)
    write_private(kept, text)
    why = f"{len(lines)} lines of {path.name} that are no records"
    now = now_us()
    note = Note(kept.name, "lines", why, now, size_bytes=len(text), resolved_us=now)
    write_note(layout, note)


def keep_manifest(layout: Layout, why: str) -> None:
    """Copy a damaged manifest into quarantine, before it is written anew.

    Raises:
        OSError: The store cannot be written.
    """
    now = now_us()
    name = f"manifest-{now}.ndjson"
    _make_folder(layout)
    size = 0
    with contextlib.suppress(FileNotFoundError):
        text = layout.manifest_path.read_bytes()
        size = len(text)
        write_private(layout.quarantine / name, text)
    write_note(layout, Note(name, "manifest", why, now, size_bytes=size, resolved_us=now))


def _read(path: Path) -> Note:
    name = path.name.removesuffix(_NOTE)
    try:
        found = orjson.loads(path.read_bytes())
        file = found.get("file")
        if file is not None:
            found["file"] = DataFile(**file)
        return Note(**{each.name: found[each.name] for each in fields(Note) if each.name in found})
    except (ValueError, KeyError, TypeError):
        return Note(name, "data file", "its note cannot be read", 0)


def _make_folder(layout: Layout) -> None:
    layout.quarantine.mkdir(mode=0o700, exist_ok=True)


def _is_damaged(line: bytes) -> bool:
    record = parsed(line)
    kind = record.get("record")
    if kind in ("seal", "count", DAMAGED):
        return False
    ids = all(isinstance(record.get(name), str) for name in ("trace_id", "span_id"))
    return kind not in _RECORDS or not ids or type(record.get("start_ns")) is not int


def _copy_range(path: Path, kept: Path, first: int, end: int) -> None:
    kept.unlink(missing_ok=True)
    write_private(kept, b"")
    with path.open("rb") as source, kept.open("ab") as target:
        source.seek(first)
        while first < end:
            chunk = source.read(min(_CHUNK, end - first))
            if not chunk:
                break
            target.write(chunk)
            first += len(chunk)
        target.flush()
        os.fsync(target.fileno())


def _blank(path: Path, first: int, end: int) -> None:
    """Write over a range: a record that tells of it, then empty lines."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        # From the end: until the marker stands in front, the line is found again by the next one.
        at = end
        while at > first + len(_MARKER):
            start = max(first + len(_MARKER), at - _CHUNK)
            os.pwrite(descriptor, _FILLER[: at - start], start)
            at = start
        os.pwrite(descriptor, _MARKER, first)
    finally:
        os.close(descriptor)
