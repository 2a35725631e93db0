"""Data files: made, described and measured. A footer tells what a file was made from."""

import contextlib
import os
import secrets
import shutil
import time
import zlib
from base64 import b85decode, b85encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from lightning_otel.store.files import is_own_file
from lightning_otel.store.layout import Layout, check_schema
from lightning_otel.store.manifest import (
    SCHEMA_VERSION,
    Counts,
    DataFile,
    DataName,
    Manifest,
    Natural,
    SegmentName,
    parse_entry,
)
from lightning_otel.store.quarantine import checksum_of
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.sql import new_connection, quote_paths, quote_text

if TYPE_CHECKING:
    import duckdb

SPILL: Final = "spill"
"""Folder under ``new/`` for what does not fit into the memory allowed."""
MEMORY: Final = "400MB"
ROW_GROUP: Final = 4096
"""Rows that one damaged byte may cost; 20,480 took 0.8 % less room."""
ROW_GROUP_BYTES: Final = 64 << 20
"""A conversation that goes on in the next row group is stored once more: 200 turns of 1 KB cost
0.76 of their unique text with this, 0.87 with half of it, and 96 MiB do not fit into the memory."""
STORED: Final = ", ".join((*COLUMNS, "settled_ns"))
"""The columns of a data file; the last one says when a span was settled, whatever is merged.

Those of earlier versions have others, which nobody reads.
"""
EVER: Final = 1 << 62
"""Later than any span, nanoseconds."""
ORIGIN: Final = "made_from"
"""The key in a footer that tells what the file was made from."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a data file, kept in its footer.

    Attributes:
        segments: Segments not to be settled again, each with its number of spans in the file.
        files: Files that do not count once this one does.
        old: Those of them that it was made from; with ``is_whole`` it holds all that they held.
        counts: Ended spans by what became of them, as the commit adds them to the manifest.
    """

    segments: Mapping[SegmentName, Natural] = field(default_factory=dict)
    files: tuple[DataName, ...] = ()
    old: tuple[DataName, ...] = ()
    is_whole: bool = True
    counts: Counts = field(default_factory=dict)

    def to_text(self) -> str:
        """Return it for a footer: names of segments are long and much alike, so it is packed."""
        return b85encode(zlib.compress(orjson.dumps(self), 9)).decode()

    @classmethod
    def from_text(cls, text: bytes) -> "Origin":
        """Return what a footer tells."""
        values = orjson.loads(zlib.decompress(b85decode(text)))
        lists = {name: tuple(values.get(name, ())) for name in ("files", "old")}
        return parse_entry(cls, values | lists)


def read_origin(con: "duckdb.DuckDBPyConnection", path: Path) -> Origin:
    """Return what a file was made from, as far as its footer tells that."""
    query = f"SELECT key, value FROM parquet_kv_metadata({quote_text(str(path))})"
    footer = {bytes(key): bytes(value) for key, value in con.execute(query).fetchall()}
    schema = footer.get(b"schema", b"1")
    check_schema(path, int(schema) if schema.isdigit() else 1)
    try:
        return Origin.from_text(footer[ORIGIN.encode()])
    except (KeyError, TypeError, ValueError, zlib.error):
        return Origin()


@contextlib.contextmanager
def bounded_connection(spill: Path) -> Iterator["duckdb.DuckDBPyConnection"]:
    """Open a DuckDB of bounded memory, on one core, that spills into a folder of its own."""
    with contextlib.suppress(OSError):  # who only reads needs none
        if spill.is_symlink():
            spill.unlink()
        spill.mkdir(mode=0o700, exist_ok=True)
    con = new_connection()
    try:
        con.execute("SET threads = 1")
        con.execute(f"SET memory_limit = '{MEMORY}'")
        con.execute(f"SET temp_directory = {quote_text(str(spill))}")
        # With one thread rows stay in order all the same, and groups can be bounded in bytes.
        con.execute("SET preserve_insertion_order = false")
        yield con
    finally:
        con.close()
        shutil.rmtree(spill, ignore_errors=True)


def write_file(
    con: "duckdb.DuckDBPyConnection",
    layout: Layout,
    query: str,
    origin: Origin,
    *,
    stamp: str,
    level: int = 3,
    group_rows: int = ROW_GROUP,
    group_bytes: int = 0,
    is_compact: bool = False,
) -> DataFile | None:
    """Write a query's rows into a data file under ``new/``; None if there are none.

    The query gives :data:`STORED`, in order; the stamp begins the file's name; a row group is
    bounded in rows and uncompressed bytes.
    """
    # In order of their names files are in order of their making.
    path = layout.new / f"spans-{stamp}-{secrets.token_hex(4)}.parquet"
    footer = f"schema: '{SCHEMA_VERSION}', {ORIGIN}: {quote_text(origin.to_text())}"
    bound = f", ROW_GROUP_SIZE_BYTES {group_bytes}" if group_bytes else ""
    try:
        con.execute(
            f"COPY ({query}) TO {quote_text(str(path))} (FORMAT parquet, COMPRESSION zstd, "
            f"COMPRESSION_LEVEL {level}, ROW_GROUP_SIZE {group_rows}{bound}, "
            f"KV_METADATA {{{footer}}})"
        )
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    path.chmod(0o600)
    sync(path)
    file = describe_file(con, path)
    if not file.rows:
        path.unlink()
        return None
    return replace(file, is_compact=is_compact)


def describe_file(con: "duckdb.DuckDBPyConnection", path: Path) -> DataFile:
    """Return the manifest's entry of a whole data file, with its checksum (0.03 s for 14 MB)."""
    numbers = ", ".join(
        f"coalesce({expression}, 0)"
        for expression in ("count(*)", "min(start_ns)", "max(start_ns)", "max(settled_ns)")
    )
    rows, low, high, settled = fetch_row(con, f"SELECT {numbers} FROM {settled_rows_sql([path])}")
    size, checksum = path.stat().st_size, checksum_of(path)
    return DataFile(path.name, 0, rows, size, low, high, checksum=checksum, settled_ns=settled)


def settled_rows_sql(paths: Iterable[Path]) -> str:
    """Return a subquery over whole data files; of an older version's ``settled_ns`` is NULL."""
    return (
        "(SELECT NULL::BIGINT AS settled_ns WHERE false UNION ALL BY NAME SELECT * FROM "
        f"read_parquet({quote_paths(paths)}, "
        "filename=true, file_row_number=true, union_by_name=true))"
    )


def find_settled_ns(folder: Path, file: DataFile) -> int:
    """Return when the last span of a file was settled; of old versions' files, its last change."""
    if file.settled_ns:
        return file.settled_ns
    with contextlib.suppress(FileNotFoundError):
        return min((folder / file.name).stat().st_mtime_ns, time.time_ns())
    return 0


def row_groups_sql(paths: Iterable[Path]) -> str:
    """Return a query for the row groups of data files, and what a row of each takes.

    ``begins`` and ``ends`` are numbers of rows, ``first_byte`` and ``end_byte`` places in the file,
    ``weight`` and ``packed`` bytes of a row, the latter compressed.
    """
    return f"""SELECT *, ends - rows AS begins, raw_size / rows AS weight, size / rows AS packed,
      first_byte + size AS end_byte
    FROM (SELECT *, sum(rows) OVER (PARTITION BY path ORDER BY id) AS ends FROM (
      SELECT file_name AS path, row_group_id AS id, any_value(row_group_num_rows) AS rows,
        sum(total_uncompressed_size) AS raw_size, sum(total_compressed_size) AS size,
        min(least(data_page_offset, coalesce(dictionary_page_offset, data_page_offset)))
          AS first_byte
      FROM parquet_metadata({quote_paths(paths)}) GROUP BY ALL))"""


def list_live_files(layout: Layout, manifest: Manifest) -> list[DataFile]:
    """Return the files that count, without those that somebody took away: they may come back."""
    return [file for file in manifest.live_files if is_own_file(layout.data / file.name)]


def fetch_row(con: "duckdb.DuckDBPyConnection", query: str) -> tuple[Any, ...]:
    """Return the first row of a query's result."""
    row = con.execute(query).fetchone()
    assert row is not None
    return tuple(row)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
