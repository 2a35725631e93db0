"""Ended spans of a store as they arrive, from live segments and settled files.

Spans of one process come in the order of its own numbers. A thread takes its number before it
writes, so a later number may stand first: its span waits for the missing one, but not for ever, as
the disk may have refused that line.
"""

import hashlib
import itertools
import logging
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

from lightning_otel.errors import StoreError
from lightning_otel.store.layout import Layout
from lightning_otel.store.lines import parse_line
from lightning_otel.store.live import COARSE_NS
from lightning_otel.store.manifest import DataFile
from lightning_otel.store.schema import COLUMNS, Record
from lightning_otel.store.snapshot import Snapshot
from lightning_otel.store.table import Query

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

HOLD_S: Final = 0.5
"""How long a span waits for one that ended before it and was not read yet."""
_MOST_HELD: Final = 5_000
_BLOCK_BYTES: Final = 1 << 20
_LONGEST: Final = 64 << 20
_NARROW: Final = 20_000
_WIDE: Final = 256

Key = bytes
"""Twelve bytes that stand for a span's trace and span id."""


def make_key(trace_id: str, span_id: str) -> Key:
    """Hash a span's ids: of 10 million spans two share a key with a chance of 1e-15."""
    text = f"{trace_id}/{span_id}".encode("utf-8", "replace")
    return hashlib.blake2b(text, digest_size=12).digest()


class Ended(NamedTuple):
    """An ended span.

    Attributes:
        number: Position of its end in its process; -1 for a span from elsewhere.
        size: Length of its line, more or less.
    """

    key: Key
    record: Record
    number: int
    size: int


class _Order:
    """Spans of one process, each held until those that ended before it were read."""

    def __init__(self) -> None:
        self.held: list[Ended] = []
        self._seen = -1
        self._ahead: set[int] = set()
        self._since = 0.0

    def note(self, numbers: Collection[int], first: int | None) -> None:
        """Take in numbers of starts and ends; the first one is expected if nothing was read yet."""
        if self._seen < 0:
            if first is None:
                return
            self._seen = first - 1
        was_whole = not self._ahead
        self._ahead.update(number for number in numbers if number > self._seen)
        self._advance_heads()
        if self._ahead and was_whole:
            self._since = time.monotonic()

    def ready(self, found: Iterable[Ended] = (), until: int | None = None) -> list[Ended]:
        """Return the spans that need not wait, of those given and those held.

        Args:
            found: Spans just read.
            until: The last of their numbers, where more are about to be read that are noted.
        """
        every = [*self.held, *found]
        if any(each.number > self._seen for each in every) and (
            time.monotonic() - self._since >= HOLD_S or len(every) > _MOST_HELD
        ):
            self._seen = max(each.number for each in every)
            self._ahead = {number for number in self._ahead if number > self._seen}
            self._advance_heads()
            self._since = time.monotonic()
        last = self._seen if until is None else min(self._seen, until)
        self.held = [each for each in every if each.number > last]
        return sorted((e for e in every if e.number <= last), key=lambda each: each.number)

    def _advance_heads(self) -> None:
        while self._seen + 1 in self._ahead:
            self._seen += 1
            self._ahead.discard(self._seen)


class Arrivals:
    """Reads, pass by pass, the spans that a consumer does not have.

    Attributes:
        files: Names of data files of which every span was read.
        skipped_ns: What ended before this time in a file made before it is passed over.
    """

    def __init__(
        self,
        layout: Layout,
        known: Callable[[Collection[Key]], set[Key]],
        files: Iterable[str],
        *,
        since_ns: int,
    ) -> None:
        """Begin at the oldest span; ``known`` returns which of some spans the consumer has."""
        self.files = set(files)
        self.skipped_ns = 0
        self._layout = layout
        self._known = known
        self._since_ns = since_ns
        self._offsets: dict[str, int] = {}
        self._orders: defaultdict[str, _Order] = defaultdict(_Order)
        self._unreadable: set[str] = set()

    @property
    def is_holding(self) -> bool:
        """True if spans wait for one that ended before them."""
        return any(order.held for order in self._orders.values())

    def read(self) -> Generator[list[Ended], None, None]:
        """Yield what there is and was not read yet: first what is settled, as it is older."""
        snapshot = Snapshot.take(self._layout)
        names = {path.name for path in snapshot.segments}
        self._offsets = {name: at for name, at in self._offsets.items() if name in names}
        self.files &= {file.name for file in snapshot.files}
        for file in snapshot.files:
            is_early = file.max_start_ns < self._since_ns
            if is_early or file.name in self.files or file.name in self._unreadable:
                continue
            try:
                yield from self._read_file(file)
            except StoreError as exc:
                self._unreadable.add(file.name)
                log.warning("spans of %s are not delivered: %s", file.name, exc)
            else:
                self.files.add(file.name)
        for path in snapshot.segments:
            try:
                yield from self._read_segment(path)
            except FileNotFoundError:
                # Settled and taken away: what it held comes first, so nothing newer is read now.
                return
        for order in list(self._orders.values()):
            if order.held:
                yield order.ready()

    def _read_segment(self, path: Path) -> Iterator[list[Ended]]:
        status = path.stat()
        offset = self._offsets.get(path.name, 0)
        if status.st_size <= offset or status.st_mtime_ns < self._since_ns - COARSE_NS:
            return
        process, _, number = path.stem.rpartition("-")
        with path.open("rb") as file:
            file.seek(offset)
            while lines := _read_lines(file):
                offset += sum(map(len, lines))
                self._offsets[path.name] = offset
                yield self._take_lines(lines, process, is_first=int(number) == 0)

    def _take_lines(self, lines: list[bytes], process: str, *, is_first: bool) -> list[Ended]:
        spans: list[Ended] = []
        numbers: list[int] = []
        for line in lines:
            record = parse_line(line)
            is_own = record.get("process") == process
            if is_own:
                places = record.get("sequence"), record.get("end_sequence")
                numbers += [number for number in places if type(number) is int and number >= 0]
            if _is_ended_span(record):
                number = record["end_sequence"] if is_own else -1
                key = make_key(record["trace_id"], record["span_id"])
                spans.append(Ended(key, record, number, len(line)))
        own = [each for each in spans if each.number >= 0]
        order = self._orders[process]
        # In a later segment starts that were written anew stand first: they tell nothing of what
        # came between.
        order.note(numbers, 1 if is_first else min((each.number for each in own), default=None))
        return [each for each in spans if each.number < 0] + order.ready(own)

    def _read_file(self, file: DataFile) -> Iterator[list[Ended]]:
        """Yield what is not known of a file; ids first, for nothing else is read of known spans."""
        from lightning_otel.store.parquet import bounded_connection
        from lightning_otel.store.reader import Reader
        from lightning_otel.store.snapshot import rows_sql
        from lightning_otel.store.source import prepare

        made_ns = int(file.name.split("-")[1])  # of merged files that of the oldest
        is_old = made_ns < self.skipped_ns
        wanted = f"start_ns >= {self._since_ns} AND end_ns >= {self.skipped_ns if is_old else 0}"

        def define(con: "duckdb.DuckDBPyConnection", snapshot: Snapshot) -> None:
            files = [each for each in snapshot.files if each.name == file.name]
            con.execute(f"CREATE OR REPLACE VIEW every AS FROM {rows_sql(self._layout, files)}")

        prepare(self._layout)
        with (
            tempfile.TemporaryDirectory(prefix="lightning-otel-") as spill,
            bounded_connection(Path(spill)) as con,
        ):
            reader = Reader(con, self._layout, define)
            numbers, unknown = self._scan_ids(reader, wanted)
            if unknown:
                for process, own in numbers.items():
                    self._orders[process].note(own, min(own))
                yield from self._read_rows(reader, unknown)
                for process in numbers:
                    yield self._orders[process].ready()

    def _scan_ids(
        self, con: "duckdb.DuckDBPyConnection", wanted: str
    ) -> tuple[Mapping[str, list[int]], list[int]]:
        """Return the numbers that stand in a file by process, and the rows that are not known."""
        query = (
            "SELECT trace_id, span_id, file_row_number, process, sequence, end_sequence, "
            f"{wanted} FROM every"
        )
        numbers: defaultdict[str, list[int]] = defaultdict(list)
        unknown: list[int] = []
        for rows in Query(con, query).batches(_NARROW)[1]:
            keys = [make_key(trace_id, span_id) for trace_id, span_id, *_ in rows]
            known = self._known(keys)
            for key, (_, _, row, process, first, last, is_wanted) in zip(keys, rows, strict=True):
                if process and first >= 0:
                    numbers[process] += [first, last] if last >= 0 else [first]
                if is_wanted and key not in known:
                    unknown.append(row)
        return numbers, unknown

    def _read_rows(
        self, con: "duckdb.DuckDBPyConnection", numbers: list[int]
    ) -> Iterator[list[Ended]]:
        query = (
            f"SELECT {', '.join(COLUMNS)} FROM every SEMI JOIN (SELECT unnest(?::BIGINT[]) AS row) "
            "ON row = file_row_number ORDER BY process, end_sequence, start_ns"
        )
        names, batches = Query(con, query, [numbers]).batches(_WIDE)
        for rows in batches:
            found = [_ended_of(dict(zip(names, row, strict=True))) for row in rows]
            for process, spans in itertools.groupby(found, lambda each: each.record["process"]):
                own = list(spans)
                if process and own[0].number >= 0:
                    yield self._orders[process].ready(own, until=own[-1].number)
                else:
                    yield own


def _read_lines(file: BinaryIO) -> list[bytes]:
    """Read some whole lines; none where there is none yet."""
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


def _ended_of(row: Record) -> Ended:
    size = sum(len(value) for value in row.values() if isinstance(value, str))
    return Ended(make_key(row["trace_id"], row["span_id"]), row, row["end_sequence"], size)
