"""The choice of rollouts that a page reads whole, within bounded memory."""

from collections.abc import Sequence
from typing import Final

from lightning_otel.dataset import Store
from lightning_otel.store.sql import ROLLOUT

MOST_SPANS: Final = 5_000
MOST_BYTES: Final = 64 << 20
"""What is read at once for a page, bodies and all."""
TOO_LARGE: Final = "too long to read here; its trace has it"
"""What is said in place of messages that were not read."""
_WEIGHTS: Final = f"""
SELECT {ROLLOUT} AS rollout_id, count(*) AS spans,
  coalesce(sum(coalesce(strlen(input_messages), 0) + coalesce(strlen(output_messages), 0)
    + strlen(attributes::VARCHAR)), 0)::BIGINT AS size
FROM spans WHERE {ROLLOUT} IN (SELECT unnest(?)) GROUP BY 1
"""


def select_small(store: Store, rollout_ids: Sequence[str]) -> list[str]:
    """Return as many of the rollouts, in order, as fit into memory together."""
    if not rollout_ids:
        return []
    weights = {row["rollout_id"]: row for row in store.sql(_WEIGHTS, [list(rollout_ids)])}
    small_ids: list[str] = []
    spans = size = 0
    for rollout_id in rollout_ids:
        weight = weights.get(rollout_id)
        own_spans, own_size = (weight["spans"], weight["size"]) if weight else (0, 0)
        if spans + own_spans <= MOST_SPANS and size + own_size <= MOST_BYTES:
            spans, size = spans + own_spans, size + own_size
            small_ids.append(rollout_id)
    return small_ids
