"""What happens in a store from now on: each ended span as its line is written, and no position.

Every span stands in a live segment first, and a settled segment stays for a period of grace: so
whoever looks at the segments every few seconds sees all. Whoever must not miss one, though the
process dies, follows (``store/follow.py``).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from lightning_otel.store.layout import Layout
from lightning_otel.store.lines import parsed
from lightning_otel.store.schema import Record

_SPAN: Final = b'{"record":"span"'
_BLOCK_BYTES: Final = 4 << 20
_TAIL_BYTES: Final = 16 << 20
"""Longer than any line of ours."""


class Seen(NamedTuple):
    """What was written since the look before.

    Attributes:
        records: Ended spans, as their lines have them.
        is_gap: Whether a segment came and went between two looks: what it held was not seen.
    """

    records: list[Record]
    is_gap: bool


class Watch:
    """Looks at a store's live segments, again and again."""

    def __init__(self, layout: Layout) -> None:
        """Begin with what comes from now on."""
        self._layout = layout
        # Listed before the manifest is read: what is settled in between is in both.
        self._offsets = {path.name: _end(path) for path in layout.segments()}
        self._settled = layout.read_manifest().settled
        self._changed = self._mark()

    def look(self, limit: int = 10_000) -> Seen:
        """What was written since; so many spans at most, and the others at the next look."""
        records: list[Record] = []
        paths = self._layout.segments()
        for path in paths:
            if len(records) >= limit:
                break
            for record in self._read(path):
                records.append(record)
        is_gap = self._is_gap()
        names = {path.name for path in paths}
        self._offsets = {name: at for name, at in self._offsets.items() if name in names}
        return Seen(records, is_gap)

    def _read(self, path: Path) -> Iterator[Record]:
        """The next ended spans of a segment: those of one block of it."""
        offset = self._offsets.setdefault(path.name, 0)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                block = file.read(_BLOCK_BYTES)
                if block and b"\n" not in block:
                    block += file.read(_TAIL_BYTES)
        except FileNotFoundError:
            return
        whole = block[: block.rfind(b"\n") + 1]
        self._offsets[path.name] = offset + len(whole)
        for line in whole.splitlines():
            if line.startswith(_SPAN):
                record = parsed(line)
                if record.get("end_ns") is not None and isinstance(record.get("trace_id"), str):
                    yield record

    def _is_gap(self) -> bool:
        mark = self._mark()
        if mark == self._changed:
            return False
        self._changed = mark
        before, self._settled = self._settled, self._layout.read_manifest().settled
        return bool(self._settled - before - self._offsets.keys())

    def _mark(self) -> tuple[int, int]:
        try:
            status = self._layout.manifest_path.stat()
        except FileNotFoundError:
            return 0, 0
        return status.st_mtime_ns, status.st_ino


def _end(path: Path) -> int:
    """Where the last whole line of a segment ends."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            begin = max(0, size - _TAIL_BYTES)
            # Most end with a whole line, which one byte tells.
            file.seek(max(0, size - 1))
            if size == 0 or file.read(1) == b"\n":
                return size
            file.seek(begin)
            return begin + file.read().rfind(b"\n") + 1
    except FileNotFoundError:
        return 0
