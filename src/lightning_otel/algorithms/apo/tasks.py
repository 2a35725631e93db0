"""Tasks that were recorded: what agents were really asked, where nobody names any to learn from."""

import json
from typing import TYPE_CHECKING, Any, Final

from lightning_otel import conventions as c
from lightning_otel.store.sql import attribute

if TYPE_CHECKING:
    from lightning_otel.dataset import Store

_HELD_OUT: Final = 3
"""Of so many recorded tasks one is kept to choose by."""


def recorded(store: "Store") -> list[Any]:
    """Every task that was recorded once, in the order of its first rollout.

    Tasks that were only validated or tested with are left out: they are to be new.

    Args:
        store: Where rollouts are recorded.
    """
    rows = store.sql(
        f"SELECT {attribute(c.TASK)} AS task FROM spans WHERE name = '{c.SPAN_ROLLOUT}' "
        f"AND coalesce({attribute(c.MODE)}, 'train') = 'train' AND task IS NOT NULL "
        "GROUP BY 1 ORDER BY min(start_ns), 1"
    )
    return [json.loads(row["task"]) for row in rows.rows()]


def split(tasks: list[Any]) -> tuple[list[Any], list[Any]]:
    """Tasks to learn from, and a third of them to choose by; none if there are too few."""
    val = tasks[_HELD_OUT - 1 :: _HELD_OUT]
    return [task for n, task in enumerate(tasks, 1) if n % _HELD_OUT or not val], val
