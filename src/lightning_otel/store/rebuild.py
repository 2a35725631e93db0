"""A damaged manifest made whole again: from its copy, else from the footers of the data files."""

import logging
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.errors import StoreDamagedError, StoreVersionError
from lightning_otel.store import quarantine
from lightning_otel.store.counts import ENDED, STORED, added
from lightning_otel.store.layout import Layout, now_us, settler_elected
from lightning_otel.store.manifest import SCHEMA_VERSION, DataFile, Manifest, SettledSegment
from lightning_otel.store.parquet import (
    ORIGIN,
    SPILL,
    Origin,
    describe_file,
    packing_connection,
    row_of,
)
from lightning_otel.store.spans import rows_of
from lightning_otel.store.sql import quoted

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

_WAIT_S: Final = 2.0


def mend_manifest(layout: Layout) -> None:
    """See that the manifest is whole, if that is ours to do now; else its copy is read."""
    try:
        if layout.whole_manifest() == layout.manifest_path:
            return
    except StoreDamagedError:
        log.debug("%s has no whole manifest", layout.root)
    try:
        with settler_elected(layout, wait_s=_WAIT_S) as is_elected:
            if is_elected:
                restore(layout)
    except OSError:
        log.debug("%s keeps its damaged manifest", layout.root, exc_info=True)
    layout.read_manifest()


def restore(layout: Layout) -> None:
    """Write a damaged manifest anew; only for the elected settler."""
    why, source = "the manifest was damaged or missing", "its copy"
    unreadable: dict[str, str] = {}
    try:
        if layout.whole_manifest() == layout.manifest_path:
            return
        manifest = layout.read_manifest()
    except StoreDamagedError as exc:
        why, source = exc.what, "the data files"
        manifest = _rebuild_manifest(layout, unreadable)
    found = layout.manifest_path.read_bytes() if layout.manifest_path.exists() else b""
    quarantine.keep_aside(layout, f"manifest-{now_us()}.ndjson", "manifest", why, found)
    layout.write_manifest(manifest)
    quarantine.put_files_aside(layout, unreadable)
    log.warning("%s: %s; it was written anew from %s", layout.catalogue, why, source)


def _rebuild_manifest(layout: Layout, unreadable: dict[str, str]) -> Manifest:
    """Return what the data files hold: their footers tell which files and segments each replaced.

    ``unreadable`` is filled with the names of damaged ones, and why each is.
    """
    import duckdb

    found: list[tuple[DataFile, Origin]] = []
    with packing_connection(layout.new / SPILL) as con:
        for path in layout.data.glob("spans-*.parquet"):
            try:
                schema, origin = _read_footer(con, path)
                found.append((describe_file(con, path, schema), origin))
            except duckdb.Error as exc:
                log.warning("%s cannot be read (%s); its spans are left out", path, exc)
                if not isinstance(exc, duckdb.IOException):
                    unreadable[path.name] = str(exc)
        replaced = {name for _, origin in found for name in origin.files}
        there = {path.name for path in layout.segments()}
        files: list[DataFile] = []
        segments: dict[str, SettledSegment] = {}
        for file, origin in sorted(found, key=lambda each: each[0].name, reverse=True):
            # A settler that died may have left a file that was made again.
            if file.name in replaced or origin.segments.keys() & segments:
                continue
            files.insert(0, file)
            for name, rows in origin.segments.items():
                held = file.name if rows else ""
                segments[name] = SettledSegment(name, now_us(), file=held, rows=rows)
        older = [file.name for file, origin in found if origin == Origin()]
        doubled = con.execute(  # by versions whose footers tell nothing
            "SELECT parse_filename(filename) AS name FROM (SELECT filename, max(filename) OVER "
            f"(PARTITION BY trace_id, span_id) AS newest FROM {rows_of(layout, files)}) "
            "WHERE name IN (SELECT unnest(?::VARCHAR[])) "
            "GROUP BY 1 HAVING bool_and(filename < newest)",
            [older],
        ).fetchall()
        files = [file for file in files if (file.name,) not in doubled]
        (ended,) = row_of(con, f"SELECT count(end_ns) FROM {rows_of(layout, files)}")
    # What became of spans that are not here is not known; these, at least, ended and are stored.
    counts = added({ENDED: ended, STORED: ended})
    kept = tuple(each for name, each in segments.items() if name in there)
    return Manifest(tuple(files), kept, counts)


def _read_footer(con: "duckdb.DuckDBPyConnection", path: Path) -> tuple[int, Origin]:
    """Return a file's schema, and what it was made from as far as its footer tells that."""
    query = f"SELECT key, value FROM parquet_kv_metadata({quoted(str(path))})"
    pairs = con.execute(query).fetchall()
    footer: dict[str, Any] = {bytes(key).decode(): bytes(value) for key, value in pairs}
    schema = int(footer.get("schema", 1))
    if schema > SCHEMA_VERSION:
        raise StoreVersionError(
            f"{path} has schema {schema}, this lightning-otel knows {SCHEMA_VERSION}; upgrade with:"
            " pip install --upgrade lightning-otel"
        )
    try:
        return schema, Origin.from_text(footer[ORIGIN])
    except (KeyError, TypeError, ValueError, zlib.error):
        return schema, Origin()
