"""The small transactional state: made once, private, changed by one at a time, kept whole."""

import pickle
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import sqlalchemy as sa

from lightning_otel import Store
from lightning_otel.errors import ConfigError, StateError, StoreVersionError
from lightning_otel.state import State

_TABLES = sa.MetaData()
COUNTS = sa.Table("counts", _TABLES, sa.Column("n", sa.Integer))


def made(path: Path) -> State:
    """A state with a table of the tests, which holds one 0."""
    state = State(path / "traces.duckdb")
    state.ensure()
    with state.change() as connection:
        _TABLES.create_all(connection)
        if not connection.scalar(sa.select(sa.func.count()).select_from(COUNTS)):
            connection.execute(sa.insert(COUNTS).values(n=0))
    return state


def add_one(state: State) -> None:
    """Read, then write: what two at once would lose."""
    with state.change() as connection:
        found = connection.scalar(sa.select(COUNTS.c.n))
        assert found is not None
        connection.execute(sa.update(COUNTS).values(n=found + 1))


def counted(state: State) -> int | None:
    """The number that stands there."""
    with state.read() as connection:
        return connection.scalar(sa.select(COUNTS.c.n))


def test_state_is_the_users_alone(tmp_path: Path) -> None:
    """Nobody else reads what is queued, nor what was written lately."""
    state = made(tmp_path)
    with state.read():
        files = list((tmp_path / "traces.duckdb.d").glob("state.sqlite*"))
        modes = {stat.S_IMODE(file.stat().st_mode) for file in files}

    assert len(files) == 3
    assert modes == {0o600}


def test_failed_change_leaves_nothing(tmp_path: Path) -> None:
    """All of a transaction is kept, or none of it."""
    state = made(tmp_path)

    def fail() -> None:
        with state.change() as connection:
            connection.execute(sa.update(COUNTS).values(n=7))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()

    assert counted(state) == 0


def test_killed_change_leaves_nothing_and_nobody_waiting(tmp_path: Path) -> None:
    """A process that is killed within a change is as if it had not begun it."""
    state = made(tmp_path)
    program = f"""
        import os, signal, sqlalchemy as sa
        from lightning_otel.state import State
        with State({str(tmp_path / "traces.duckdb")!r}).change() as connection:
            connection.execute(sa.text("UPDATE counts SET n = 9"))
            os.kill(os.getpid(), signal.SIGKILL)
    """

    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=30)
    add_one(state)

    assert done.returncode == -signal.SIGKILL
    assert counted(state) == 1


def test_state_is_sent_to_another_process_as_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever unpickles it opens the same one, wherever it works; a relative path is made whole."""
    monkeypatch.chdir(tmp_path)
    state = made(Path())
    add_one(state)
    sent = pickle.dumps(state)
    monkeypatch.chdir(tmp_path.parent)

    assert counted(pickle.loads(sent)) == 1


def test_state_goes_with_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies beside the store's files, unless the environment names a place; it need not be."""
    store = Store(tmp_path / "traces.duckdb")
    state = State.beside(store)
    assert not state.is_made
    add_one(made(tmp_path))
    assert state.is_made
    assert counted(state) == 1

    monkeypatch.setenv("LIGHTNING_OTEL_STATE", str(tmp_path / "other.duckdb"))
    assert State.beside(store).name.endswith("other.duckdb.d/state.sqlite")


def test_newer_state_is_refused(tmp_path: Path) -> None:
    """It is named with what to do."""
    made(tmp_path)
    with sqlite3.connect(tmp_path / "traces.duckdb.d" / "state.sqlite") as opened:
        opened.execute("UPDATE lightning_state SET version = 99")

    with pytest.raises(StoreVersionError, match=r"version 99.*--upgrade"):
        State(tmp_path / "traces.duckdb").ensure()


def test_damaged_state_is_told_of(tmp_path: Path) -> None:
    """The error names the file."""
    (tmp_path / "traces.duckdb.d").mkdir()
    (tmp_path / "traces.duckdb.d" / "state.sqlite").write_bytes(b"not a database" * 100)

    with pytest.raises(StateError, match=r"state\.sqlite.*not a database"):
        State(tmp_path / "traces.duckdb").ensure()


@pytest.mark.parametrize("place", ["nosuch://host/db", "postgresql+nosuch://me:secret@host/db"])
def test_unknown_database_is_refused_without_its_password(place: str) -> None:
    """What can be named is said; a password is not."""
    with pytest.raises(ConfigError, match="postgresql") as caught:
        State(place)

    assert "secret" not in str(caught.value)
