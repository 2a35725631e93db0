"""The agreement of a judge's rewards with labels that people gave to the same rollouts."""

from dataclasses import dataclass
from typing import Final

from lightning_otel.dataset import Store
from lightning_otel.store.source import read_overview

# A rollout has passed above 0.5 on a scale from 0 to 1, and above 0 on any other.
_PAIRS: Final = """
WITH latest AS (
  SELECT rollout_id, name, arg_max(value, (start_ns, span_id)) AS value FROM rewards
  WHERE name IN ($1, $2) GROUP BY rollout_id, name
), scales AS (
  SELECT name, if(min(value) >= 0 AND max(value) <= 1, 0.5, 0.0) AS middle FROM latest GROUP BY name
), sides AS (
  SELECT rollout_id, name, value, value > middle AS passed FROM latest JOIN scales USING (name)
), pairs AS (
  SELECT j.value AS judged, l.value AS label, j.passed AS judge_passed, l.passed AS label_passed,
    rank() OVER (ORDER BY j.value) + count(*) OVER (PARTITION BY j.value) / 2 AS judge_rank,
    rank() OVER (ORDER BY l.value) + count(*) OVER (PARTITION BY l.value) / 2 AS label_rank
  FROM sides AS j JOIN sides AS l USING (rollout_id) WHERE j.name = $1 AND l.name = $2
)
SELECT count(*) AS rollouts, count_if(judge_passed = label_passed) AS same,
  avg(judge_passed::INTEGER) AS judge_share, avg(label_passed::INTEGER) AS label_share,
  avg(abs(judged - label)) AS difference,
  if(count(DISTINCT judged) > 1 AND count(DISTINCT label) > 1, corr(judge_rank, label_rank), NULL)
    AS correlation
FROM pairs"""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two rewards of the same rollouts agree.

    Attributes:
        label: The name of the reward that people gave.
        rollouts: Rollouts that have both; the latest of each counts.
        same: Those that both let pass, or neither.
        kappa: Cohen's kappa of that; None where it is not defined.
        correlation: Spearman's rank correlation; None if either is constant.
        difference: The mean absolute difference; None without a rollout.
    """

    label: str
    rollouts: int
    same: int
    kappa: float | None
    correlation: float | None
    difference: float | None


def read_agreement(store: Store, judge: str, label: str) -> Agreement:
    """Compare the rewards named ``judge`` with those named ``label``, rollout by rollout."""
    (row,) = read_overview(store.source, _PAIRS, [judge, label])
    rollouts, kappa = row["rollouts"], None
    if rollouts:
        chance = row["judge_share"] * row["label_share"]
        chance += (1 - row["judge_share"]) * (1 - row["label_share"])
        kappa = (row["same"] / rollouts - chance) / (1 - chance) if chance < 1 else None
    return Agreement(label, rollouts, row["same"], kappa, row["correlation"], row["difference"])
