"""Ids as people write them: a prefix, or ``@last``, to one whole id."""

import re
from typing import TYPE_CHECKING, Final

from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.store.sql import ROLLOUT, quote_text
from lightning_otel.store.views import IS_ANNOTATION
from lightning_otel.types import conventions as c
from lightning_otel.types.values import check_types

if TYPE_CHECKING:
    import duckdb

ID_COLUMNS: Final = {
    "rollout": ROLLOUT,
    "trace": "trace_id",
    "span": "span_id",
    "response": "response_id",
}
"""The column of each kind of id."""
_SHOWN = 5
LAST = "@last"
"""Stands for the rollout that began last, ``@last~2`` for the one two before it.

One of a program that a recorded process executed is none that the user started.
"""
_MOST_LOOKED_AT: Final = 64
_HEX = re.compile(r"0x(?=[0-9a-f]+$)")
"""What the SDK prints before the digits of an id."""
_BEFORE = re.compile(r"@last(?:~(\d{1,6}))?")


def find_rollout(con: "duckdb.DuckDBPyConnection", noun: str, whole_id: str) -> str:
    """Return the id of the rollout that a trace, span or response belongs to."""
    if noun not in ID_COLUMNS:
        raise ConfigError(f"noun is {noun!r}; it must be one of {', '.join(ID_COLUMNS)}")
    row = con.execute(
        f"SELECT {ROLLOUT} FROM spans WHERE {ID_COLUMNS[noun]} = ? ORDER BY start_ns LIMIT 1",
        [whole_id],
    ).fetchone()
    if row is None:
        raise NotFoundError(f"no {noun} {whole_id!r}")
    return str(row[0])


def find_id(con: "duckdb.DuckDBPyConnection", prefix: str) -> tuple[str, str]:
    """Return the noun and the whole id that a prefix names.

    Raises:
        NotFoundError: Nothing has such an id, or several have.
    """
    check_types({"the id": prefix}, {"the id": str})
    if prefix.startswith(LAST):
        return "rollout", _last_rollout(con, prefix)
    text, prefix = prefix, _HEX.sub("", prefix)
    for noun, column in ID_COLUMNS.items():
        # In order, so that an id that is the prefix itself comes first.
        rows = con.execute(
            f"SELECT DISTINCT {column} AS id FROM spans WHERE starts_with({column}, ?) "
            f"ORDER BY id LIMIT {_SHOWN}",
            [prefix],
        ).fetchall()
        ids = [str(row[0]) for row in rows]
        if ids and (len(ids) == 1 or ids[0] == prefix):
            return noun, ids[0]
        if ids:
            raise NotFoundError(
                f"{prefix!r} begins several {noun} ids: {', '.join(ids)}; give more of it"
            )
    raise NotFoundError(f"no rollout, trace, span or response id begins with {text!r}")


def _last_rollout(con: "duckdb.DuckDBPyConnection", text: str) -> str:
    match = _BEFORE.fullmatch(text)
    if match is None:
        raise NotFoundError(f"{text!r} is no rollout; write @last, or @last~1 for the one before")
    # A mere reward may be one for an older rollout, in a trace of its own.
    latest = (
        f"SELECT rollout, max(began) AS began FROM (SELECT {ROLLOUT} AS rollout, "
        f"min(start_ns) AS began FROM spans WHERE NOT {IS_ANNOTATION} "
        "GROUP BY rollout, coalesce(attempt_id, '1')) GROUP BY rollout ORDER BY 2 DESC, 1 DESC"
    )
    before = int(match[1] or 0)
    for most in (f"LIMIT {before + _MOST_LOOKED_AT}", ""):  # attributes are read of few spans
        rows = con.execute(
            f"SELECT rollout, began FROM ({latest} {most}) WHERE rollout IN (SELECT {ROLLOUT} "
            f"FROM spans WHERE {ROLLOUT} IN (SELECT rollout FROM ({latest} {most})) "
            f"AND NOT contains(attributes::VARCHAR, {quote_text(c.EXECUTED)})) "
            "ORDER BY 2 DESC, 1 DESC LIMIT 1 OFFSET ?",
            [before],
        ).fetchall()
        if rows:
            return str(rows[0][0])
    if match[1]:
        raise NotFoundError(f"the store holds fewer rollouts than {text} asks for")
    raise NotFoundError(
        "the store holds no span yet, so there is no @last; record some: "
        "lightning-otel run -- python agent.py"
    )
