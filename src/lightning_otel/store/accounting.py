"""Accounts of every span that ended, for a whole store and for each process.

Counted from what writers and settlers noted; what is stored is counted anew in the files, so that
the two can be compared.
"""

from typing import TYPE_CHECKING, Final

from lightning_otel.errors import StoreDamagedError, StoreError
from lightning_otel.store.counts import PENDING, STORED, Accounting, account, added
from lightning_otel.store.damage import exclude_damage, list_excluded, reading
from lightning_otel.store.packing import segment_counts
from lightning_otel.store.parquet import row_of
from lightning_otel.store.sql import listed, new_connection
from lightning_otel.store.writer import writer_if_any

if TYPE_CHECKING:
    from lightning_otel.store.layout import Layout
    from lightning_otel.store.manifest import Manifest, SettledSegment

_TRIES: Final = 5


def accounting_of(layout: "Layout") -> Accounting:
    """Return what became of every span of the store, as of one moment for each file."""
    manifest, segments = _read_segments(layout)
    counts = added(manifest.counts, *(each.counts for each in (*manifest.segments, *segments)))
    # Of a file that was taken out the spans are missing, which is what is to be found.
    paths = [layout.data / file.name for file in manifest.live_files]
    files = [path for path in paths if path.name not in list_excluded(layout) and path.exists()]
    stored = sum(each.counts.get(STORED, 0) for each in segments)
    if files:
        with reading(layout), new_connection() as con:
            stored += row_of(con, f"SELECT count(end_ns) FROM read_parquet({listed(files)})")[0]
    writer = writer_if_any(layout)
    untold = writer.untold() if writer is not None else {}
    return account(added(counts, untold), stored=stored, pending=untold.get(PENDING, 0))


def accounting_by_process(layout: "Layout", since_ns: int = 0) -> dict[str, Accounting]:
    """Return the same for each process since then with a loss or a segment settled lately."""
    manifest, segments = _read_segments(layout)
    found: dict[str, dict[str, int]] = {}
    for each in (*manifest.segments, *segments):
        found[each.process] = added(found.get(each.process, {}), each.counts)
    writer = writer_if_any(layout)
    if writer is not None:
        found[writer.process] = added(found.get(writer.process, {}), writer.untold())
    return {
        process: account(counts, stored=counts.get(STORED, 0), pending=counts.get(PENDING, 0))
        for process, counts in sorted(found.items())
        if int(process.split("-")[1]) >= since_ns
    }


def _read_segments(layout: "Layout") -> "tuple[Manifest, list[SettledSegment]]":
    """Return the manifest, and the counts of the segments it does not name."""
    import duckdb

    layout.require()
    for left in reversed(range(_TRIES)):
        exclude_damage(layout)
        manifest, known = layout.read_manifest(), list_excluded(layout)
        paths = [path for path in layout.unsettled(manifest) if path.name not in known]
        try:
            with reading(layout, "account for"):
                return manifest, segment_counts(layout, manifest, paths)
        except StoreError as exc:
            # A settler, or the user, took one away that was listed already.
            is_gone = isinstance(exc.__cause__, duckdb.IOException)
            # What is damaged is put aside by now.
            if not (left and (is_gone or isinstance(exc, StoreDamagedError))):
                raise
    raise AssertionError("the last time returns or raises")
