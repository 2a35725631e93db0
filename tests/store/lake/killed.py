"""A publisher that ends itself with SIGKILL at a chosen step: a program of its own.

    python killed.py STORE LAKE MOMENT STATEMENT

``MOMENT`` is ``before``, ``in`` or ``after`` the first statement that begins with ``STATEMENT``.
"""

import os
import random
import signal
import sys
import threading
import time
from typing import Any

from lightning_otel import Store
from lightning_otel.store.engines import publish


def die() -> None:
    """End this process as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


class Killed:
    """A connection to the lake that does not survive one of its statements."""

    def __init__(self, con: Any, moment: str, statement: str) -> None:
        self._con, self._moment, self._statement = con, moment, statement

    def __enter__(self) -> "Killed":
        return self

    def __exit__(self, *_: object) -> None:
        self._con.close()

    def execute(self, text: str, *parameters: Any) -> Any:
        """What the statement gives, if it is not the last one."""
        if not text.startswith(self._statement):
            return self._con.execute(text, *parameters)
        if self._moment == "before":
            die()
        if self._moment == "in":
            wait_s = random.random() / 50
            threading.Thread(target=lambda: (time.sleep(wait_s), die()), daemon=True).start()
        found = self._con.execute(text, *parameters)
        if self._moment == "after":
            die()
        return found


if __name__ == "__main__":
    store, lake, moment, statement = sys.argv[1:]
    attach = publish.attach_lake
    publish.attach_lake = lambda *args, **options: Killed(  # type: ignore[assignment]  # stands for it
        attach(*args, **options), moment, statement
    )
    Store(store).publish(lake, is_rest_included=True)
