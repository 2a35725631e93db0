"""Whether what a run made becomes live, waits, or is withdrawn: rewards decide.

It becomes live only where it earns more on held-out tasks. It is withdrawn where it earns less
there, or in live traffic, and that is no chance. Where neither is known it waits as the canary.
"""

import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_otel.algorithms.setting import Setting
from lightning_otel.algorithms.working import Ran, run_tasks
from lightning_otel.errors import LightningOtelError, NotFoundError
from lightning_otel.resources.comparing import FEWEST, interval_of, is_chance

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
        if standing != version and made_here:
            if standing is None:
                return Verdict(reason=f"nothing of {name} is live to compare with: by hand")
            live[name] = standing
    if not live:
        return Verdict(reason="nothing better was made")
    unmeasured = _unmeasured(setting, stop)
    if unmeasured:
        return _of_traffic(context, setting, live, f"{unmeasured}: by hand")
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
    withdrawn = [
        name for name in verdict.withdrawn if _withdraw(context, setting, name, verdict.reason)
    ]
    return replace(verdict, withdrawn=tuple(withdrawn))


def _unmeasured(setting: Setting, stop: threading.Event) -> str:
    """Why held-out tasks cannot tell; empty if they can."""
    if stop.is_set():
        return "stopped"
    if not setting.val:
        return "there are no held-out tasks (val)"
    if setting.agent is None and setting.workers:
        return "there is no agent to run held-out tasks with"
    return ""


def _of_traffic(
    context: "Context", setting: Setting, live: Mapping[str, int], reason: str
) -> Verdict:
    """Withdraw what earned less than what is live on the same tasks of recorded traffic."""
    withdrawn = []
    for name, standing in live.items():
        version = context.versions[name]
        try:
            found = setting.resources.compare(name, standing, version, setting.store)
        except LightningOtelError:  # too little is recorded of both: nothing is known
            continue
        if found.is_worse and _withdraw(context, setting, name, f"worse: {found}"):
            withdrawn.append(name)
            reason = f"worse in live traffic: {found}"
    return Verdict(reason=reason, withdrawn=tuple(withdrawn))


def _withdraw(context: "Context", setting: Setting, name: str, reason: str) -> bool:
    """Whether what this run made was the canary, and is so no more."""
    by_whom = f"{reason} ({context.run.run_id})"
    try:
        setting.resources.withdraw(name, by_whom, version=context.versions[name])
    except NotFoundError:  # another one is by now
        return False
    return True


def _judged(
    before: Sequence[Ran], after: Sequence[Ran], names: tuple[str, ...], min_gain: float
) -> Verdict:
    pairs = [
        (old.rollout.reward, new.rollout.reward) for old, new in zip(before, after, strict=True)
    ]
    both = [(old, new) for old, new in pairs if old is not None and new is not None]
    lost = sum(old is not None and new is None for old, new in pairs)
    won = sum(old is None and new is not None for old, new in pairs)
    is_broken = not is_chance(lost, won)
    why = f"{lost} of {len(pairs)} held-out tasks have a reward no more"
    if not both:
        # Where the agent fails on all of them, there is no reward to compare.
        return Verdict(
            reason=why if is_broken else "no held-out task has a reward from both: by hand",
            withdrawn=names if is_broken else (),
        )
    live = statistics.fmean(old for old, _ in both)
    candidate = statistics.fmean(new for _, new in both)
    gain = candidate - live
    measured = f"held-out reward {live:.3f} → {candidate:.3f} over {len(both)} tasks"
    if len(both) >= FEWEST:
        low, high = interval_of([new - old for old, new in both])
        if high < 0:
            told = f"{measured}, a difference of {gain:+.3f} [{low:+.3f}, {high:+.3f}]"
            return Verdict((), told, live, candidate, names)
    if lost:
        return Verdict((), why, live, candidate, names if is_broken else ())
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
