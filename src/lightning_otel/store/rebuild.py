"""A damaged manifest made whole again: from its copy, else from the data files themselves."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_otel.errors import StoreDamagedError, StoreVersionError
from lightning_otel.store import quarantine
from lightning_otel.store.counts import ENDED, STORED, added
from lightning_otel.store.election import settler_elected
from lightning_otel.store.layout import SCHEMA_VERSION, DataFile, Layout, Manifest
from lightning_otel.store.parquet import (
    ROW_GROUP,
    SPILL,
    described,
    new_name,
    packing_connection,
    row_of,
    sync,
)
from lightning_otel.store.spans import same_span
from lightning_otel.store.sql import quoted

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

_WAIT_S = 2.0


def mend_manifest(layout: Layout) -> None:
    """See that the manifest is whole, if that is ours to do now; else its copy is read.

    Raises:
        StoreDamagedError: It is not, nor is its copy, and neither can be written here.
        StoreError: It cannot be read.
    """
    if not _damage(layout):
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
    why = _damage(layout)
    if not why:
        return
    try:
        manifest, source = layout.read_manifest(), "its copy"
    except StoreDamagedError:
        manifest, source = _rebuilt(layout), "the data files"
    quarantine.keep_manifest(layout, why)
    layout.write_manifest(manifest)
    log.warning("%s: %s; it was written anew from %s", layout.catalogue, why, source)


def _damage(layout: Layout) -> str:
    try:
        whole = layout.whole_manifest()
    except StoreDamagedError as exc:
        return exc.what
    return "" if whole == layout.manifest_path else "the manifest was damaged or missing"


def _rebuilt(layout: Layout) -> Manifest:
    """What the data files hold, each span once; segments are settled anew, which doubles nothing.

    The newest file first: if it was merged from older ones that were still there, it holds all of
    theirs, and they are left to be swept.
    """
    import duckdb

    found: list[DataFile] = []
    with packing_connection(layout.new / SPILL) as con:
        con.execute(
            "CREATE TABLE held (trace_id VARCHAR, span_id VARCHAR, "
            "start_ns BIGINT, is_ended BOOLEAN)"
        )
        for path in sorted(layout.data.glob("spans-*.parquet"), reverse=True):
            try:
                file = _taken(con, layout, path)
            except duckdb.Error as exc:
                # It stays where it is: who reads it finds the damage, and puts it aside.
                log.warning("%s cannot be read (%s); %s", path, exc, "its spans are left out")
                continue
            if file is not None:
                found.append(file)
        (ended,) = row_of(con, "SELECT count(*) FROM held WHERE is_ended")
    # What became of spans that are not here is not known; these, at least, ended and are stored.
    return Manifest(tuple(reversed(found)), counts=added({ENDED: ended, STORED: ended}))


def _taken(con: "duckdb.DuckDBPyConnection", layout: Layout, path: Path) -> DataFile | None:
    """A file's entry, or that of one with its spans that no newer file holds."""
    schema = _schema_of(con, path)
    if schema > SCHEMA_VERSION:
        raise StoreVersionError(
            f"{path} has schema {schema}, this lightning-otel knows {SCHEMA_VERSION}; upgrade with:"
            " pip install --upgrade lightning-otel"
        )
    file = f"read_parquet({quoted(str(path))})"
    is_held = (
        f"EXISTS (SELECT 1 FROM held WHERE held.trace_id = f.trace_id AND held.span_id = f.span_id "
        f"AND {same_span('held', 'f')})"
    )
    rows, held = row_of(con, f"SELECT count(*), count(*) FILTER (WHERE {is_held}) FROM {file} AS f")
    if rows == held:
        return None
    if held:
        made = layout.new / new_name()
        con.execute(
            f"COPY (SELECT * FROM {file} AS f WHERE NOT {is_held} "
            "ORDER BY trace_id, agent, start_ns, sequence) "
            f"TO {quoted(str(made))} (FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 3, "
            f"ROW_GROUP_SIZE {ROW_GROUP}, KV_METADATA {{schema: '{schema}'}})"
        )
        made.chmod(0o600)
        sync(made)
        path = layout.data / made.name
        os.replace(made, path)
        sync(layout.data)
        file = f"read_parquet({quoted(str(path))})"
    rows, low, high = row_of(con, f"SELECT count(*), min(start_ns), max(start_ns) FROM {file}")
    con.execute(
        f"INSERT INTO held SELECT trace_id, span_id, start_ns, end_ns IS NOT NULL FROM {file}"
    )
    return described(path, rows, low, high, schema=schema)


def _schema_of(con: "duckdb.DuckDBPyConnection", path: Path) -> int:
    found = con.execute(
        f"SELECT value FROM parquet_kv_metadata({quoted(str(path))}) WHERE key = 'schema'::BLOB"
    ).fetchone()
    return int(bytes(found[0])) if found else 1
