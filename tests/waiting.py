"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], object], limit_s: float = 40.0) -> None:
    """Wait for a condition; fail where it does not come true."""
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        time.sleep(0.02)
