"""Arrow over a wire: rows come whole or not at all."""

import io
import sys
from collections.abc import Callable

import duckdb
import pytest

from lightning_otel.errors import ConfigError, StoreError
from lightning_otel.store.engines.ipc import END, Arrival, parts
from lightning_otel.store.sql import new_connection

pytest.importorskip("nanoarrow")


def numbers(first: int, last: int) -> duckdb.DuckDBPyRelation:
    """A relation of numbers and texts."""
    return new_connection().sql(
        "SELECT i::BIGINT AS i, CASE WHEN i % 2 = 0 THEN 'ü' || i END AS s "
        f"FROM range({first}, {last}) r(i)"
    )


def loaded(body: io.BytesIO) -> list[tuple[object, ...]]:
    """The rows that a body holds."""
    with new_connection() as con:
        con.execute("CREATE TABLE t (i BIGINT, s VARCHAR)")
        Arrival(body, "there").load(con, lambda rows: f"INSERT INTO t SELECT i, s FROM {rows}")
        return con.execute("SELECT * FROM t ORDER BY i").fetchall()


def test_rows_of_several_tables_come_as_one_stream() -> None:
    """With their missing values, and one end."""
    body = b"".join(parts([numbers(0, 3), numbers(3, 3), numbers(3, 300_000)]))

    rows = loaded(io.BytesIO(body))

    assert rows[:3] == [(0, "ü0"), (1, None), (2, "ü2")]
    assert len(rows) == 300_000
    assert body.count(END) >= 1
    assert body.endswith(END)


def test_no_rows_are_a_stream_too() -> None:
    """Its schema and its end."""
    assert loaded(io.BytesIO(b"".join(parts([numbers(0, 0)])))) == []


def test_parts_are_sent_as_they_are_made() -> None:
    """Memory holds one table at a time."""
    asked: list[int] = []

    def tables() -> "object":
        for number in range(3):
            asked.append(number)
            yield numbers(number, number + 1)

    sent = parts(tables())  # type: ignore[arg-type]  # a generator of relations
    next(sent)

    assert asked == [0]


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 500, 5000])
def test_what_is_cut_off_anywhere_is_refused(cut: int) -> None:
    """Also between two batches, where every Arrow reader takes it for whole."""
    body = b"".join(parts([numbers(0, 1000)]))

    with pytest.raises(StoreError, match="there"):
        loaded(io.BytesIO(body[: len(body) - max(cut, 1)]))


def test_a_fault_while_it_is_made_leaves_no_end() -> None:
    """Whoever reads it knows that it is not all."""

    def tables() -> "object":
        yield numbers(0, 10)
        raise RuntimeError("broken")

    sent: list[bytes] = []

    def send() -> None:
        sent.extend(parts(tables()))  # type: ignore[arg-type]  # a generator of relations

    with pytest.raises(RuntimeError):
        send()
    with pytest.raises(StoreError):
        loaded(io.BytesIO(b"".join(sent)))


@pytest.mark.parametrize("body", [b"", b"no Arrow", b"<html>", b"\xff" * 64, END])
def test_what_is_no_such_stream_is_refused(body: bytes) -> None:
    """With the name of who sent it."""
    with pytest.raises(StoreError, match="there"):
        loaded(io.BytesIO(body))


def test_a_fault_of_the_way_is_told() -> None:
    """What the connection says, not what Arrow makes of it."""

    class Broken(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise ConnectionResetError("reset by peer")

    with pytest.raises(StoreError, match="reset by peer") as raised:
        loaded(Broken())

    assert raised.value.__cause__ is not None


@pytest.mark.parametrize("act", [lambda: loaded(io.BytesIO(b"x")), lambda: list(parts([]))])
def test_without_nanoarrow_the_extra_is_named(
    act: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever lacks it is told what to install."""
    monkeypatch.setitem(sys.modules, "nanoarrow.ipc", None)

    with pytest.raises(ConfigError, match=r"lightning-otel\[remote\]"):
        act()
