"""A store as one self-contained DuckDB database: real tables, nothing beside it."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_otel.errors import StoreError
from lightning_otel.store.damage import damage_of
from lightning_otel.store.layout import Layout
from lightning_otel.store.schema import COLUMNS, WIDE_COLUMNS
from lightning_otel.store.sql import quoted
from lightning_otel.store.views import derived_view_statements

if TYPE_CHECKING:
    import duckdb


def pack(
    con: "duckdb.DuckDBPyConnection", path: str | os.PathLike[str], layout: Layout | None = None
) -> int:
    """Write the spans visible on a connection into a new database, with the views over them.

    Args:
        con: The connection.
        path: The new database.
        layout: Where the spans come from, to name a damaged file.

    Returns:
        The number of spans written.

    Raises:
        StoreError: Something stands at the path already, or it cannot be written.
    """
    import duckdb

    final = Path(path)
    if final.exists():
        raise StoreError(f"{final} exists already; name another file or remove it")
    try:
        # In a folder of one's own: nobody else can read what is half made, and all of it goes.
        with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{final.name}.") as folder:
            made = Path(folder) / "packed.duckdb"
            count = _write(con, made)
            made.chmod(0o600)
            os.replace(made, final)
    except (duckdb.Error, OSError) as exc:
        damage = None
        if layout is not None and isinstance(exc, duckdb.Error):
            damage = damage_of(exc, layout)
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise damage or StoreError(
            f"cannot write {final}: {why}; name a writable place with room"
        ) from exc
    return count


def _write(con: "duckdb.DuckDBPyConnection", path: Path) -> int:
    # zstd is both smaller and cheaper than DuckDB's own choice for long texts.
    columns = ", ".join(
        f"{name} {kind}{' USING COMPRESSION zstd' if name in WIDE_COLUMNS else ''}"
        for name, kind in COLUMNS.items()
    )
    con.execute(f"ATTACH {quoted(str(path))} AS packed (ROW_GROUP_SIZE 20480)")
    con.execute(f"CREATE TABLE packed.spans ({columns})")
    con.execute(
        f"INSERT INTO packed.spans SELECT {', '.join(COLUMNS)} FROM spans "
        "ORDER BY trace_id, start_ns, sequence"
    )
    (row,) = con.execute("SELECT count(*) FROM packed.spans").fetchall()
    con.execute("USE packed")
    for statement in derived_view_statements():
        con.execute(statement)
    con.execute("USE memory")
    con.execute("DETACH packed")
    return int(row[0])
