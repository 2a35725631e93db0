"""Promotion and withdrawal of what a run made: rewards decide, and nothing but evidence.

It becomes live where it earns more on held-out tasks, or in live traffic, and is withdrawn where it
earns less. Until one or the other is told for sure enough it waits as the canary.
"""

import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_otel.algorithms.setting import Setting
from lightning_otel.algorithms.working import Ran, run_tasks
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.resources.evidence import tell, weigh

if TYPE_CHECKING:
    from lightning_otel.algorithms import Context


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a run's candidates.

    Attributes:
        promoted: Names of the resources that became live.
        reason: Why they did, or did not.
        live: Mean held-out reward of what was live; None if it was not measured.
        candidate: That of what the run made.
        withdrawn: Names of the resources whose version of this run is the canary no more.
    """

    promoted: tuple[str, ...] = ()
    reason: str = ""
    live: float | None = None
    candidate: float | None = None
    withdrawn: tuple[str, ...] = ()


def promote(
    context: "Context", setting: Setting, stop: threading.Event, *, min_gain: float
) -> Verdict:
    """Compare what a run made with what is live, task by task, and do what follows from it.

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
        is_canary = setting.resources.aliases(name).get("canary") == version
        if standing != version and (made_here or is_canary):
            if standing is None:
                return Verdict(reason=f"nothing of {name} is live to compare with: by hand")
            live[name] = standing
    if not live:
        return Verdict(reason="nothing better was made")
    unmeasured = _explain_unmeasured(setting, stop)
    if unmeasured:
        return _of_traffic(context, setting, live, unmeasured, min_gain)
    others = context.versions
    before = run_tasks(setting, setting.val, {**others, **live}, stop, mode="val")
    after = run_tasks(setting, setting.val, others, stop, mode="val")
    verdict = _judge_candidates(before, after, tuple(live), min_gain)
    told = {"val/live": verdict.live, "val/candidate": verdict.candidate}
    context.log(context.step, {name: value for name, value in told.items() if value is not None})
    if stop.is_set():
        return Verdict(reason="stopped before the held-out tasks were done: by hand")
    for name in verdict.promoted:
        _make_live(context, setting, name)
    withdrawn = [
        name
        for name in verdict.withdrawn
        if _withdraw_canary(context, setting, name, verdict.reason)
    ]
    return replace(verdict, withdrawn=tuple(withdrawn))


def _explain_unmeasured(setting: Setting, stop: threading.Event) -> str:
    """Return why held-out tasks cannot tell; empty if they can."""
    if stop.is_set():
        return "stopped"
    if not setting.val:
        return "there are no held-out tasks (val)"
    if setting.agent is None and setting.workers:
        return "there is no agent to run held-out tasks with"
    return ""


def _of_traffic(
    context: "Context",
    setting: Setting,
    live: Mapping[str, int],
    unmeasured: str,
    min_gain: float,
) -> Verdict:
    """Judge by what recorded rollouts earned with what is live and with what the run made."""
    promoted, withdrawn, reasons = [], [], []
    for name, standing in live.items():
        version = context.versions[name]
        try:
            found = setting.resources.compare(name, standing, version, setting.store)
        except ConfigError:  # nothing is recorded of one of them
            share = setting.resources.canary_weight(name)
            reasons.append(
                f"{unmeasured}: {name}@{version} is the canary, which {share:.0%} of the runs with "
                f"apply are given; what they and those with {name}@{standing} earn decides at the "
                f"next look: train() again, or lightning-otel resources promote {name} --if-better"
            )
            continue
        if found.is_worse and _withdraw_canary(context, setting, name, f"worse: {found}"):
            withdrawn.append(name)
        elif found.is_better and found.difference >= min_gain:
            _make_live(context, setting, name)
            promoted.append(name)
        reasons.append(f"{found.verdict} in live traffic: {found}")
    return Verdict(tuple(promoted), "; ".join(reasons), withdrawn=tuple(withdrawn))


def _make_live(context: "Context", setting: Setting, name: str) -> None:
    """Make what was measured live, whatever became the canary meanwhile."""
    if setting.resources.aliases(name).get("canary") == context.versions[name]:
        setting.resources.promote(name)
    else:
        setting.resources.set_alias(name, "live", context.versions[name])


def _withdraw_canary(context: "Context", setting: Setting, name: str, reason: str) -> bool:
    """Withdraw this run's canary; return whether there was one."""
    by_whom = f"{reason} ({context.run.run_id})"
    try:
        setting.resources.withdraw(name, by_whom, version=context.versions[name])
    except NotFoundError:  # another one is by now
        return False
    return True


def _judge_candidates(
    before: Sequence[Ran], after: Sequence[Ran], names: tuple[str, ...], min_gain: float
) -> Verdict:
    pairs = [
        (old.rollout.reward, new.rollout.reward) for old, new in zip(before, after, strict=True)
    ]
    both = [(old, new) for old, new in pairs if old is not None and new is not None]
    lost = sum(old is not None and new is None for old, new in pairs)
    kept = [float(new is not None) - float(old is not None) for old, new in pairs]
    is_broken = weigh(kept, [0.0, 1.0]).is_below
    why = f"{lost} of {len(pairs)} held-out tasks have a reward no more"
    if not both:
        # Where the agent fails on all of them, there is no reward to compare.
        return Verdict(
            reason=why if is_broken else "no held-out task has a reward from both: by hand",
            withdrawn=names if is_broken else (),
        )
    live = statistics.fmean(old for old, _ in both)
    candidate = statistics.fmean(new for _, new in both)
    found = weigh([new - old for old, new in both], [reward for pair in both for reward in pair])
    told = (
        f"held-out reward {live:.3f} → {candidate:.3f} over {len(both)} tasks, a difference of "
        f"{candidate - live:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
    )
    if found.is_below:
        return Verdict((), told, live, candidate, names)
    if lost:
        return Verdict((), why, live, candidate, names if is_broken else ())
    if not found.is_above:
        return Verdict((), f"{told}: {tell(0, found.missing, 'tasks')}", live, candidate)
    if candidate - live < min_gain:
        return Verdict((), f"{told}, and {min_gain:g} is needed", live, candidate)
    return Verdict(names, told, live, candidate)


def mean_reward(rans: Sequence[Ran]) -> float | None:
    """The mean over rollouts that have a reward; None if none has."""
    rewards = [each.rollout.reward for each in rans if each.rollout.reward is not None]
    return statistics.fmean(rewards) if rewards else None


def reasons(rans: Sequence[Ran]) -> Mapping[str, int]:
    """Count rollouts without a reward, by reason."""
    found: dict[str, int] = {}
    for each in rans:
        if each.rollout.reward is None:
            why = each.rollout.reason or "no reward"
            found[why] = found.get(why, 0) + 1
    return found
