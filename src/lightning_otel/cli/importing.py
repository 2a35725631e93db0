"""``import``: spans of files into the store, with every line that is none named."""

import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from lightning_otel.cli.output import count_noun, print_note, progress_bar, store_option, suggest
from lightning_otel.errors import ConfigError, ReceiveError, StoreError

if TYPE_CHECKING:
    from io import BufferedReader

    from lightning_otel.dataset import Store
    from lightning_otel.types import Span

_MOST_NAMED: Final = 5
_BATCH: Final = 1000
_BATCH_CHARACTERS: Final = 32 << 20
Refuse = Callable[[int, str], None]
"""Counts a line, by its number, or a span in it that could not be read."""


@click.command("import")
@click.argument(
    "files", nargs=-1, required=True,
    type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
)  # fmt: skip
@store_option
def import_files(files: tuple[Path, ...], store: str | None) -> int:
    """Read spans from FILES into the store: what is there already is not stored again.

    A file holds OTLP JSON lines, as a Collector's file exporter writes them, what export spans
    wrote, spans of Agent Lightning 0.3 (mongoexport, GET /v1/agl/spans, model_dump_json), ATIF
    documents, or an export of LangSmith, Langfuse, MLflow or Phoenix, whose scores become rewards;
    it may be a gzip. Exits with 1 if anything in it could not be read.
    """
    from lightning_otel.dataset import Store

    opened = Store(store)
    if opened.layout is None:
        raise ConfigError("import needs a store on disk; name one with --store")
    rejected: Counter[str] = Counter()
    named: list[str] = []

    def refuse(path: Path, number: int, reason: str) -> None:
        rejected[reason] += 1
        if len(named) < _MOST_NAMED:
            named.append(f"  {path}, line {number}: {reason}")

    before = _count_spans(opened)
    spans = sum(_keep_spans(opened, path, partial(refuse, path)) for path in files)
    opened.writer().seal()
    new = _count_spans(opened) - before
    print_note(f"⚡ {count_noun(spans, 'span')} read, {new} new → {opened.name}")
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


def _keep_spans(opened: "Store", path: Path, refuse: Refuse) -> int:
    """Keep the spans of a file, and return how many there are."""
    count = characters = 0
    batch: list[Span] = []
    size = path.stat().st_size
    with progress_bar(path.name.replace("[", r"\[")) as progress:
        for text, number, end in _read_documents(path, refuse):
            for span in _read_spans(text, partial(refuse, number)):
                batch.append(span)
                characters += sum(len(v) for v in span.attributes.values() if isinstance(v, str))
                if len(batch) >= _BATCH or characters >= _BATCH_CHARACTERS:
                    count += _keep_batch(opened, batch)
                    batch, characters = [], 0
            if progress is not None:
                progress(end, size)
        return count + _keep_batch(opened, batch)


def _keep_batch(opened: "Store", batch: "list[Span]") -> int:
    try:
        opened.writer().add_all(batch)
    except OSError as exc:
        raise StoreError(
            f"cannot write to {opened.name}: {exc.strerror or exc}; make room and import "
            "again: what is there already is not stored twice"
        ) from exc
    return len(batch)


def _read_spans(text: bytes, refuse: Callable[[str], None]) -> "Iterator[Span]":
    from lightning_otel.receivers import Rejected, documents

    try:
        for each in documents.decode_spans(text):
            if isinstance(each, Rejected):
                refuse(each.reason)
            else:
                yield each
    except ReceiveError as exc:
        refuse(exc.what)


def _read_documents(path: Path, refuse: Refuse) -> Iterator[tuple[bytes, int, int]]:
    """Yield the lines that say something, with their number and how far into the file they end.

    Of a file whose first line is no JSON by itself, that is all of it.
    """
    from lightning_otel.receivers.documents import FILE_LIMITS

    most = FILE_LIMITS.body_bytes
    number = 0
    with path.open("rb") as raw, _open_inflated(raw) as file:
        try:
            if _is_one_document(file, most):
                yield file.read(most + 1), 1, path.stat().st_size
                return
            while line := file.readline(most + 1):
                number += 1
                if len(line) > most:
                    refuse(number, f"line is longer than {most} bytes")
                    while line and not line.endswith(b"\n"):
                        line = file.readline(most)
                elif not line.isspace():
                    yield line, number, raw.tell()
        except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
            refuse(number + 1, f"the gzip is damaged from here on: {exc}")


def _open_inflated(raw: "BufferedReader") -> "BufferedReader | gzip.GzipFile":
    """Open a file, inflated if it is a gzip, whatever its name."""
    is_gzip = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if is_gzip else raw


def _is_one_document(file: "BufferedReader | gzip.GzipFile", most: int) -> bool:
    """Return True for a file that is one JSON document over several lines."""
    line = file.readline(most).strip()
    while not line and file.peek(1):
        line = file.readline(most).strip()
    file.seek(0)
    # A damaged line ends anyhow; the first line of a printed document opens something.
    return line.endswith((b"{", b"[", b","))
