"""A result is handed out in whatever form the reader works with."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import pandas as pd  # type: ignore[import-untyped]  # has no stubs
import polars as pl
import pyarrow as pa  # type: ignore[import-untyped]  # has no stubs
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # has no stubs
import pytest
from tests.store.conftest import MakeSpan

from lightning_otel import Store
from lightning_otel.dataset.tables import query_rows
from lightning_otel.errors import ConfigError, QueryError
from lightning_otel.store.sql import new_connection
from lightning_otel.store.table import (
    Query,
    Table,
)
from lightning_otel.types import Span


@pytest.fixture
def table(store: Store, make_span: MakeSpan) -> Table[Span]:
    store.add(make_span(name=f"s{number}", attributes={"n": number}) for number in range(3))
    return store.spans()


NAMES = ["s0", "s1", "s2"]


def test_table_comes_in_every_form(store: Store, table: Table[Span], make_span: MakeSpan) -> None:
    """Objects, again and several at once; dicts; frames, Arrow and whatever reads its stream."""
    stream = pa.RecordBatchReader.from_stream(table)  # noqa: F841  # DuckDB finds it by its name
    with duckdb.connect() as con:
        streamed = con.execute("SELECT name FROM stream").fetchall()
    frame, polars, arrow, dicts = table.df(), table.pl(), table.arrow(), list(table.dicts())
    names: list[list[str]] = [
        [span.name for span in table],
        [span.name for span in table.rows()],
        [row["name"] for row in dicts],
        list(frame["name"]),
        polars["name"].to_list(),
        pl.DataFrame(table)["name"].to_list(),
        arrow["name"].to_pylist(),
        [name for (name,) in streamed],
    ]
    pairs = [(one.name, other.name) for one, other in zip(table, table, strict=True)]
    store.add(make_span() for _ in range(5_000))

    assert names == [NAMES] * len(names)
    assert pairs == [(name, name) for name in NAMES]
    assert isinstance(frame, pd.DataFrame)
    assert isinstance(polars, pl.DataFrame)
    assert pa.table(table).num_rows == len({span.span_id for span in table}) == 5_003
    assert (dicts[1]["attributes"], list(dicts[0])) == ('{"n":1}', table.columns)
    assert repr(table).startswith("<Table of spans: iterate, or .df()")


def test_table_is_written_to_parquet(table: Table[Span], tmp_path: Path) -> None:
    """A file with the same rows, whatever its name."""
    path = tmp_path / "it's.parquet"

    table.to_parquet(path)

    found = pq.read_table(path)
    assert found["name"].to_pylist() == ["s0", "s1", "s2"]
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"
    with pytest.raises(ConfigError, match="missing"):
        table.to_parquet(tmp_path / "missing" / "x.parquet")


@pytest.mark.parametrize(
    ("method", "library"), [("df", "pandas"), ("pl", "polars"), ("arrow", "pyarrow")]
)
def test_table_names_a_missing_library(
    table: Table[Span], monkeypatch: pytest.MonkeyPatch, method: str, library: str
) -> None:
    """The message says what to install.

    The library is hidden by a patch, because the tests need it.
    """
    monkeypatch.setitem(sys.modules, library, None)

    with pytest.raises(ConfigError, match=f"pip install {library}"):
        getattr(table, method)()


def test_table_needs_no_library_for_parquet_and_rows(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    """Without pandas, polars and pyarrow, rows and files work."""
    script = """
    import sys
    for name in ("pandas", "polars", "pyarrow", "numpy"):
        sys.modules[name] = None
    from lightning_otel import Store
    from lightning_otel.types import Span
    store = Store(sys.argv[1])
    store.add([Span("1" * 32, "1" * 16, None, "s", 1, 2)])
    store.spans().to_parquet(sys.argv[2])
    print(len(store.spans().rows()), store.spans().columns[0])
    print(store.sql("SELECT count(*) AS n FROM spans").rows())
    """

    printed = run_python(script, tmp_path / "traces.duckdb", tmp_path / "out.parquet")

    assert printed.splitlines() == ["1 trace_id", "[{'n': 1}]"]
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 1


@pytest.mark.parametrize("end", ["", ";", "; -- the newest", " -- the newest;\n"])
def test_query_gives_times_with_a_zone_as_text(end: str) -> None:
    """In lists and structs too, under the names and in the order that were asked for."""
    con = new_connection()
    con.execute("SET GLOBAL TimeZone = 'Asia/Kathmandu'")
    made = "make_timestamptz((i * 1e6)::BIGINT)"
    text = (
        f"SELECT {made} AS t, [{made}] AS t, {{'at': {made}, 'n': i}} AS s, i "
        f"FROM range(3) numbers(i) WHERE i < ? ORDER BY i DESC{end}"
    )

    names, batches = Query(con, text, [2]).batches()
    rows = [row for batch in batches for row in batch]

    def at(second: int) -> str:
        return f"1970-01-01 05:30:0{second}+05:30"

    head = Query(con, "SELECT epoch_ms(0)::TIMESTAMPTZ AS t FROM range(3)").head(2)

    assert [row["t"][:4] for row in head] == ["1970", "1970"]
    assert names == ["t", "t", "s", "i"]
    assert rows == [(at(i), [at(i)], {"at": at(i), "n": i}, i) for i in (1, 0)]


def test_query_of_takes_what_a_model_may_say() -> None:
    """Python rows, typed; integers beyond 64 bits and half surrogate pairs cost no row."""
    rows = [{"n": 1, "said": {"n": 2**80, "text": "\ud83d"}}, {"n": 2, "said": [{"text": "fine"}]}]
    columns = {"n": "BIGINT", "said": "JSON"}
    nothing = query_rows([], columns)

    assert [tuple(row.values()) for row in query_rows(rows, columns).dicts()] == [
        (1, '{"n":1208925819614629174706176,"text":"?"}'),
        (2, '[{"text":"fine"}]'),
    ]
    assert list(nothing.dicts()) == []
    assert nothing.take(lambda relation: relation.columns) == ["n", "said"]


def test_rows_of_any_length_are_written_to_parquet(tmp_path: Path) -> None:
    """Where 2,048 of them are more than the memory that DuckDB is first given."""
    rows = [{"body": os.urandom(25_000).hex()} for _ in range(4_100)]
    table = Table(lambda: query_rows(rows, {"body": "VARCHAR"}), lambda: rows, "rows")

    table.to_parquet(tmp_path / "t.parquet")

    found = pq.read_table(tmp_path / "t.parquet").column("body").to_pylist()
    assert found == [row["body"] for row in rows]


READ_ONLY = """SELECT 1|SELECT 1;|/* why */ SELECT 1 -- so|FROM range(3)|VALUES (1)|SHOW TABLES
WITH a AS (SELECT 1) SELECT * FROM a|DESCRIBE SELECT 1|SUMMARIZE SELECT 1|EXPLAIN SELECT 1
explain analyze SELECT 1|EXPLAIN (ANALYZE, FORMAT json) SELECT 1"""
NOT_READ_ONLY = """-- nothing|SELECT 1; SELECT 2|SELECT 1; DROP VIEW spans|nonsense|CHECKPOINT
INSERT INTO t VALUES (1)|DELETE FROM t|CREATE TABLE t (a INT)|DROP VIEW spans|LOAD httpfs
COPY (SELECT 1) TO '{made}'|ATTACH '{made}'|EXPORT DATABASE '{made}'|INSTALL httpfs
SET threads = 1|PRAGMA enable_profiling|CALL pragma_version()|PREPARE p AS SELECT 1
WITH gone AS (DELETE FROM spans RETURNING *) SELECT * FROM gone|SELECT * FROM nowhere
SELECT 'x'::INTEGER
EXPLAIN ANALYZE COPY (SELECT 1) TO '{made}'|EXPLAIN ANALYZE CREATE TABLE t AS SELECT 1
/**/ explain/**/analyze COPY (SELECT 1) TO '{made}'
EXPLAIN (ANALYZE, FORMAT json) COPY (SELECT 1) TO '{made}'"""


def test_sql_only_reads(store: Store, tmp_path: Path) -> None:
    """Whatever only reads may run; whatever writes, changes a setting or is several may not."""
    store.writer()
    made = tmp_path / "made"
    for text in re.split(r"[|\n]", READ_ONLY):
        assert store.sql(text).rows() is not None
    for text in ["", *re.split(r"[|\n]", NOT_READ_ONLY)]:
        with pytest.raises(QueryError, match=r"DuckDB refused|expected|only SELECT"):
            store.sql(text.format(made=made)).rows()

    assert not made.exists()
    assert len(store.sql("SHOW TABLES").rows()) == 11
