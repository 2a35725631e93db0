"""Records of living processes, read from their segments without DuckDB."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from lightning_otel.errors import StoreDamagedError
from lightning_otel.store.layout import Layout
from lightning_otel.store.lines import parsed
from lightning_otel.store.schema import Record

_COARSE_NS: Final = 1_000_000_000
"""How far a file's time may lie behind the clock, on any filesystem."""


def records_of_others(
    layout: Layout, process: str, since_ns: int, mentions: Sequence[str]
) -> list[Record] | None:
    """The spans that other processes began since a time and whose lines hold one of some texts.

    Args:
        layout: The store's paths.
        process: The process whose own lines are not wanted.
        since_ns: When the first span wanted began, at the earliest.
        mentions: The texts.

    Returns:
        Parsed lines, starts without their end among them; None if some may be settled already.
    """
    wanted = [mention.encode("utf-8", "replace") for mention in mentions]
    found: list[Record] = []
    for path in layout.segments():
        if not path.name.startswith(f"{process}-"):
            found += _read_records(path, since_ns, wanted)
    # Looked at last: what was settled and taken away meanwhile stands in it by now.
    try:
        files = layout.read_manifest().live_files
    except StoreDamagedError:
        return None
    return None if any(file.max_start_ns >= since_ns for file in files) else found


def living(layout: Layout) -> list[str]:
    """Processes that hold the lock of their newest segment, and so may still end what they began.

    Raises:
        OSError: The segments cannot be listed.
    """
    newest: dict[str, Path] = {}
    for path in layout.segments():
        newest[path.name.rpartition("-")[0]] = path
    return [process for process, path in newest.items() if _is_locked(path)]


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _read_records(path: Path, since_ns: int, wanted: Sequence[bytes]) -> Iterator[Record]:
    try:
        if path.stat().st_mtime_ns < since_ns - _COARSE_NS:
            return
        with path.open("rb") as lines:
            for line in lines:
                if any(text in line for text in wanted):
                    record = parsed(line)
                    if record.get("span_id") and record.get("start_ns", 0) >= since_ns:
                        yield record
    except FileNotFoundError:
        return
