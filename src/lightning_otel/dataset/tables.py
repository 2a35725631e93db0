"""Python rows as a table of DuckDB's, and rows of a Parquet file for Python."""

import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from os import SEEK_CUR
from pathlib import Path
from typing import IO, Any, Final

from lightning_otel.errors import ConfigError, ReceiveError, TooLargeError
from lightning_otel.store.sql import new_connection, quote_text, struct_sql
from lightning_otel.store.table import Query, json_line
from lightning_otel.types import Conversation

_LINE_BYTES: Final = 1 << 20
_PARQUET_MEMORY: Final = "1GB"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"


def query_rows(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> Query:
    """Return Python rows as a query over a temporary file, which goes with it."""
    file = tempfile.NamedTemporaryFile(suffix=".ndjson")  # noqa: SIM115  # closed with the query
    text = f"FROM {write_rows(rows, columns, file)}"
    con = new_connection()
    con.execute("SET threads = 1")  # each holds a piece of the lines
    con.execute(f"SET temp_directory = {quote_text(f'{file.name}.spilled')}")
    query = Query(con, text)
    weakref.finalize(query, file.close)
    return query


def write_rows(
    rows: Iterable[Mapping[str, Any]],
    columns: Mapping[str, str],
    file: IO[bytes],
) -> str:
    """Write rows as lines of JSON, and return the SQL table function that reads them."""
    longest = max(map(file.write, map(json_line, rows)), default=0)
    file.flush()
    options = f"format='newline_delimited', maximum_object_size={max(_LINE_BYTES, longest + 1)}"
    if columns:
        options += f", columns={struct_sql(columns)}"
    return f"read_json({quote_text(file.name)}, {options})"


def is_parquet(path: Path) -> bool:
    """Return whether a file begins as Parquet does."""
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def read_parquet(path: Path, *, is_limited: bool = True) -> Iterator[str]:
    """Yield the rows of a Parquet file, each as JSON.

    One of others' is limited in its memory: 9 MB of Parquet may hold 9 GB.

    Raises:
        ConfigError: It cannot be read.
        TooLargeError: It takes more memory than a file gets.
    """
    import duckdb

    try:
        with new_connection() as con:
            con.execute("SET TimeZone = 'UTC'; SET threads = 1")
            if is_limited:
                con.execute(f"SET memory_limit = '{_PARQUET_MEMORY}'; SET temp_directory = ''")
            query = f"SELECT to_json(t)::VARCHAR FROM read_parquet({quote_text(str(path))}) t"
            result = con.execute(query)
            while row := result.fetchone():
                yield row[0]
    except duckdb.OutOfMemoryException as exc:
        raise TooLargeError(
            f"the file takes over {_PARQUET_MEMORY} of memory; write it with smaller row groups"
        ) from exc
    except duckdb.Error as exc:
        raise ConfigError(f"{path} is no readable Parquet file: {exc}; write it again") from exc


def is_zstd(path: Path) -> bool:
    """Return whether a file begins as a frame of Zstandard does."""
    with path.open("rb") as file:
        return file.read(4) == _ZSTD


def _is_whole(path: Path) -> bool:
    """Return whether the last frame of Zstandard ends with the file: DuckDB does not say so.

    Source: RFC 8878, 3.1: lengths of frame headers and of blocks.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        while file.tell() < size:
            magic = file.read(4)
            if magic[1:] == b"\x2a\x4d\x18":  # a frame that is skipped
                file.seek(int.from_bytes(file.read(4), "little"), SEEK_CUR)
                continue
            if magic != _ZSTD:
                return False
            flags = (file.read(1) or b"\0")[0]
            is_single, has_checksum = flags >> 5 & 1, flags >> 2 & 1
            content = (is_single, 2, 4, 8)[flags >> 6]
            file.seek((1 - is_single) + (0, 1, 2, 4)[flags & 3] + content, SEEK_CUR)
            is_last = 0
            while not is_last and file.tell() + 3 <= size:
                block = int.from_bytes(file.read(3), "little")
                is_last, is_repeated = block & 1, block >> 1 & 3 == 1
                file.seek(1 if is_repeated else block >> 3, SEEK_CUR)
            file.seek(4 * has_checksum, SEEK_CUR)
            if not is_last:
                return False
        return file.tell() == size


def read_zstd(path: Path, longest: int) -> Iterator[bytes]:
    """Yield the lines of a text compressed by Zstandard, without empty ones.

    DuckDB inflates it as it goes: Python has no Zstandard before 3.14. A line may have ``longest``
    bytes.

    Raises:
        ReceiveError: It is damaged, no text, or has a longer line.
    """
    import duckdb

    options = (
        "compression = 'zstd', columns = {'line': 'VARCHAR'}, header = false, auto_detect = false, "
        "delim = '\x01', quote = '', escape = '', nullstr = '\x02', strict_mode = false, "
        f"max_line_size = {longest}, buffer_size = {2 * longest}"
    )
    try:
        with new_connection() as con:
            con.execute("SET threads = 1")
            result = con.execute(f"SELECT line FROM read_csv({quote_text(str(path))}, {options})")
            while row := result.fetchone():
                yield row[0].encode() + b"\n"
    except duckdb.Error as exc:
        what = str(exc).partition("\n")[0]
        raise ReceiveError(f"the zstd is damaged from here on: {what}") from exc
    if not _is_whole(path):
        raise ReceiveError("the zstd is cut off here")


MESSAGE_COLUMNS: Mapping[str, str] = {
    "rollout_id": "VARCHAR",
    "attempt_id": "VARCHAR",
    "agent": "VARCHAR",
    "branch": "INTEGER",
    "step": "INTEGER",
    "messages": "JSON",
    "tools": "JSON",
    "reward": "DOUBLE",
    "answers": "INTEGER[]",
    "rewards": "DOUBLE[]",
    "alternatives": "JSON",
    "span_ids": "VARCHAR[]",
    "model": "VARCHAR",
    "resource_version": "VARCHAR",
}


def message_row(conversation: Conversation) -> dict[str, Any]:
    """A conversation as a flat row of JSON values, in the order of ``MESSAGE_COLUMNS``."""
    row = {name: getattr(conversation, name) for name in MESSAGE_COLUMNS}
    row["alternatives"] = [
        {"answer": position, "message": message} for position, message in conversation.alternatives
    ]
    return row
