"""Checksums, and the quarantine of corrupt data.

``quarantine/`` holds the damaged parts and beside each a note, ``NAME.json``. A note is open while
spans are missing that it may be possible to get back. Nothing in here imports DuckDB.
"""

import contextlib
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Final, Literal

import orjson

from lightning_otel.store.files import is_own_file, make_private, replace_file, write_private
from lightning_otel.store.layout import Layout, now_us
from lightning_otel.store.lines import (
    MAX_RECORD_BYTES,
    format_control_line,
    is_corrupt,
    is_sound,
    parse_line,
    read_records,
)
from lightning_otel.store.manifest import DataFile, Manifest, Natural, parse_entry
from lightning_otel.types.text import count_noun

_DAMAGED: Final = "damaged"
_MARKER: Final = format_control_line(_DAMAGED)
"""The record that stands where a damaged line stood, so that it is counted."""
_NOTE: Final = ".json"
_SPAN: Final = b'{"record":"span"'
_CHECK: Final = b',"crc":"'
LONGEST_LINE: Final = 2 * MAX_RECORD_BYTES
_CHUNK: Final = 1 << 20
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
        file.seek(max(0, size - 8))
        footer = min(size, int.from_bytes(file.read(4), "little") + 8)
        block = _SMALLEST_BLOCK
        while block * _MOST_BLOCKS < size - footer:
            block *= 2
        sums = "".join(crc for _, crc in _sum_blocks(file, block, size, footer))
    return f"{block:x}.{size:x}.{footer:x}.{sums}"


def find_corrupt_ranges(path: Path, checksum: str) -> list[Range]:
    """Return the bytes of a data file that are not as they were when its checksum was taken."""
    lengths, _, sums = checksum.rpartition(".")
    if not sums:
        return []
    block, size, footer = (int(length, 16) for length in lengths.split("."))
    with path.open("rb") as file:
        if (real_size := file.seek(0, os.SEEK_END)) != size or footer > size:
            return [(0, max(real_size, size))]
        blocks = enumerate(_sum_blocks(file, block, size, footer))
        return [block for n, (block, crc) in blocks if crc != sums[8 * n : 8 * n + 8]]


def _sum_blocks(file: BinaryIO, block: int, size: int, footer: int) -> Iterator[tuple[Range, str]]:
    for first, end in pairwise((*range(0, size - footer, block), size - footer, size)):
        file.seek(first)
        yield (first, end), f"{zlib.crc32(file.read(end - first)):08x}"


def find_corrupt_lines(
    path: Path, start: int = 0, *, is_closed: bool = False
) -> tuple[list[Range], int, int]:
    """Find lines from ``start`` on that differ from their checksum, or are too long for a query.

    In a closed segment, lines that are no records are found too. Return them, where the last whole
    line ends, and the number of whole lines that are not blank, over which DuckDB steps.
    """
    ranges: list[Range] = []
    first, count = start, 0
    with path.open("rb") as file:
        file.seek(start)
        while line := file.readline(LONGEST_LINE + 1):
            end = first + len(line)
            if is_sound(line) and len(line) <= LONGEST_LINE:
                first, count = end, count + 1
                continue
            is_overlong = len(line) > LONGEST_LINE
            while not line.endswith(b"\n") and (more := file.readline(_CHUNK)):
                end, line = end + len(more), more
            if is_overlong or _is_damaged(line, is_closed=is_closed):
                ranges.append((first, end - line.endswith(b"\n")))
            elif not line.endswith(b"\n"):
                break  # its process is still writing it
            first, count = end, count + (not line.isspace())
    return ranges, first, count


def _is_damaged(line: bytes, *, is_closed: bool) -> bool:
    line = line.strip()
    if not is_closed or not line or _CHECK in line[-18:]:
        return len(line) >= len(_MARKER) and is_corrupt(line)
    record = parse_line(line)
    ids = [type(record.get(name)) for name in ("trace_id", "span_id", "start_ns")]
    return record.get("record") not in ("seal", "count", _DAMAGED) and ids != [str, str, int]


@dataclass(frozen=True, slots=True)
class Note:
    """A note on something damaged, by its file's name.

    Attributes:
        rows: Spans it held; 0 if it held none, or that is not known.
        missing: Spans that no reader sees for want of it.
        recovered: Spans taken out of it by a repair.
        gone: Spans that a repair could not get back.
        file: The manifest's entry of a data file.
        resolved_us: When nothing more was to be got out of it; None while something may be.
    """

    name: str
    noun: Literal["data file", "segment", "manifest", "lines"]
    why: str
    found_us: Natural
    rows: Natural = 0
    missing: Natural = 0
    recovered: Natural = 0
    gone: Natural = 0
    file: DataFile | None = None
    resolved_us: Natural | None = None

    @property
    def is_open(self) -> bool:
        """True if a repair may bring spans back."""
        return self.resolved_us is None


def read_notes(layout: Layout) -> list[Note]:
    """Return every note, the oldest first."""
    notes = map(_read_note, sorted(layout.quarantine.glob(f"*{_NOTE}")))
    return sorted(notes, key=lambda note: note.found_us)


def _read_note(path: Path) -> Note:
    name = path.name.removesuffix(_NOTE)
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        values = orjson.loads(path.read_bytes()) if is_own_file(path) else {}
        if values.get("file") is not None:
            values["file"] = parse_entry(DataFile, values["file"])
        note = parse_entry(Note, values)
        if note.name == name:
            return note
    return Note(name, "data file", "its note cannot be read", 0)


def write_note(layout: Layout, note: Note) -> None:
    """Keep a note on disk, in place of an older one of that name."""
    make_private(layout.quarantine)
    text = orjson.dumps(asdict(note), option=orjson.OPT_INDENT_2)
    replace_file(layout.quarantine / (note.name + _NOTE), text, layout.new, is_synced=True)


def list_predecessors(layout: Layout, manifest: Manifest) -> list[DataFile]:
    """Return the files that ceased to count, still lie there, and whose successor holds it all."""
    dropped = [file for file in manifest.files if file.dropped_us is not None and file.successor]
    return [file for file in dropped if is_own_file(layout.data / file.name)]


def quarantine_files(layout: Layout, damaged: Mapping[str, str]) -> None:
    """Move data files into quarantine; what segments still hold of their spans counts from there.

    Only for the elected settler, which may die at any point: the next one continues.
    """
    if not damaged:
        return
    manifest = layout.read_manifest()
    listed = {file.name: file for file in manifest.live_files}
    present = {path.name for path in layout.segments()}
    in_segments, in_files = Counter[str](), Counter[str]()
    for segment in manifest.segments:
        if segment.name in present and segment.file in damaged:
            # Of a copy that began while it was written only a part may be there.
            records = read_records(layout.live / segment.name)
            spans = {record.get("span_id") for record in records} - {None}
            in_segments[segment.file] += min(segment.rows, len(spans))
    predecessors = {file.name: file for file in list_predecessors(layout, manifest)}
    for file in predecessors.values():
        in_files[file.successor] += file.rows
    reasons = {note.name: note.why for note in read_notes(layout)}
    now = now_us()
    for name, why in damaged.items():
        path, entry = layout.data / name, listed.get(name)
        rows = entry.rows if entry else 0
        missing = max(0, rows - max(in_segments[name], in_files[name]))
        note = Note(
            name,
            "data file",
            reasons.get(name, why),  # the process that moved it knew it better
            now,
            rows=rows,
            missing=missing,
            file=entry,
            resolved_us=None if missing else now,
        )
        write_note(layout, note)
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, layout.quarantine / name)
    intact = listed.keys() - damaged.keys()
    layout.write_manifest(
        replace(
            manifest,
            files=tuple(
                replace(file, dropped_us=None, successor="")
                if file.name in predecessors and file.successor in damaged
                else file
                for file in manifest.files
                if file.name not in damaged
            ),
            # The spans of the others stand in a file: none of them is read or settled twice.
            segments=tuple(
                item
                for item in manifest.segments
                if item.name not in present or item.file in intact or not (item.rows or item.file)
            ),
        )
    )


def put_aside(layout: Layout, path: Path, note: Note) -> None:
    """Move a file into quarantine, with its note; a link is moved, not followed."""
    write_note(layout, note)
    os.replace(path, layout.quarantine / path.name)


def quarantine_lines(layout: Layout, path: Path, *, is_closed: bool = False) -> None:
    """Move the corrupt lines of a segment into quarantine; leave a marker record in their place.

    The segment is changed in place: its process may go on appending to it.
    """
    ranges, _, _ = find_corrupt_lines(path, is_closed=is_closed)
    if not ranges:
        return
    with path.open("r+b") as file:
        lines = []
        for first, end in ranges:
            file.seek(first)
            lines.append(file.read(end - first))
        keep_copy(
            layout,
            f"{path.name}-{ranges[0][0]}.lines",
            "lines",
            f"{count_noun(len(lines), 'line')} of {path.name} not as written, the first at byte "
            f"{ranges[0][0]}",
            b"".join(line + b"\n" for line in lines),
            spans=sum(line.startswith(_SPAN) for line in lines),
        )
        for (first, _), line in zip(ranges, lines, strict=True):
            if len(line) >= len(_MARKER) - 1:  # readers step over a shorter one
                # Then empty lines, as few as readers hold.
                filler = (b" " * 1023 + b"\n") * (len(line) // 1024 + 1)
                file.seek(first)
                file.write((_MARKER + filler)[: max(len(line), len(_MARKER))])


def keep_copy(
    layout: Layout,
    name: str,
    noun: Literal["manifest", "lines"],
    why: str,
    content: bytes,
    spans: int = 0,
) -> None:
    """Keep a copy of damaged bytes in quarantine before something else is put in their place."""
    make_private(layout.quarantine)
    (layout.quarantine / name).unlink(missing_ok=True)
    write_private(layout.quarantine / name, content, is_synced=True)
    now = now_us()
    write_note(layout, Note(name, noun, why, now, spans, gone=spans, resolved_us=now))
