"""``dpo``: a better and a worse answer to the same prompt, for TRL's ``DPOTrainer``.

Source: TRL's conversational preference type (``prompt``, ``chosen``, ``rejected``, ``tools``).
"""

from collections.abc import Iterable
from typing import Final

from lightning_otel.formats.format import ORIGIN, Format, LeftOut, Made, other_choices
from lightning_otel.formats.pairs import pairs
from lightning_otel.formats.steps import answered
from lightning_otel.types import Trajectory


def make(trajectories: Iterable[Trajectory], *, gap: float = 0.0) -> Made:
    """One row a pair of answers whose rewards differ.

    Args:
        trajectories: What is made into rows, group by group.
        gap: By how much at least.
    """
    for pair in pairs(trajectories, gap):
        if isinstance(pair, LeftOut):
            yield pair
            continue
        chosen, rejected = answered(pair.chosen), answered(pair.rejected)
        if isinstance(chosen, LeftOut) or isinstance(rejected, LeftOut):
            reason = chosen.reason if isinstance(chosen, LeftOut) else ""
            reason = rejected.reason if isinstance(rejected, LeftOut) else reason
            yield from (LeftOut(step, reason) for step in pair)
            continue
        for step in pair:
            yield from other_choices(step)
        chosen["chosen"] = chosen.pop("completion")
        chosen["rejected"] = rejected["completion"]
        yield {
            **chosen,
            "rejected_rollout_id": pair.rejected.rollout_id,
            "rejected_span_id": pair.rejected.span_id,
            "rejected_reward": pair.rejected.reward,
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
