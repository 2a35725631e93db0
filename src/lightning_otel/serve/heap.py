"""The server's memory: what a read took goes back to the system after it.

A read takes some 50 MB for a moment, which the C library keeps for each thread.

Source: mallopt(3), malloc_trim(3) of glibc; other C libraries have neither, nor the habit.
"""

import ctypes
from functools import cache
from typing import Final

_M_ARENA_MAX: Final = -8
_HEAPS: Final = 2


def limit_arenas() -> None:
    """Have all threads take from few heaps; to be called before they are started."""
    if (libc := _load_glibc()) is not None:
        libc.mallopt(_M_ARENA_MAX, _HEAPS)


def trim_heap() -> None:
    """Give what is free back to the system: a millisecond where a hundred megabytes are."""
    if (libc := _load_glibc()) is not None:
        libc.malloc_trim(0)


@cache
def _load_glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
