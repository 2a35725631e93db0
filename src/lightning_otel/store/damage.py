"""Which settled file cannot be read, where DuckDB's own words often leave it open."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel.errors import StoreError
from lightning_otel.store.layout import Layout
from lightning_otel.store.views import quoted

if TYPE_CHECKING:
    import duckdb

_SUFFIX: Final = ".parquet"


@contextlib.contextmanager
def reading(layout: Layout | None, verb: str = "read") -> Iterator[None]:
    """A block in which a damaged file of the store is an error that names it.

    Args:
        layout: The store's paths; None if it has no files.
        verb: What is done to the store, for the error where no file is damaged.

    Raises:
        StoreError: DuckDB cannot read one of the store's files.
    """
    import duckdb

    try:
        yield
    except duckdb.Error as exc:
        if layout is None:
            raise StoreError(
                f"cannot {verb} the spans: {' '.join(str(exc).split())}; look after what holds them"
            ) from exc
        raise damage_of(exc, layout.data) or StoreError(
            f"cannot {verb} {layout.catalogue}: {exc}; see: lightning-otel doctor"
        ) from exc


def damage_of(exc: "duckdb.Error", data: Path) -> StoreError | None:
    """The error that names the damaged file behind one of DuckDB's; None if none is behind it.

    Args:
        exc: What DuckDB raised.
        data: The folder of settled files.
    """
    damaged = _damaged(exc, data)
    if damaged is None:
        return None
    path, why = damaged
    return StoreError(
        f"cannot read {path}, which is damaged ({why}); restore it from a copy, or move it "
        "elsewhere: all other spans can be read then"
    )


def _damaged(exc: "duckdb.Error", data: Path) -> tuple[Path, str] | None:
    import duckdb

    text = str(exc)
    suspects = sorted(data.glob(f"*{_SUFFIX}"))
    # Errors of the Parquet reader that name no file have no class of their own; those of a user's
    # query always do, and are not worth a look at every file.
    is_nameless = type(exc) is duckdb.Error or isinstance(exc, duckdb.OperationalError)
    if not is_nameless or str(data) in text:
        suspects = [path for path in suspects if str(path) in text]
    faults = ((path, _fault(path)) for path in suspects)
    return next(((path, fault) for path, fault in faults if fault), None)


def _fault(path: Path) -> str:
    """Why not every value of a file can be read; empty if all can, or the file is gone."""
    import duckdb

    try:
        with duckdb.connect() as con:
            con.execute("SET enable_progress_bar = false")
            con.execute(f"SELECT bit_xor(hash(COLUMNS(*))) FROM read_parquet({quoted(str(path))})")
            con.fetchall()
    except duckdb.Error as exc:
        return str(exc).partition("\n")[0].replace(str(path), path.name) if path.exists() else ""
    return ""
