"""Checks of a statement: it may use the views and functions that only compute.

Only known kinds of node of DuckDB's own tree pass: no function that reads a file, setting or
catalogue is ever bound. It is the first of two walls: the second are locked settings, and files
other than the store's own out of reach.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import orjson

from lightning_otel.errors import QueryError
from lightning_otel.store.sql import check_read_only
from lightning_otel.store.views import NAMES

if TYPE_CHECKING:
    import duckdb

_NODES: Final = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
"""Of the kinds of query in a tree those that read: ``DELETE_QUERY_NODE`` stands in a WITH."""
_TABLES: Final = frozenset(
    {
        "BASE_TABLE", "SUBQUERY", "JOIN", "TABLE_FUNCTION", "EXPRESSION_LIST", "EMPTY", "PIVOT",
        "SHOW_REF",
    }
)  # fmt: skip
_OTHERS: Final = frozenset(
    {
        "ORDER_MODIFIER", "LIMIT_MODIFIER", "LIMIT_PERCENT_MODIFIER", "DISTINCT_MODIFIER",
        "ORDER_DEFAULT", "ASCENDING", "DESCENDING",
    }
)  # fmt: skip
_CATALOGUES: Final = frozenset({"", "memory"})
_SCHEMAS: Final = frozenset({"", "main"})
_LISTS: Final = frozenset({'"tables"', "tables", "__show_tables_expanded"})
"""What SHOW lists of views; others are of databases, settings and variables."""
_TABLE_FUNCTIONS: Final = frozenset(
    {"unnest", "range", "generate_series", "json_each", "json_tree", "repeat"}
)
_KINDS: Final = frozenset({"scalar", "aggregate", "window", "macro"})
_HARMLESS: Final = frozenset(
    {
        "random", "uuid", "gen_random_uuid", "uuidv4", "uuidv7", "now", "today", "current_date",
        "get_current_time", "get_current_timestamp", "transaction_timestamp", "error",
        "current_localtime", "current_localtimestamp",
    }
)  # fmt: skip
"""Functions of time and chance. All others that do not depend on their arguments alone tell of the
session or change it."""
_HARMFUL: Final = frozenset({"json_serialize_plan", "current_setting", "getvariable"})
"""The first binds a text as a statement of its own, which nobody has looked at; the others tell of
the session, which DuckDB 1.5 does not say of them."""
_ONLY_VIEWS: Final = "only the views spans, calls, rewards and rollouts can be read"


def check(con: "duckdb.DuckDBPyConnection", text: str) -> None:
    """Check that a text is one statement that reads the views and nothing else."""
    tree = _parse_tree(con, check_read_only(con, text))
    functions: set[str] = set()
    for node, names in _walk_nodes(tree):
        functions |= _function_of(node, names)
    _check_functions(con, functions)


def _parse_tree(con: "duckdb.DuckDBPyConnection", text: str) -> Any:
    row = con.execute("SELECT json_serialize_sql(?)", [text]).fetchone()
    assert row is not None
    try:
        tree = orjson.loads(row[0])
    except ValueError as exc:
        raise QueryError("the statement is nested too deeply") from exc
    if tree["error"] or len(tree["statements"]) != 1:
        raise QueryError(
            f"the statement cannot be checked: {tree.get('error_message', 'it is not one')}"
        )
    return tree["statements"]


def _walk_nodes(tree: Any) -> Iterator[tuple[Mapping[str, Any], frozenset[str]]]:
    """Yield every object of a tree, with the names that stand for tables there."""
    stack: list[tuple[Any, frozenset[str]]] = [(tree, NAMES)]
    while stack:
        node, names = stack.pop()
        if isinstance(node, list):
            stack += [(item, names) for item in node]
        elif isinstance(node, dict):
            inner = names
            # A name of WITH stands for its query in what follows, and in itself if it is recursive.
            for entry in node.get("cte_map", {}).get("map", ()):
                stack.append((entry["value"], inner))
                inner |= {entry["key"].lower()}
            for key in ("cte_name", "ctename"):
                inner |= {node[key].lower()} if node.get(key) else set()
            yield node, inner
            stack += [(value, inner) for key, value in node.items() if key != "cte_map"]


def _function_of(node: Mapping[str, Any], names: frozenset[str]) -> set[str]:
    """Return the functions a node calls by itself, once it is seen that it may stand there."""
    kind = node.get("type")
    if "class" in node:
        if node["class"] in ("FUNCTION", "WINDOW"):
            return {node["function_name"].lower()}
    elif kind == "TABLE_FUNCTION":
        name = node["function"].get("function_name", "").lower()
        if name not in _TABLE_FUNCTIONS:
            raise QueryError(f"{name or 'this'}() may not be read from here: {_ONLY_VIEWS}")
    elif kind == "BASE_TABLE":
        _check_table(node, names)
    elif kind == "SHOW_REF":
        if not node["query"] and node["table_name"] not in _LISTS | NAMES:
            raise QueryError(f"SHOW of {node['table_name']} is not allowed here: {_ONLY_VIEWS}")
    elif isinstance(kind, str) and not (
        kind in _NODES | _TABLES | _OTHERS or kind.endswith("_TYPE_INFO")
    ):
        raise QueryError(f"{kind.replace('_', ' ').lower()} is not allowed here: {_ONLY_VIEWS}")
    return set()


def _check_table(node: Mapping[str, Any], names: frozenset[str]) -> None:
    name, schema, catalogue = node["table_name"], node["schema_name"], node["catalog_name"]
    # A name in a schema is never one that WITH gave.
    allowed = NAMES if schema or catalogue else names
    if name.lower() not in allowed or schema not in _SCHEMAS or catalogue not in _CATALOGUES:
        raise QueryError(f"there is no view {name!r} here: {_ONLY_VIEWS}")


def _check_functions(con: "duckdb.DuckDBPyConnection", names: set[str]) -> None:
    names -= _HARMLESS | _TABLE_FUNCTIONS
    if not names:
        return
    functions = con.execute(
        "SELECT DISTINCT lower(function_name), function_type, stability FROM duckdb_functions() "
        "WHERE lower(function_name) IN (SELECT unnest(?))",
        [sorted(names)],
    ).fetchall()
    may = {
        name
        for name, kind, stability in functions
        if kind in _KINDS and (stability is None or stability == "CONSISTENT")
    }
    for name in sorted(names - may | names & _HARMFUL):
        if any(name == other for other, _, _ in functions):
            raise QueryError(f"{name}() is not allowed here: it does more than compute")
        raise QueryError(f"there is no function {name}()")
