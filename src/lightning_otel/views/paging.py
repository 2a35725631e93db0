"""A part of a table's rows in a given order, with the count of all of them; one pass makes both."""

from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_otel.store.table import Table

if TYPE_CHECKING:
    import duckdb


class Page(NamedTuple):
    """Rows to show."""

    rows: list[dict[str, Any]]
    total: int


def page_of(table: Table[Any], *, limit: int, offset: int = 0, order: str = "") -> Page:
    """Some rows of a table."""
    ordered = f"ORDER BY {order}" if order else ""
    part = f"SELECT * FROM paged {ordered} LIMIT {int(limit)} OFFSET {int(offset)}"

    def get(relation: "duckdb.DuckDBPyRelation") -> Page:
        counted = relation.query("paged", "SELECT count(*) FROM paged")
        found = relation.query("paged", part)
        assert counted is not None  # both are SELECTs
        assert found is not None
        rows = [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]
        return Page(rows, int(counted.fetchall()[0][0]))

    return table._query().take(get)
