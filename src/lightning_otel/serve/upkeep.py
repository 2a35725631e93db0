"""Settling while the server has nothing better to do."""

import asyncio
import logging
from typing import Final

from lightning_otel.errors import LightningOtelError
from lightning_otel.serve.intake import Intake
from lightning_otel.store import Store

log = logging.getLogger(__name__)

EVERY_S: Final = 10.0
IDLE_S: Final = 5.0
"""Without a span for so long, the segment is closed, so that it can be settled."""


async def keep_settled(store: Store, intake: Intake) -> None:
    """Settle, again and again, what is worth it; the settler's own lock keeps others out."""
    while True:
        await asyncio.sleep(EVERY_S)
        try:
            await asyncio.to_thread(_settle, store, intake)
        except (LightningOtelError, OSError) as exc:
            log.warning("%s could not be settled: %s", store.name, exc)


def _settle(store: Store, intake: Intake) -> None:
    from lightning_otel.store.settle import settle_if_worthwhile
    from lightning_otel.store.source import ensure_catalogue

    intake.seal_if_idle(IDLE_S)
    if store.layout is not None and store.layout.exists():
        ensure_catalogue(store.layout)
        settle_if_worthwhile(store.layout)
