"""The views of the catalogue ``X.duckdb``, for whoever opens the store with DuckDB alone.

The manifest decides at each query what counts, as of the start of its transaction: a catalogue,
once written, stays right. :mod:`template` makes the file.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel.errors import StoreError
from lightning_otel.store.facts import PATTERN, facts_sql
from lightning_otel.store.layout import Layout
from lightning_otel.store.manifest import FURTHEST_AHEAD_US
from lightning_otel.store.schema import COLUMNS, WIDE_COLUMNS
from lightning_otel.store.snapshot import (
    FIRST_LINE_ONLY,
    IS_SPAN,
    NO_COLUMNS,
    SEGMENT_COLUMNS,
    ndjson_sql,
    union_sql,
)
from lightning_otel.store.sql import ROLLOUT, quote_text
from lightning_otel.store.views import (
    ALIVE,
    ATTEMPTS,
    DERIVED,
    EMPTY_PRICES,
    IS_ANNOTATION,
    NAMES,
    alive_macro_sql,
    create_views,
)
from lightning_otel.types import conventions as c

if TYPE_CHECKING:
    from lightning_otel.store.reader import Reader

_ATTEMPTS: Final = f"CREATE OR REPLACE VIEW attempts AS {ATTEMPTS}"
_LINK: Final = rf'"{re.escape(c.LINK_PREFIX)}\.\d+\.value_match"\s*:\s*"([^"]+)"'
# A reward that came since facts were made may judge a span of an attempt that did not change.
_JUDGED_ATTEMPTS: Final = f"""CREATE OR REPLACE VIEW attempts AS
WITH narrow AS MATERIALIZED (
  SELECT trace_id, span_id, parent_span_id, rollout_id, attempt_id, name, start_ns, end_ns, status,
    process, operation, reward, response_id
  FROM spans),
recorded AS MATERIALIZED ({ATTEMPTS.replace("FROM spans", "FROM narrow")}),
stale AS (
  SELECT rollout_id, attempt_id FROM recorded ANTI JOIN (
    SELECT rollout_id, attempt_id, fingerprint FROM facts WHERE kind = 'attempt'
  ) USING (rollout_id, attempt_id, fingerprint)),
candidates AS MATERIALIZED (
  SELECT trace_id, span_id
  FROM (SELECT * REPLACE ({ROLLOUT} AS rollout_id, coalesce(attempt_id, '1') AS attempt_id)
    FROM narrow WHERE {IS_ANNOTATION}) SEMI JOIN stale USING (rollout_id, attempt_id)),
linked AS MATERIALIZED (
  SELECT unnest(regexp_extract_all(attributes::VARCHAR, {quote_text(_LINK)}, 1)) AS linked_id
  FROM spans SEMI JOIN candidates USING (trace_id, span_id)),
judged AS (
  SELECT {ROLLOUT} AS rollout_id FROM narrow SEMI JOIN linked ON span_id = linked_id UNION
  SELECT {ROLLOUT} FROM narrow SEMI JOIN linked ON response_id = linked_id)
SELECT * REPLACE (CASE WHEN rollout_id NOT IN (FROM judged) THEN fingerprint END AS fingerprint)
FROM recorded"""
_NO_SPANS: Final = f"CREATE OR REPLACE VIEW spans AS SELECT {NO_COLUMNS}"
MANIFEST_COLUMNS: Final = {
    "kind": "VARCHAR",
    "name": "VARCHAR",
    "added_us": "BIGINT",
    "dropped_us": "BIGINT",
    "settled_us": "BIGINT",
    "rows": "BIGINT",
    "size_bytes": "BIGINT",
    "damaged": "BIGINT",
}


def find_catalogue_fault(layout: Layout) -> str:
    """Return why ``X.duckdb`` cannot be opened; empty if it can, or if it is locked."""
    import duckdb

    try:
        duckdb.connect(str(layout.catalogue), read_only=True).close()
    except duckdb.Error as exc:
        text = str(exc).partition("\n")[0]
        return "" if "lock" in text or "Cannot open" in text else text
    return ""


def catalogue_statements(
    folder: str,
    manifest_name: str = "manifest.ndjson",
    excluded: Collection[str] = (),
    alive: Collection[str] | None = None,
) -> dict[str, str]:
    """Return ``CREATE VIEW`` of every view by its name, for connections that stay open.

    Args:
        folder: The store's folder as a SQL expression, which DuckDB reads as a pattern.
        manifest_name: The name of its manifest.
        excluded: Names of damaged files and segments, which are not opened.
        alive: Processes that may still end spans; by default each one with an unsettled segment.
    """
    manifest = ndjson_sql(f"{folder} || {quote_text(f'/{manifest_name}')}", MANIFEST_COLUMNS)
    macro = _unsettled_sql(folder, manifest) if alive is None else alive_macro_sql(alive)
    spans = f"CREATE OR REPLACE VIEW spans AS {_spans_sql(folder, manifest, excluded)}"
    source = f"read_parquet({folder} || {quote_text(f'/facts/{PATTERN}')}, filename=true)"
    facts = f"CREATE OR REPLACE VIEW facts AS {facts_sql(source, is_one=False)}"
    # Each of the others looks up ``spans``, and this one every segment.
    first = {"no spans": _NO_SPANS, ALIVE: macro, "facts": facts, "attempts": _JUDGED_ATTEMPTS}
    return {**first, "prices": EMPTY_PRICES, **DERIVED, "spans": spans}


def _spans_sql(folder: str, manifest: str, excluded: Collection[str]) -> str:
    """SELECT every span once; a materialized manifest lets DuckDB 2.0 read all columns."""
    damaged = [name for name in excluded if name.endswith(".parquet")]
    segments = ndjson_sql(f"{folder} || '/live/*.ndjson'", SEGMENT_COLUMNS)
    columns = ", ".join(COLUMNS)
    return f"""
WITH manifest AS NOT MATERIALIZED (
  SELECT kind, name FROM {manifest}
  WHERE NOT {_is_ahead("coalesce(added_us, settled_us)")}
    AND (dropped_us IS NULL OR {_is_ahead("dropped_us")})
),
settled AS NOT MATERIALIZED (
  SELECT {columns} FROM read_parquet({folder} || '/data/*.parquet', filename=true)
  WHERE {_is_in_none_of(damaged)}
    AND parse_filename(filename) IN (SELECT name FROM manifest WHERE kind = 'file')
),
live AS NOT MATERIALIZED (
  SELECT {columns} FROM {segments}
  WHERE {IS_SPAN} AND {_is_in_none_of(excluded)}
    AND parse_filename(filename) NOT IN (SELECT name FROM manifest WHERE kind = 'segment')
  {FIRST_LINE_ONLY}
)
{union_sql(columns)}"""


def _is_in_none_of(names: Collection[str]) -> str:
    # One text, not a list of values: DuckDB looks into that for each file, a list takes it longer.
    text = quote_text("/".join(["", *sorted(names), ""]))
    return f"NOT contains({text}, '/' || parse_filename(filename) || '/')" if names else "true"


def _is_ahead(time_us: str) -> str:
    """Return the condition that a commit does not count yet; see ``layout.is_in_effect``."""
    return f"({time_us} - epoch_us(now()) BETWEEN 1 AND {FURTHEST_AHEAD_US})"


def _unsettled_sql(folder: str, manifest: str) -> str:
    """Take a process for alive that has an unsettled segment: as near as SQL comes to locks."""
    return rf"""CREATE OR REPLACE MACRO is_alive(process) AS process IN (
  SELECT regexp_extract(parse_filename(file), '^(.+)-[0-9]+\.ndjson$', 1)
  FROM glob({folder} || '/live/*.ndjson')
  WHERE parse_filename(file) NOT IN (SELECT name FROM {manifest} WHERE kind = 'segment'))"""


def _database_folder(path: Path) -> contextlib.AbstractContextManager[str | Path]:
    """Return where to make a database: DuckDB writes none to a path with a question mark."""
    is_writable = "?" not in str(path)
    return contextlib.nullcontext(path.parent) if is_writable else tempfile.TemporaryDirectory()


def pack(con: "Reader", path: str | os.PathLike[str]) -> int:
    """Write the visible spans into a new database, with the views; return how many they are."""
    import duckdb

    final = Path(path)
    if final.exists():
        raise StoreError(f"{final} exists already; name another file or remove it")
    try:
        # In a folder of one's own: nobody else can read what is half made, and all of it goes.
        with (
            tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{final.name}.") as scratch,
            _database_folder(Path(scratch) / "packed.duckdb") as folder,
        ):
            copy = Path(scratch) / "packed.duckdb"
            count = _write_pack(con, Path(folder) / copy.name)
            shutil.move(Path(folder) / copy.name, copy)
            copy.chmod(0o600)
            os.replace(copy, final)
    except (duckdb.Error, OSError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise StoreError(f"cannot write {final}: {why}; name a writable place with room") from exc
    return count


def _write_pack(reader: "Reader", path: Path) -> int:
    con = reader.con
    # zstd is both smaller and cheaper than DuckDB's own choice for long texts.
    columns = ", ".join(
        f"{name} {kind}{' USING COMPRESSION zstd' if name in WIDE_COLUMNS else ''}"
        for name, kind in COLUMNS.items()
    )
    con.execute(f"ATTACH {quote_text(str(path))} AS packed (ROW_GROUP_SIZE 20480)")
    con.execute(f"CREATE TABLE packed.spans ({columns})")
    rows = f"SELECT {', '.join(COLUMNS)} FROM spans ORDER BY trace_id, start_ns, sequence"
    reader.attempt(lambda: con.execute(f"INSERT INTO packed.spans {rows}"))
    (row,) = con.execute("SELECT count(*) FROM packed.spans").fetchall()
    reader.attempt(lambda: con.execute("CREATE TABLE packed.facts AS FROM facts"))
    con.execute("USE packed")
    con.execute(alive_macro_sql(()))
    con.execute(_ATTEMPTS)
    create_views(con, NAMES)
    con.execute("USE memory")
    con.execute("DETACH packed")
    return int(row[0])
