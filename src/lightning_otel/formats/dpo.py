"""``dpo``: a better and a worse answer to the same prompt, for TRL's ``DPOTrainer``.

Source: TRL's conversational preference type (``prompt``, ``chosen``, ``rejected``, ``tools``).
"""

from collections.abc import Iterable
from typing import Final

from lightning_otel.formats.chat import answered
from lightning_otel.formats.format import ORIGIN, Format, Made, Row, other_choices
from lightning_otel.formats.pairs import Pair, pair_rows
from lightning_otel.types import Trajectory


def make(trajectories: Iterable[Trajectory], *, gap: float = 0.0) -> Made:
    """Return one row a pair of answers whose rewards differ.

    Args:
        trajectories: What is made into rows, group by group.
        gap: By how much at least.
    """
    return pair_rows(trajectories, gap, _make_row, other_choices)


def _make_row(pair: Pair) -> Row:
    row, rejected = map(answered, pair)
    row["chosen"] = row.pop("completion")
    return {
        **row,
        "rejected": rejected["completion"],
        "rejected_rollout_id": rejected["rollout_id"],
        "rejected_span_id": rejected["span_id"],
        "rejected_reward": rejected["reward"],
    }


FORMAT: Final = Format(
    make,
    {
        "prompt": "JSON",
        "chosen": "JSON",
        "rejected": "JSON",
        "tools": "JSON",
        **ORIGIN,
        "rejected_rollout_id": "VARCHAR",
        "rejected_span_id": "VARCHAR",
        "rejected_reward": "DOUBLE",
    },
    used_by="TRL DPOTrainer",
    needs="messages, and several rewarded answers to one prompt",
    is_grouped=True,
)
