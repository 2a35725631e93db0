"""One at a time: whoever changes the manifest is elected by a lock, which dies with its process."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from lightning_otel.store.layout import Layout


@contextlib.contextmanager
def settler_elected(layout: Layout, *, wait_s: float = 0.0) -> Iterator[bool]:
    """Elect this process the one settler for a block; gives False if another one is.

    Args:
        layout: The store's paths.
        wait_s: How long to wait for another settler to finish.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(layout.settler_lock, flags, 0o600)
    deadline = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(0.02)
            else:
                yield True
                return
    finally:
        os.close(descriptor)
