"""What to read of spans that lie near each other in time, and nothing else.

Narrow columns of a million spans are read in a tenth of a second. The view over all files takes ten
times as long to say which of them count; here that is decided once for many looks.
"""

from typing import TYPE_CHECKING, Final

from lightning_otel import conventions as c
from lightning_otel.store.gist import KIND, ODD, RECEIVED, REWARD
from lightning_otel.store.narrow_rows import COLUMNS, NarrowRows
from lightning_otel.store.reader import Reader
from lightning_otel.store.schema import NARROW_COLUMNS
from lightning_otel.store.source import SpanSource
from lightning_otel.store.sql import listed

if TYPE_CHECKING:
    pass

_MESSAGES: Final = ("input_messages", "output_messages", "system_instructions")
_GIST: Final = f"""{ODD} + CASE WHEN contains(attributes::VARCHAR, '"{c.RECEIVED}"')
  THEN {RECEIVED} ELSE 0 END"""
"""What is known of a span whose gist nobody made."""
GIVEN: Final = "reward IS NOT NULL AND operation IS NULL AND start_ns >= ?"
"""Rewards that are nothing else, from a time on."""
_MAY_LINK: Final = f"SELECT 1 FROM {{spans}} WHERE {GIVEN} AND {KIND} <> {REWARD} LIMIT 1"


class Near:
    """What to read for a span of time: files that hold some of it, and what no file holds.

    The view over all files costs ten times as much as the narrow columns themselves.
    """

    def __init__(self, con: Reader, source: SpanSource) -> None:
        """Look what no file holds.

        Args:
            con: A connection of the source with the view ``spans``.
            source: Where the spans are.
        """
        self._con = con
        self._rows = None if source.layout is None else NarrowRows(con, source.layout)
        self._has_loose = bool(
            self._rows is not None and con.execute("FROM loose LIMIT 1").fetchall()
        )

    def narrow(self, low: int | None, high: int | None) -> str:
        """Narrow rows with the kind that their gist says."""
        if self._rows is None:
            return f"(SELECT {', '.join(COLUMNS)}, {_GIST} AS gist_kind FROM spans)"
        columns = f"{', '.join(COLUMNS)}, coalesce(gist_kind, {ODD}) AS gist_kind"
        parts = [f"SELECT {columns} FROM loose"]
        if paths := self._rows.paths(low, high):
            parts.insert(0, f"SELECT {columns} FROM read_parquet({listed(paths)})")
        return f"({' UNION ALL '.join(parts)})"

    def whole(self, low: int | None, high: int | None) -> str:
        """Whole spans."""
        if self._rows is None:
            return "spans"
        paths = self._rows.paths(low, high)
        columns = ", ".join((*NARROW_COLUMNS, "attributes", *_MESSAGES))
        parts = [f"SELECT {columns} FROM read_parquet({listed(paths)})"] if paths else []
        if self._has_loose or not parts:
            parts.append(f"SELECT {columns} FROM ({self._rows.loose_query()})")
        return f"({' UNION ALL '.join(parts)})"

    def may_link(self, low: int | None) -> bool:
        """Whether some reward may be linked to what it judges."""
        query = _MAY_LINK.format(spans=self.narrow(low, None))
        return bool(self._con.execute(query, [low or 0]).fetchall())
