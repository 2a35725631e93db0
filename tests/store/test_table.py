"""A result is handed out in whatever form the reader works with."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import pandas as pd  # type: ignore[import-untyped]  # has no stubs
import polars as pl
import pyarrow as pa  # type: ignore[import-untyped]  # has no stubs
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # has no stubs
import pytest

from lightning_otel import Store
from lightning_otel.errors import ConfigError, QueryError, StoreError
from lightning_otel.store.sql import new_connection
from lightning_otel.store.table import (
    Query,
    Table,
    check_read_only,
    query_of,
    windows,
)
from lightning_otel.types import Span


@pytest.fixture
def table(store: Store, make_span: Callable[..., Span]) -> Table[Span]:
    """Three spans."""
    store.add(make_span(name=f"s{number}", attributes={"n": number}) for number in range(3))
    return store.spans()


def test_table_is_iterated_as_objects(table: Table[Span]) -> None:
    """Again and again, and several at once."""
    names = ["s0", "s1", "s2"]

    assert [span.name for span in table] == names
    assert [span.name for span in table.rows()] == names
    assert [(a.name, b.name) for a, b in zip(table, table, strict=True)] == [
        (name, name) for name in names
    ]


def test_table_sees_what_was_recorded_since(
    store: Store, table: Table[Span], make_span: Callable[..., Span]
) -> None:
    """A result is computed when it is asked for."""
    before = len(table.rows())
    store.add([make_span()])

    assert (before, len(table.rows())) == (3, 4)


def test_table_gives_dicts_of_columns(table: Table[Span]) -> None:
    """A row is what DuckDB has, by column."""
    rows = list(table.dicts())

    assert [row["name"] for row in rows] == ["s0", "s1", "s2"]
    assert rows[1]["attributes"] == '{"n":1}'
    assert table.columns == list(rows[0])


def test_table_gives_more_rows_than_one_fetch(store: Store, make_span: Callable[..., Span]) -> None:
    """Rows are fetched a few thousand at a time, and all of them."""
    store.add(make_span() for _ in range(5_000))

    assert len({span.span_id for span in store.spans()}) == 5_000


def test_table_is_a_pandas_frame(table: Table[Span]) -> None:
    """``df()`` is a data frame."""
    frame = table.df()

    assert isinstance(frame, pd.DataFrame)
    assert list(frame["name"]) == ["s0", "s1", "s2"]


def test_table_is_a_polars_frame(table: Table[Span]) -> None:
    """``pl()`` is a data frame, and so is what polars makes of the table itself."""
    frame = table.pl()

    assert isinstance(frame, pl.DataFrame)
    assert frame["name"].to_list() == pl.DataFrame(table)["name"].to_list() == ["s0", "s1", "s2"]


def test_table_is_arrow(table: Table[Span]) -> None:
    """``arrow()`` is a table, and so is what pyarrow makes of the stream."""
    found = table.arrow()

    assert isinstance(found, pa.Table)
    assert found["name"].to_pylist() == ["s0", "s1", "s2"]
    assert pa.table(table).equals(found)


def test_table_is_read_by_duckdb(table: Table[Span]) -> None:
    """Another DuckDB takes the stream as it is."""
    stream = pa.RecordBatchReader.from_stream(table)  # noqa: F841  # DuckDB finds it by its name

    with duckdb.connect() as con:
        assert con.execute("SELECT count(*) FROM stream").fetchone() == (3,)


def test_table_is_written_to_parquet(table: Table[Span], tmp_path: Path) -> None:
    """A file with the same rows, whatever its name."""
    path = tmp_path / "it's.parquet"

    table.to_parquet(path)

    found = pq.read_table(path)
    assert found["name"].to_pylist() == ["s0", "s1", "s2"]
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"


def test_table_says_where_it_cannot_be_written(table: Table[Span], tmp_path: Path) -> None:
    """A folder that is not there is named."""
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


def test_table_says_what_it_is(table: Table[Span]) -> None:
    """A table at the prompt tells what can be done with it."""
    assert repr(table).startswith("<Table of spans: iterate, or .df()")


@pytest.mark.parametrize(
    "text", ["SELEC 1", "SELECT x FROM range(1)", "SELECT * FROM nowhere", "SELECT 'x'::INTEGER"]
)
def test_query_that_duckdb_refuses_is_named(text: str) -> None:
    """A wrong query is an error of ours with DuckDB's words."""
    query = Query(new_connection(), text)

    with pytest.raises(QueryError, match="DuckDB refused the query"):
        list(query.dicts())
    with pytest.raises(QueryError, match="DuckDB refused the query"):
        query.take(lambda relation: relation.fetchall())


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

    assert names == ["t", "t", "s", "i"]
    assert rows == [(at(i), [at(i)], {"at": at(i), "n": i}, i) for i in (1, 0)]


def test_query_of_times_with_a_zone_shows_its_first_rows() -> None:
    """As a notebook does, without the library that DuckDB asks for."""
    query = Query(new_connection(), "SELECT epoch_ms(0)::TIMESTAMPTZ AS t FROM range(3)")

    found = query.head(2)

    assert [row["t"][:4] for row in found] == ["1970", "1970"]


def test_query_gives_up_on_a_file_that_cannot_be_read() -> None:
    """A file that stays unreadable is an error of the store's."""
    query = Query(new_connection(), "SELECT * FROM 'nowhere/*.parquet'")

    with pytest.raises(StoreError, match="cannot read the spans"):
        list(query.dicts())


def test_query_of_rows_holds_them_all() -> None:
    """Python rows become a query with the columns named, and typed."""
    rows = ({"n": number, "body": [{"a": number}]} for number in range(3))

    query = query_of(rows, {"n": "BIGINT", "body": "JSON"})

    assert list(query.dicts()) == [
        {"n": number, "body": f'[{{"a":{number}}}]'} for number in range(3)
    ]
    assert query.take(lambda relation: relation.columns) == ["n", "body"]


def test_rows_of_any_length_are_written_to_parquet(tmp_path: Path) -> None:
    """Where 2,048 of them are more than the memory that DuckDB is first given."""
    rows = [{"body": os.urandom(25_000).hex()} for _ in range(4_100)]
    table = Table(lambda: query_of(rows, {"body": "VARCHAR"}), lambda: rows, "rows")

    table.to_parquet(tmp_path / "t.parquet")

    found = pq.read_table(tmp_path / "t.parquet").column("body").to_pylist()
    assert found == [row["body"] for row in rows]


def test_query_of_no_rows_has_columns() -> None:
    """Nothing is a result too."""
    query = query_of([], {"n": "BIGINT"})

    assert list(query.dicts()) == []
    assert query.take(lambda relation: relation.columns) == ["n"]


@pytest.mark.parametrize(
    "text",
    [
        "SELECT 1",
        "SELECT 1;",
        "/* why */ SELECT 1 -- so",
        "FROM range(3)",
        "WITH a AS (SELECT 1) SELECT * FROM a",
        "VALUES (1)",
        "DESCRIBE SELECT 1",
        "SHOW TABLES",
        "SUMMARIZE SELECT 1",
        "EXPLAIN SELECT 1",
        "explain analyze SELECT 1",
        "EXPLAIN (ANALYZE, FORMAT json) SELECT 1",
    ],
)
def test_check_read_only_lets_reading_through(text: str) -> None:
    """Whatever only reads may run."""
    with new_connection() as con:
        check_read_only(con, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-- nothing",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP VIEW spans",
        "INSERT INTO t VALUES (1)",
        "DELETE FROM t",
        "CREATE TABLE t (a INT)",
        "DROP VIEW spans",
        "COPY (SELECT 1) TO '{target}'",
        "ATTACH '{target}'",
        "EXPORT DATABASE '{target}'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET threads = 1",
        "PRAGMA enable_profiling",
        "CALL pragma_version()",
        "CHECKPOINT",
        "PREPARE p AS SELECT 1",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{target}'",
        "EXPLAIN ANALYZE CREATE TABLE t AS SELECT 1",
        "/**/ explain/**/analyze COPY (SELECT 1) TO '{target}'",
        "EXPLAIN (ANALYZE, FORMAT json) COPY (SELECT 1) TO '{target}'",
        "nonsense",
    ],
)
def test_check_read_only_stops_the_rest(tmp_path: Path, text: str) -> None:
    """Whatever writes, changes a setting or is several statements may not."""
    with new_connection() as con, pytest.raises(QueryError):
        check_read_only(con, text.format(target=tmp_path / "made"))

    assert list(tmp_path.iterdir()) == []


def test_query_of_takes_what_a_model_may_say() -> None:
    """Integers beyond 64 bits and half surrogate pairs cost no row."""
    rows = [{"said": {"n": 2**80, "text": "\ud83d"}}, {"said": {"n": 1, "text": "fine"}}]

    found = list(query_of(rows, {"said": "JSON"}).dicts())

    assert [row["said"] for row in found] == [
        '{"n":1208925819614629174706176,"text":"?"}',
        '{"n":1,"text":"fine"}',
    ]


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("SELECT count(*) FROM spans", set()),
        ("SELECT * FROM CALLS c JOIN spans s ON c.span_id = s.span_id", {"calls"}),
        ("DESCRIBE rewards", {"rewards"}),
        ("EXPLAIN SELECT (SELECT count(*) FROM rollouts)", {"rollouts"}),
        ("SELECT 1", {"calls", "rewards", "rollouts"}),
        ("SELECT view_name FROM duckdb_views()", {"calls", "rewards", "rollouts"}),
        ("SELECT * FROM spans, duckdb_views()", {"calls", "rewards", "rollouts"}),
        ("SHOW TABLES", {"calls", "rewards", "rollouts"}),
    ],
)
def test_views_of_are_those_a_query_names(query: str, named: set[str], store: Store) -> None:
    """To bind a view costs as much as to read a little; where it cannot be told, all are made."""
    store.writer()

    with store.source.connect(query=query) as con:
        views = con.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall()

    assert {name for (name,) in views} == {"spans", *named}
    assert store.sql(query).rows() is not None


def test_windows_part_spans_between_instants() -> None:
    """All of one instant stay together; the windows hold all and do not overlap."""
    with new_connection() as con:
        con.execute("CREATE TABLE starts AS SELECT i // 10 AS start_ns FROM range(95) r(i)")

        found = windows(Query(con, "SELECT start_ns FROM starts"), 25)
        none = windows(Query(con, "SELECT start_ns FROM starts WHERE false"), 25)

    assert found == [(0, 1), (2, 4), (5, 6), (7, 9)]
    assert none == []
