"""A store as one self-contained DuckDB database: real tables, nothing beside it."""

import os
import tempfile
from pathlib import Path

from lightning_otel.errors import StoreError
from lightning_otel.store.reader import Reader
from lightning_otel.store.schema import COLUMNS, WIDE_COLUMNS
from lightning_otel.store.sql import quoted
from lightning_otel.store.views import NAMES, define_derived


def pack(con: Reader, path: str | os.PathLike[str]) -> int:
    """Write the spans visible on a connection into a new database, with the views over them.

    Returns:
        The number of spans written.
    """
    import duckdb

    final = Path(path)
    if final.exists():
        raise StoreError(f"{final} exists already; name another file or remove it")
    try:
        # In a folder of one's own: nobody else can read what is half made, and all of it goes.
        with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{final.name}.") as folder:
            made = Path(folder) / "packed.duckdb"
            count = _write_pack(con, made)
            made.chmod(0o600)
            os.replace(made, final)
    except (duckdb.Error, OSError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise StoreError(f"cannot write {final}: {why}; name a writable place with room") from exc
    return count


def _write_pack(reader: Reader, path: Path) -> int:
    con = reader.con
    # zstd is both smaller and cheaper than DuckDB's own choice for long texts.
    columns = ", ".join(
        f"{name} {kind}{' USING COMPRESSION zstd' if name in WIDE_COLUMNS else ''}"
        for name, kind in COLUMNS.items()
    )
    con.execute(f"ATTACH {quoted(str(path))} AS packed (ROW_GROUP_SIZE 20480)")
    con.execute(f"CREATE TABLE packed.spans ({columns})")
    rows = f"SELECT {', '.join(COLUMNS)} FROM spans ORDER BY trace_id, start_ns, sequence"
    reader.attempt(lambda: con.execute(f"INSERT INTO packed.spans {rows}"))
    (row,) = con.execute("SELECT count(*) FROM packed.spans").fetchall()
    con.execute("USE packed")
    define_derived(con, NAMES)
    con.execute("USE memory")
    con.execute("DETACH packed")
    return int(row[0])
