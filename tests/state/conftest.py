"""States of the tests: in SQLite, and in PostgreSQL where it is installed; and their clock."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.lake import servers

from lightning_otel.state import State

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


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000_000

    def __call__(self) -> int:
        """Return the time, Unix nanoseconds."""
        return self.ns

    def go_on(self, seconds: float) -> None:
        """Let time pass."""
        self.ns += int(seconds * 1e9)


@pytest.fixture
def clock() -> Clock:
    """The time, as everybody who shares the state reads it."""
    return Clock()


@pytest.fixture
def state(place: str, clock: Clock) -> Iterator[State]:
    """A state that holds nothing yet."""
    made = State(place, now_ns=clock)
    yield made
    made.close()
