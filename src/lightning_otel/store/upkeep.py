"""What keeps a store in order while others use it: settling, merging small files, a size limit.

Each piece is small and takes bounded memory, whatever waits. None of it runs in a traced process.
"""

import logging
import threading
import time
from typing import Final, Self

from lightning_otel import config
from lightning_otel.errors import LightningOtelError
from lightning_otel.store.catalogue import ensure_catalogue
from lightning_otel.store.compact import compact_some
from lightning_otel.store.damage import reading
from lightning_otel.store.layout import Layout
from lightning_otel.store.settle import (
    WORTHWHILE_BYTES,
    WORTHWHILE_SEGMENTS,
    Settled,
    sealed,
    settle_some,
)

log = logging.getLogger(__name__)
_warned: set[str] = set()

PERIOD_S: Final = 5.0
IDLE_S: Final = 30.0
"""After so long in which nothing new was sealed, what waits is settled, little as it is."""


def keep_up(layout: Layout, *, is_idle: bool = False) -> Settled:
    """One piece of work, if there is one: a batch of segments, or small files, or what is too much.

    It never raises for a full disk or a damaged file: it warns, and what waits goes on waiting.

    Args:
        layout: The store's paths.
        is_idle: Whether little that waits is to be settled too.

    Returns:
        What was settled; nothing means that nothing waits.
    """
    import duckdb

    done = Settled()
    try:
        if not layout.exists():
            return done
        ensure_catalogue(layout)
        is_much = len(sealed(layout)) >= WORTHWHILE_SEGMENTS
        done = settle_some(layout, least_bytes=1 if is_idle or is_much else WORTHWHILE_BYTES)
        with reading(layout, "keep in order"):
            told = sum(compact_some(layout, config.max_size_bytes()).values())
            if told:
                log.warning(
                    "%s outgrew %s: its oldest rollouts were dropped, %d spans",
                    layout.catalogue,
                    config.MAX_SIZE.name,
                    told,
                )
    except (OSError, duckdb.Error, LightningOtelError) as exc:
        _warn_once(f"{layout.catalogue} could not be kept in order: {exc}")
    return done


def _warn_once(text: str) -> None:
    """A disk that is full now is full every few seconds from now on."""
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)


class Keeper:
    """Looks at a store now and then, and keeps it in order."""

    def __init__(self, layout: Layout) -> None:
        """Name the store; nothing is looked at yet."""
        self._layout = layout
        self._waited = 0
        self._since_s = time.monotonic()

    def look(self) -> Settled:
        """One piece of work, as :func:`keep_up` does it; little that waits is let wait a while."""
        now_s, waiting = time.monotonic(), self._waiting()
        if waiting != self._waited:
            self._since_s = now_s
        is_idle = waiting > 0 and now_s - self._since_s >= IDLE_S
        done = keep_up(self._layout, is_idle=is_idle)
        self._waited = self._waiting()
        return done

    def _waiting(self) -> int:
        try:
            return len(sealed(self._layout))
        except (OSError, LightningOtelError):  # gone, damaged, or not made yet
            return 0


class Upkeep:
    """Keeps a store in order from a thread of its own, in a process that records no one else's.

    ``with Upkeep(layout): …`` in ``run``'s own process.
    """

    def __init__(self, layout: Layout, *, period_s: float = PERIOD_S) -> None:
        """Name the store; nothing begins yet.

        Args:
            layout: The store's paths.
            period_s: How long to wait between two looks where nothing waits.
        """
        self._keeper = Keeper(layout)
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go, name="lightning-otel-upkeep", daemon=True)

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Finish the piece that is being worked on, and stop."""
        self._stop.set()
        self._thread.join()

    def _go(self) -> None:
        wait_s = self._period_s
        while not self._stop.wait(wait_s):
            # As long as there is a backlog there is no pause.
            wait_s = 0.0 if self._keeper.look().segments else self._period_s
