"""Every engine under the same tests: how each is made, and how spans get into it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_otel import Store
from lightning_otel.types import Span

ENGINES = ("local", "settled", "memory", "http", "chdb", "clickhouse")
"""An engine is added by a name here and a function in ``MAKERS``."""


@dataclass
class Held:
    """A store of one engine, and how a program's spans come into it.

    Attributes:
        store: What is read.
        write: Has spans in it, all of them when it returns.
    """

    store: Store
    write: Callable[[Iterable[Span]], None]


@pytest.fixture(params=ENGINES)
def held(request: pytest.FixtureRequest) -> Held:
    """An empty store of each engine in turn."""
    return MAKERS[request.param](request)


def _local(request: pytest.FixtureRequest) -> Held:
    store = request.getfixturevalue("store")
    store.writer()
    return Held(store, store.add)


def _settled(request: pytest.FixtureRequest) -> Held:
    store = request.getfixturevalue("store")

    def write(spans: Iterable[Span]) -> None:
        store.add(spans)
        store.writer().seal()
        store.settle()

    store.writer()
    return Held(store, write)


def _memory(request: pytest.FixtureRequest) -> Held:
    store = Store(":memory:")
    return Held(store, store.add)


def _http(request: pytest.FixtureRequest) -> Held:
    # What came by OTLP lies in the server's own store; how it gets there is tested with it.
    pytest.importorskip("starlette")
    behind = request.getfixturevalue("store")
    behind.writer()
    return Held(Store(request.getfixturevalue("served")(behind)), behind.add)


def _chdb(request: pytest.FixtureRequest) -> Held:
    return _loaded(Store(f"clickhouse+chdb://{_engine(request)}?database={_name(request)}"))


def _clickhouse(request: pytest.FixtureRequest) -> Held:
    _engine(request)
    port = request.getfixturevalue("clickhouse_port")
    return _loaded(Store(f"clickhouse://someone:secret@127.0.0.1:{port}/{_name(request)}"))


def _engine(request: pytest.FixtureRequest) -> Path:
    pytest.importorskip("chdb")
    pytest.importorskip("clickhouse_connect")
    folder: Path = request.getfixturevalue("chdb_folder")
    return folder


def _name(request: pytest.FixtureRequest) -> str:
    return f"db{abs(hash(request.node.nodeid))}"


def _loaded(store: Store) -> Held:
    store.add([])  # the table is made with the first spans, even none
    return Held(store, store.add)


MAKERS: dict[str, Callable[[pytest.FixtureRequest], Held]] = {
    "local": _local,
    "settled": _settled,
    "memory": _memory,
    "http": _http,
    "chdb": _chdb,
    "clickhouse": _clickhouse,
}
