"""``import``: spans of files into the store, with every line that is none named."""

import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from lightning_otel.cli.options import store_option
from lightning_otel.cli.output import count_noun, format_size, print_note, progress_bar, suggest
from lightning_otel.errors import ConfigError, ReceiveError, StoreError, TooLargeError
from lightning_otel.types.text import parse_size

if TYPE_CHECKING:
    from io import BufferedReader

    from lightning_otel.dataset import Store
    from lightning_otel.types import Span

_MOST_NAMED: Final = 5
_BATCH: Final = 1000
_BATCH_CHARACTERS: Final = 32 << 20
_LIMIT: Final = "2GB"
_SHORTEST: Final = 1000
"""Bytes that a line or row counts at least: a span is about as long, and takes its time."""
Refuse = Callable[[int, str], None]
"""Counts a line, by its number, or a span in it that could not be read."""


@click.command("import")
@click.argument(
    "files", nargs=-1, required=True,
    type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
)  # fmt: skip
@click.option("--limit", default=_LIMIT, show_default=True, metavar="SIZE",
              help="Read no more than SIZE of a file, decompressed.")  # fmt: skip
@store_option
def import_files(files: tuple[Path, ...], limit: str, store: str | None) -> int:
    """Read spans from FILES into the store: what is there already is not stored again.

    A file holds OTLP JSON lines, as a Collector's file exporter writes them, what export spans
    wrote, spans of Agent Lightning 0.3 (mongoexport, GET /v1/agl/spans, model_dump_json), ATIF
    documents, or an export of LangSmith, Langfuse, MLflow or Phoenix, whose scores become rewards;
    it may be a gzip. LangSmith's bulk exports and Phoenix's data frames are also read from Parquet.
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
    if unread := [str(path) for path in files if not path.is_file()]:
        raise ConfigError(f"{unread[0]} is a pipe or device; save what it gives to a file first")
    rejected: Counter[str] = Counter()
    named: list[str] = []

    def refuse(path: Path, number: int, reason: str) -> None:
        rejected[reason] += 1
        if len(named) < _MOST_NAMED:
            named.append(f"  {path}, line {number}: {reason}")

    before = _count_spans(opened)
    reader = _Reader(opened, limit_bytes)
    spans = sum(reader.keep_spans(path, partial(refuse, path)) for path in files)
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


def _count_spans(opened: "Store") -> int:
    if opened.layout is None or not opened.layout.exists():
        return 0
    ((count,),) = (row.values() for row in opened.sql("SELECT count(*) FROM spans").dicts())
    return int(count)


class _Reader:
    """Reads files into a store.

    Attributes:
        known: Attempts that were not read, as the store recorded them itself.
    """

    def __init__(self, opened: "Store", limit_bytes: int) -> None:
        self._opened = opened
        self._limit_bytes = limit_bytes
        self._traces: dict[tuple[str, str], set[str]] | None = None
        self.known = 0

    def keep_spans(self, path: Path, refuse: Refuse) -> int:
        count = characters = 0
        batch: list[Span] = []
        size = path.stat().st_size
        with progress_bar(path.name.replace("[", r"\[")) as progress:
            for text, number, end in _read_documents(path, refuse, self._limit_bytes):
                for span in self._read_spans(text, partial(refuse, number)):
                    batch.append(span)
                    values = span.attributes.values()
                    characters += sum(len(each) for each in values if isinstance(each, str))
                    if len(batch) >= _BATCH or characters >= _BATCH_CHARACTERS:
                        count += self._keep_batch(batch)
                        batch, characters = [], 0
                if progress is not None:
                    progress(end, size)
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

    def _read_spans(self, text: bytes, refuse: Callable[[str], None]) -> "Iterator[Span]":
        from lightning_otel.receivers import Rejected, documents

        try:
            for each in documents.decode_spans(text, self._is_recorded):
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
