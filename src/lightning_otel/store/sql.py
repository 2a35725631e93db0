"""Pieces of SQL text that every query is made of."""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel.errors import QueryError, StoreError, disk_remedy
from lightning_otel.types import conventions as c

if TYPE_CHECKING:
    import duckdb

ROLLOUT: Final = "coalesce(nullif(rollout_id, ''), trace_id)"
"""The rollout a span belongs to: the one it names, else its trace."""
_EXPLAIN: Final = re.compile(r"\s*explain\s+(analyze\s+)?(\([^()]*\)\s*)?", re.IGNORECASE)


def quote_text(text: str) -> str:
    """Return a SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


CALL_OPERATIONS: Final = ", ".join(map(quote_text, sorted(c.CALL_OPERATIONS)))
"""Operations of model calls, as a SQL list without its parentheses."""
GENERATIVE_OPERATIONS: Final = ", ".join(map(quote_text, sorted(c.GENERATIVE_OPERATIONS)))
"""Those of calls that make text, likewise."""


def quote_paths(paths: Iterable[Path]) -> str:
    """Return a SQL list of paths."""
    return "[" + ", ".join(quote_text(str(path)) for path in paths) + "]"


def attribute_sql(key: str) -> str:
    """Return the SQL for an attribute's text, or NULL."""
    return f"""json_extract_string(attributes, '$."{key}"')"""


def hide_progress_bar(con: "duckdb.DuckDBPyConnection") -> None:
    """Turn off the progress bar of a connection, which can land on stdout."""
    import duckdb

    # In a Jupyter kernel without ipywidgets there is none, and the setting is refused.
    with contextlib.suppress(duckdb.InvalidInputException):
        con.execute("SET enable_progress_bar = false")


def new_connection() -> "duckdb.DuckDBPyConnection":
    """Return an in-memory DuckDB connection that keeps stdout clean.

    Raises:
        StoreError: The process has no file descriptor or no memory left for it.
    """
    import duckdb

    try:
        os.close(os.open(os.devnull, os.O_RDONLY))  # without any, DuckDB 1.5 ends the process
        con = duckdb.connect()
    except (OSError, duckdb.Error) as exc:
        raise StoreError(f"cannot start DuckDB: {exc}; {disk_remedy(exc, 'try again')}") from exc
    hide_progress_bar(con)
    return con


def struct_sql(columns: Mapping[str, str]) -> str:
    """Return the types of columns as a SQL struct, as ``read_json`` takes them."""
    return "{" + ", ".join(f"{quote_text(k)}: {quote_text(v)}" for k, v in columns.items()) + "}"


def check_read_only(con: "duckdb.DuckDBPyConnection", query: str) -> str:
    """Check that a text is one statement that reads; return what an EXPLAIN explains, or the text.

    Raises:
        QueryError: It is not.
    """
    import duckdb

    try:
        statements = con.extract_statements(query)
        if len(statements) != 1:
            raise QueryError(f"one statement is expected, {len(statements)} were given")
        kind = _statement_kind(statements[0])
        # EXPLAIN ANALYZE executes what it explains.
        text = _EXPLAIN.sub("", statements[0].query, count=1) if kind == "EXPLAIN" else query
        kinds = list(map(_statement_kind, con.extract_statements(text)))
    except duckdb.Error as exc:
        raise QueryError(f"DuckDB refused the query: {exc}") from exc
    if kinds != ["SELECT"]:
        raise QueryError(
            f"only SELECT, DESCRIBE and EXPLAIN of these read; this is {kind}; "
            "use connect() for a database of your own over the same views"
        )
    return text


def _statement_kind(statement: "duckdb.Statement") -> str:
    try:
        return statement.type.name
    except ValueError:
        # DuckDB's Python does not know every kind of statement that DuckDB does.
        return "of an unknown kind"
