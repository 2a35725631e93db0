"""Pieces of SQL text that every query is made of."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import duckdb

ROLLOUT: Final = "coalesce(nullif(rollout_id, ''), trace_id)"
"""The rollout a span belongs to: the one it names, else its trace."""


def quoted(text: str) -> str:
    """A SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def listed(paths: Iterable[Path]) -> str:
    """A SQL list of paths."""
    return "[" + ", ".join(quoted(str(path)) for path in paths) + "]"


def attribute(key: str) -> str:
    """An attribute's text, or NULL."""
    return f"""json_extract_string(attributes, '$."{key}"')"""


def keep_quiet(con: "duckdb.DuckDBPyConnection") -> None:
    """Have a connection show no progress bar, which can land on stdout."""
    import duckdb

    # In a Jupyter kernel without ipywidgets there is none, and the setting is refused.
    with contextlib.suppress(duckdb.InvalidInputException):
        con.execute("SET enable_progress_bar = false")


def new_connection(path: str = ":memory:") -> "duckdb.DuckDBPyConnection":
    """Return a DuckDB connection that keeps stdout clean."""
    import duckdb

    con = duckdb.connect(path)
    keep_quiet(con)
    return con
