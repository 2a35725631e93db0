"""Every engine under the same tests: how each is made, and how spans get into it."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest

from lightning_otel import Store
from lightning_otel.types import Span


class Held(NamedTuple):
    """The store of an engine, and a function after which a program's spans are in it."""

    store: Store
    write: Callable[[Iterable[Span]], None]


@pytest.fixture(params=["local", "settled", "memory", "http", "clickhouse"])
def held(request: pytest.FixtureRequest, store: Store) -> Held:
    """An empty store of each engine in turn."""
    if request.param == "memory":
        store = Store(":memory:")
    elif request.param == "clickhouse":
        store = Store(request.getfixturevalue("clickhouse_url"))
    store.add([])  # the table is made with the first spans, even none

    def write(spans: Iterable[Span]) -> None:
        store.add(spans)
        if request.param == "settled":
            store.writer().seal()
            store.settle()

    # What came by OTLP lies in the server's own store; how it gets there is tested with it.
    url = request.getfixturevalue("served")(store) if request.param == "http" else ""
    return Held(Store(url) if url else store, write)
