"""A segment while its process writes it: an open, locked file that only grows."""

import contextlib
import errno
import fcntl
import logging
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lightning_otel.store.files import give_to_owner
from lightning_otel.store.layout import SEGMENT_SUFFIX, Layout
from lightning_otel.store.lines import format_reserved_line
from lightning_otel.store.pace import DiskPace

log = logging.getLogger(__name__)

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Refusals that a shorter text may not meet."""
_CLOSE: Final = stat.S_IXUSR
_FAR: Final = 700
_OPEN_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def read_boot_id() -> str:
    """Eight characters that differ between machines, and on Linux between two boots of one."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = f"{zlib.crc32(os.uname().nodename.encode()):08x}"
    return text.strip().replace("-", "")[:8]


def request_rotation(path: Path) -> None:
    """Ask a segment's process to close it, by the owner's right to execute the file."""
    with contextlib.suppress(FileNotFoundError):  # settled meanwhile
        path.chmod(0o600 | _CLOSE)


def is_rotation_requested(path: Path) -> bool:
    """Return whether a segment's process was asked to close it, and has not done so yet."""
    return path.exists() and bool(path.stat().st_mode & _CLOSE)


class Segment:
    """An append-only file of one process, locked while it is open.

    It is locked under a temporary name, then renamed into ``live/``, lest a settler takes it
    between. Its first line has room for counts, which can be written when the disk is full.
    """

    def __init__(
        self, layout: Layout, process: str, number: int, pace: DiskPace, lines: bytes = b""
    ) -> None:
        """Make and lock the file, and write its first lines; OSError if the store refuses."""
        name = f"{process}-{number:06d}{SEGMENT_SUFFIX}"
        self.path = layout.live / name
        draft = layout.new / name
        self.size_bytes = 0
        self.is_asked_to_close = False
        self.has_final_counts = False
        self._pace = pace
        self._is_torn = False
        self._descriptor = _out_of_reach(os.open(draft, _OPEN_FLAGS, 0o600))
        give_to_owner(self._descriptor, draft)
        status = os.fstat(self._descriptor)
        self._identity = status.st_ino, status.st_dev
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _check_locks(draft)
            if not self.append(format_reserved_line({}) + lines):
                raise FileNotFoundError(errno.ENOENT, "somebody removed it", str(draft))
            os.rename(draft, self.path)
        except OSError:
            self.close()
            draft.unlink(missing_ok=True)
            raise

    def append(self, lines: bytes) -> bool:
        """Write whole lines, or nothing; False if the file is not there or not ours any more.

        A user may remove the store, and a daemon closes every descriptor, whose number is used
        again. OSError if the disk is full or gone; the file ends as it ended before.
        """
        if not self._is_ours():
            return False
        self._is_torn = True
        try:
            written = self._pace.write(self._descriptor, lines)
            if written != len(lines):
                raise OSError(errno.ENOSPC, "short write, no space left")
        except OSError as exc:
            if exc.errno == errno.EBADF:
                return False
            self._is_ours()  # a torn line would swallow the next one
            raise
        # With no call after it: a signal handler may raise at any.
        self.size_bytes += written
        self._is_torn = False
        return True

    def _is_ours(self) -> bool:
        """Look at the file, and cut off what a refused or interrupted write left there."""
        try:
            status = os.fstat(self._descriptor)
            is_ours = (status.st_ino, status.st_dev) == self._identity and status.st_nlink > 0
            if is_ours and self._is_torn and status.st_size > self.size_bytes:
                os.ftruncate(self._descriptor, self.size_bytes)
        except OSError:
            return False
        self.is_asked_to_close = is_ours and bool(status.st_mode & _CLOSE)
        return is_ours

    def is_removed(self) -> bool:
        """Return whether somebody removed the file."""
        try:
            status = os.fstat(self._descriptor)
        except OSError:
            return False
        return (status.st_ino, status.st_dev) == self._identity and status.st_nlink == 0

    def write_final_counts(self, counts: Mapping[str, int]) -> None:
        """Write counts into the room kept for them, also on a full disk; none take it back."""
        with contextlib.suppress(OSError):
            # Not the descriptor that appends: on Linux it does so wherever one asks it to write.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(descriptor, format_reserved_line(counts), 0)
                self.has_final_counts = bool(counts)
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """Close the file, which frees its lock unless a parent process still holds it."""
        with contextlib.suppress(OSError):
            status = os.fstat(self._descriptor)
            if (status.st_ino, status.st_dev) == self._identity:
                os.close(self._descriptor)

    def remove(self) -> None:
        """Close the file and take it away."""
        self.close()
        self.path.unlink(missing_ok=True)


def _out_of_reach(descriptor: int) -> int:
    """Return the same file under a number that a program which closes all files does not reuse."""
    try:
        far = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FAR)
    except OSError:  # not so many are allowed
        return descriptor
    os.close(descriptor)
    return far


_checked: set[Path] = set()
"""Folders whose filesystem was tried."""


def _check_locks(draft: Path) -> None:
    """Warn once where a lock keeps nobody out: settlers would take what is still being written."""
    if draft.parent in _checked:
        return
    _checked.add(draft.parent)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    finally:
        os.close(descriptor)
    log.warning(
        "file locks do not work in %s: spans are lost if anybody reads the store while this "
        "program records; keep it on a local disk, with LIGHTNING_OTEL_STORE",
        draft.parent.parent,
    )
