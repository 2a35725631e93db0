"""A lake as a source of spans: DuckLake on PostgreSQL, Parquet on object storage or in a folder.

No extension is ever fetched from the network: a lake needs those of the extra ``lake``, or ones
that a user installed.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel import config
from lightning_otel.errors import ConfigError, StoreError, StoreMissingError, install_command
from lightning_otel.store.engines.remote import add_time_bounds
from lightning_otel.store.lake import LakeAddress
from lightning_otel.store.layout import Layout, check_schema
from lightning_otel.store.parquet import fetch_row
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.selection import Selection
from lightning_otel.store.snapshot import same_span_sql
from lightning_otel.store.source import SpanSource
from lightning_otel.store.sql import hide_progress_bar, quote_text
from lightning_otel.store.table import Query
from lightning_otel.store.writer import SpanWriter, writer_for

if TYPE_CHECKING:
    import duckdb

LAKE: Final = "lake"
SPANS: Final = f"{LAKE}.main.spans"
PUBLISHED: Final = f"{LAKE}.main.published"
POSTGRES: Final = f"__ducklake_metadata_{LAKE}"
"""DuckLake's own connection to its catalogue, under the name DuckDB knows it by."""
_EXTENSIONS: Final = ("ducklake", "postgres_scanner", "httpfs")
"""Also the last: only the lake's own catalogue knows if its files are on S3."""
_READER: Final = "lightning-otel read"
_INSTALL: Final = (
    f"{install_command('lake')} in an environment of its own, which brings duckdb 1.5.5 "
    "and its extensions"
)
_MOST_LITERALS: Final = 1000
# Which ids are there twice is told from their hash: 0.2 s for a million spans, where a join of all
# with all takes 1 s, and 8 s with bodies.
_LATER: Final = f"""
WITH doubtful AS (
  SELECT line, trace_id, span_id, start_ns FROM reading.lines
  WHERE hash(trace_id, span_id) IN (
    SELECT hash(trace_id, span_id) FROM reading.lines GROUP BY 1 HAVING count(*) > 1)
)
SELECT DISTINCT later.line FROM doubtful AS later JOIN doubtful AS earlier
  ON {same_span_sql("earlier", "later")} AND earlier.line < later.line"""


class DuckLakeSource(SpanSource):
    """Spans that any number of machines published into one lake."""

    def __init__(self, address: LakeAddress) -> None:
        self.address = address
        self.name = address.name
        self.local = Layout(address.local or config.DEFAULT_STORE)

    def writer(self) -> SpanWriter:
        """Return this process's writer into the local store, from which spans are published."""
        return writer_for(self.local)

    def fetch(self, selection: Selection, con: "duckdb.DuckDBPyConnection | None" = None) -> Query:
        """Return the selected spans; files that hold none of them are not read."""
        if con is not None and selection.also is None:
            selection = add_time_bounds(selection, con)
        traces, times = _selection_bounds(selection)
        text, values = selection.query()
        # The condition is said again as literals, by which DuckLake leaves out files.
        bounded = f"SELECT * FROM main.spans WHERE {traces} AND {times}"
        if con is None:
            con = self._open(traces)
        return Query(con, f"WITH spans AS NOT MATERIALIZED ({bounded}) {text}", values)

    def _open(self, where: str = "true") -> "duckdb.DuckDBPyConnection":
        with translate_errors(self.address):
            con = attach_lake(self.address, application=_READER, is_read_only=True)
            rows = con.execute(
                "SELECT table_name, column_name FROM duckdb_columns() "
                f"WHERE database_name = '{LAKE}' AND schema_name = 'main'"
            ).fetchall()
            if {"spans", "published"} - {table for table, _ in rows}:
                raise StoreMissingError(_missing_message(self.address))
            check_version(con, self.address)
            # A column that the lake has not got yet is empty.
            present = {column for table, column in rows if table == "spans"}
            columns = ", ".join(
                name if name in present else f"NULL::{kind} AS {name}"
                for name, kind in COLUMNS.items()
            )
            # One snapshot for all that is read through a connection: what is published meanwhile
            # would otherwise come with some of its batches and not with others.
            (snapshot,) = fetch_row(con, f"SELECT id FROM ducklake_current_snapshot('{LAKE}')")
            # Not temporary, which a cursor of the connection would not see.
            con.execute("CREATE SCHEMA reading")
            con.execute(
                f"CREATE VIEW reading.lines AS SELECT rowid AS line, {columns} "
                f"FROM {SPANS} AT (VERSION => {snapshot}) WHERE {where}"
            )
            con.execute(f"CREATE TABLE reading.later AS {_LATER}")
            con.execute(
                "CREATE VIEW spans AS SELECT * EXCLUDE (line) FROM reading.lines "
                "ANTI JOIN reading.later USING (line)"
            )
            return con


def attach_lake(
    address: LakeAddress, *, application: str, is_read_only: bool
) -> "duckdb.DuckDBPyConnection":
    """Return a DuckDB with the lake attached as ``lake``; made if it is to be written.

    PostgreSQL lists the sessions under the application's name, of at most 63 characters. Errors of
    DuckDB may hold secrets, see :func:`translate_errors`.
    """
    import duckdb

    settings: dict[str, str | bool | int | float | list[str]]
    settings = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    con = duckdb.connect(config=settings)
    hide_progress_bar(con)
    for name in _EXTENSIONS:
        try:
            con.execute(f"LOAD {_find_extension(name)}")
        except duckdb.Error as exc:
            raise ConfigError(
                f"a lake needs DuckDB's extension {name}, and there is none for DuckDB "
                f"{duckdb.__version__} here; {_INSTALL}"
            ) from exc
    _create_storage_secret(con)
    conninfo = f"{address.conninfo} application_name='{application}'"
    options = ["META_SECRET 'lake_postgres'", "DATA_INLINING_ROW_LIMIT 0"]
    if is_read_only:
        options.append("READ_ONLY")
    if address.data:
        options.append(f"DATA_PATH {quote_text(normalize_folder(address.data))}")
    con.execute(
        f"CREATE SECRET lake_postgres (TYPE postgres, PASSWORD {quote_text(address.password)})"
    )
    con.execute(
        f"ATTACH {quote_text(f'ducklake:postgres:{conninfo}')} AS {LAKE} ({', '.join(options)})"
    )
    return con


def normalize_folder(data: str) -> str:
    """Return a data path as DuckLake keeps it: absolute, and with a slash at the end."""
    place = data if "://" in data else os.path.abspath(Path(data).expanduser())
    return place.rstrip("/") + "/"


def _find_extension(name: str) -> str:
    """Return the file that pip put here for this DuckDB, else the name of what a user installed."""
    import duckdb

    package = importlib.util.find_spec(f"duckdb_extension_{name}")
    for folder in (package.submodule_search_locations or ()) if package else ():
        file = Path(folder) / "extensions" / f"v{duckdb.__version__}" / f"{name}.duckdb_extension"
        if file.exists():
            return quote_text(str(file))
    return name


def _create_storage_secret(con: "duckdb.DuckDBPyConnection") -> None:
    storage = config.object_storage()
    options = {
        "KEY_ID": storage.key_id,
        "SECRET": storage.secret,
        "SESSION_TOKEN": storage.token,
        "REGION": storage.region,
    }
    if storage.endpoint:
        scheme, _, host = storage.endpoint.rpartition("://")
        options["ENDPOINT"] = host.rstrip("/")
        options["URL_STYLE"] = "path"
        options["USE_SSL"] = "false" if scheme == "http" else "true"
    settings = "".join(f", {name} {quote_text(value)}" for name, value in options.items() if value)
    con.execute(f"CREATE SECRET lake_storage (TYPE s3{settings})")


@contextmanager
def translate_errors(address: LakeAddress, verb: str = "read") -> Iterator[None]:
    """A block in which what DuckDB says of the lake is an error of ours, without any secret."""
    import duckdb

    try:
        yield
    except duckdb.Error as exc:
        text = message = " ".join(str(exc).split())
        storage = config.object_storage()
        for secret in (address.password, storage.secret, storage.token, storage.key_id):
            text = text.replace(secret, "***") if secret else text
        # A cause would show the secret that its text holds.
        cause = exc if text == message else None
        if "creating a new DuckLake is explicitly disabled" in text:
            raise StoreMissingError(_missing_message(address)) from cause
        if "data_path is not set" in text:
            raise ConfigError(
                f"there is no lake at {address.name} yet, and nothing says where its files shall "
                "lie; add ?data=s3://bucket/prefix (or a folder) to its URL"
            ) from cause
        raise StoreError(
            f"cannot {verb} the lake {address.name}: {text}; nothing is lost by it: look after "
            "PostgreSQL and the data path, and run it again"
        ) from cause


def _missing_message(address: LakeAddress) -> str:
    return (
        f"no lake at {address.name}, or nothing is in it; put spans there with: "
        "lightning-otel export lake"
    )


def check_version(con: "duckdb.DuckDBPyConnection", address: LakeAddress) -> None:
    """Check that this version knows all that was published."""
    newest = fetch_row(con, f"SELECT max(schema_version) FROM {PUBLISHED}")[0] or 0
    check_schema(f"the lake {address.name}", newest)


def _selection_bounds(selection: Selection) -> tuple[str, str]:
    parts = [selection] if selection.also is None else [selection, selection.also]
    ids = sorted({trace_id for part in parts for trace_id in part.trace_ids})
    traces, times = "true", ["true"]
    if all(part.trace_ids for part in parts) and len(ids) <= _MOST_LITERALS:
        traces = f"trace_id IN ({', '.join(map(quote_text, ids))})"
    since_ns = [part.since_ns for part in parts if part.since_ns is not None]
    until_ns = [part.until_ns for part in parts if part.until_ns is not None]
    times += [f"start_ns >= {min(since_ns)}"] if len(since_ns) == len(parts) else []
    times += [f"start_ns <= {max(until_ns)}"] if len(until_ns) == len(parts) else []
    return traces, " AND ".join(times)
