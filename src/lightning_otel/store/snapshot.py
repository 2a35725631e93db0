"""The files and segments of a store that count at one moment, and the SQL that reads their spans.

A file that ceases to count, and a segment that is settled, stay for a period of grace: time enough
for a query that follows at once. A later one takes a new snapshot; see :mod:`reader`. Only the
catalogue, which other programs open, decides inside its SQL (:mod:`catalogue`).
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from lightning_otel.errors import StoreError
from lightning_otel.store.damage import avoided
from lightning_otel.store.layout import DataFile, Layout, is_in_effect, now_us, total_bytes
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.spans import live_query, rows_of, settled_and_live
from lightning_otel.store.sql import listed, quoted

if TYPE_CHECKING:
    import duckdb

_SMALL_BYTES: Final = 1 << 20
"""A store up to this size is read into memory: to plan a query over files takes longer."""
_FEW_FILES: Final = 16


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Which files and segments count.

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
        """Return what counts now.

        Raises:
            StoreError: The manifest or a folder cannot be read.
        """
        listed = layout.segments()  # first: what is settled meanwhile stands in the manifest
        manifest, now, excluded = layout.read_manifest(), now_us(), avoided(layout)
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
        """Whether all spans fit into a little memory."""
        return self.live_bytes + sum(file.size_bytes for file in self.files) <= _SMALL_BYTES

    def live_sql(self, where: str = "true") -> str:
        """SELECT the spans of the segments, each once; a file may hold some of them too."""
        return live_query(self.segments, where, live_bytes=self.live_bytes)

    def spans_sql(
        self, where: str = "", *, columns: Iterable[str] = COLUMNS, live: str = ""
    ) -> str:
        """SELECT every span once, an unended one with an empty ``end_ns``.

        Args:
            where: A condition that few spans meet; those settled are then read once.
            columns: Which columns.
            live: What stands for :meth:`live_sql`, such as a table made of it.
        """
        names = ", ".join(columns)
        settled = f"SELECT {names} FROM {rows_of(self.layout, self.files)}"
        if where:
            settled += f" WHERE {where}"
        if not self.segments:
            return settled
        return f"""
WITH settled AS {"" if where else "NOT "}MATERIALIZED ({settled}),
live AS NOT MATERIALIZED ({live or self.live_sql(where or "true")})
{settled_and_live(names)}"""

    def without(self, segments: Iterable[str]) -> Self:
        """Return the snapshot without some segments, by name."""
        names = frozenset(segments)
        kept = tuple(path for path in self.segments if path.name not in names)
        return replace(self, segments=kept, live_bytes=total_bytes(kept))

    def of_traces(self, con: "duckdb.DuckDBPyConnection", trace_ids: Sequence[str]) -> Self:
        """Return the snapshot of only those files and segments that hold spans of some traces."""
        segments = tuple(path for path in self.segments if _mentions(path, trace_ids))
        files = self.files
        if len(files) > _FEW_FILES:  # one narrow column tells it; the others cost more
            paths = listed(self.layout.data / file.name for file in files)
            rows = con.execute(
                "SELECT DISTINCT parse_filename(filename) FROM "
                f"read_parquet({paths}, filename=true) WHERE {trace_condition(trace_ids)}"
            ).fetchall()
            names = {name for (name,) in rows}
            files = tuple(file for file in files if file.name in names)
        return replace(self, files=files, segments=segments, live_bytes=total_bytes(segments))


def trace_condition(trace_ids: Iterable[str]) -> str:
    """Return the SQL condition that a span is of one of some traces."""
    return f"trace_id IN ({', '.join(map(quoted, trace_ids))})"


def _mentions(path: Path, texts: Iterable[str]) -> bool:
    """Tell whether a segment holds one of some ids, which are never escaped in JSON."""
    try:
        content = path.read_bytes()
    except OSError:
        return True  # DuckDB shall say what is wrong with it
    return any(text.encode() in content for text in texts)
