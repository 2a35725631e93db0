"""Answers that are held as long as they are true: what costs a look at the whole store."""

import math
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from lightning_otel.dataset import Store
from lightning_otel.store.layout import Layout

T = TypeVar("T")
_LEAST_S: Final = 1.0
_LONG_S: Final = 5.0
_MOST_S: Final = 30.0

Mark = tuple[object, ...]


def read_fingerprint(layout: Layout) -> Mark:
    """Return a value that changes whenever the store is written: sizes and times of change."""
    fingerprint: list[object] = []
    for path in (layout.manifest_path, *layout.segments()):
        try:
            status = path.stat()
        except FileNotFoundError:  # settled meanwhile
            continue
        fingerprint.append((path.name, status.st_size, status.st_mtime_ns))
    return tuple(fingerprint)


class CachedRead(Generic[T]):
    """A cached read of a store, valid until the store is written.

    Where something is written all the time it is asked anew at most half of the time.
    """

    def __init__(self, patience: float = 1.0, most_s: float = math.inf) -> None:
        """Hold an answer ``patience`` times as long as it took, to 5 s, at most ``most_s``."""
        self._patience, self._most_s = patience, most_s
        self._mark: Mark | None = None
        self._read: Mark | None = None
        self._until_s = self._read_s = 0.0
        self._held: T | None = None
        self._lock = threading.Lock()  # so that what is asked for by many at once is read once

    def of(self, store: Store, read: Callable[[Store], T]) -> T:
        """Return the cached answer, or read it anew if the store was written."""
        with self._lock:
            # Taken before it is read: what comes meanwhile makes it old.
            mark = read_store_fingerprint(store)
            began_s = time.monotonic()
            is_held = (mark == self._read and began_s < self._read_s + self._most_s) or (
                mark == self._mark and began_s < self._until_s + _MOST_S
            )
            if self._held is not None and (is_held or began_s < self._until_s):
                return self._held
            self._read_s = began_s
            self._held = read(store)
            took_s = time.monotonic() - began_s
            self._mark = self._read = mark
            rest_s = max(took_s, min(self._patience * took_s, _LONG_S))
            self._until_s = time.monotonic() + max(_LEAST_S, rest_s)
            return self._held

    def last(self, store: Store, read: Callable[[], tuple[T, bool]]) -> tuple[T, float, bool]:
        """Return the cached answer, however old, its age in seconds, and whether it is still true.

        Where there is none ``read`` gives one at once, and whether it is whole.
        """
        mark, began_s, answer = read_store_fingerprint(store), time.monotonic(), self._held
        if answer is not None:
            age_s = began_s - self._read_s
            return answer, age_s, mark == self._mark and age_s < self._most_s
        answer, is_whole = read()
        if is_whole and self._lock.acquire(blocking=False):
            self._held, self._mark, self._read, self._read_s = answer, mark, mark, began_s
            self._lock.release()
        return answer, 0.0, is_whole

    def keep_valid(self, before: Mark, after: Mark) -> None:
        """Count what was written meanwhile as changing nothing of the answer.

        What another process wrote at the very same time may be seen half a minute late.
        """
        with self._lock:
            if self._mark == before:
                self._mark = after


def read_store_fingerprint(store: Store) -> Mark:
    """As :func:`read_fingerprint`, of a store on this disk; empty of any other."""
    return read_fingerprint(store.layout) if store.layout is not None else ()
