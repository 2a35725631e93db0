"""A damaged manifest made whole again: from its copy, else from the footers of the data files."""

import logging
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.errors import StoreDamagedError, StoreVersionError
from lightning_otel.store import quarantine
from lightning_otel.store.counts import ENDED, STORED, added
from lightning_otel.store.election import settler_elected
from lightning_otel.store.gist import with_gist
from lightning_otel.store.layout import (
    SCHEMA_VERSION,
    DataFile,
    Layout,
    Manifest,
    SettledSegment,
    now_us,
)
from lightning_otel.store.parquet import (
    ORIGIN,
    SPILL,
    Origin,
    described,
    extent_of,
    packing_connection,
    row_of,
    sync,
    write_file,
)
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.spans import is_one_span, rows_of
from lightning_otel.store.sql import quoted

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

_WAIT_S = 2.0
HELD: Final = "held (trace_id VARCHAR, span_id VARCHAR, start_ns BIGINT, is_ended BOOLEAN)"
"""A table of spans that stand in files already."""
IS_HELD: Final = f"EXISTS (SELECT 1 FROM held WHERE {is_one_span('held', 'f')})"
"""A condition on rows of ``f``."""


def mend_manifest(layout: Layout) -> None:
    """See that the manifest is whole, if that is ours to do now; else its copy is read.

    Raises:
        StoreDamagedError: It is not, nor is its copy, and neither can be written here.
        StoreError: It cannot be read.
    """
    if not _find_damage(layout):
        return
    try:
        with settler_elected(layout, wait_s=_WAIT_S) as is_elected:
            if is_elected:
                restore(layout)
    except OSError:
        log.debug("%s keeps its damaged manifest", layout.root, exc_info=True)
    layout.read_manifest()


def restore(layout: Layout) -> None:
    """Write a damaged manifest anew; only for the elected settler.

    Raises:
        OSError: It cannot be written.
        StoreVersionError: A newer version wrote the data files.
    """
    why = _find_damage(layout)
    if not why:
        return
    unreadable: dict[str, str] = {}
    try:
        manifest, source = layout.read_manifest(), "its copy"
    except StoreDamagedError:
        manifest, source = _rebuild(layout, unreadable), "the data files"
    quarantine.keep_manifest(layout, why)
    layout.write_manifest(manifest)
    if unreadable:
        quarantine.put_aside(layout, unreadable)
    log.warning("%s: %s; it was written anew from %s", layout.catalogue, why, source)


def _find_damage(layout: Layout) -> str:
    try:
        whole = layout.whole_manifest()
    except StoreDamagedError as exc:
        return exc.what
    return "" if whole == layout.manifest_path else "the manifest was damaged or missing"


def _rebuild(layout: Layout, unreadable: dict[str, str]) -> Manifest:
    """Return what the data files hold, each span once.

    The footer of a rewritten file tells which files it stands for, and which segments. Where none
    does, spans that newer files hold are left out, and segments are settled anew.

    Args:
        layout: The store's paths.
        unreadable: Filled with the names of damaged files, and why each is.
    """
    import duckdb

    files: list[DataFile] = []
    segments: dict[str, SettledSegment] = {}
    with packing_connection(layout.new / SPILL) as con:
        con.execute(f"CREATE TABLE {HELD}")
        footers = {path: _read_footer(con, path) for path in layout.data.glob("spans-*.parquet")}
        replaced = {name for _, each in footers.values() if each for name in each.files}
        for path in sorted(footers, reverse=True):
            schema, origin = footers[path]
            # Whoever died may have left a file that was made again.
            if path.name in replaced or (origin and origin.segments.keys() & segments):
                continue
            try:
                file = _take_file(con, layout, path, schema)
            except duckdb.Error as exc:
                log.warning("%s cannot be read (%s); its spans are left out", path, exc)
                if not isinstance(exc, duckdb.IOException):
                    unreadable[path.name] = str(exc)
                continue
            if file is not None:
                files.append(file)
                segments |= _list_segments(layout, file, origin)
        (ended,) = row_of(con, "SELECT count(*) FROM held WHERE is_ended")
    # What became of spans that are not here is not known; these, at least, ended and are stored.
    counts = added({ENDED: ended, STORED: ended})
    return Manifest(tuple(reversed(files)), tuple(segments.values()), counts)


def _read_footer(con: "duckdb.DuckDBPyConnection", path: Path) -> tuple[int, Origin | None]:
    """Return a file's schema, and what it was made from if its footer tells that."""
    import duckdb

    try:
        rows = con.execute(
            f"SELECT key, value FROM parquet_kv_metadata({quoted(str(path))})"
        ).fetchall()
    except duckdb.Error:
        return SCHEMA_VERSION, None
    told: dict[str, Any] = {bytes(key).decode(): bytes(value) for key, value in rows}
    schema = int(told.get("schema", 1))
    if schema > SCHEMA_VERSION:
        raise StoreVersionError(
            f"{path} has schema {schema}, this lightning-otel knows {SCHEMA_VERSION}; upgrade with:"
            " pip install --upgrade lightning-otel"
        )
    try:
        return schema, Origin.from_text(told[ORIGIN])
    except (KeyError, TypeError, ValueError, zlib.error):
        return schema, None


def _list_segments(
    layout: Layout, file: DataFile, origin: Origin | None
) -> dict[str, SettledSegment]:
    """Return the segments of a file that are still there, to be taken away after a while."""
    there = {path.name for path in layout.segments()} if origin else set()
    return {
        name: SettledSegment(name, now_us(), file=file.name if rows else "", rows=rows)
        for name, rows in (origin.segments if origin else {}).items()
        if name in there
    }


def _take_file(
    con: "duckdb.DuckDBPyConnection", layout: Layout, path: Path, schema: int
) -> DataFile | None:
    """Return a file's entry, or that of one with its spans that no newer file holds.

    Args:
        con: A connection with the table ``held``.
        layout: The store's paths.
        path: The file.
        schema: The version of its columns.
    """
    source = f"read_parquet({quoted(str(path))})"
    (held,) = row_of(con, f"SELECT count(*) FROM {source} AS f WHERE {IS_HELD}")
    rows, low, high = extent_of(con, path)
    if held == rows:
        return None
    file: DataFile | None = described(path, rows, low, high, schema=schema)
    if held and file:
        spans = f"(SELECT * FROM {rows_of(layout, [file])} AS f WHERE NOT {IS_HELD})"
        file = write_file(con, layout, with_gist(spans, COLUMNS))
        assert file is not None
        os.replace(layout.new / file.name, layout.data / file.name)
        sync(layout.data)
        source = f"read_parquet({quoted(str(layout.data / file.name))})"
    con.execute(
        f"INSERT INTO held SELECT trace_id, span_id, start_ns, end_ns IS NOT NULL FROM {source}"
    )
    return file
