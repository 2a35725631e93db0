"""Publish settled files into a lake, exactly once, also if a publisher is killed.

The manifest notes publications of enough rows; each becomes one file, registered together with a
row in the lake's table ``published``: that transaction is the only commit mark. A dead publisher
is ended in PostgreSQL before the next one looks.
"""

import contextlib
import os
import random
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel.errors import StoreDamagedError, StoreError
from lightning_otel.store.damage import exclude_damage, explain
from lightning_otel.store.engines.ducklake import (
    LAKE,
    POSTGRES,
    PUBLISHED,
    SPANS,
    attach_lake,
    check_version,
    normalize_folder,
    translate_errors,
)
from lightning_otel.store.files import file_lock
from lightning_otel.store.lake import LakeAddress
from lightning_otel.store.layout import Layout, hold_settler_lock
from lightning_otel.store.manifest import SCHEMA_VERSION
from lightning_otel.store.parquet import fetch_row, sync
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.settle import settle
from lightning_otel.store.snapshot import rows_sql
from lightning_otel.store.sql import quote_text

if TYPE_CHECKING:
    import duckdb

LEAST_ROWS: Final = 8192
"""Fewer spans make no file of their own: many small files are what slows a lake down."""
ENOUGH_ROWS: Final = 65_536
"""From here on a publication takes no further file: bounds what is sorted at once."""
_WAIT_S: Final = 60.0
_TRIES: Final = 12
_MEMORY: Final = "600MB"
_ID_BYTES: Final = 8
_PUBLISHED_COLUMNS: Final = {
    "publication": "VARCHAR",
    "publisher": "VARCHAR",
    "spans": "BIGINT",
    "min_start_ns": "BIGINT",
    "max_start_ns": "BIGINT",
    "schema_version": "INTEGER",
    "published_ns": "BIGINT",
}


@dataclass(frozen=True, slots=True)
class PublishResult:
    """The spans and files that went into the lake, and settled spans still too few for a file."""

    spans: int = 0
    files: int = 0
    waiting: int = 0


def publish(
    layout: Layout, address: LakeAddress, *, is_rest_included: bool = False
) -> PublishResult:
    """Settle, and put what the lake has not got yet into it; see :meth:`SpanStore.publish`."""
    import duckdb

    layout.require()
    put: dict[str, int] = {}
    with _elect_publisher(layout) as publisher:
        settle(layout, wait_s=_WAIT_S)
        exclude_damage(layout)  # damage stays here
        planned = _plan_publications(layout, is_rest_included=is_rest_included)
        files = layout.read_manifest().live_files
        with translate_errors(address, "publish into"):
            for tries in reversed(range(_TRIES)):
                try:
                    with _open_lake(layout, address, publisher) as con:
                        query = f"SELECT publication FROM {PUBLISHED} WHERE publisher = ?"
                        present = {name for (name,) in con.execute(query, [publisher]).fetchall()}
                        for publication in sorted(planned - present):
                            put[publication] = _put_publication(con, layout, publisher, publication)
                    break
                except duckdb.Error as exc:
                    # Two machines make or change one lake at once; DuckDB has no class for the one
                    # failure. What is there then, only a new session knows.
                    is_conflict = "Failed to initialize DuckLake" in str(exc) or isinstance(
                        exc, duckdb.TransactionException | duckdb.CatalogException
                    )
                    if not tries or not is_conflict:
                        raise
                    time.sleep(random.uniform(0.05, 0.5))
    pending = sum(file.rows for file in files if not file.publication)
    return PublishResult(sum(put.values()), sum(map(bool, put.values())), pending)


@contextlib.contextmanager
def _elect_publisher(layout: Layout) -> Iterator[str]:
    with file_lock(layout.root / "publisher.lock") as descriptor:
        if descriptor is None:
            raise StoreError(
                f"another process publishes {layout.catalogue} just now; wait until it is done"
            )
        publisher = os.pread(descriptor, 2 * _ID_BYTES, 0).decode("ascii", "replace")
        if not re.fullmatch(f"[0-9a-f]{{{2 * _ID_BYTES}}}", publisher):
            publisher = secrets.token_hex(_ID_BYTES)
            os.pwrite(descriptor, publisher.encode(), 0)
            os.fsync(descriptor)
        yield publisher


def _plan_publications(layout: Layout, *, is_rest_included: bool) -> set[str]:
    """Note in the manifest which files go as what, for good; return all publications."""
    with hold_settler_lock(layout, _WAIT_S):
        manifest = layout.read_manifest()
        names = {file.name: file.publication for file in manifest.live_files}
        queue = [file for file in manifest.live_files if not file.publication]
        while queue:
            group, rows = list[str](), 0
            while queue and rows < ENOUGH_ROWS:
                file = queue.pop(0)
                group.append(file.name)
                rows += file.rows
            if rows >= LEAST_ROWS or is_rest_included:
                publication = f"{time.time_ns():019d}-{secrets.token_hex(4)}"
                names |= dict.fromkeys(group, publication)
        files = tuple(
            replace(file, publication=names.get(file.name, file.publication))
            for file in manifest.files
        )
        if files != manifest.files:
            layout.write_manifest(replace(manifest, files=files))
    return {*names.values()} - {""}


@contextlib.contextmanager
def _open_lake(
    layout: Layout, address: LakeAddress, publisher: str
) -> "Iterator[duckdb.DuckDBPyConnection]":
    if address.data and "://" not in address.data:
        Path(normalize_folder(address.data)).mkdir(mode=0o700, parents=True, exist_ok=True)
    application = f"lightning-otel publish {publisher}"
    identity = f"{application} {secrets.token_hex(4)}"
    spill = layout.root / "publish"
    shutil.rmtree(spill, ignore_errors=True)
    with attach_lake(address, application=identity, is_read_only=False) as con:
        con.execute("SET threads = 1")
        con.execute(f"SET memory_limit = '{_MEMORY}'")
        con.execute(f"SET temp_directory = {quote_text(str(spill))}")
        con.execute("SET ducklake_max_retry_count = 50")
        _end_predecessors(con, application, identity)
        for table, columns in ((SPANS, COLUMNS), (PUBLISHED, _PUBLISHED_COLUMNS)):
            kinds = [f"{name} {kind}" for name, kind in columns.items()]
            con.execute(f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(kinds)})")
            present = {row[0] for row in con.execute(f"DESCRIBE {table}").fetchall()}
            for name, kind in columns.items():  # which a lake of an earlier version lacks
                if name not in present:
                    con.execute(f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {name} {kind}")
        check_version(con, address)
        yield con


def _end_predecessors(con: "duckdb.DuckDBPyConnection", application: str, identity: str) -> None:
    """End what an earlier publisher left running in PostgreSQL: its commit may outlive it."""
    ended = (
        "SELECT count(pg_terminate_backend(pid)) AS n FROM pg_stat_activity "
        "WHERE datname = current_database() "
        f"AND application_name LIKE '{application}%' AND application_name <> '{identity}'"
    )
    query = f"SELECT n FROM postgres_query('{POSTGRES}', {quote_text(ended)})"
    deadline = time.monotonic() + _WAIT_S
    while con.execute(query).fetchall() != [(0,)]:
        if time.monotonic() > deadline:
            raise StoreError(
                "an earlier publisher's session in PostgreSQL does not end; see pg_stat_activity "
                f"for application_name {application!r}"
            )
        time.sleep(0.05)


def _put_publication(
    con: "duckdb.DuckDBPyConnection", layout: Layout, publisher: str, publication: str
) -> int:
    """Write a publication and register it; return its spans, 0 if none is left."""
    query = f"FROM ducklake_options('{LAKE}') SELECT value WHERE option_name = 'data_path'"
    folder = f"{fetch_row(con, query)[0]}main/spans"
    place = f"{folder}/spans-{publication}.parquet"
    if "://" not in folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
    if not _write_files(con, layout, publication, place):
        return 0
    spans, first_ns, last_ns = fetch_row(
        con, f"SELECT count(*), min(start_ns), max(start_ns) FROM read_parquet({quote_text(place)})"
    )
    con.execute("BEGIN")
    con.execute(
        f"CALL ducklake_add_data_files('{LAKE}', 'spans', {quote_text(place)}, schema => 'main', "
        "allow_missing => true)"
    )
    con.execute(
        f"INSERT INTO {PUBLISHED} ({', '.join(_PUBLISHED_COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?, ?)",
        [publication, publisher, spans, first_ns, last_ns, SCHEMA_VERSION, time.time_ns()],
    )
    con.execute("COMMIT")
    return int(spans)


def _write_files(
    con: "duckdb.DuckDBPyConnection", layout: Layout, publication: str, place: str
) -> bool:
    """Write a publication's files as one; False if retention has taken all of them away."""
    import duckdb

    target = place if "://" in place else f"{place}.part"
    for tries in reversed(range(_TRIES)):
        live = layout.read_manifest().live_files
        files = [file for file in live if file.publication == publication]
        if not files:
            return False
        # One file is sorted already.
        order = "ORDER BY trace_id, agent, start_ns, sequence" if len(files) > 1 else ""
        try:
            con.execute(
                f"COPY (SELECT {', '.join(COLUMNS)} FROM {rows_sql(layout, files)} {order}) "
                f"TO {quote_text(target)} (FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 3, "
                f"ROW_GROUP_SIZE 20480, KV_METADATA {{schema: '{SCHEMA_VERSION}'}})"
            )
            break
        except duckdb.Error as exc:
            # Compaction puts others in their place, and takes them away a minute later.
            if isinstance(error := explain(exc, layout), StoreDamagedError):
                raise error from exc
            if not tries or all((layout.data / file.name).exists() for file in files):
                raise
    if target != place:
        sync(Path(target))
        os.replace(target, place)
        sync(Path(place).parent)
    return True
