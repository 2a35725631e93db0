"""Records of living processes, read from their segments without DuckDB."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lightning_otel.errors import StoreDamagedError
from lightning_otel.store.counts import ENDED
from lightning_otel.store.files import total_bytes
from lightning_otel.store.layout import Layout
from lightning_otel.store.lines import read_records
from lightning_otel.store.schema import Record

COARSE_NS: Final = 1_000_000_000
"""How far a file's time may lie behind the clock, on any filesystem."""
_MOST_BYTES: Final = 8 << 20
"""Segments that take longer to read here than DuckDB takes to start."""


def read_others_records(
    layout: Layout, process: str, since_ns: int, mentions: Sequence[str]
) -> list[Record] | None:
    """Read spans that other processes began since a time and whose lines hold one of some texts.

    Starts without their end are among them. None if some may be settled already.
    """
    texts = [mention.encode("utf-8", "replace") for mention in mentions]
    matches: list[Record] = []
    for path in layout.segments():
        if path.name.startswith(f"{process}-"):
            continue
        with contextlib.suppress(FileNotFoundError):
            records = read_records(path, texts) if _is_written_since(path, since_ns) else ()
            matches += [
                record
                for record in records
                if record.get("span_id") and record.get("start_ns", 0) >= since_ns
            ]
    return None if _is_settled_since(layout, since_ns) else matches


def read_whole_records(layout: Layout, since_ns: int) -> list[Record] | None:
    """Return the records of segments written to since a time, one a span, ended or not.

    None where the store must be asked: they are large, settled already, damaged or doubled.
    """
    spans: dict[Any, Record] = {}
    segments = [path for path in layout.segments() if _is_written_since(path, since_ns)]
    if total_bytes(segments) > _MOST_BYTES:
        return None
    for path in segments:
        ended, total = 0, None
        for record in read_records(path):
            get = record.get
            kind, name, counts = get("record"), (get("trace_id"), get("span_id")), get("counts")
            if kind == "span" and get("end_ns") is not None:
                if name in spans and spans[name].get("end_ns") is not None:
                    return None
                ended += 1
                spans[name] = record
            elif kind in ("span", "start") and None not in name:
                spans.setdefault(name, record)
            elif kind not in ("count", "seal") or counts is None or counts.keys() - {ENDED}:
                return None
            else:
                total = counts.get(ENDED, total)
        if total not in (None, ended):
            return None
    return None if _is_settled_since(layout, since_ns) else list(spans.values())


def _is_settled_since(layout: Layout, since_ns: int) -> bool:
    """Return whether files may hold some, asked last: what was settled meanwhile stands there."""
    try:
        return any(file.max_start_ns >= since_ns for file in layout.read_manifest().live_files)
    except StoreDamagedError:
        return True


def _is_written_since(path: Path, since_ns: int) -> bool:
    return path.stat().st_mtime_ns >= since_ns - COARSE_NS
