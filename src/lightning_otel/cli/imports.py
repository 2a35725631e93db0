"""``import``: spans of files into the store, with every line that is none named."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import click

from lightning_otel.cli.archives import list_files
from lightning_otel.cli.inputs import FileReader
from lightning_otel.cli.options import SignalStop, store_option
from lightning_otel.cli.output import count_noun, print_note, suggest
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError
from lightning_otel.types.text import parse_size

_MOST_NAMED: Final = 5
_LIMIT: Final = "2GB"
_POLL_S: Final = 1.0


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

    A file holds OTLP JSON (traces or logs), what export spans wrote, spans of Agent Lightning 0.3,
    an export of Langfuse, LangSmith, MLflow, Phoenix or Jaeger, ATIF documents, chat messages, or
    requests with their responses. Scores become rewards. It may be CSV or Parquet, a gzip,
    Zstandard or a zip. Sessions of Claude Code and Codex are read as well, and of a folder each
    .jsonl below it, compressed or not. docs/capture.md says where each comes from.

    An attempt that the store recorded itself is not read again from its ATIF document. No more than
    --limit is read of a file; what stands before is kept. Exits with 1 if anything could not be
    read.
    """
    opened = Store(store)
    if opened.layout is None:
        raise ConfigError("import needs a store on disk; name one with --store")
    limit_bytes = parse_size(limit)
    if not limit_bytes:
        raise ConfigError(f"--limit {limit} is no size; write it as 10GB, 500MB or 1.5GiB")
    if unread := [str(path) for path in files if not (path.is_file() or path.is_dir())]:
        raise ConfigError(f"{unread[0]} is a pipe or device; save what it gives to a file first")
    refusals = _Refusals()
    before = _count_spans(opened)
    reader = FileReader(opened, limit_bytes, is_following=follow)
    spans = 0
    with list_files(files, limit_bytes, refusals.note_file) as list_them:
        for path in list_them():
            try:
                count = reader.keep_spans(path, partial(refusals.note, path))
            except OSError as exc:
                refusals.note_file(path, f"it cannot be read: {exc.strerror or exc}")
                continue
            refusals.end_file(path, is_empty=not count)
            spans += count
        if follow:
            spans += _follow_sessions(reader, list_them, refusals)
    spans += reader.end_sessions()
    opened.writer().seal()
    new = _count_spans(opened) - before
    print_note(f"⚡ {count_noun(spans, 'span')} read, {new} new → {opened.name}")
    if reader.open:
        answers = count_noun(reader.open, "answer")
        print_note(f"  {answers} not read: still being written; import again when it is whole")
    if reader.grown:
        answers = count_noun(reader.grown, "answer")
        print_note(f"  {answers} half in the store, from when the file was; use a new --store")
    if reader.known:
        print_note(f"  {count_noun(reader.known, 'attempt')} not read: the store recorded them")
    refusals.print_all()
    if new:
        suggest("ls", store)
    return 1 if refusals.counts else 0


class _Refusals:
    """What could not be read: each of the first few by its line, of another file's kind in one."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._lines: list[str] = []
        self._of_file: Counter[str] = Counter()
        self._joined = 0  # refusals beyond the first that a file's line stands for

    def note(self, path: Path, number: int, reason: str) -> None:
        self.counts[reason] += 1
        self._of_file[reason] += 1
        if len(self._lines) < _MOST_NAMED:
            self._lines.append(f"  {path}, line {number}: {reason}")

    def note_file(self, path: Path, reason: str) -> None:
        self.counts[reason] += 1
        self._lines.append(f"  {path}: {reason}")

    def end_file(self, path: Path, *, is_empty: bool) -> None:
        counts, self._of_file = self._of_file, Counter()
        if is_empty and len(counts) == 1 and counts.total() > 1:
            ((reason, count),) = counts.items()
            prefix = f"  {path}, "
            others = [line for line in self._lines if not line.startswith(prefix)]
            self._joined += count - 1
            self._lines = [*others, f"  {path}: {count} × {reason}; see import --help"]

    def print_all(self) -> None:
        for line in self._lines:
            print_note(line)
        if self.counts.total() > len(self._lines) + self._joined:
            for reason, count in self.counts.most_common():
                print_note(f"  in all {count} × {reason}")


def _follow_sessions(
    reader: FileReader, list_them: Callable[[], list[Path]], refusals: _Refusals
) -> int:
    count = 0
    print_note("  following; end with Ctrl-C")
    with SignalStop() as stop:
        while not stop.wait(_POLL_S):
            paths = list_them()
            count += reader.end_missing({*paths})
            for path in paths:
                count += reader.keep_growth(path, partial(refusals.note, path))
    return count


def _count_spans(opened: Store) -> int:
    if opened.layout is None or not opened.layout.exists():
        return 0
    ((count,),) = (row.values() for row in opened.sql("SELECT count(*) FROM spans").dicts())
    return int(count)
