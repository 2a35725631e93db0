"""What of a settled file a consumer was not given yet, in the order of each process."""

import itertools
import logging
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel.store.catalogue import ensure_catalogue
from lightning_otel.store.damage import avoid, avoided, look, tell
from lightning_otel.store.layout import EMPTY_DATA, Layout
from lightning_otel.store.position import Key, key_of
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.sql import new_connection, quoted
from lightning_otel.store.tail import Found, Numbers

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

_MEMORY: Final = "400MB"
_NARROW: Final = 20_000
_WIDE: Final = 256


def unread(
    layout: Layout,
    path: Path,
    known: Callable[[Collection[Key]], set[Key]],
    since_ns: int,
    numbers_of: Callable[[str], Numbers],
) -> Iterator[list[Found] | None]:
    """The ended spans of a file that were not delivered, some at a time.

    Ids first: of a file whose spans came from its segments nothing else is read.

    Args:
        layout: The store's paths.
        path: The file.
        known: Which of some spans were delivered.
        since_ns: Spans that started earlier are left out.
        numbers_of: What was read of a process; its spans wait there for those that ended before
            them and stand in another file or segment.

    Yields:
        Spans, those of one process by the number of their end; None if the file cannot be read.
    """
    import duckdb

    ensure_catalogue(layout)
    avoid(layout, look(layout, layout.read_manifest()))
    tell(layout)
    if path.name in avoided(layout):
        yield None
        return
    with (
        tempfile.TemporaryDirectory(prefix="lightning-otel-") as spill,
        new_connection() as con,
    ):
        con.execute("SET threads = 1")
        con.execute(f"SET memory_limit = '{_MEMORY}'")
        con.execute(f"SET temp_directory = {quoted(spill)}")
        try:
            # Beside the file without rows, whose columns are those of today.
            both = [quoted(str(each)) for each in (layout.data / EMPTY_DATA, path)]
            con.execute(
                "CREATE VIEW every AS SELECT * FROM read_parquet("
                f"[{', '.join(both)}], file_row_number=true, union_by_name=true)"
            )
            con.execute(
                "CREATE VIEW ended AS SELECT * FROM every "
                f"WHERE end_ns IS NOT NULL AND start_ns >= {int(since_ns)}"
            )
            is_whole = _choose(con, known)
            if is_whole is not None:
                processes = _note(con, numbers_of)
                for found in _rows(con, is_whole=is_whole):
                    yield _in_turn(found, numbers_of)
                for process in processes:
                    yield numbers_of(process).ready([])
        except duckdb.Error:
            log.debug("%s cannot be read", path, exc_info=True)
            yield None


def _choose(
    con: "duckdb.DuckDBPyConnection", known: Callable[[Collection[Key]], set[Key]]
) -> bool | None:
    """Note in ``wanted`` which rows were not delivered: whether all of them; None if none."""
    con.execute("CREATE TABLE wanted (row BIGINT)")
    cursor = con.cursor()
    cursor.execute("SELECT trace_id, span_id, file_row_number FROM ended")
    is_whole, is_any = True, False
    while rows := cursor.fetchmany(_NARROW):
        keys = {key_of(trace_id, span_id): row for trace_id, span_id, row in rows}
        delivered = known(keys.keys())
        wanted = [row for key, row in keys.items() if key not in delivered]
        is_whole = is_whole and len(wanted) == len(rows)
        if wanted:
            is_any = True
            con.execute("INSERT INTO wanted SELECT unnest(?)", [wanted])
    return is_whole if is_any else None


def _note(con: "duckdb.DuckDBPyConnection", numbers_of: Callable[[str], Numbers]) -> list[str]:
    """Take in the numbers that stand in the file, those of spans that never ended too.

    Returns:
        The processes they are of.
    """
    processes: list[str] = []
    cursor = con.cursor()
    cursor.execute(
        "SELECT process, list(sequence), list(end_sequence) FROM every "
        "WHERE process <> '' AND sequence >= 0 GROUP BY process"
    )
    while rows := cursor.fetchmany(_WIDE):
        for process, starts, ends in rows:
            every = [number for number in (*starts, *ends) if number >= 0]
            numbers_of(process).note(every, min(every))
            processes.append(process)
    return processes


def _in_turn(found: list[Found], numbers_of: Callable[[str], Numbers]) -> list[Found]:
    """Those that need not wait; the rows come process by process."""
    ready: list[Found] = []
    for process, rows in itertools.groupby(found, lambda each: each.record["process"]):
        own = [each._replace(number=each.record["end_sequence"]) for each in rows]
        # Those without a place in a process wait for nothing. What was read live and waits here may
        # have to wait for the file's next rows.
        waiting = process and own[0].number >= 0
        ready += numbers_of(process).ready(own, until=own[-1].number) if waiting else own
    return ready


def _rows(con: "duckdb.DuckDBPyConnection", *, is_whole: bool) -> Iterator[list[Found]]:
    join = "" if is_whole else "SEMI JOIN wanted ON wanted.row = ended.file_row_number"
    names = list(COLUMNS)
    cursor = con.cursor()
    cursor.execute(
        f"SELECT {', '.join(names)} FROM ended {join} ORDER BY process, end_sequence, start_ns"
    )
    while rows := cursor.fetchmany(_WIDE):
        records = [dict(zip(names, row, strict=True)) for row in rows]
        yield [
            Found(
                key_of(record["trace_id"], record["span_id"]), record, "", 0, -1, _size_of(record)
            )
            for record in records
        ]


def _size_of(record: dict[str, object]) -> int:
    return sum(len(value) for value in record.values() if isinstance(value, str))
