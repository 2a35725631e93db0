"""Landlock: how a process on Linux gives up writing files and reaching networks, for good.

Source: ``landlock(7)`` and ``Documentation/userspace-api/landlock.rst`` of the kernel.
"""

import ctypes
import sys
from typing import Final

_CREATE_RULESET: Final = 444
_RESTRICT_SELF: Final = 446
"""Numbers of the system calls, the same on every architecture."""
_GIVE_VERSION: Final = 1
_NO_NEW_PRIVILEGES: Final = 38

_FILES: Final = (
    # The kernel's first version that knows them, and the rights: to write a file; to remove and to
    # make every kind of entry; to move one to another folder; to truncate.
    (1, 1 << 1),
    (1, sum(1 << bit for bit in range(4, 13))),
    (2, 1 << 13),
    (3, 1 << 14),
)
_NETWORK: Final = (4, 0b11)
"""To bind and to connect by TCP, and the first version that knows it."""


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64))


def give_up() -> bool:
    """Let this thread, and those it starts, open no file for writing and no connection."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, 0, _GIVE_VERSION)
    if version < 1:
        return False
    rules = _RulesetAttributes(files=sum(right for first, right in _FILES if version >= first))
    size = 8
    if version >= _NETWORK[0]:
        rules.network, size = _NETWORK[1], 16
    descriptor = libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), 0)
    if descriptor < 0 or libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return False
    return bool(libc.syscall(_RESTRICT_SELF, descriptor, 0) == 0)
