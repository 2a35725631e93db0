"""Settled files into a lake, exactly once, whatever dies.

Settled files become publications of enough rows, which the manifest notes down; each is written to
the lake's data path as one file, and registered together with a row in the lake's table
``published``: that transaction is the only commit mark. A publisher that died is finished off in
PostgreSQL before the next one looks what is there.
"""

import contextlib
import fcntl
import os
import random
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel.errors import StoreError
from lightning_otel.store.damage import exclude_damage, explain, find_damage
from lightning_otel.store.engines.ducklake import (
    LAKE,
    POSTGRES,
    PUBLISHED,
    SPANS,
    attached,
    check_version,
    data_path,
    folder_of,
    telling,
)
from lightning_otel.store.lake import LakeAddress
from lightning_otel.store.layout import SCHEMA_VERSION, DataFile, Layout, Manifest
from lightning_otel.store.parquet import sync
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.settle import settle, settler_elected
from lightning_otel.store.sql import quoted

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
class Published:
    """What one publishing did.

    Attributes:
        spans: How many went into the lake.
        files: As how many files.
        waiting: Settled spans that are too few for a file yet.
    """

    spans: int = 0
    files: int = 0
    waiting: int = 0


def publish(layout: Layout, address: LakeAddress, *, is_rest_included: bool = False) -> Published:
    """Settle, and put what the lake has not got yet into it.

    Args:
        layout: The local store.
        address: The lake, made if it is not there.
        is_rest_included: Whether spans too few for a file go in as well.

    Raises:
        StoreMissingError: There is no local store.
        ConfigError: DuckDB has no extension for it here, or the lake has no data path.
        StoreError: Another process publishes this store, or the lake cannot be reached or written.
    """
    layout.require()
    with _publisher_elected(layout) as publisher:
        settle(layout, wait_s=_WAIT_S)
        exclude_damage(layout)  # damage stays here
        planned = _plan(layout, is_rest_included=is_rest_included)
        manifest = layout.read_manifest()
        waiting = sum(file.rows for file in manifest.live_files if not file.publication)
        put: list[int] = []
        with telling(address, "publish into"):
            _publish(layout, address, publisher, planned, put)
        return Published(sum(put), len(put), waiting)


def _publish(
    layout: Layout,
    address: LakeAddress,
    publisher: str,
    planned: Sequence[str],
    put: list[int],
) -> None:
    """Put what is planned and not there into the lake; ``put`` is told each file's spans.

    Two machines that make one lake at once, or commit at once more often than DuckLake tries again
    by itself, get an error, as does whoever loses PostgreSQL in a commit: what is there then, only
    a new session knows.
    """
    import duckdb

    for left in reversed(range(_TRIES)):
        try:
            with _opened(layout, address, publisher) as con:
                held = _held(con, publisher)
                for publication in planned:
                    if publication not in held:
                        put += _put(con, layout, publisher, publication)
            return
        except duckdb.Error as exc:
            if not left or not _is_of_others(exc):
                raise
            time.sleep(random.uniform(0.05, 0.5))


def _is_of_others(exc: "duckdb.Error") -> bool:
    """Whether what failed is that somebody else was at the same lake at the same time."""
    import duckdb

    is_conflict = isinstance(exc, duckdb.TransactionException | duckdb.CatalogException)
    # Of this failure DuckDB has no class: two have made the tables of one catalogue.
    return is_conflict or "Failed to initialize DuckLake" in str(exc)


@contextlib.contextmanager
def _publisher_elected(layout: Layout) -> Iterator[str]:
    """A block in which this process alone publishes the store; gives the publisher's id.

    Raises:
        StoreError: Another process does already.
    """
    path = layout.root / "publisher.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"another process publishes {layout.catalogue} just now; wait until it is done"
            ) from None
        publisher = os.pread(descriptor, 2 * _ID_BYTES, 0).decode("ascii", "replace")
        if len(publisher) < 2 * _ID_BYTES:
            publisher = secrets.token_hex(_ID_BYTES)
            os.pwrite(descriptor, publisher.encode(), 0)
            os.fsync(descriptor)
        yield publisher
    finally:
        os.close(descriptor)


def _plan(layout: Layout, *, is_rest_included: bool) -> list[str]:
    """Note down in the manifest which files go as what; names of all publications, oldest first.

    What was noted down stays so: a publisher that comes after a dead one goes on with its files.
    """
    with settler_elected(layout, wait_s=_WAIT_S) as is_elected:
        if not is_elected:
            raise StoreError(
                f"{layout.catalogue} is being settled for more than {_WAIT_S:.0f} s; try again"
            )
        manifest = layout.read_manifest()
        planned = _planned(manifest, is_rest_included=is_rest_included)
        if planned != manifest:
            layout.write_manifest(planned)
    return sorted({file.publication for file in planned.live_files} - {""})


def _planned(manifest: Manifest, *, is_rest_included: bool) -> Manifest:
    names: dict[str, str] = {}
    group: list[DataFile] = []
    rows = 0
    fresh = [file for file in manifest.live_files if not file.publication]
    for file in fresh:
        group.append(file)
        rows += file.rows
        is_last = file is fresh[-1]
        if rows >= ENOUGH_ROWS or (is_last and (rows >= LEAST_ROWS or is_rest_included)):
            publication = f"{time.time_ns():019d}-{secrets.token_hex(4)}"
            names |= {each.name: publication for each in group}
            group, rows = [], 0
    files = (replace(f, publication=names.get(f.name, f.publication)) for f in manifest.files)
    return replace(manifest, files=tuple(files))


@contextlib.contextmanager
def _opened(
    layout: Layout, address: LakeAddress, publisher: str
) -> "Iterator[duckdb.DuckDBPyConnection]":
    """The lake with its tables, made if need be, and no earlier publisher of this store at it."""
    if address.data and "://" not in address.data:
        folder = Path(folder_of(address.data))
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True)
    application = f"lightning-otel publish {publisher}"
    own = f"{application} {secrets.token_hex(4)}"
    spill = layout.root / "publish"
    shutil.rmtree(spill, ignore_errors=True)
    with attached(address, application=own, is_read_only=False) as con:
        con.execute("SET threads = 1")
        con.execute(f"SET memory_limit = '{_MEMORY}'")
        con.execute(f"SET temp_directory = {quoted(str(spill))}")
        con.execute("SET ducklake_max_retry_count = 50")
        _end_predecessors(con, application, own)
        _make_tables(con)
        check_version(con, address)
        yield con


def _end_predecessors(con: "duckdb.DuckDBPyConnection", application: str, own: str) -> None:
    """End what an earlier publisher of this store left running in PostgreSQL, and wait for its end.

    A publisher killed in its commit may be outlived by it: only when that session is gone, it is
    certain what is in the lake.
    """
    theirs = (
        f"FROM pg_stat_activity WHERE datname = current_database() "
        f"AND application_name LIKE '{application}%' AND application_name <> '{own}'"
    )
    deadline = time.monotonic() + _WAIT_S
    while _asked(con, f"SELECT count(pg_terminate_backend(pid)) AS n {theirs}"):
        if time.monotonic() > deadline:
            raise StoreError(
                "an earlier publisher's session in PostgreSQL does not end; see pg_stat_activity "
                f"for application_name {application!r}"
            )
        time.sleep(0.05)


def _asked(con: "duckdb.DuckDBPyConnection", query: str) -> int:
    row = con.execute(f"SELECT n FROM postgres_query('{POSTGRES}', {quoted(query)})").fetchone()
    assert row is not None
    return int(row[0])


def _make_tables(con: "duckdb.DuckDBPyConnection") -> None:
    """The lake's two tables; a lake of an earlier version gets the columns it lacks."""
    for table, columns in ((SPANS, COLUMNS), (PUBLISHED, _PUBLISHED_COLUMNS)):
        listed = ", ".join(f"{name} {kind}" for name, kind in columns.items())
        con.execute(f"CREATE TABLE IF NOT EXISTS {table} ({listed})")
        held = {row[0] for row in con.execute(f"DESCRIBE {table}").fetchall()}
        for name, kind in columns.items():
            if name not in held:
                con.execute(f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {name} {kind}")


def _held(con: "duckdb.DuckDBPyConnection", publisher: str) -> set[str]:
    """Publications of this store that the lake holds."""
    rows = con.execute(
        f"SELECT publication FROM {PUBLISHED} WHERE publisher = ?", [publisher]
    ).fetchall()
    return {name for (name,) in rows}


def _put(
    con: "duckdb.DuckDBPyConnection", layout: Layout, publisher: str, publication: str
) -> list[int]:
    """Write a publication to the data path and register it; how many spans, if it has any left."""
    folder = f"{data_path(con)}main/spans"
    place = f"{folder}/spans-{publication}.parquet"
    if "://" not in folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
    if not _write(con, layout, publication, place):
        return []
    found = con.execute(
        f"SELECT count(*), min(start_ns), max(start_ns) FROM read_parquet({quoted(place)})"
    ).fetchone()
    assert found is not None
    row = [publication, publisher, *found, SCHEMA_VERSION, time.time_ns()]
    con.execute("BEGIN")
    con.execute(
        f"CALL ducklake_add_data_files('{LAKE}', 'spans', {quoted(place)}, schema => 'main', "
        "allow_missing => true)"
    )
    con.execute(
        f"INSERT INTO {PUBLISHED} ({', '.join(_PUBLISHED_COLUMNS)}) "
        f"VALUES ({', '.join('?' for _ in row)})",
        row,
    )
    con.execute("COMMIT")
    return [int(found[0])]


def _write(con: "duckdb.DuckDBPyConnection", layout: Layout, publication: str, place: str) -> bool:
    """Write a publication's files as one; False if retention has taken all of them away.

    Raises:
        StoreError: A local file is damaged.
        duckdb.Error: The data path cannot be written.
    """
    import duckdb

    for left in reversed(range(_TRIES)):
        live = layout.read_manifest().live_files
        files = [layout.data / each.name for each in live if each.publication == publication]
        if not files:
            return False
        try:
            _copy(con, files, place)
        except duckdb.Error as exc:
            # Compaction puts others in their place, and takes them away a minute later.
            if find_damage(exc, layout):
                raise explain(exc, layout) from exc
            if not left or all(file.exists() for file in files):
                raise
        else:
            return True
    raise AssertionError("the last time returns or raises")


def _copy(con: "duckdb.DuckDBPyConnection", files: Sequence[Path], place: str) -> None:
    listed = ", ".join(quoted(str(file)) for file in files)
    source = f"read_parquet([{listed}], union_by_name = true)"
    held = {row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()}
    columns = ", ".join(
        name if name in held else f"NULL::{kind} AS {name}" for name, kind in COLUMNS.items()
    )
    # One file is sorted already.
    order = "ORDER BY trace_id, agent, start_ns, sequence" if len(files) > 1 else ""
    is_remote = "://" in place
    made = place if is_remote else f"{place}.part"
    con.execute(
        f"COPY (SELECT {columns} FROM {source} {order}) TO {quoted(made)} (FORMAT parquet, "
        "COMPRESSION zstd, COMPRESSION_LEVEL 3, ROW_GROUP_SIZE 20480, "
        f"KV_METADATA {{schema: '{SCHEMA_VERSION}'}})"
    )
    if not is_remote:
        sync(Path(made))
        os.replace(made, place)
        sync(Path(place).parent)
