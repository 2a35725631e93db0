"""Rows of a format in a file: JSON lines, Parquet, or a folder that Hugging Face's datasets reads.

A file stands at its place once it is whole, and is the user's alone. Rows are written as they are
made: memory does not grow with them.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from lightning_otel.adapter import Adaptation
from lightning_otel.adapter.selection import Selection
from lightning_otel.dataset import formats
from lightning_otel.dataset.formats.format import LeftOut, Row
from lightning_otel.dataset.tables import write_rows
from lightning_otel.errors import ConfigError
from lightning_otel.store.files import private_file, write_private
from lightning_otel.store.sql import new_connection
from lightning_otel.store.table import Query, json_line
from lightning_otel.types import Report, Trajectory

FileKind: TypeAlias = Literal["jsonl", "parquet", "folder"]
Place: TypeAlias = str | os.PathLike[str] | Callable[[Row], None] | None

_KINDS: Final[Mapping[str, FileKind]] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet",
}  # fmt: skip
_TABLE: Final = "data/train-00000-of-00001.parquet"


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
    """

    format: str
    report: Report
    rows: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)
    partial: Mapping[str, int] = field(default_factory=dict)
    span_ids: Mapping[str, str] = field(default_factory=dict)


def export(
    adaptations: Callable[[], Iterable[Adaptation]],
    name: str,
    place: Place,
    *,
    kind: FileKind | None = None,
    wanted: Selection,
    left_out: Callable[[LeftOut], None] | None = None,
    progress: Callable[[int], None] | None = None,
    options: Mapping[str, Any],
) -> Exported:
    """Write the rows of a format; arguments as ``Store.export`` and :func:`rows` take them."""
    reports: list[Report] = []
    reasons: Counter[tuple[str, bool]] = Counter()
    span_ids: dict[str, str] = {}
    rollouts = 0

    def read() -> Iterator[Adaptation]:
        nonlocal rollouts
        for each in adaptations():
            yield each
            reports.append(each.report)
            rollouts += each.report.rollouts
            if progress is not None:
                progress(rollouts)

    def note(left: LeftOut) -> None:
        reasons[left.reason, left.is_row_written] += 1
        span_ids.setdefault(left.reason, left.step.span_id)
        if left_out is not None:
            left_out(left)

    made = rows(read, name, wanted=wanted, left_out=note, options=options)
    member = formats.get(name)
    count = save_rows(made, place, kind, member.choose_columns(member.columns, options))
    told = reasons.most_common()
    return Exported(
        format=name,
        report=Report.total(reports),
        rows=count,
        left_out={reason: number for (reason, is_written), number in told if not is_written},
        partial={reason: number for (reason, is_written), number in told if is_written},
        span_ids=span_ids,
    )


def rows(
    adaptations: Callable[[], Iterable[Adaptation]],
    name: str,
    *,
    wanted: Selection,
    left_out: Callable[[LeftOut], None] | None = None,
    options: Mapping[str, Any],
) -> Iterator[Row]:
    """Return the rows of a format as they are made; ``adaptations`` begins to read.

    Raises:
        ConfigError: There is no such format or option; said before anything is read.
    """

    def trajectories() -> Iterator[Trajectory]:
        for each in adaptations():
            yield from filter(None, map(wanted.part_of, each.trajectories))

    return formats.rows(name, trajectories(), left_out=left_out, **options)


def kind_of(path: str | os.PathLike[str], kind: FileKind | None = None) -> FileKind:
    """Return what is written to a path: as it was said, else as its name says."""
    if kind is not None:
        return kind
    name, suffix = os.fspath(path), Path(path).suffix.lower()
    if _is_stream(Path(name)):
        return "jsonl"
    if name.endswith(os.sep) or Path(name).is_dir() or not suffix:
        return "folder"
    if found := _KINDS.get(suffix):
        return found
    raise ConfigError(f"unknown output format: {name}; end it in .jsonl or .parquet")


def save_rows(
    rows: Iterable[Row], place: Place, kind: FileKind | None, columns: Mapping[str, str]
) -> int:
    """Write rows to a place and return their number; a file is replaced once all are written."""
    count = 0

    def counted() -> Iterator[Row]:
        nonlocal count
        for row in rows:
            count += 1
            yield row

    if place is None or callable(place):
        for row in counted():
            if place is not None:
                place(row)
        return count
    kind, path = kind_of(place, kind), Path(place)
    check_place(path, kind)
    if kind == "folder":
        _write_folder(counted(), path, columns)
        return count
    with nullcontext(path) if _is_stream(path) else private_file(path) as made:
        if kind == "parquet":
            _write_parquet(counted(), made, columns)
        else:
            with made.open("wb") as file:
                file.writelines(map(json_line, counted()))
    return count


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
    """Return whether a path is no file of bytes, such as a pipe: nothing may take its place."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _write_folder(rows: Iterable[Row], path: Path, columns: Mapping[str, str]) -> None:
    """Make a folder as ``datasets.load_dataset`` takes it, which is there once it is whole."""
    import shutil

    final = Path(os.path.realpath(path))
    made = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        (made / _TABLE).parent.mkdir(mode=0o700)
        write_private(made / _TABLE, b"")
        _write_parquet(rows, made / _TABLE, columns)
        write_private(made / "README.md", _make_card(columns).encode())
        made.replace(final)
    except OSError as exc:
        exc.filename = exc.filename or str(path)  # a write that fails does not say of what
        raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write_parquet(rows: Iterable[Row], made: Path, columns: Mapping[str, str]) -> None:
    # Of a file that is deleted when closed, a full disk leaves an error for the end of the program.
    with (
        tempfile.TemporaryDirectory(dir=made.parent) as folder,
        Path(folder, "rows.ndjson").open("w+b") as file,
    ):
        query = Query(new_connection(), f"FROM {write_rows(rows, columns, file)}")
        if not columns and not query.count():
            raise ConfigError("no rows, and the format names no columns; write JSON lines")
        query.to_parquet(made)


def _make_card(columns: Mapping[str, str]) -> str:
    """Return the card that says where the rows are; the Parquet file tells their types."""
    return (
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
        f"    path: {_TABLE}\n---\n\nWritten by lightning-otel; columns: {', '.join(columns)}.\n"
        f"Loads with datasets {'4.7' if 'JSON' in columns.values() else '3.6'} or newer.\n"
    )
