"""Rows in files: JSON lines, Parquet, or a folder that Hugging Face's datasets reads.

A file stands at its place once it is whole, and is the user's alone. Rows are written as they are
made: memory does not grow with them.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from lightning_otel.dataset.census import TRAIN
from lightning_otel.dataset.formats.format import Row
from lightning_otel.dataset.tables import write_rows
from lightning_otel.errors import ConfigError
from lightning_otel.store.files import private_file, write_private
from lightning_otel.store.sql import new_connection
from lightning_otel.store.table import Query, json_line

FileKind: TypeAlias = Literal["jsonl", "parquet", "folder"]
Place: TypeAlias = str | os.PathLike[str] | Callable[[Row], None] | None

_KINDS: Final[Mapping[str, FileKind]] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet",
}  # fmt: skip


def kind_of(path: str | os.PathLike[str], kind: FileKind | None = None) -> FileKind:
    """Return what is written to a path: as it was said, else as its name says."""
    if kind is not None:
        return kind
    name, suffix = os.fspath(path), Path(path).suffix.lower()
    if is_stream(Path(name)):
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
    if place is None or callable(place):
        return sum(1 for _ in map(place or (lambda _: None), rows))
    parts = save_parts({TRAIN: rows}, Path(place), kind_of(place, kind), columns, lambda _: {})
    return parts[0].rows


class Part(NamedTuple):
    """A file of rows: its side, its name, where it is while it is written, and its rows."""

    side: str
    name: str
    path: Path
    rows: int


def save_parts(
    sides: Mapping[str, Iterable[Row]],
    path: Path,
    kind: FileKind,
    columns: Mapping[str, str],
    texts: Callable[[Sequence[Part]], Mapping[str, bytes]],
) -> list[Part]:
    """Write a file of rows for each side, and the texts that are made of them, by their names.

    All are in place once all are whole. The rows of validation stand beside those of training, with
    ``.validation`` before the ending.
    """
    check_place(path, kind)
    if kind == "folder":
        return _write_folder(sides, path, columns, texts)
    parts: list[Part] = []
    with ExitStack() as stack:
        for side, rows in sides.items():
            end = path.suffix if side == TRAIN else f".{side}{path.suffix}"
            final = path.with_name(path.name.removesuffix(path.suffix) + end)
            target = nullcontext(final) if is_stream(final) else private_file(final)
            parts.append(_write_part(side, final.name, stack.enter_context(target), rows, kind,
                                     columns))  # fmt: skip
        for name, text in texts(parts).items():
            stack.enter_context(private_file(path.with_name(name))).write_bytes(text)
    return parts


def _write_part(
    side: str,
    name: str,
    path: Path,
    rows: Iterable[Row],
    kind: FileKind,
    columns: Mapping[str, str],
) -> Part:
    count = 0

    def counted() -> Iterator[Row]:
        nonlocal count
        for row in rows:
            count += 1
            yield row

    if kind == "jsonl":
        with path.open("wb") as file:
            file.writelines(map(json_line, counted()))
    else:
        _write_parquet(counted(), path, columns)
    return Part(side, name, path, count)


def check_place(path: Path, kind: FileKind) -> None:
    """Refuse a place where nothing can be written, before anything is read."""
    parent = Path(os.path.realpath(path)).parent
    if not parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {parent}; name another place")
    if is_stream(path):
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


def is_stream(path: Path) -> bool:
    """Return whether a path is no file of bytes, such as a pipe: nothing may take its place."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _write_folder(
    sides: Mapping[str, Iterable[Row]],
    path: Path,
    columns: Mapping[str, str],
    texts: Callable[[Sequence[Part]], Mapping[str, bytes]],
) -> list[Part]:
    """Make a folder as ``datasets.load_dataset`` takes it, which is there once it is whole."""
    import shutil

    final = Path(os.path.realpath(path))
    made = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        (made / "data").mkdir(mode=0o700)
        parts: list[Part] = []
        for side, rows in sides.items():
            name = f"data/{side}-00000-of-00001.parquet"
            write_private(made / name, b"")
            parts.append(_write_part(side, name, made / name, rows, "folder", columns))
        for name, text in texts(parts).items():
            write_private(made / name, text)
        made.replace(final)
    except OSError as exc:
        exc.filename = exc.filename or str(path)  # a write that fails does not say of what
        raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return parts


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
