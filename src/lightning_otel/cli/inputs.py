"""Files as spans: documents one after the other, and sessions of coding agents as they grow."""

import contextlib
import gzip
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel.cli.output import format_size, progress_bar
from lightning_otel.errors import ReceiveError, StoreError, TooLargeError
from lightning_otel.messages import object_of
from lightning_otel.types.values import parse_json

if TYPE_CHECKING:
    from io import BufferedReader

    from lightning_otel.dataset import Store
    from lightning_otel.receivers.sessions import SessionReader
    from lightning_otel.types import Span

_BATCH: Final = 1000
_BATCH_CHARACTERS: Final = 32 << 20
_PEEK_LINES: Final = 50
"""Of a file, in which the first record of a session's conversation stands."""
_SHORTEST: Final = 1000
"""Bytes that a line or row counts at least: a span is about as long, and takes its time."""
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
Refuse = Callable[[int, str], None]
"""Counts a line, by its number, or a span in it that could not be read."""


class _Session:
    """A session file, and how far it was read.

    Attributes:
        reader: None for a file that is no session.
        end: The byte after its last line that was read.
    """

    def __init__(self, reader: "SessionReader | None") -> None:
        self.reader = reader
        self.end = self.lines = 0
        self.is_told = False


class FileReader:
    """Reads files into a store.

    Attributes:
        known: Attempts that were not read, as the store recorded them itself.
    """

    def __init__(self, opened: "Store", limit_bytes: int, *, is_following: bool) -> None:
        self._opened = opened
        self._is_following = is_following
        self._limit_bytes = limit_bytes
        self._traces: dict[tuple[str, str], set[str]] | None = None
        self._sessions: dict[Path, _Session] = {}
        self.known = 0

    def keep_spans(self, path: Path, refuse: Refuse) -> int:
        """Keep the spans of a file, and return how many there are."""
        session, size = _Session(_open_session(path)), path.stat().st_size
        if self._is_following and session.reader is not None:
            self._sessions[path] = session
            return self.keep_growth(path, refuse)
        with progress_bar(path.name.replace("[", r"\[")) as progress:

            def read() -> "Iterator[Span]":
                for text, number, end in _read_documents(path, refuse, self._limit_bytes):
                    yield from self._read_spans(text, partial(refuse, number), session.reader)
                    if progress is not None:
                        progress(end, size)
                if session.reader is not None:
                    yield from session.reader.flush()

            return self._keep_all(read())

    def keep_growth(self, path: Path, refuse: Refuse) -> int:
        """Keep what came to a session since it was read; what nothing came to is flushed."""
        session = self._sessions.get(path)
        if session is None or session.reader is None:  # its first lines may come late
            session = self._sessions[path] = _Session(_open_session(path))
        if (reader := session.reader) is None:
            return 0
        if path.stat().st_size <= session.end:
            if session.is_told:
                return 0
            session.is_told = True
            return self._keep_all(reader.flush(is_over=False))
        session.is_told = False

        def read() -> "Iterator[Span]":
            with path.open("rb") as raw, _open_inflated(raw) as file:
                file.seek(session.end)
                for line in file:
                    if not line.endswith(b"\n"):  # it is being written
                        break
                    session.end += len(line)
                    session.lines += 1
                    if not line.isspace():
                        told = partial(refuse, session.lines)
                        yield from self._read_spans(line, told, reader)

        return self._keep_all(read())

    def end_sessions(self) -> int:
        """Keep what the ends of followed sessions complete; return how many spans that are."""
        readers = [each.reader for each in self._sessions.values() if each.reader is not None]
        self._sessions = {}
        return self._keep_all(span for reader in readers for span in reader.flush())

    def _keep_all(self, spans: "Iterable[Span]") -> int:
        count = characters = 0
        batch: list[Span] = []
        for span in spans:
            batch.append(span)
            values = span.attributes.values()
            characters += sum(len(each) for each in values if isinstance(each, str))
            if len(batch) >= _BATCH or characters >= _BATCH_CHARACTERS:
                count += self._keep_batch(batch)
                batch, characters = [], 0
        return count + self._keep_batch(batch)

    def _keep_batch(self, batch: "list[Span]") -> int:
        try:
            self._opened.writer().add_all(batch)
        except OSError as exc:
            raise StoreError(
                f"cannot write to {self._opened.name}: {exc.strerror or exc}; make room and import "
                "again: what is there already is not stored twice"
            ) from exc
        return len(batch)

    def _read_spans(
        self, text: bytes, refuse: Callable[[str], None], reader: "SessionReader | None"
    ) -> "Iterator[Span]":
        from lightning_otel.receivers import Rejected, coding_agents, documents

        try:
            if reader is not None:
                records = coding_agents.read_line(reader, text)
            else:
                records = documents.decode_spans(text, self._is_recorded)
            for each in records:
                if not isinstance(each, Rejected):
                    yield each
                elif each.is_known:
                    self.known += 1
                else:
                    refuse(each.reason)
        except ReceiveError as exc:
            refuse(exc.what)

    def _is_recorded(self, span: "Span") -> bool:
        if self._traces is None:
            self._traces = {}
            layout = self._opened.layout
            if layout is not None and layout.exists():
                query = "SELECT DISTINCT rollout_id, attempt_id, trace_id FROM spans"
                for row in self._opened.sql(query):
                    attempt = row["rollout_id"] or row["trace_id"], row["attempt_id"] or "1"
                    self._traces.setdefault(attempt, set()).add(row["trace_id"])
        traces = self._traces.get((span.rollout_id, span.attempt_id), set())
        return bool(traces - {span.trace_id})


@contextlib.contextmanager
def list_files(paths: Iterable[Path], limit_bytes: int) -> Iterator[Callable[[], list[Path]]]:
    """Give what lists the files: of a folder each ``.jsonl`` below it, of a zip what it holds.

    Raises:
        TooLargeError: A zip holds more than a limit.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folders: list[Path] = []
        for number, path in enumerate(paths):
            if path.is_dir() or not zipfile.is_zipfile(path):
                folders.append(path)
                continue
            with zipfile.ZipFile(path) as archive:
                if sum(each.file_size for each in archive.infolist()) > limit_bytes:
                    size = format_size(limit_bytes)
                    raise TooLargeError(f"{path} holds more than {size}; raise --limit")
                folder = Path(scratch, str(number), path.name)
                archive.extractall(folder)
            folders += sorted(each for each in folder.rglob("*") if each.is_file())

        def list_them() -> list[Path]:
            return [
                file
                for path in folders
                for file in (sorted(path.rglob("*.jsonl")) if path.is_dir() else [path])
            ]

        yield list_them


def _open_session(path: Path) -> "SessionReader | None":
    """Return a reader of a session file; None for another file."""
    from lightning_otel.receivers.coding_agents import open_session
    from lightning_otel.receivers.documents import FILE_LIMITS

    beside = path.with_suffix(".meta.json")
    try:
        about = object_of(parse_json(beside.read_text()) if beside.is_file() else None)
        with path.open("rb") as raw, _open_inflated(raw) as file:
            lines = iter(lambda: file.readline(FILE_LIMITS.body_bytes), b"")
            return open_session(islice(lines, _PEEK_LINES), about)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, ReceiveError):
        return None  # who reads it all says why


def _read_documents(
    path: Path, refuse: Refuse, limit_bytes: int
) -> Iterator[tuple[bytes, int, int]]:
    """Yield the lines that say something, with their number and how far into the file they end.

    Of a file whose first line is no JSON by itself, that is all of it.
    """
    from lightning_otel.dataset.tables import is_parquet, read_parquet
    from lightning_otel.receivers.documents import FILE_LIMITS

    most = FILE_LIMITS.body_bytes
    number = 0
    try:
        if is_parquet(path):
            rows = (row.encode() for row in read_parquet(path))
            for number, row in enumerate(_limit_lines(rows, limit_bytes), 1):
                yield row, number, 0
            return
        with path.open("rb") as raw, _open_inflated(raw) as file:
            if _is_one_document(file, most, limit_bytes):
                text = file.read(most + 1).removeprefix(_BYTE_ORDER_MARK)
                yield text, 1, path.stat().st_size
                return
            lines = _limit_lines(iter(lambda: file.readline(most + 1), b""), limit_bytes)
            for line in lines:
                number += 1
                if len(line) > most:
                    refuse(number, f"line is longer than {most} bytes")
                    while line and not line.endswith(b"\n"):
                        line = next(lines, b"")
                elif not line.isspace():
                    yield line.removeprefix(_BYTE_ORDER_MARK), number, raw.tell()
    except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
        refuse(number + 1, f"the gzip is damaged from here on: {exc}")
    except ReceiveError as exc:
        refuse(number + 1, str(exc))


def _limit_lines(lines: Iterable[bytes], limit_bytes: int) -> Iterator[bytes]:
    """Yield lines until they are more than a limit.

    Raises:
        TooLargeError: There are more.
    """
    size = 0
    for line in lines:
        size += max(len(line), _SHORTEST)
        if size > limit_bytes:
            raise TooLargeError(
                f"the file holds more than {format_size(limit_bytes)}, and a line counts "
                f"{_SHORTEST} bytes at least; split it, or raise --limit"
            )
        yield line


def _open_inflated(raw: "BufferedReader") -> "BufferedReader | gzip.GzipFile":
    """Open a file, inflated if it is a gzip, whatever its name."""
    start = raw.read(4)
    raw.seek(0)
    if start == _ZSTD:
        raise ReceiveError("the file is compressed by zstd; decompress it: zstd -d FILE")
    return gzip.GzipFile(fileobj=raw) if start.startswith(b"\x1f\x8b") else raw


def _is_one_document(file: "BufferedReader | gzip.GzipFile", most: int, limit_bytes: int) -> bool:
    """Return True for a file that is one JSON document over several lines."""
    lines = map(bytes.strip, _limit_lines(iter(lambda: file.readline(most), b""), limit_bytes))
    line = next(filter(None, lines), b"")
    file.seek(0)
    # A damaged line ends anyhow; the first line of a printed document opens something.
    return line.endswith((b"{", b"[", b","))
