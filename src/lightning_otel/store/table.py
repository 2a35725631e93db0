"""A query's result, handed out in whatever form the reader works with.

Nothing is computed until it is asked for, and pandas, polars and pyarrow are imported only by the
method that is named after them.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import orjson

from lightning_otel.errors import ConfigError
from lightning_otel.store.views import quoted

if TYPE_CHECKING:
    import duckdb

T = TypeVar("T")
_FETCH = 2048


class Query:
    """One SELECT on a connection of its own: Arrow for whoever reads that, rows for us."""

    def __init__(
        self, con: "duckdb.DuckDBPyConnection", text: str, parameters: Sequence[object] = ()
    ) -> None:
        self._con = con
        self._text = text
        self._parameters = list(parameters)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The Arrow C stream interface."""
        return self.relation().__arrow_c_stream__(requested_schema)

    def relation(self) -> "duckdb.DuckDBPyRelation":
        """The result as a DuckDB relation."""
        return self._con.sql(self._text, params=self._parameters or None)

    def dicts(self) -> Iterator[dict[str, Any]]:
        """Each row as a dict of columns, fetched a few thousand at a time."""
        # A cursor of its own: DuckDB 2 refuses a connection whose result is half read.
        cursor = self._con.cursor()
        cursor.execute(self._text, self._parameters)
        names = [column[0] for column in cursor.description or ()]
        while rows := cursor.fetchmany(_FETCH):
            for row in rows:
                yield dict(zip(names, row, strict=True))


class Table(Generic[T]):
    """Rows of one kind: iterate over them, or take them as Arrow, a frame or a file."""

    def __init__(
        self,
        query: Callable[[], Query],
        rows: Callable[[], Iterable[T]],
        noun: str,
    ) -> None:
        """Describe a result.

        Args:
            query: Opens the result in DuckDB, on a connection of its own.
            rows: Opens the result as Python objects.
            noun: What a row is, for ``repr``.
        """
        self._query = query
        self._rows = rows
        self._noun = noun

    def __iter__(self) -> Iterator[T]:
        """Each row as an object."""
        return iter(self._rows())

    def __repr__(self) -> str:
        return f"<Table of {self._noun}: iterate, or .df() .pl() .arrow() .to_parquet(path)>"

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The Arrow C stream interface, which polars, pyarrow, pandas and others read as it is."""
        return self._query().__arrow_c_stream__(requested_schema)

    @property
    def columns(self) -> list[str]:
        """Names of the columns, in order."""
        return list(self._query().relation().columns)

    def rows(self) -> list[T]:
        """Every row, in memory."""
        return list(self)

    def dicts(self) -> Iterator[dict[str, Any]]:
        """Each row as a dict of columns."""
        return self._query().dicts()

    def df(self) -> Any:
        """A pandas data frame.

        Raises:
            ConfigError: pandas is not installed.
        """
        _require("pandas")
        return self._query().relation().df()

    def pl(self) -> Any:
        """A polars data frame.

        Raises:
            ConfigError: polars is not installed.
        """
        polars = _require("polars")
        return polars.DataFrame(self)

    def arrow(self) -> Any:
        """A pyarrow table.

        Raises:
            ConfigError: pyarrow is not installed.
        """
        pyarrow = _require("pyarrow")
        return pyarrow.table(self)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a zstd Parquet file; needs no other library."""
        self._copy(path, "FORMAT parquet, COMPRESSION zstd")

    def _copy(self, path: str | os.PathLike[str], options: str) -> None:
        relation = self._query().relation()
        relation.query("result", f"COPY result TO {quoted(str(Path(path)))} ({options})")


def query_of(
    con: "duckdb.DuckDBPyConnection", rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]
) -> Query:
    """Python rows as a query, through a temporary file: memory does not grow with them.

    Args:
        con: The connection that will hold the temporary table.
        rows: Values that JSON knows.
        columns: DuckDB type of each column.
    """
    with tempfile.NamedTemporaryFile(suffix=".ndjson") as file:
        for row in rows:
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        file.flush()
        described = "{" + ", ".join(f"{quoted(k)}: {quoted(v)}" for k, v in columns.items()) + "}"
        con.execute(
            f"CREATE OR REPLACE TABLE held AS SELECT * FROM read_json({quoted(file.name)}, "
            f"format='newline_delimited', columns={described}, maximum_object_size=268435456)"
        )
    return Query(con, "SELECT * FROM held")


def _require(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise ConfigError(f"this needs {name}; install it with: pip install {name}") from exc
