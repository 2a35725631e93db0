"""Files of a store on the disk: private, their owner's, replaced whole, never through a link.

Nothing in here imports DuckDB: the traced process uses it.
"""

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Final

from lightning_otel.errors import ConfigError

_SHORTEST_TOKEN: Final = 16


def is_own_file(path: Path) -> bool:
    """Return whether a file stands there, and no link to one, no pipe and no folder."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def list_names(folder: Path, *, are_files: bool = True) -> set[str]:
    """Return the names of the files in a folder, or of what else stands there, such as links."""
    with os.scandir(folder) as entries:
        return {
            entry.name for entry in entries if entry.is_file(follow_symlinks=False) is are_files
        }


def find_filesystem(path: Path) -> str:
    """Return the type of the file system that a path lies on; empty if that is unknown."""
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in mounts:
        _, place, name, *_ = line.split(" ")
        if path.is_relative_to(place) and len(place) > len(best):
            best, kind = place, name
    return kind


def escape_glob(path: Path) -> str:
    """Return the pattern that matches a path and nothing else."""
    return re.sub(r"[*?\[]", r"[\g<0>]", str(path))


@contextlib.contextmanager
def file_lock(path: Path, *, wait_s: float = 0.0) -> Iterator[int | None]:
    """Lock a file for a block, until its process dies; give its descriptor, None if it is taken."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    give_to_owner(descriptor, path)
    deadline = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    yield None
                    return
                time.sleep(0.02)
        yield descriptor
    finally:
        os.close(descriptor)


def give_to_owner(target: int | Path, path: Path) -> None:
    """Give a descriptor or path that root made in somebody else's store to that store's owner."""
    if os.geteuid() == 0:
        root = next((folder for folder in path.parents if folder.name.endswith(".duckdb.d")), path)
        owner = root.stat()
        with contextlib.suppress(OSError):  # where root may not, as in some containers
            is_open = isinstance(target, int)
            os.chown(target, owner.st_uid, owner.st_gid, follow_symlinks=is_open)


def put_file(source: Path, final: Path, replaced: Iterable[Path] = ()) -> None:
    """Rename a file to its place, with the rights that all files had which it replaces."""
    modes = [path.lstat().st_mode & 0o666 for path in replaced or [final] if is_own_file(path)]
    source.chmod(0o600 | reduce(and_, modes) if modes else 0o600)
    give_to_owner(source, source)
    os.replace(source, final)


def replace_file(final: Path, content: bytes, drafts: Path, *, is_synced: bool = False) -> None:
    """Put a file in its place as a whole, made in another folder of the same disk."""
    draft = drafts / f"{os.getpid()}-{os.urandom(4).hex()}-{final.name}"
    write_private(draft, content, is_synced=is_synced)
    try:
        put_file(draft, final)
    finally:
        draft.unlink(missing_ok=True)


def write_private(path: Path, content: bytes, *, is_synced: bool = False) -> None:
    """Make a file that only its owner can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        give_to_owner(descriptor, path)
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        if is_synced:
            os.fsync(descriptor)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def private_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file atomically: give a temporary path, renamed to the path if the block succeeds.

    Only those who could read what stood there can read it then.
    """
    final = Path(os.path.realpath(path))
    draft = final.with_name(f".{final.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        rights = stat.S_IMODE(final.stat().st_mode) if final.exists() else 0o600
        write_private(draft, b"")
    except OSError as exc:
        raise ConfigError(
            f"cannot write {path}: {exc.strerror or exc}; name a writable place"
        ) from exc
    try:
        yield draft
        draft.chmod(rights)
        if os.geteuid() == 0 and final.exists():
            os.chown(draft, final.stat().st_uid, final.stat().st_gid)
        draft.replace(final)
    except OSError as exc:
        exc.filename = exc.filename or str(path)  # a write that fails does not say of what
        raise
    finally:
        draft.unlink(missing_ok=True)


def add_private(path: Path, content: bytes) -> None:
    """Make a private file, unless one stands there, be it since a moment."""
    with contextlib.suppress(FileExistsError):
        write_private(path, content)


def make_private(folder: Path) -> None:
    """Make a folder and those above it, all private: ``parents=True`` would leave these open."""
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
            give_to_owner(path, path)


def read_token(path: Path) -> tuple[str, bool]:
    """Return the token in a file, and whether the file was made just now.

    Raises:
        ConfigError: The file cannot be read or made, others can read it, or it holds no token.
    """
    try:
        if is_new := not path.exists():
            add_private(path, f"{os.urandom(32).hex()}\n".encode())
        with path.open() as file:
            status = os.fstat(file.fileno())
            token = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise ConfigError(f"cannot use the token file {path}: {why}; name another one") from exc
    owners = os.geteuid(), path.parent.stat().st_uid  # who owns the folder can replace the file
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in owners:
        raise ConfigError(f"others can read the token file {path}; run: chmod 600 {path}")
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or any(map(str.isspace, token)):
        raise ConfigError(
            f"{path} holds no token of at least {_SHORTEST_TOKEN} characters; remove it, and "
            "a new one is made"
        )
    return token, is_new


def total_bytes(paths: Iterable[Path]) -> int:
    """Size of the files that are still there."""
    size = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size
