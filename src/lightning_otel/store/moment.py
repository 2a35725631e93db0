"""What of a store counts at one moment, for a query that comes at once.

Files that cease to count later stay for a period of grace, which is time enough for it. Where a
connection stays open, the query itself decides; see :func:`spans.spans_query`.
"""

import os
from pathlib import Path
from typing import NamedTuple

from lightning_otel.store.damage import avoided
from lightning_otel.store.layout import DataFile, Layout, is_in_effect, now_us


class Moment(NamedTuple):
    """What counts.

    Attributes:
        files: Data files that are there and not known to be damaged.
        segments: Segments whose spans none of these holds, oldest first.
    """

    files: list[DataFile]
    segments: list[Path]


def moment_of(layout: Layout) -> Moment:
    """What counts now.

    Raises:
        StoreError: The manifest cannot be read.
    """
    listed = layout.segments()  # first: what is settled meanwhile stands in the manifest
    manifest, now, damaged = layout.read_manifest(), now_us(), avoided(layout)
    out = manifest.settled_by(now) | damaged
    there = set(os.listdir(layout.data))
    files = [
        file
        for file in manifest.files
        if is_in_effect(file.added_us, now)
        and (file.dropped_us is None or not is_in_effect(file.dropped_us, now))
        and file.name in there
        and file.name not in damaged
    ]
    return Moment(files, [path for path in listed if path.name not in out])
