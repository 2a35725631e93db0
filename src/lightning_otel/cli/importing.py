"""``import``: spans of files into the store, with every line that is none named."""

import contextlib
import gzip
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from lightning_otel.cli.output import count_noun, store_option, suggest, talk
from lightning_otel.errors import ConfigError, ReceiveError, StoreError

if TYPE_CHECKING:
    from io import BufferedReader

    from lightning_otel.dataset import Store
    from lightning_otel.types import Span

_MOST_NAMED: Final = 5
_BATCH: Final = 1000


class _Document(NamedTuple):
    """A line of a file, or all of it; and how far into the file it ends."""

    text: bytes
    number: int
    end: int


@click.command("import")
@click.argument(
    "files", nargs=-1, required=True,
    type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
)  # fmt: skip
@store_option
def import_files(files: tuple[Path, ...], store: str | None) -> int:
    """Read spans from FILES into the store: what is there already is not stored again.

    A file holds OTLP JSON lines, as a Collector's file exporter writes them, what export spans
    wrote, or spans of Agent Lightning 0.3 (mongoexport, GET /v1/agl/spans, model_dump_json); it may
    be a gzip. Exits with 1 if anything in it could not be read.
    """
    from lightning_otel.dataset import Store

    opened = Store(store)
    if opened.layout is None:
        raise ConfigError("import needs a store on disk; name one with --store")
    before = _count_spans(opened)
    found = _Import(opened)
    for path in files:
        found.read(path)
    opened.writer().seal()
    new = _count_spans(opened) - before
    talk(f"⚡ {count_noun(found.spans, 'span')} read, {new} new → {opened.name}")
    found.tell()
    if new:
        suggest("ls", store)
    return 1 if found.rejected else 0


def _count_spans(opened: "Store") -> int:
    if opened.layout is None or not opened.layout.exists():
        return 0
    ((count,),) = (row.values() for row in opened.sql("SELECT count(*) FROM spans").dicts())
    return int(count)


class _Import:
    """Files being read into one store, and what could not be."""

    def __init__(self, opened: "Store") -> None:
        self._opened = opened
        self.spans = 0
        self.rejected: Counter[str] = Counter()
        self._named: list[str] = []

    def read(self, path: Path) -> None:
        """Keep the spans of a file."""
        batch: list[Span] = []
        with _show_progress(path) as advance:
            for document in _read_documents(path, self):
                for span in self._read_spans(document, path):
                    batch.append(span)
                    if len(batch) >= _BATCH:
                        self._keep_batch(batch)
                        batch = []
                advance(document.end)
            self._keep_batch(batch)

    def refuse(self, path: Path, number: int, reason: str) -> None:
        """Count a line, or a span in it, that could not be read."""
        self.rejected[reason] += 1
        if len(self._named) < _MOST_NAMED:
            self._named.append(f"  {path}, line {number}: {reason}")

    def tell(self) -> None:
        """Say what could not be read, and where the first of it stands."""
        for line in self._named:
            talk(line)
        if self.rejected.total() > len(self._named):
            for reason, count in self.rejected.most_common():
                talk(f"  in all {count} × {reason}")

    def _read_spans(self, document: _Document, path: Path) -> "Iterator[Span]":
        from lightning_otel.receivers import Rejected, documents

        try:
            found: Iterable[Span | Rejected] = documents.spans_in(document.text)
        except ReceiveError as exc:
            self.refuse(path, document.number, exc.what)
            return
        for each in found:
            if isinstance(each, Rejected):
                self.refuse(path, document.number, each.reason)
            else:
                yield each

    def _keep_batch(self, batch: "list[Span]") -> None:
        try:
            self._opened.writer().take(batch)
        except OSError as exc:
            raise StoreError(
                f"cannot write to {self._opened.name}: {exc.strerror or exc}; make room and import "
                "again: what is there already is not stored twice"
            ) from exc
        self.spans += len(batch)


def _read_documents(path: Path, found: _Import) -> Iterator[_Document]:
    """The lines of a file that say something; of a file whose first line is no JSON, all of it."""
    from lightning_otel.receivers.documents import FILE_LIMITS

    most = FILE_LIMITS.body_bytes
    number = 0
    with path.open("rb") as raw, _open_inflated(raw) as file:
        try:
            if _is_one_document(file, most):
                yield _Document(file.read(most + 1), 1, path.stat().st_size)
                return
            while line := file.readline(most + 1):
                number += 1
                if len(line) > most:
                    found.refuse(path, number, f"line is longer than {most} bytes")
                    while line and not line.endswith(b"\n"):
                        line = file.readline(most)
                elif not line.isspace():
                    yield _Document(line, number, raw.tell())
        except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
            found.refuse(path, number + 1, f"the gzip is damaged from here on: {exc}")


def _open_inflated(raw: "BufferedReader") -> "BufferedReader | gzip.GzipFile":
    """Open a file, inflated if it is a gzip, whatever its name."""
    is_gzip = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if is_gzip else raw


def _is_one_document(file: "BufferedReader | gzip.GzipFile", most: int) -> bool:
    """Return whether a file is one JSON document over several lines."""
    line = file.readline(most).strip()
    while not line and file.peek(1):
        line = file.readline(most).strip()
    file.seek(0)
    # A damaged line ends anyhow; the first line of a printed document opens something.
    return line.endswith((b"{", b"[", b","))


@contextlib.contextmanager
def _show_progress(path: Path) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, over the bytes of a file."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    is_shown = sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=not is_shown) as bar:
        task = bar.add_task(path.name.replace("[", r"\["), total=path.stat().st_size)
        yield lambda end: bar.update(task, completed=end)
