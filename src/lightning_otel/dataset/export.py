"""Rows of a format in a file: JSON lines, Parquet, or a folder that Hugging Face's datasets reads.

A file stands at its place once it is whole, and is the user's alone. Rows are written as they are
made: memory does not grow with them.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from lightning_otel.adapter import Adaptation
from lightning_otel.adapter.selection import StepSelection
from lightning_otel.dataset import formats
from lightning_otel.dataset.card import Facts, RowFile, write_card
from lightning_otel.dataset.census import TRAIN, Census, Split
from lightning_otel.dataset.certificate import IN_FOLDER, find_certificate, write_certificate
from lightning_otel.dataset.formats.format import LeftOut, Row
from lightning_otel.dataset.tables import write_rows
from lightning_otel.errors import ConfigError
from lightning_otel.store.files import private_file
from lightning_otel.store.sql import new_connection
from lightning_otel.store.table import Query, json_line
from lightning_otel.types import Report, Trajectory
from lightning_otel.types.transitions import distinct

FileKind: TypeAlias = Literal["jsonl", "parquet", "folder"]
Place: TypeAlias = str | os.PathLike[str] | Callable[[Row], None] | None

_KINDS: Final[Mapping[str, FileKind]] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet",
}  # fmt: skip
_TABLE: Final = "data/{}-00000-of-00001.parquet"


@dataclass(frozen=True, slots=True)
class Exported:
    """The funnel of an export, with every reason.

    Attributes:
        format: The format's name.
        report: From spans to transitions, of every agent.
        rows: How many rows were made.
        left_out: How many steps are in no row, by reason, the most frequent first.
        partial: How many steps are in a row without something, by what it is.
        span_ids: The first step's span, by each of these reasons.
        steps: How many distinct steps came: those in rows and those left out.
        in_rows: How many of them are in rows; None if the format does not tell.
        tasks: How many tasks fell on each side of a split.
    """

    format: str
    report: Report
    rows: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)
    partial: Mapping[str, int] = field(default_factory=dict)
    span_ids: Mapping[str, str] = field(default_factory=dict)
    steps: int = 0
    in_rows: int | None = 0
    tasks: Mapping[str, int] = field(default_factory=dict)


def export(
    adaptations: Callable[[], Iterable[Adaptation]],
    name: str,
    place: Place,
    *,
    kind: FileKind | None = None,
    wanted: StepSelection,
    split: Split,
    source: str | None,
    left_out: Callable[[LeftOut], None] | None = None,
    progress: Callable[[int], None] | None = None,
    options: Mapping[str, Any],
    query: Mapping[str, Any],
) -> Exported:
    """Write the rows of a format, as ``Store.export`` does.

    Card and certificate name ``query``; the store's name ``source`` asks for a certificate.
    """
    path = None if place is None or callable(place) else Path(place)
    if source is not None and (path is None or _is_stream(path)):
        raise ConfigError("a certificate tells of files; name a file or folder for the rows")
    if split.share is not None and callable(place):
        raise ConfigError("a split writes two files; name a file or folder for the rows")
    layout = formats.get(name)
    is_folder = path is not None and kind_of(path, kind) == "folder"
    is_full = is_folder or source is not None  # card and certificate tell of tasks, too
    is_divided = is_full or split.share is not None
    census = Census(is_full=is_full)

    def read(side: str) -> Iterator[Trajectory]:
        rollouts = 0
        for part in adaptations():
            names = set(split.list_rollouts(part, side)) if is_divided else None
            chosen = (
                path
                for path in layout.trajectories_of(part)
                if names is None or path.rollout_id in names
            )
            paths = [path for path in map(wanted.part_of, chosen) if path is not None]
            for step, _ in distinct(paths):
                census.add_step(step)
            yield from paths
            if side == TRAIN:
                census.add_part(part)
                rollouts += part.report.rollouts
                if progress is not None:
                    progress(rollouts)

    def note(part: LeftOut) -> None:
        census.leave_out(part)
        if left_out is not None:
            left_out(part)

    def make_rows(side: str) -> Iterator[Row]:
        for row in formats.rows(name, read(side), left_out=note, **options):
            census.add_row(layout.steps_of(row))
            yield row

    def describe(parts: Sequence[RowFile]) -> dict[str, bytes]:
        facts = Facts(name, parts, census, split, {**query, **options})
        texts = {"README.md": write_card(facts, columns)} if is_folder else {}
        if path is not None and source is not None:
            certificate = IN_FOLDER if is_folder else find_certificate(path).name
            texts[certificate] = write_certificate(facts, dict(texts), source)
        return texts

    formats.rows(name, (), **options)  # refuses what is wrong before anything is read or made
    columns = layout.choose_columns(layout.columns, options)
    sides = {side: make_rows(side) for side in split.tasks}
    number = save_rows(sides, place, kind, columns, describe)
    return Exported(
        format=name,
        report=Report.total(census.reports),
        rows=number,
        left_out=census.list_reasons(),
        partial=census.list_reasons(is_row_written=True),
        span_ids=census.span_ids,
        steps=census.steps,
        in_rows=census.in_rows,
        tasks={} if split.share is None else {side: len(t) for side, t in split.tasks.items()},
    )


def kind_of(path: str | os.PathLike[str], kind: FileKind | None = None) -> FileKind:
    """Return what is written to a path: as it was said, else as its name says."""
    if kind is not None:
        return kind
    name, suffix = os.fspath(path), Path(path).suffix.lower()
    if _is_stream(Path(name)):
        return "jsonl"
    if name.endswith(os.sep) or Path(name).is_dir() or not suffix:
        return "folder"
    if file_kind := _KINDS.get(suffix):
        return file_kind
    raise ConfigError(f"unknown output format: {name}; end it in .jsonl or .parquet")


def save_rows(
    sides: Mapping[str, Iterable[Row]],
    place: Place,
    kind: FileKind | None,
    columns: Mapping[str, str],
    describe: Callable[[Sequence[RowFile]], Mapping[str, bytes]] = lambda _: {},
) -> int:
    """Write the rows of each side, and the texts that are made of the files; return their number.

    The rows of validation stand beside those of training, with ``.validation`` before the ending.
    A file is replaced once all are written.
    """
    if place is None or callable(place):
        take = place or (lambda _: None)
        return sum(1 for rows in sides.values() for _ in map(take, rows))
    kind, path, parts = kind_of(place, kind), Path(place), list[RowFile]()
    check_place(path, kind)
    with ExitStack() as stack:
        folder = stack.enter_context(_new_folder(path)) if kind == "folder" else path.parent
        for side, rows in sides.items():
            name = _TABLE.format(side)
            if kind != "folder":
                more = "" if side == TRAIN else f".{side}"
                name = f"{path.name.removesuffix(path.suffix)}{more}{path.suffix}"
            final = folder / name
            target = final if _is_stream(final) else stack.enter_context(private_file(final))
            parts.append(RowFile(side, name, target, _write_rows(rows, target, kind, columns)))
        for name, text in describe(parts).items():
            stack.enter_context(private_file(folder / name)).write_bytes(text)
    return sum(part.rows for part in parts)


def _write_rows(rows: Iterable[Row], path: Path, kind: FileKind, columns: Mapping[str, str]) -> int:
    number = count()
    numbered = (row for row, _ in zip(rows, number, strict=False))
    if kind == "jsonl":
        with path.open("wb") as file:
            file.writelines(map(json_line, numbered))
    else:
        _write_parquet(numbered, path, columns)
    return next(number)


def check_place(path: Path, kind: FileKind) -> None:
    """Refuse a place where nothing can be written, before anything is read."""
    parent = Path(os.path.realpath(path)).parent
    if not parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {parent}; name another place")
    if _is_stream(path):
        if kind != "jsonl":
            raise ConfigError(f"{path} takes JSON lines alone; name a file")
        return
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write {path}: permission denied; name another place")
    if kind == "folder":
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise ConfigError(f"{path} exists already; name a new folder, or remove it")
    elif path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; name a file")


def _is_stream(path: Path) -> bool:
    """Return whether nothing may take its place, such as that of a pipe."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Make a folder that is there once it is whole."""
    import shutil

    final = Path(os.path.realpath(path))
    folder = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        (folder / _TABLE).parent.mkdir(mode=0o700)
        yield folder
        folder.replace(final)
    except OSError as exc:
        exc.filename = exc.filename or str(path)  # a write that fails does not say of what
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_parquet(rows: Iterable[Row], path: Path, columns: Mapping[str, str]) -> None:
    # Of a file that is deleted when closed, a full disk leaves an error for the end of the program.
    with (
        tempfile.TemporaryDirectory(dir=path.parent) as folder,
        Path(folder, "rows.ndjson").open("w+b") as file,
    ):
        query = Query(new_connection(), f"FROM {write_rows(rows, columns, file)}")
        if not columns and not query.count():
            raise ConfigError("no rows, and the format names no columns; write JSON lines")
        query.to_parquet(path)
