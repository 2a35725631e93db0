"""Segments closed by the processes that write them, because somebody asks.

Nobody but its process may seal a segment. It is asked by a bit of the file's mode, which a writer
sees with its next line at no cost, and then goes on in a new segment; one that writes nothing is
not reached. What is asked stays asked: it is closed with the next line, whenever that comes.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lightning_otel.store.layout import Layout
from lightning_otel.store.segment import ask_to_close
from lightning_otel.store.settle import sealed
from lightning_otel.store.writer import writer_if_any

ASKED_S: Final = 1.0
"""How long a process that writes is waited for."""
_LOOK_S: Final = 0.02


def open_segments(layout: Layout) -> list[Path]:
    """Segments that other processes still write to; this one's can be closed at any time."""
    manifest = layout.read_manifest()
    done = {*sealed(layout), *_own(layout)}
    return [path for path in layout.unsettled(manifest) if path not in done]


def close_segments(layout: Layout, holds: Callable[[Path], bool]) -> None:
    """Have segments closed that processes still write to, as far as they do within a second.

    Args:
        layout: The store's paths.
        holds: Whether a segment needs to be; the others are left alone.
    """
    writer = writer_if_any(layout)
    if writer is not None and any(map(holds, _own(layout))):
        writer.rotate()
    waiting = [path for path in open_segments(layout) if holds(path)]
    for path in waiting:
        ask_to_close(path)
    until = time.monotonic() + ASKED_S
    while waiting and time.monotonic() < until:
        time.sleep(_LOOK_S)
        still = set(open_segments(layout))
        waiting = [path for path in waiting if path in still]


def _own(layout: Layout) -> list[Path]:
    writer = writer_if_any(layout)
    segment = writer.segment if writer is not None else None
    return [segment.path] if segment is not None else []
