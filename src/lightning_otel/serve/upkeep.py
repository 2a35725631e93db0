"""Idle work of the server: settle, deliver waiting feedback, release memory."""

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from lightning_otel.dataset import Store
from lightning_otel.errors import LightningOtelError
from lightning_otel.serve.intake import Intake
from lightning_otel.serve.memory import give_back
from lightning_otel.serve.viewer.trace import let_go
from lightning_otel.store.upkeep import Keeper

if TYPE_CHECKING:
    from lightning_otel.serve.api.rooms import Rooms

log = logging.getLogger(__name__)

EVERY_S: Final = 10.0
GIVEN_S: Final = 2.0
"""How soon feedback is given to a span that came after it, where looking takes no time."""
_LATEST_S: Final = 15.0
IDLE_S: Final = 5.0
"""Without a span for so long, the segment is closed, so that it can be settled."""


async def keep_settled(store: Store, intake: Intake) -> None:
    """Settle, again and again, what is worth it; the settler's own lock keeps others out."""
    keeper = None if store.layout is None else Keeper(store.layout)
    while True:
        await asyncio.sleep(EVERY_S)
        try:
            await asyncio.to_thread(_settle_store, keeper, intake)
        except (LightningOtelError, OSError) as exc:
            log.warning("%s could not be settled: %s", store.name, exc)


def _settle_store(keeper: Keeper | None, intake: Intake) -> None:
    intake.seal_if_idle(IDLE_S)
    while keeper is not None and keeper.look().segments:
        pass  # a batch at a time, as long as there is a backlog
    let_go()
    give_back()


async def keep_given(store: Store, rooms: "Rooms", intake: Intake) -> None:
    """Give feedback that waits to what it judges, whenever something was written."""
    wait_s = GIVEN_S
    while True:
        await asyncio.sleep(wait_s)
        began_s = time.monotonic()
        try:
            await asyncio.to_thread(rooms.give_waiting, intake.keep)
        except (LightningOtelError, OSError) as exc:
            log.warning("feedback to %s could not be given: %s", store.name, exc)
        wait_s = min(max(GIVEN_S, 4 * (time.monotonic() - began_s)), _LATEST_S)
