"""A DuckDB connection over a store: the one place where a read recovers from damage.

It shows the store at one moment, which several connections may share. A query that fails is asked
once more, without parts that turn out damaged or were taken away meanwhile.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from lightning_otel.errors import StoreError
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
_TRIES: Final = 5
"""As often a settler may take files away; damage is excluded for good, and so is not counted."""


class Moment:
    """What counts for all connections that are made of it: looked at by the first of them.

    ``prepare`` takes the first look; ``is_shared`` if several connections show the moment.
    """

    def __init__(
        self,
        layout: Layout,
        prepare: Callable[[Layout], Snapshot] = Snapshot.take,
        *,
        is_shared: bool = False,
    ) -> None:
        self.layout, self.is_shared = layout, is_shared
        self._look = prepare
        self._snapshot: Snapshot | None = None

    def snapshot(self) -> Snapshot:
        """Return what counts."""
        if self._snapshot is None:
            self._snapshot = self._look(self.layout).fix()
            self._look = Snapshot.take
        return self._snapshot

    def renew(self) -> None:
        """Let what counts be looked at once more."""
        self._snapshot = None


class Reader(_Connection):
    """A connection with the views of a store; all other calls go to DuckDB's own, ``con``."""

    def __init__(
        self,
        con: "duckdb.DuckDBPyConnection",
        moment: Moment | None = None,
        define: Define | None = None,
    ) -> None:
        self.con = con
        self._moment, self._define = moment, define
        self._layout = moment.layout if moment is not None else None
        self._snapshot: Snapshot | None = None
        self._rows: Iterator[Any] = iter(())
        self._is_within = False
        self.run(lambda: None)

    def attempt(self, act: Callable[[], T]) -> T:
        """Return the result of a function, called again after a part of the store was excluded."""
        import duckdb

        if self._is_within:  # the outer act begins again
            return act()
        tries = _TRIES
        while True:
            self._is_within = True
            try:
                self._follow_snapshot()
                return act()
            except duckdb.Error as exc:
                tries -= 1
                if not self._can_recover(exc, is_last=tries <= 0):
                    raise
            finally:
                self._is_within = False

    def run(self, act: Callable[[], T]) -> T:
        """Return the result of a function as :meth:`attempt` does; DuckDB's errors become ours."""
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
        """Redefine the views if the store has changed, unless others look at the same moment."""
        if self._moment is None or self._moment.is_shared:
            return
        if self._snapshot != Snapshot.take(self._moment.layout):
            self._forget_snapshot()

    def error(self, exc: "duckdb.Error") -> StoreError:
        """Return the error that says what of the store one of DuckDB's is about."""
        return explain(exc, self._layout)

    def execute(  # type: ignore[override]
        self, query: str, parameters: Sequence[object] = ()
    ) -> Self:
        """Run a query and hold its rows; large results are read with a cursor."""
        rows = self.run(lambda: self.con.execute(query, parameters or None).fetchall())
        self._rows = iter(rows)
        return self

    def fetchall(self) -> list[Any]:
        """Return the rows that are left."""
        return list(self._rows)

    def fetchone(self) -> tuple[Any, ...] | None:
        """Return the next row, if there is one."""
        return next(self._rows, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.con, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.con.close()

    def _follow_snapshot(self) -> None:
        if self._moment is None or self._define is None or self._snapshot is not None:
            return
        snapshot = self._moment.snapshot()
        self._define(self.con, snapshot)
        self._snapshot = snapshot
        warn_of_missing_spans(self._moment.layout, snapshot.manifest)

    def _forget_snapshot(self) -> None:
        self._snapshot = None
        if self._moment is not None:
            self._moment.renew()

    def _can_recover(self, exc: "duckdb.Error", *, is_last: bool) -> bool:
        """Return whether another attempt would read something else."""
        import duckdb

        if self._layout is None:
            return False
        before, excluded = self._snapshot, Snapshot.take(self._layout).excluded
        self._forget_snapshot()
        if damage := recover(exc, self._layout):
            return not excluded >= damage.keys()
        if not isinstance(exc, duckdb.IOException) or is_last:
            return False
        # Facts that were merged or deleted are read, or computed, anew.
        return str(self._layout.facts) in str(exc) or before != Snapshot.take(self._layout)
