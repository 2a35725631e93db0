"""Where the queue's tests keep their state: in SQLite, and in PostgreSQL where it is installed."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.lake import servers

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[servers.Postgres]:
    """A PostgreSQL for all tests; it skips them where the driver or the server is missing."""
    pytest.importorskip("psycopg")
    with servers.postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a state lies that holds nothing yet."""
    if request.param == "sqlite":
        return str(tmp_path / "traces.duckdb")
    server: servers.Postgres = request.getfixturevalue("cluster")
    name = f"queue{next(_numbers)}"
    server.run(f"CREATE DATABASE {name}")
    return f"postgresql+psycopg://lake:{servers.PASSWORD}@127.0.0.1:{server.port}/{name}"
