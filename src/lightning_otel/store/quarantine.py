"""Damaged parts of a store, found by their checksums and put aside with a note.

``quarantine/`` holds the damaged parts and beside each a note, ``NAME.json``. A note is open while
spans are missing that it may be possible to get back. Nothing in here imports DuckDB.
"""

import contextlib
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Final, Literal

import orjson

from lightning_otel.store.layout import DataFile, Layout, now_us, total_bytes, write_private
from lightning_otel.store.lines import MAX_RECORD_BYTES, control_line, is_corrupt, parsed
from lightning_otel.store.manifest import parse_entry
from lightning_otel.types.wording import count_noun

DAMAGED: Final = "damaged"
"""The record that stands where a damaged line stood, so that it is counted."""
_MARKER: Final = control_line(DAMAGED)
_SPAN: Final = b'{"record":"span"'
_NOTE: Final = ".json"
_LONGEST_LINE: Final = 2 * MAX_RECORD_BYTES
_CHUNK: Final = 1 << 20
_CONTROLS: Final = frozenset({"seal", "count", DAMAGED})
_CHECK: Final = b',"crc":"'
_SMALLEST_BLOCK: Final = 4096
_MOST_BLOCKS: Final = 32
"""Each costs eight letters in the manifest, which every reader reads."""

Range = tuple[int, int]
"""The first byte, and one past the last."""


def checksum_of(path: Path) -> str:
    """Return the length of a block, of a data file and of its footer, and each block's CRC-32.

    Neither Parquet pages as DuckDB writes them nor zstd have checksums: of 60 single bits flipped
    in pages 42 changed values in silence. Blocks tell which row groups are whole.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        tail = os.pread(file.fileno(), 8, max(0, size - 8))
        footer = min(size, int.from_bytes(tail[:4], "little") + 8)
        block = _SMALLEST_BLOCK
        while block * _MOST_BLOCKS < size - footer:
            block *= 2
        sums = [_checksum(file.fileno(), each) for each in _split_blocks(size, footer, block)]
    return f"{block:x}.{size:x}.{footer:x}." + "".join(sums)


def find_corrupt_ranges(path: Path, checksum: str) -> list[Range]:
    """Return the bytes of a data file that are not as they were when its checksum was taken."""
    lengths, _, sums = checksum.rpartition(".")
    block, size, footer = (int(each, 16) for each in lengths.split("."))
    with path.open("rb") as file:
        if (found := file.seek(0, os.SEEK_END)) != size:
            return [(0, max(found, size))]
        return [
            each
            for number, each in enumerate(_split_blocks(size, footer, block))
            if _checksum(file.fileno(), each) != sums[8 * number : 8 * number + 8]
        ]


def _split_blocks(size: int, footer: int, block: int) -> list[Range]:
    body = size - footer
    found = [(first, min(body, first + block)) for first in range(0, body, block)]
    return [*found, (body, size)]


def _checksum(descriptor: int, each: Range) -> str:
    return f"{zlib.crc32(os.pread(descriptor, each[1] - each[0], each[0])):08x}"


@dataclass(frozen=True, slots=True)
class Note:
    """A note on something damaged.

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
        """True if a repair may bring spans back."""
        return self.resolved_us is None


def read_notes(layout: Layout) -> list[Note]:
    """Every note, the oldest first."""
    try:
        paths = sorted(layout.quarantine.glob(f"*{_NOTE}"))
    except FileNotFoundError:
        return []
    return sorted(map(_read_note, paths), key=lambda note: note.found_us)


def write_note(layout: Layout, note: Note) -> None:
    """Keep a note on disk, in place of an older one of that name."""
    _make_folder(layout)
    made = layout.new / f"note-{os.getpid()}-{os.urandom(4).hex()}"
    write_private(made, orjson.dumps(asdict(note), option=orjson.OPT_INDENT_2), is_synced=True)
    os.replace(made, layout.quarantine / (note.name + _NOTE))


def put_aside(layout: Layout, damaged: Mapping[str, str]) -> None:
    """Move data files into quarantine; what segments still hold of their spans counts from there.

    Only for the elected settler. It may die at any point: a file that is listed and already moved
    is taken out of the manifest by the next one.

    Args:
        layout: The store's paths.
        damaged: Names of data files, and why each is damaged.
    """
    _make_folder(layout)
    manifest = layout.read_manifest()
    listed = {file.name: file for file in manifest.live_files}
    waiting = {path.name for path in layout.segments()}
    known = {note.name: note.why for note in read_notes(layout)}
    now = now_us()
    for name, why in damaged.items():
        file = listed.get(name)
        rows = file.rows if file else 0
        held = (e.rows for e in manifest.segments if e.name in waiting and e.file == name)
        missing = max(0, rows - sum(held))
        path = layout.data / name
        note = Note(
            name,
            "data file",
            known.get(name, why),  # the process that moved it knew it better
            now,
            rows=rows,
            missing=missing,
            size_bytes=total_bytes([path]),
            file=file,
            resolved_us=None if missing else now,
        )
        write_note(layout, note)
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, layout.quarantine / name)
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


def find_corrupt_lines(
    path: Path, start: int = 0, *, is_closed: bool = False
) -> tuple[list[Range], int]:
    """Find lines that are not as their checksum says, or too long for a reader's query.

    Args:
        path: A segment.
        start: Where to begin: at the beginning of a line.
        is_closed: Nobody writes to it any more; then lines that are no records are found too.

    Returns:
        First byte and one past the last of each, and where the last whole line ends.
    """
    found: list[Range] = []
    first = start
    with path.open("rb") as file:
        file.seek(start)
        while line := file.readline(_LONGEST_LINE + 1):
            end = first + len(line)
            is_overlong = len(line) > _LONGEST_LINE
            while not line.endswith(b"\n") and (more := file.readline(_CHUNK)):
                end, line = end + len(more), more
            if is_overlong or _is_damaged(line, is_closed=is_closed):
                found.append((first, end - line.endswith(b"\n")))
            elif not line.endswith(b"\n"):
                break  # its process is still writing it
            first = end
    return found, first


def put_aside_lines(layout: Layout, path: Path, *, is_closed: bool = False) -> None:
    """Move the corrupt lines of a segment into quarantine, and say in their places that one was.

    The segment is changed where it is, in place: its process may go on appending to it.
    """
    ranges, _ = find_corrupt_lines(path, is_closed=is_closed)
    if not ranges:
        return
    _make_folder(layout)
    kept = layout.quarantine / f"{path.name}-{ranges[0][0]}.lines"
    kept.unlink(missing_ok=True)
    write_private(kept, b"")
    spans = 0
    with path.open("rb") as source, kept.open("ab") as target:
        for first, end in ranges:
            source.seek(first)
            line = source.read(end - first)
            spans += line.startswith(_SPAN)
            target.write(line + b"\n")
        target.flush()
        os.fsync(target.fileno())
        size = target.tell()
    now = now_us()
    why = f"{count_noun(len(ranges), 'line')} of {path.name} not as written, the first at byte "
    note = Note(
        kept.name, "lines", f"{why}{ranges[0][0]}", now, rows=spans, gone=spans, size_bytes=size,
        resolved_us=now,
    )  # fmt: skip
    write_note(layout, note)
    for first, end in ranges:
        if end - first >= len(_MARKER) - 1:  # readers step over a shorter one
            _blank_range(path, first, end)


def keep_manifest(layout: Layout, why: str) -> None:
    """Copy a damaged manifest into quarantine, before it is written anew."""
    now = now_us()
    name = f"manifest-{now}.ndjson"
    _make_folder(layout)
    size = 0
    with contextlib.suppress(FileNotFoundError):
        text = layout.manifest_path.read_bytes()
        size = len(text)
        write_private(layout.quarantine / name, text)
    write_note(layout, Note(name, "manifest", why, now, size_bytes=size, resolved_us=now))


def _read_note(path: Path) -> Note:
    name = path.name.removesuffix(_NOTE)
    try:
        found = orjson.loads(path.read_bytes())
        file = found.get("file")
        if file is not None:
            found["file"] = parse_entry(DataFile, file)
        return Note(**{each.name: found[each.name] for each in fields(Note) if each.name in found})
    except (ValueError, KeyError, TypeError):
        return Note(name, "data file", "its note cannot be read", 0)


def _make_folder(layout: Layout) -> None:
    layout.quarantine.mkdir(mode=0o700, exist_ok=True)


def _is_damaged(line: bytes, *, is_closed: bool) -> bool:
    line = line.strip()
    if not is_closed or not line or _CHECK in line[-18:]:
        return len(line) >= len(_MARKER) and is_corrupt(line)
    record = parsed(line)
    ids = [type(record.get(name)) for name in ("trace_id", "span_id", "start_ns")]
    return record.get("record") not in _CONTROLS and ids != [str, str, int]


def _blank_range(path: Path, first: int, end: int) -> None:
    """Write over a range: a record that tells of it, then empty lines, as few as readers hold."""
    filler = (b" " * 1023 + b"\n") * ((end - first) // 1024 + 1)
    with path.open("r+b") as file:
        file.seek(first)
        file.write((_MARKER + filler)[: max(end - first, len(_MARKER))])
