"""The transactional state beside a store: queue, resources, training runs, waiting feedback.

A SQLite file on one machine, or a shared PostgreSQL database. Every change is one transaction.
"""

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from lightning_otel import config
from lightning_otel.errors import (
    ConfigError,
    NotInstalledError,
    StateError,
    disk_remedy,
    install_command,
)
from lightning_otel.store.files import write_private
from lightning_otel.store.layout import STATE_VERSION, Layout, check_state

try:
    import sqlalchemy as sa
except ModuleNotFoundError as exc:
    raise NotInstalledError(
        f"rollouts, resources and training need SQLAlchemy; {install_command('learn')}"
    ) from exc

if TYPE_CHECKING:
    import sqlite3

    from sqlalchemy.engine import Connection, Engine

    from lightning_otel.dataset import Store

METADATA: Final = sa.MetaData()
"""The metadata of every table; its owner passes a table to :meth:`State.ensure`."""
_BUSY_S: Final = 30.0
_WRITES: Final = "lightning_writes"
_LOCK: Final = 0x6C6F7465

_VERSIONS: Final = sa.Table(
    "lightning_state", METADATA, sa.Column("version", sa.Integer, primary_key=True)
)


class State:
    """A database of small facts that change; threads and processes share it."""

    def __init__(
        self,
        place: str | os.PathLike[str] | None = None,
        *,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Args:
            place: ``postgresql+psycopg://user@host/database``, another URL of SQLAlchemy's, or a
                store on this machine, beside whose files it lies as ``state.sqlite``. By default
                ``LIGHTNING_OTEL_STATE``, else the default store.
            now_ns: The clock, Unix nanoseconds; all machines that share a state need the same time.

        Raises:
            ConfigError: The place is none of these, or its driver is missing.
        """
        address = os.fspath(place) if place is not None else config.state_place()
        self._layout = None if _is_database(address) else Layout(address)
        self._place = address if self._layout is None else str(self._layout.catalogue)
        self.now_ns = now_ns
        self._ready: set[str] = set()
        self._engine = _make_engine(address, self._layout)
        _ENGINES.add(self._engine)

    @classmethod
    def beside(cls, store: "Store") -> "State":
        """The state that goes with a store: ``LIGHTNING_OTEL_STATE``, else beside its files."""
        layout = store.local.layout
        address = config.STATE.read() or None
        return cls(address if address is not None or layout is None else layout.catalogue)

    def __reduce__(self) -> "tuple[Callable[..., State], tuple[object, ...]]":
        # Another process opens connections of its own.
        return partial(State, now_ns=self.now_ns), (self._place,)

    @property
    def is_shared(self) -> bool:
        """True if other machines may use it."""
        return self._engine.dialect.name != "sqlite"

    @property
    def is_made(self) -> bool:
        """True if there is anything to read; a shared one counts as made."""
        return self._layout is None or self._layout.has_state()

    @property
    def name(self) -> str:
        """The place, without a password."""
        return self._engine.url.render_as_string(hide_password=True)

    def ensure(self, *tables: sa.Table) -> None:
        """Create missing tables; any number of processes may do so at once.

        Raises:
            StateError: They cannot be made.
            StoreVersionError: A newer version made the state.
        """
        missing = [table for table in (_VERSIONS, *tables) if table.name not in self._ready]
        if not missing:
            return
        if self._layout is not None:
            self._layout.create()
        with self.change() as connection:
            take_lock(connection, _LOCK)
            METADATA.create_all(connection, tables=missing)
            version = connection.scalar(sa.select(sa.func.max(_VERSIONS.c.version)))
            if version is None:
                connection.execute(sa.insert(_VERSIONS).values(version=STATE_VERSION))
            else:
                check_state(self.name, version)
        self._ready.update(table.name for table in missing)

    @contextlib.contextmanager
    def change(self) -> "Iterator[Connection]":
        """Open a transaction that may write: all of it is kept, or none.

        SQLite allows one at a time; in PostgreSQL lock rows with ``with_for_update``.

        Raises:
            StateError: The database does not answer or is damaged, or others held it too long.
        """
        with (
            self._translate_errors(),
            self._engine.execution_options(**{_WRITES: True}).begin() as connection,
        ):
            yield connection

    @contextlib.contextmanager
    def read(self) -> "Iterator[Connection]":
        """Open a connection that reads one snapshot and blocks no writer.

        Raises:
            StateError: The database does not answer or is damaged.
        """
        with self._translate_errors(), self._engine.begin() as connection:
            yield connection

    def close(self) -> None:
        """Close all connections; the next use opens new ones."""
        self._engine.dispose()

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.DBAPIError as exc:
            why = str(exc.orig).partition("\n")[0]
            remedy = disk_remedy(exc, "")
            raise StateError(
                f"the state {self.name} failed: {why}" + (f"; {remedy}" if remedy else "")
            ) from exc
        except OverflowError as exc:  # SQLite's driver; of nothing else in a transaction
            raise ConfigError("a number is beyond 64 bits; give a smaller one") from exc


def take_lock(connection: "Connection", lock: int) -> None:
    """Hold an advisory lock of PostgreSQL until the transaction ends; SQLite has one writer."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(lock)))


def _is_database(address: str) -> bool:
    return "://" in address and not address.startswith(("http://", "https://", "clickhouse://"))


def _make_engine(address: str, layout: Layout | None) -> "Engine":
    if layout is None:
        try:
            return sa.create_engine(address, pool_pre_ping=True)
        except (sa.exc.ArgumentError, ModuleNotFoundError, sa.exc.NoSuchModuleError) as exc:
            raise ConfigError(
                f"no state at {address.partition('@')[2] or address!r}: {exc}; name one like "
                "postgresql+psycopg://user@host/database (pip install 'psycopg[binary]')"
            ) from exc
    path = layout.state_path
    # A connection costs 0.1 ms; kept ones would have to know of threads and forks.
    engine = sa.create_engine(
        f"sqlite:///{path}", poolclass=sa.pool.NullPool, connect_args={"timeout": _BUSY_S}
    )

    @sa.event.listens_for(engine, "do_connect")
    def make(*_: object) -> None:
        layout.refuse_links()
        # SQLite would make it readable for others; what stands beside it takes its mode. Never
        # opened once it is there: to close a file lets go of every lock the process has on it.
        if not path.exists():
            with contextlib.suppress(OSError):
                write_private(path, b"")

    @sa.event.listens_for(engine, "connect")
    def prepare(opened: "sqlite3.Connection", _: object) -> None:
        opened.isolation_level = None  # else Python begins transactions of its own
        opened.execute("PRAGMA journal_mode = WAL")
        opened.execute("PRAGMA synchronous = NORMAL")
        opened.execute("PRAGMA secure_delete = ON")  # what is deleted leaves no text in the file

    @sa.event.listens_for(engine, "begin")
    def begin(connection: "Connection") -> None:
        # A transaction that has read cannot go on to write once another has written: who will
        # write says so at once.
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


_ENGINES: "weakref.WeakSet[Engine]" = weakref.WeakSet()


def _forget_connections() -> None:
    # They are the parent's: a child that used or closed one would disturb it.
    for engine in _ENGINES:
        engine.dispose(close=False)


os.register_at_fork(after_in_child=_forget_connections)
