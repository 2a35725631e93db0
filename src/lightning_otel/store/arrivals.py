"""Ended spans of a store as they arrive, from live segments and settled files."""

import contextlib
import itertools
import logging
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from lightning_otel.errors import StoreError
from lightning_otel.store.layout import Layout
from lightning_otel.store.lines import parse_line
from lightning_otel.store.live import COARSE_NS
from lightning_otel.store.manifest import DataFile
from lightning_otel.store.parquet import bounded_connection, find_settled_ns, settled_rows_sql
from lightning_otel.store.position import Bound, Ended, Key, Numbers, Place, Position, make_key
from lightning_otel.store.quarantine import read_notes
from lightning_otel.store.reader import Moment, Reader
from lightning_otel.store.schema import COLUMNS, Record
from lightning_otel.store.snapshot import Snapshot, rows_sql
from lightning_otel.store.table import Query

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

_BLOCK_BYTES: Final = 1 << 20
_LONGEST: Final = 64 << 20
_NARROW: Final = 20_000
_WIDE: Final = 256


class Arrivals:
    """Reads, pass by pass, the spans that a consumer does not have.

    ``bound`` is what the last pass has read to the end; None where something is left to read.
    """

    def __init__(self, layout: Layout, position: Position, *, since_ns: int) -> None:
        self.bound: Bound | None = None
        self._layout, self._position, self._since_ns = layout, position, since_ns
        self._read: set[str] = set()
        self._unreadable: set[str] = set()
        self._offsets: dict[str, int] = {}
        self._keys: defaultdict[str, set[Key]] = defaultdict(set)
        self._numbers: defaultdict[str, Numbers] = defaultdict(Numbers)

    def read(self) -> Generator[list[Ended], None, None]:
        """Yield what there is and was not read yet: first what is settled, as it is older."""
        snapshot = Snapshot.take(self._layout)
        self._forget_segments({path.name for path in snapshot.segments})
        self._read &= {file.name for file in snapshot.files}
        for file in snapshot.files:
            if self._has_file(file):
                continue
            self.bound = None
            if file.name in self._unreadable:
                continue
            try:
                yield from self._read_file(file)
            except StoreError as exc:
                self._unreadable.add(file.name)
                log.warning("spans of %s are not delivered: %s", file.name, exc)
            else:
                self._read.add(file.name)
        for path in snapshot.segments:
            try:
                yield from self._read_segment(path, snapshot)
            except FileNotFoundError:
                # Settled and taken away: what it held comes first, so nothing newer is read now.
                self.bound = None
                return
        self.bound = self._make_bound(snapshot)

    def advance_position(self) -> None:
        """Note that all up to the bound was delivered; what tells of spans in segments is kept."""
        assert self.bound is not None
        origins = {Path(name).stem for name in self._offsets}
        keys = itertools.chain.from_iterable(self._keys.values())
        self._position.advance(self.bound, origins, keys)

    def find_newest_ns(self) -> int:
        """Return when the last of the spans was settled that now stand in files."""
        files = Snapshot.take(self._layout).files
        return max((find_settled_ns(self._layout.data, file) for file in files), default=0)

    def _forget_segments(self, names: set[str]) -> None:
        processes = {name.rpartition("-")[0] for name in names}
        for name in self._offsets.keys() - names:
            del self._offsets[name]
            self._keys.pop(name, None)
        for process in self._numbers.keys() - processes:
            del self._numbers[process]

    def _has_file(self, file: DataFile) -> bool:
        return (
            file.max_start_ns < self._since_ns
            or file.name in self._read
            or find_settled_ns(self._layout.data, file) <= self._position.settled_ns
        )

    def _make_bound(self, snapshot: Snapshot) -> Bound | None:
        """Return what a pass has read, unless a file may come back that the consumer has not."""
        folder, before_ns = self._layout.data, self._position.settled_ns
        times = [find_settled_ns(folder, file) for file in snapshot.files]
        settled_ns = max([before_ns, *times])
        if settled_ns > before_ns:
            names = {file.name for file in snapshot.files} - self._unreadable
            missing = [f for f in self._layout.read_manifest().live_files if f.name not in names]
            notes = read_notes(self._layout)
            missing += [note.file for note in notes if note.is_open and note.file is not None]
            if any(not f.settled_ns or before_ns < f.settled_ns <= settled_ns for f in missing):
                return None
        segments = frozenset(path.stem for path in snapshot.segments)
        return Bound(settled_ns, segments.union(Path(name).stem for name in snapshot.excluded))

    def _read_segment(self, path: Path, snapshot: Snapshot) -> Iterator[list[Ended]]:
        status = path.stat()
        offset = self._offsets.get(path.name, 0)
        if status.st_size <= offset or status.st_mtime_ns < self._since_ns - COARSE_NS:
            return
        with path.open("rb") as file:
            file.seek(offset)
            while lines := _read_lines(file):
                offset += sum(map(len, lines))
                self._offsets[path.name] = offset
                yield self._take_lines(lines, path, snapshot)

    def _take_lines(self, lines: list[bytes], path: Path, snapshot: Snapshot) -> list[Ended]:
        process = path.stem.rpartition("-")[0]
        spans: list[Ended] = []
        places: list[Place] = []
        for line in lines:
            record = parse_line(line)
            if not _is_ended_span(record):
                continue
            key, origin = make_key(record["trace_id"], record["span_id"]), ""
            number = record["end_sequence"] if _is_numbered(record) else -1
            if number >= 0 and record["process"] == process:
                numbers = self._numbers[process]
                numbers.add(record["sequence"])
                if numbers.add(number):
                    origin = path.stem
                else:  # a copy under another id
                    number = -1
            if not origin:
                self._keys[path.name].add(key)
            spans.append(Ended(key, record, origin, False, len(line)))
            places.append(Place(key, str(record.get("process")), number))
        arrivals: list[Ended] = []
        for span, is_new in zip(spans, self._position.select_new(places), strict=True):
            if is_new:
                arrivals.append(span)
            elif span.origin:
                self._position.add(span)  # an older version noted its key
        return self._drop_settled(arrivals, snapshot)

    def _drop_settled(self, spans: list[Ended], snapshot: Snapshot) -> list[Ended]:
        """Leave out spans that came twice: only those without a number can, with the same start."""
        times = [span.record["start_ns"] for span in spans if not span.origin]
        files = [
            file
            for file in snapshot.files
            if any(file.min_start_ns <= time <= file.max_start_ns for time in times)
        ]
        if not files:
            return spans
        query = (
            "SELECT trace_id, span_id FROM every "
            f"WHERE end_ns IS NOT NULL AND start_ns BETWEEN {min(times)} AND {max(times)}"
        )
        with self._open_files(files) as reader:
            keys = {make_key(*ids) for ids in reader.execute(query).fetchall()}
        return [span for span in spans if span.origin or span.key not in keys]

    @contextlib.contextmanager
    def _open_files(self, files: Sequence[DataFile]) -> Iterator[Reader]:
        from lightning_otel.store.source import prepare

        names = {file.name for file in files}

        def define(con: "duckdb.DuckDBPyConnection", snapshot: Snapshot) -> None:
            paths = [self._layout.data / file.name for file in snapshot.files if file.name in names]
            none = f"(SELECT *, NULL::BIGINT AS settled_ns FROM {rows_sql(self._layout, ())})"
            rows = settled_rows_sql(paths) if paths else none
            con.execute(f"CREATE OR REPLACE VIEW every AS FROM {rows}")

        with (
            tempfile.TemporaryDirectory(prefix="lightning-otel-") as spill,
            bounded_connection(Path(spill)) as con,
        ):
            yield Reader(con, Moment(self._layout, prepare), define)

    def _read_file(self, file: DataFile) -> Iterator[list[Ended]]:
        """Yield what is not delivered of a file: ids first, for nothing else is read of others."""
        with self._open_files([file]) as reader:
            rows = self._find_rows(reader)
            if rows:
                yield from self._read_rows(reader, rows)

    def _find_rows(self, con: "duckdb.DuckDBPyConnection") -> list[int]:
        query = (
            "SELECT file_row_number, trace_id, span_id, process, end_sequence FROM every "
            f"WHERE end_ns IS NOT NULL AND start_ns >= {self._since_ns} "
            f"AND coalesce(settled_ns > {self._position.settled_ns}, true)"
        )
        numbers: list[int] = []
        for rows in Query(con, query).batches(_NARROW)[1]:
            places = [
                Place(make_key(trace_id, span_id), process or "", -1 if number is None else number)
                for _, trace_id, span_id, process, number in rows
            ]
            news = zip(rows, self._position.select_new(places), strict=True)
            numbers += [row[0] for row, is_new in news if is_new]
        return numbers

    def _read_rows(
        self, con: "duckdb.DuckDBPyConnection", numbers: list[int]
    ) -> Iterator[list[Ended]]:
        query = (
            f"SELECT {', '.join(COLUMNS)} FROM every SEMI JOIN (SELECT unnest(?::BIGINT[]) AS row) "
            "ON row = file_row_number ORDER BY process, end_sequence, start_ns"
        )
        names, batches = Query(con, query, [numbers]).batches(_WIDE)
        for rows in batches:
            yield [_ended_of(dict(zip(names, row, strict=True))) for row in rows]


def _read_lines(file: BinaryIO) -> list[bytes]:
    block = file.read(_BLOCK_BYTES)
    while b"\n" not in block and len(block) <= _LONGEST and (more := file.read(_BLOCK_BYTES)):
        block += more
    end = block.rfind(b"\n") + 1
    if not end and len(block) > _LONGEST:  # no line of ours: step over it piece by piece
        return [block]
    file.seek(end - len(block), 1)
    return block[:end].splitlines(keepends=True)


def _is_ended_span(record: Record) -> bool:
    """Tell whether a line is one; a damaged line is not, and the settler counts it."""
    get = record.get
    ids = type(get("trace_id")), type(get("span_id"))
    is_ended = get("record") == "span" and get("end_ns") is not None
    return is_ended and ids == (str, str) and type(get("start_ns")) is int


def _is_numbered(record: Record) -> bool:
    """Return whether a span has a number in a process, and its start has one before it."""
    numbers = record.get("sequence"), record.get("end_sequence")
    is_counted = all(type(number) is int and number >= 0 for number in numbers)
    return is_counted and bool(record.get("process"))


def _ended_of(row: Record) -> Ended:
    size = sum(len(value) for value in row.values() if isinstance(value, str))
    origin = f"{row['process']}-" if _is_numbered(row) else ""
    return Ended(make_key(row["trace_id"], row["span_id"]), row, origin, True, size)
