"""The files that are imported: those of folders and zips, in the order in which to read them."""

import contextlib
import os
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

from lightning_otel.cli.inputs import open_session_file
from lightning_otel.cli.output import format_size, print_note
from lightning_otel.errors import TooLargeError

_LINES: Final = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_ZIP: Final = b"PK\x03\x04"
_ZIP_FAULTS: Final = (
    zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, ValueError,
    NotImplementedError, OverflowError,
)  # fmt: skip


@contextlib.contextmanager
def list_files(
    paths: Iterable[Path], limit_bytes: int, refuse: Callable[[Path, str], None]
) -> Iterator[Callable[[], list[Path]]]:
    """Give what lists the files: of a folder each ``.jsonl`` below it, of a zip what it holds.

    Raises:
        TooLargeError: A zip holds more than a limit.
    """
    from lightning_otel.receivers.sessions import SessionLinks

    with tempfile.TemporaryDirectory() as scratch:
        folders: list[Path] = []
        for number, path in enumerate(paths):
            if path.is_dir() or not _is_zip(path):
                folders.append(path)
                if not _list_folder(path):
                    print_note(f"  {path}: no .jsonl below it; name other files one by one")
                continue
            folder = Path(scratch, str(number), path.name)
            _extract_zip(path, folder, limit_bytes, partial(refuse, path))
            lines = _list_folder(folder)
            is_of_sessions = any(open_session_file(file, SessionLinks())[0] for file in lines)
            members = sorted(member for member in folder.rglob("*") if member.is_file())
            folders += lines if is_of_sessions else members

        ordered: dict[tuple[Path, ...], list[Path]] = {}

        def list_them() -> list[Path]:
            listed = tuple(chain.from_iterable(map(_list_folder, folders)))
            if listed not in ordered:
                ordered.clear()
                ordered[listed] = _order_files(listed)
            return ordered[listed]

        yield list_them


def _list_folder(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*.jsonl*") if file.name.endswith(_LINES))


def _order_files(paths: Sequence[Path]) -> list[Path]:
    """Return files, a session before its subagents and those that copied it."""
    from lightning_otel.receivers.coding_agents import read_origin
    from lightning_otel.receivers.documents import FILE_LIMITS

    origins: dict[str, str] = {}
    names: dict[Path, str] = {}
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb") as file:
            lines = [file.readline(FILE_LIMITS.body_bytes) for _ in range(2)]
            names[path], origin = read_origin(lines)
            origins[names[path]] = origin

    def rank_file(path: Path) -> tuple[int, bool]:
        ids: list[str] = []
        name = names.get(path, "")
        while name and name not in ids:
            ids.append(name)
            name = origins.get(name, "")
        return max(1, len(ids)), path.name.startswith("agent-") or "subagents" in path.parts

    return sorted(paths, key=rank_file)


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP or zipfile.is_zipfile(path)


def _extract_zip(path: Path, folder: Path, limit_bytes: int, refuse: Callable[[str], None]) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
            if sum(member.file_size for member in members) > limit_bytes:
                size = format_size(limit_bytes)
                raise TooLargeError(f"{path} holds more than {size}; raise --limit")
            for member in members:
                try:
                    file = archive.extract(member, folder)
                    time_s = time.mktime((*member.date_time, 0, 0, -1))
                    os.utime(file, (time_s, time_s))
                except _ZIP_FAULTS as exc:
                    refuse(f"{member.filename} in it cannot be read to its end: {exc}")
    except _ZIP_FAULTS as exc:
        refuse(f"the zip is damaged: {exc}; repair it, or import what it holds")
