"""Keep a store in order while others use it: settle, merge, hold a size limit, unlink old files.

Each piece is small and takes bounded memory, whatever waits. None of it runs in a traced process.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from lightning_otel import config
from lightning_otel.errors import LightningOtelError, warn_once
from lightning_otel.store.layout import Layout, is_settling_due

if TYPE_CHECKING:
    from lightning_otel.store.settle import SettleResult

log = logging.getLogger(__name__)

PERIOD_S: Final = 5.0
IDLE_S: Final = 30.0
"""After so long in which nothing new was sealed, what waits is settled, little as it is."""


class Maintainer:
    """Looks at a store now and then, and keeps it in order."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._waited = 0
        self._since_s = time.monotonic()

    def run_once(self) -> "SettleResult":
        """Do one piece of work, if there is one: settle a batch, merge files, hold the size limit.

        Return what was settled. A full disk or a damaged file is warned of, never raised.
        """
        # Not before there is work: a program under ``run`` waits for its parent's imports.
        import duckdb

        from lightning_otel.store.compact import compact_if_needed
        from lightning_otel.store.damage import translate_errors
        from lightning_otel.store.removal import close_own_segment
        from lightning_otel.store.segment import is_rotation_requested
        from lightning_otel.store.settle import SettleResult, list_sealed, settle
        from lightning_otel.store.template import ensure_catalogue

        result, layout = SettleResult(), self._layout
        try:
            if not layout.exists():
                return result
            ensure_catalogue(layout)
            close_own_segment(layout, is_rotation_requested)  # where no line may come for long
            now_s, segments = time.monotonic(), list_sealed(layout)
            if len(segments) != self._waited:
                self._waited, self._since_s = len(segments), now_s
            is_idle = bool(segments) and now_s - self._since_s >= IDLE_S
            # With nothing to settle it unlinks what was replaced.
            result = settle(layout, int(is_idle or is_settling_due(segments)))
            self._waited -= result.segments
            with translate_errors(layout, "keep in order"):
                report = compact_if_needed(layout, config.MAX_SIZE.read())
            if report:
                log.warning(
                    "%s outgrew %s: its oldest rollouts were dropped, %d spans",
                    layout.catalogue,
                    config.MAX_SIZE.name,
                    report,
                )
        except (OSError, duckdb.Error, LightningOtelError) as exc:
            # Once: a disk that is full now is full every few seconds.
            warn_once(f"{layout.catalogue} could not be kept in order: {exc}")
        return result


@contextlib.contextmanager
def maintain_store(layout: Layout, *, period_s: float = PERIOD_S) -> Iterator[None]:
    """Keep a store in order for a block, from a thread that looks at it every so often."""
    stop = threading.Event()
    maintainer = Maintainer(layout)

    def work() -> None:
        wait_s = period_s
        while not stop.wait(wait_s):
            # As long as there is a backlog there is no pause.
            wait_s = 0.0 if maintainer.run_once().segments else period_s

    thread = threading.Thread(target=work, name="lightning-otel-maintenance", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
