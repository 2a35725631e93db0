"""Whether what a run made becomes live: only where it earns more on held-out tasks."""

import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_otel.algorithms.setting import Setting
from lightning_otel.algorithms.working import Ran, run_tasks

if TYPE_CHECKING:
    from lightning_otel.algorithms import Context


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of the candidates of a run.

    Attributes:
        promoted: Names of the resources that became live.
        reason: Why they did, or did not.
        live: Mean held-out reward of what was live; None if it was not measured.
        candidate: That of what the run made.
    """

    promoted: tuple[str, ...] = ()
    reason: str = ""
    live: float | None = None
    candidate: float | None = None


def promote(
    context: "Context", setting: Setting, stop: threading.Event, *, min_gain: float
) -> Verdict:
    """Compare what a run made with what is live, task by task, and make the better one live.

    Args:
        context: Of the run, which is over.
        setting: Of the run.
        stop: When to give up.
        min_gain: How much more of mean reward is needed.
    """
    live: dict[str, int] = {}
    for name, version in context.versions.items():
        standing = setting.resources.aliases(name).get("live")
        made_here = setting.resources.get(name, version).run_id == context.run.run_id
        if standing != version and made_here:
            if standing is None:
                return Verdict(reason=f"nothing of {name} is live to compare with: by hand")
            live[name] = standing
    if not live:
        return Verdict(reason="nothing better was made")
    if not setting.val:
        return Verdict(reason="there are no held-out tasks (val): by hand")
    if setting.agent is None and setting.workers:
        return Verdict(reason="there is no agent to run held-out tasks with: by hand")
    others = context.versions
    before = run_tasks(setting, setting.val, {**others, **live}, stop, mode="val")
    after = run_tasks(setting, setting.val, others, stop, mode="val")
    verdict = _judged(before, after, tuple(live), min_gain)
    told = {"val/live": verdict.live, "val/candidate": verdict.candidate}
    context.log(context.step, {name: value for name, value in told.items() if value is not None})
    if stop.is_set():
        return Verdict(reason="stopped before the held-out tasks were done: by hand")
    for name in verdict.promoted:
        # It is what was measured that becomes live, whatever became the canary meanwhile.
        if setting.resources.aliases(name).get("canary") == context.versions[name]:
            setting.resources.promote(name)
        else:
            setting.resources.set_alias(name, "live", context.versions[name])
    return verdict


def _judged(
    before: Sequence[Ran], after: Sequence[Ran], names: tuple[str, ...], min_gain: float
) -> Verdict:
    pairs = [
        (old.rollout.reward, new.rollout.reward) for old, new in zip(before, after, strict=True)
    ]
    both = [(old, new) for old, new in pairs if old is not None and new is not None]
    lost = sum(old is not None and new is None for old, new in pairs)
    if not both:
        return Verdict(reason="no held-out task has a reward from both: by hand")
    live = statistics.fmean(old for old, _ in both)
    candidate = statistics.fmean(new for _, new in both)
    gain = candidate - live
    if lost:
        why = f"{lost} of {len(pairs)} held-out tasks have a reward no more"
        return Verdict((), why, live, candidate)
    measured = f"held-out reward {live:.3f} → {candidate:.3f} over {len(both)} tasks"
    if gain > 0 and gain >= min_gain:
        return Verdict(names, measured, live, candidate)
    return Verdict((), f"{measured}, and {min_gain:g} more is needed", live, candidate)


def mean_reward(rans: Sequence[Ran]) -> float | None:
    """The mean over rollouts that have a reward; None if none has."""
    rewards = [each.rollout.reward for each in rans if each.rollout.reward is not None]
    return statistics.fmean(rewards) if rewards else None


def reasons(rans: Sequence[Ran]) -> Mapping[str, int]:
    """How many rollouts have no reward, by reason."""
    found: dict[str, int] = {}
    for each in rans:
        if each.rollout.reward is None:
            why = each.rollout.reason or "no reward"
            found[why] = found.get(why, 0) + 1
    return found
