"""``import``: spans of files into the store, with every line that is none named."""

import gzip
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from lightning_otel.cli.options import store_option
from lightning_otel.cli.output import count_noun, format_size, print_note, progress_bar, suggest
from lightning_otel.errors import ConfigError, ReceiveError, StoreError, TooLargeError
from lightning_otel.messages import object_of
from lightning_otel.types.text import parse_size
from lightning_otel.types.values import parse_json

if TYPE_CHECKING:
    from io import BufferedReader

    from lightning_otel.dataset import Store
    from lightning_otel.receivers.sessions import SessionReader
    from lightning_otel.types import Span

_MOST_NAMED: Final = 5
_BATCH: Final = 1000
_BATCH_CHARACTERS: Final = 32 << 20
_LIMIT: Final = "2GB"
_PEEK_LINES: Final = 50
"""Of a file, in which the first record of a session's conversation stands."""
_POLL_S: Final = 1.0
_SHORTEST: Final = 1000
"""Bytes that a line or row counts at least: a span is about as long, and takes its time."""
Refuse = Callable[[int, str], None]
"""Counts a line, by its number, or a span in it that could not be read."""


@click.command("import")
@click.argument(
    "files", nargs=-1, required=True,
    type=click.Path(exists=True, readable=True, path_type=Path),
)  # fmt: skip
@click.option("--follow", is_flag=True,
              help="Go on as sessions of coding agents grow, until interrupted.")  # fmt: skip
@click.option("--limit", default=_LIMIT, show_default=True, metavar="SIZE",
              help="Read no more than SIZE of a file, decompressed.")  # fmt: skip
@store_option
def import_files(files: tuple[Path, ...], follow: bool, limit: str, store: str | None) -> int:
    """Read spans from FILES into the store: what is there already is not stored again.

    A file holds OTLP JSON lines, as a Collector's file exporter writes them, what export spans
    wrote, spans of Agent Lightning 0.3 (mongoexport, GET /v1/agl/spans, model_dump_json), ATIF
    documents, or an export of LangSmith, Langfuse, MLflow or Phoenix, whose scores become rewards;
    it may be a gzip. LangSmith's bulk exports and Phoenix's data frames are also read from Parquet.
    Sessions of Claude Code and Codex are read as well, and of a folder each .jsonl below it.

    An attempt that the store recorded itself is not read again from its ATIF document. No more than
    --limit is read of a file; what stands before is kept. Exits with 1 if anything could not be
    read.
    """
    from lightning_otel.dataset import Store

    opened = Store(store)
    if opened.layout is None:
        raise ConfigError("import needs a store on disk; name one with --store")
    limit_bytes = parse_size(limit)
    if not limit_bytes:
        raise ConfigError(f"--limit {limit} is no size; write it as 10GB, 500MB or 1.5GiB")
    if unread := [str(path) for path in files if not (path.is_file() or path.is_dir())]:
        raise ConfigError(f"{unread[0]} is a pipe or device; save what it gives to a file first")
    rejected: Counter[str] = Counter()
    named: list[str] = []

    def refuse(path: Path, number: int, reason: str) -> None:
        rejected[reason] += 1
        if len(named) < _MOST_NAMED:
            named.append(f"  {path}, line {number}: {reason}")

    before = _count_spans(opened)
    reader = _Reader(opened, limit_bytes, is_following=follow)
    spans = sum(reader.keep_spans(path, partial(refuse, path)) for path in _list_files(files))
    if follow:
        spans += _follow_sessions(reader, files, refuse)
    spans += reader.end_sessions()
    opened.writer().seal()
    new = _count_spans(opened) - before
    print_note(f"⚡ {count_noun(spans, 'span')} read, {new} new → {opened.name}")
    if reader.known:
        print_note(f"  {count_noun(reader.known, 'attempt')} not read: the store recorded them")
    for line in named:
        print_note(line)
    if rejected.total() > len(named):
        for reason, count in rejected.most_common():
            print_note(f"  in all {count} × {reason}")
    if new:
        suggest("ls", store)
    return 1 if rejected else 0


def _list_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files, and of a folder each ``.jsonl`` below it."""
    return [
        file
        for path in paths
        for file in (sorted(path.rglob("*.jsonl")) if path.is_dir() else [path])
    ]


def _follow_sessions(
    reader: "_Reader", paths: Iterable[Path], refuse: Callable[[Path, int, str], None]
) -> int:
    """Read what comes to sessions, and new ones in the folders, until interrupted."""
    count = 0
    print_note("  following; end with Ctrl-C")
    try:
        while True:
            time.sleep(_POLL_S)
            for path in _list_files(paths):
                count += reader.keep_growth(path, partial(refuse, path))
    except KeyboardInterrupt:
        return count


def _count_spans(opened: "Store") -> int:
    if opened.layout is None or not opened.layout.exists():
        return 0
    ((count,),) = (row.values() for row in opened.sql("SELECT count(*) FROM spans").dicts())
    return int(count)


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


class _Reader:
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
    except (OSError, EOFError, UnicodeDecodeError, zlib.error):
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
                yield file.read(most + 1), 1, path.stat().st_size
                return
            lines = _limit_lines(iter(lambda: file.readline(most + 1), b""), limit_bytes)
            for line in lines:
                number += 1
                if len(line) > most:
                    refuse(number, f"line is longer than {most} bytes")
                    while line and not line.endswith(b"\n"):
                        line = next(lines, b"")
                elif not line.isspace():
                    yield line, number, raw.tell()
    except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
        refuse(number + 1, f"the gzip is damaged from here on: {exc}")
    except TooLargeError as exc:
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
    is_gzip = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if is_gzip else raw


def _is_one_document(file: "BufferedReader | gzip.GzipFile", most: int, limit_bytes: int) -> bool:
    """Return True for a file that is one JSON document over several lines."""
    lines = map(bytes.strip, _limit_lines(iter(lambda: file.readline(most), b""), limit_bytes))
    line = next(filter(None, lines), b"")
    file.seek(0)
    # A damaged line ends anyhow; the first line of a printed document opens something.
    return line.endswith((b"{", b"[", b","))
