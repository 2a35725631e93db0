"""The files and segments of a store that count at one moment, and the SQL that reads their spans.

A file that ceases to count, and a segment that is settled, stay for a period of grace: time enough
for a query that follows at once. A later one takes a new snapshot; see :mod:`reader`. Only the
catalogue, which other programs open, decides inside its SQL (:mod:`catalogue`).
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from lightning_otel.errors import StoreError
from lightning_otel.store.damage import list_excluded
from lightning_otel.store.layout import DataFile, Layout, is_in_effect, now_us, total_bytes
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.spans import live_query, rows_of, settled_and_live

_SMALL_BYTES: Final = 1 << 20
"""A store up to this size is read into memory: to plan a query over files takes longer."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files and segments that count.

    Attributes:
        layout: The store's paths.
        files: Data files that are there and not known to be damaged.
        segments: Segments whose spans none of these holds, oldest first.
        excluded: Names of files and segments that are damaged and lie where they always lay.
        live_bytes: Size of the segments, which grow.
    """

    layout: Layout
    files: tuple[DataFile, ...]
    segments: tuple[Path, ...]
    excluded: frozenset[str]
    live_bytes: int

    @classmethod
    def take(cls, layout: Layout) -> Self:
        """Return what counts now."""
        listed = layout.segments()  # first: what is settled meanwhile stands in the manifest
        manifest, now, excluded = layout.read_manifest(), now_us(), list_excluded(layout)
        try:
            there = set(os.listdir(layout.data)) - excluded
        except OSError as exc:
            raise StoreError(
                f"cannot read {layout.catalogue}: {exc}; see: lightning-otel doctor"
            ) from exc
        out = manifest.settled_by(now) | excluded
        files = tuple(
            file
            for file in manifest.files
            if is_in_effect(file.added_us, now)
            and (file.dropped_us is None or not is_in_effect(file.dropped_us, now))
            and file.name in there
        )
        segments = tuple(path for path in listed if path.name not in out)
        return cls(layout, files, segments, excluded, total_bytes(segments))

    @property
    def is_small(self) -> bool:
        """True if all spans fit into a little memory."""
        return self.live_bytes + sum(file.size_bytes for file in self.files) <= _SMALL_BYTES

    def live_sql(self) -> str:
        """SELECT the spans of the segments, each once; a file may hold some of them too."""
        return live_query(self.segments, live_bytes=self.live_bytes)

    def spans_sql(self) -> str:
        """SELECT every span once, an unended one with an empty ``end_ns``."""
        names = ", ".join(COLUMNS)
        settled = f"SELECT {names} FROM {rows_of(self.layout, self.files)}"
        if not self.segments:
            return settled
        return f"""
WITH settled AS NOT MATERIALIZED ({settled}), live AS NOT MATERIALIZED ({self.live_sql()})
{settled_and_live(names)}"""

    def without(self, segments: Iterable[str]) -> Self:
        """Return the snapshot without some segments, by name."""
        names = frozenset(segments)
        kept = tuple(path for path in self.segments if path.name not in names)
        return replace(self, segments=kept, live_bytes=total_bytes(kept))
