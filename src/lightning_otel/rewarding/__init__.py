"""Rewards from code and people: reward functions over what is stored, and feedback.

A reward is a span like any other, written when it is given; nothing that is stored is changed.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Final, NamedTuple, Unpack, get_args

from lightning_otel import conventions as c
from lightning_otel.adapter.assembly import INCOMPLETE_ROLLOUT
from lightning_otel.dataset import Store
from lightning_otel.dataset.query import Asked, Keywords
from lightning_otel.emitters import reward_span
from lightning_otel.rewarding.functions import Case, Failure, RewardFunction
from lightning_otel.rewarding.writing import add_surely, derived_id, identified
from lightning_otel.store.schema import NARROW_COLUMNS
from lightning_otel.store.sql import attribute
from lightning_otel.types import Mode, Rollout, Span, Trajectory
from lightning_otel.values import parse_json

__all__ = ["Applied", "Judgement", "apply_rewards"]

_FINISHED: Final = ("succeeded", "failed", "cancelled")
_ROLLOUTS: Final = """
SELECT rollout_id, attempt_id, status, task, agents, reward, start_ns, end_ns FROM rollouts
ORDER BY start_ns"""
_HELD: Final = f"""
SELECT span_id, {attribute(c.REWARD_SOURCE)} FROM spans
WHERE reward IS NOT NULL AND {attribute(c.REWARD_FUNCTION)} = ?"""


class Judgement(NamedTuple):
    """A function's judgement of an attempt, or of one of its trajectories.

    Attributes:
        values: Rewards by name; empty where it gave none.
        failure: Why it could give none; empty otherwise.
    """

    rollout_id: str
    attempt_id: str
    agent: str
    values: Mapping[str, float]
    failure: str = ""


@dataclass(slots=True)
class Applied:
    """Counts of the attempts that a function was to judge.

    Attributes:
        name: The function.
        version: Its version; empty for the first.
        rewards: Rewards it gave now.
        attempts: Attempts that were looked at, whatever came of it.
        held: Cases it had judged before, and was not asked about again.
        changed: Those of ``held`` that it judged when its source text was another.
        none: Cases of which it said nothing.
        running: Attempts that have not ended yet.
        stepless: Ended attempts it was not asked about, as they made no step.
        failed: Cases in which it raised, or gave what is no number, by what that was.
        total: The sum of the primary numbers of ``rewards``.
    """

    name: str
    version: str = ""
    rewards: int = 0
    attempts: int = 0
    held: int = 0
    changed: int = 0
    none: int = 0
    running: int = 0
    stepless: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    total: float = 0.0

    @property
    def mean(self) -> float | None:
        """The mean of the primary numbers it gave; None if it gave none."""
        return self.total / self.rewards if self.rewards else None


def apply_rewards(
    store: Store | str,
    function: Callable[..., object],
    *,
    version: str = "",
    is_dry_run: bool = False,
    told: Callable[[Judgement], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    **keywords: Unpack[Keywords],
) -> Applied:
    """Have a function judge every ended attempt that it has not judged yet, and keep what it says.

    ``def exact_match(task, answer): return float(answer == task["want"])``. It asks by the names of
    its parameters for ``task``, ``answer`` (the text of the last step), ``rollout``, ``rewards``
    (those there are, by name), ``trajectories``, or ``trajectory``: then it is called for each of
    them, and its reward is linked to the last step of that one. A function of one parameter with
    another name gets the trajectory. It gives a number, numbers by name (the primary one first), or
    None, and may be ``async``.

    To do it again adds nothing: a function is known by its name and version. Where it raises, the
    others keep their rewards; and whatever ends this, what was given until then is kept. The store
    may be written by others meanwhile: what still runs is left for the next time.

    Args:
        store: Where the spans are, and the rewards go.
        function: Judges.
        version: Another one than before is asked about everything anew; it stands behind the names
            of its rewards, as in ``exact_match@2``.
        is_dry_run: Ask the function, and keep nothing.
        told: Told of each judgement.
        progress: Told how many of about how many attempts are done.
        **keywords: Which attempts, and how rewards there are reach steps, as
            :meth:`Store.transitions` takes them, such as ``rollout_id`` and ``since``.

    Raises:
        ConfigError: The function asks for what there is not, or a keyword cannot be understood.
        StoreMissingError: There is no store.
        StoreError: The store cannot be written; what was given until then is kept.
    """
    opened = store if isinstance(store, Store) else Store(store)
    judge = RewardFunction.of(function, version)
    done = _Application(opened, judge, Asked.of(keywords), is_dry_run=is_dry_run)
    seen = set()
    for key, trajectories in _read_attempts(opened, keywords):
        seen.add(key)
        done.attempt(key, trajectories, told)
        if progress is not None:
            progress(done.applied.attempts, max(done.expected, done.applied.attempts))
    done.count_stepless(seen)
    return done.applied


def _read_attempts(
    store: Store, keywords: Keywords
) -> Iterator[tuple[tuple[str, str], tuple[Trajectory, ...]]]:
    """The trajectories of each attempt with its rollout and attempt ids."""
    every = store.trajectories(**keywords)
    for key, members in groupby(every, key=lambda each: (each.rollout_id, each.attempt_id)):
        yield key, tuple(members)


class _Application:
    """One function on its way through a store."""

    def __init__(
        self, store: Store, judge: RewardFunction, asked: Asked, *, is_dry_run: bool
    ) -> None:
        self._store = store
        self._judge = judge
        self._is_dry_run = is_dry_run
        self._rollouts, self._held = _read_known(store, judge)
        self.applied = Applied(judge.name, judge.version)
        wanted = asked.wanted
        self._wants_all = wanted.wants_all and wanted.received
        self._wanted = {
            key
            for key, rollout in self._rollouts.items()
            if (wanted.rollout_ids is None or key[0] in wanted.rollout_ids)
            and (wanted.since_ns is None or rollout.created_ns >= wanted.since_ns)
            and (wanted.until_ns is None or rollout.created_ns < wanted.until_ns)
        }
        self.expected = len(self._wanted)

    def count_stepless(self, seen: Collection[tuple[str, str]]) -> None:
        """Count the ended attempts that had nothing to judge, where none was left out by choice."""
        if self._wants_all:
            left = (self._rollouts[key] for key in self._wanted.difference(seen))
            self.applied.stepless = sum(
                each.status in _FINISHED and each.reason != INCOMPLETE_ROLLOUT for each in left
            )

    def attempt(
        self,
        key: tuple[str, str],
        trajectories: tuple[Trajectory, ...],
        told: Callable[[Judgement], None] | None,
    ) -> None:
        """Have the function judge an attempt."""
        self.applied.attempts += 1
        rollout = self._rollouts.get(key)
        # One that is not there began after the store was asked, and so cannot be over for sure.
        if rollout is None or rollout.status not in _FINISHED:
            self.applied.running += 1
            return
        given: list[Span] = []
        for case in self._make_cases(rollout, key[1], trajectories):
            identity = _case_id(self._judge, case)
            if identity in self._held:
                self.applied.held += 1
                self.applied.changed += self._held[identity] not in ("", self._judge.source)
                continue
            judgement = self._judge_case(case)
            if judgement.values:
                given.append(_make_span(self._judge, case, judgement.values, identity))
            if told is not None:
                told(judgement)
        if given and not self._is_dry_run:
            add_surely(self._store, given)

    def _make_cases(
        self, rollout: Rollout, attempt_id: str, trajectories: tuple[Trajectory, ...]
    ) -> Iterator[Case]:
        rewards = _sum_rewards(trajectories)
        mode = trajectories[0].transitions[0].mode
        if mode in get_args(Mode):
            rollout = replace(rollout, mode=mode)  # type: ignore[arg-type]  # it is one of them
        last = max(trajectories, key=lambda each: each.transitions[-1].end_ns)
        for each in trajectories if self._judge.judges_each_trajectory else (last,):
            yield Case(rollout, attempt_id, trajectories, rewards, each)

    def _judge_case(self, case: Case) -> Judgement:
        found = self._judge.judge(case)
        agent = case.trajectory.agent
        if isinstance(found, Failure):
            self.applied.failed[found.kind] += 1
            return Judgement(case.rollout.rollout_id, case.attempt_id, agent, {}, found.message)
        if not found:
            self.applied.none += 1
            return Judgement(case.rollout.rollout_id, case.attempt_id, agent, {})
        self.applied.rewards += 1
        self.applied.total += next(iter(found.values()))
        return Judgement(case.rollout.rollout_id, case.attempt_id, agent, found)


def _read_known(
    store: Store, judge: RewardFunction
) -> tuple[dict[tuple[str, str], Rollout], dict[str, str]]:
    """Each attempt's rollout, as far as spans tell of it; and the rewards the function gave before.

    Of these the span ids, each with the hash of the function's source then.
    """
    # One connection for both: each costs as much as its queries.
    con = store.source.connect(("spans", "rollouts"), (*NARROW_COLUMNS, "attributes"))
    rows = con.execute(_ROLLOUTS).fetchall()
    given = con.execute(_HELD, [judge.name]).fetchall()
    rollouts = {(row[0], row[1]): _make_rollout(*row) for row in rows}
    return rollouts, {span_id: source or "" for span_id, source in given}


def _make_rollout(
    rollout_id: str,
    attempt_id: str,
    status: Any,
    task: str | None,
    agents: str | None,
    reward: float | None,
    start_ns: int,
    end_ns: int,
) -> Rollout:
    broke_off = status == "incomplete"
    return Rollout(
        rollout_id=rollout_id,
        task=parse_json(task),
        status="failed" if broke_off else status,
        reason=INCOMPLETE_ROLLOUT if broke_off else "",
        agent=agents,
        attempts=int(attempt_id) if attempt_id.isdecimal() else 1,
        reward=reward,
        created_ns=start_ns,
        ended_ns=end_ns,
    )


def _sum_rewards(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    steps = {id(step): step for path in trajectories for step in path.transitions}
    found: dict[str, float] = {}
    for step in steps.values():
        for name, value in step.rewards.items():
            found[name] = found.get(name, 0.0) + value
    return found


def _case_id(judge: RewardFunction, case: Case) -> str:
    """The span id of what a function says of a case: it is the same each time it is asked."""
    where = (case.trajectory.agent, case.trajectory.branch) if judge.judges_each_trajectory else ()
    told = (judge.name, judge.version, case.rollout.rollout_id, case.attempt_id, *where)
    return derived_id(json.dumps(told))


def _make_span(
    judge: RewardFunction, case: Case, values: Mapping[str, float], identity: str
) -> Span:
    link = case.trajectory.transitions[-1].span_id if judge.judges_each_trajectory else None
    made = reward_span(values, rollout_id=case.rollout.rollout_id, span_id=link)
    found = {
        c.ATTEMPT_ID: case.attempt_id,
        c.REWARD_FUNCTION: judge.name,
        c.REWARD_VERSION: judge.version,
        c.REWARD_SOURCE: judge.source,
    }
    return identified(made, identity, {name: text for name, text in found.items() if text})
