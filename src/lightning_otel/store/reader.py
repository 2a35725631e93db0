"""A DuckDB connection over a store: the one place where a read recovers from damage.

A query that fails is asked once more of what counts then: without a file or segment that turns out
to be damaged, which is put aside and reported, and without a file that was taken away meanwhile.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Self, SupportsInt, TypeVar

from lightning_otel.errors import StoreDamagedError, StoreError
from lightning_otel.store.damage import explain, recover, warn_of_missing_spans
from lightning_otel.store.layout import Layout
from lightning_otel.store.snapshot import Snapshot

if TYPE_CHECKING:
    import duckdb

    _Connection = duckdb.DuckDBPyConnection
else:
    _Connection = object

T = TypeVar("T")
Define = Callable[["duckdb.DuckDBPyConnection", Snapshot], None]
_CUT_OFF: Final = "a part of the store was damaged while it was read; read again for the rest"
_TRIES: Final = 5
"""As often a settler may take files away; damage is excluded for good, and so is not counted."""


class Reader(_Connection):
    """A connection with the views of a store; whatever else is asked of it DuckDB's own answers.

    Attributes:
        con: DuckDB's own.
    """

    def __init__(
        self,
        con: "duckdb.DuckDBPyConnection",
        layout: Layout | None = None,
        define: Define | None = None,
    ) -> None:
        """Define the views."""
        self.con = con
        self._layout, self._define = layout, define
        self._snapshot: Snapshot | None = None
        self._statement: tuple[str, Sequence[object]] | None = None
        self._is_within = False
        self.answered(lambda: None)

    def attempt(self, act: Callable[[], T]) -> T:
        """Return what an act gives, tried again where a part of the store had to be excluded."""
        import duckdb

        if self._is_within:  # the outer act begins again
            return act()
        left = _TRIES
        while True:
            self._is_within = True
            try:
                self._follow_snapshot()
                return act()
            except duckdb.Error as exc:
                left -= 1
                if not self._can_recover(exc, is_last=left <= 0):
                    raise
            finally:
                self._is_within = False

    def answered(self, act: Callable[[], T]) -> T:
        """Return what an act of several queries gives, as :meth:`attempt`."""
        import duckdb

        if self._is_within:
            return act()
        try:
            return self.attempt(act)
        except duckdb.OutOfMemoryException:
            raise  # it says nothing about the store
        except duckdb.Error as exc:
            raise self.error(exc) from exc

    def refresh(self) -> None:
        """Have the views show what counts now; a connection that stays open was made long ago."""
        if self._layout is not None and self._snapshot != Snapshot.take(self._layout):
            self._snapshot = None

    def error(self, exc: "duckdb.Error") -> StoreError:
        """Return the error that says what of the store one of DuckDB's is about."""
        return explain(exc, self._layout)

    def execute(  # type: ignore[override]
        self, query: str, parameters: Sequence[object] = ()
    ) -> Self:
        """Put a query, as DuckDB's own ``execute``."""
        self._statement = query, parameters
        self.answered(lambda: self.con.execute(query, parameters or None))
        return self

    def fetchall(self) -> list[Any]:
        """Return the rows that are left."""
        return self._fetch_again(lambda: self.con.fetchall())

    def fetchone(self) -> tuple[Any, ...] | None:
        """Return the next row, if there is one."""
        return self._fetch_again(lambda: self.con.fetchone())

    def fetchmany(self, size: SupportsInt = 1) -> list[Any]:
        """Return the next rows."""
        return self._fetch_again(lambda: self.con.fetchmany(size))

    def cursor(self) -> "duckdb.DuckDBPyConnection":
        """Return another one on the same database."""
        if self._is_within:
            return self.con.cursor()
        found = Reader(self.con.cursor())
        found._layout, found._define, found._snapshot = self._layout, self._define, self._snapshot
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.con, name)

    def __enter__(self) -> Self:
        """It, to be closed at the end of the block."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close it."""
        self.con.close()

    def _fetch_again(self, fetch: Callable[[], T]) -> T:
        """Fetch; the statement is put again only while nothing of its result was handed out."""
        statement, self._statement = self._statement, None
        tries = 0

        def act() -> T:
            nonlocal tries
            tries += 1
            if tries > 1:
                if statement is None:
                    raise StoreDamagedError(_CUT_OFF)
                self.con.execute(statement[0], statement[1] or None)
            return fetch()

        return self.answered(act)

    def _follow_snapshot(self) -> None:
        """Define the views, unless they show the latest snapshot."""
        if self._layout is None or self._define is None or self._snapshot is not None:
            return
        snapshot = Snapshot.take(self._layout)
        self._define(self.con, snapshot)
        self._snapshot = snapshot
        warn_of_missing_spans(self._layout)

    def _can_recover(self, exc: "duckdb.Error", *, is_last: bool) -> bool:
        """Tell whether there is something else to be read now."""
        import duckdb

        if self._layout is None:
            return False
        before, known = self._snapshot, Snapshot.take(self._layout).excluded
        self._snapshot = None
        if found := recover(exc, self._layout):
            return not known >= found.keys()
        if not isinstance(exc, duckdb.IOException) or is_last:
            return False
        return before != Snapshot.take(self._layout)
