"""Idle work of the server: settle, deliver waiting feedback, release memory."""

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from lightning_otel.dataset import Store
from lightning_otel.errors import LightningOtelError
from lightning_otel.serve.api.repositories import Repositories
from lightning_otel.serve.heap import trim_heap
from lightning_otel.serve.ingest import Ingester
from lightning_otel.serve.viewer.trace import KEPT_S, drop_traces
from lightning_otel.store.maintenance import Maintainer

log = logging.getLogger(__name__)

EVERY_S: Final = 10.0
GIVEN_S: Final = 2.0
"""How soon feedback is given to a span that came after it, where looking takes no time."""
_LATEST_S: Final = 15.0
IDLE_S: Final = 5.0
"""Without a span for so long, the segment is closed, so that it can be settled."""


async def run_maintenance(store: Store, repositories: Repositories, ingester: Ingester) -> None:
    """Settle what is worth it, and give feedback that waits, again and again."""
    maintainer = None if store.layout is None else Maintainer(store.layout)
    settle = partial(_settle_store, maintainer, ingester)
    give = partial(repositories.deliver_feedback, ingester.keep)
    await asyncio.gather(
        _repeat(settle, EVERY_S, EVERY_S, f"{store.name} could not be settled"),
        _repeat(give, GIVEN_S, _LATEST_S, f"feedback to {store.name} could not be given"),
    )


async def _repeat(work: Callable[[], None], least_s: float, most_s: float, fault: str) -> None:
    """Do some work, a fifth of the time at most."""
    wait_s = least_s
    while True:
        await asyncio.sleep(wait_s)
        began_s = time.monotonic()
        try:
            await asyncio.to_thread(work)
        except (LightningOtelError, OSError) as exc:
            log.warning("%s: %s", fault, exc)
        wait_s = min(max(least_s, 4 * (time.monotonic() - began_s)), most_s)


def _settle_store(maintainer: Maintainer | None, ingester: Ingester) -> None:
    ingester.seal_if_idle(IDLE_S)
    while maintainer is not None and maintainer.run_once().segments:
        pass  # a batch at a time, as long as there is a backlog
    drop_traces(KEPT_S)
    gc.collect()  # 40 ms; empties the interpreter's own lists of free objects, too
    trim_heap()
