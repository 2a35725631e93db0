"""Rewards from code and people: reward functions over what is stored, and feedback.

A reward is a span like any other, written when it is given; nothing that is stored is changed.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple, Unpack, get_args

from lightning_otel.adapter.rewards import add_decimals
from lightning_otel.adapter.triplet import INCOMPLETE_ROLLOUT
from lightning_otel.dataset import Store
from lightning_otel.dataset.query import QueryKeywords, TransitionQuery
from lightning_otel.errors import NotFoundError
from lightning_otel.rewards import judges
from lightning_otel.rewards.feedback import Keep, derive_span_id, replace_span_id, write_spans
from lightning_otel.rewards.functions import Case, RewardFailure, RewardFunction
from lightning_otel.store.schema import NARROW_COLUMNS
from lightning_otel.store.source import read_overview
from lightning_otel.store.sql import attribute_sql
from lightning_otel.tracing.emitters import retraction_span, reward_span
from lightning_otel.types import Mode, Rollout, Span, Trajectory
from lightning_otel.types import conventions as c
from lightning_otel.types.rollouts import FINAL
from lightning_otel.types.transitions import distinct_steps
from lightning_otel.types.values import parse_json

__all__ = ["Applied", "Judgement", "apply_rewards", "judges"]

_ROLLOUTS: Final = """
SELECT rollout_id, attempt_id, status, task, agents, reward, start_ns, end_ns FROM rollouts
ORDER BY start_ns"""
_HELD: Final = f"""
SELECT span_id, {attribute_sql(c.REWARD_SOURCE)} FROM spans
WHERE reward IS NOT NULL AND {attribute_sql(c.REWARD_FUNCTION)} = ?"""

_NAMED: Final = """
SELECT span_id, rollout_id, coalesce(name, '') AS name, value FROM rewards
WHERE starts_with(span_id, nullif(?, '')) LIMIT 2"""


def retract(
    store: Store, prefix: str, keep: Keep | None = None, *, received: str | None = None
) -> dict[str, Any]:
    """Retract the reward whose span's id begins so; return its row.

    Raises:
        NotFoundError: No reward that counts has such an id, or several have.
    """
    rows = read_overview(store.source, _NAMED, [prefix])
    if len(rows) != 1:
        many = "several span ids of rewards begin" if rows else "no reward's span id begins"
        raise NotFoundError(
            f"{many} with {prefix!r}, or it is retracted already; list those that count: "
            'lightning-otel sql "SELECT span_id, rollout_id, name, value FROM rewards"'
        )
    span = retraction_span(rows[0]["span_id"], rows[0]["rollout_id"], received)
    (keep or partial(write_spans, store))([span])
    return rows[0]


class Judgement(NamedTuple):
    """The rewards of an attempt or trajectory by name, or why there is none."""

    rollout_id: str
    attempt_id: str
    agent: str
    values: Mapping[str, float]
    failure: str = ""


@dataclass(slots=True)
class Applied:
    """Counts of the attempts that a function was to judge.

    Attributes:
        version: Its version; empty for the first.
        rewards: Rewards it gave now.
        attempts: Attempts that were looked at, whatever came of it.
        held: Cases it had judged before, and was not asked about again.
        changed: Those of ``held`` that it judged when its source text was another.
        none: Cases of which it said nothing.
        running: Attempts that have not ended yet.
        crashed: Attempts that failed, and were left alone.
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
    crashed: int = 0
    stepless: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    total: float = 0.0

    @property
    def reward_name(self) -> str:
        """The name of its reward, where it gives a plain number."""
        return f"{self.name}@{self.version}" if self.version else self.name

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
    with_failed: bool = False,
    told: Callable[[Judgement], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    **keywords: Unpack[QueryKeywords],
) -> Applied:
    """Have a function judge every ended attempt that it has not judged yet, and keep what it says.

    ``def exact_match(task, answer): return float(answer == task["want"])``. It asks by the names of
    its parameters for ``task``, ``answer`` (the text of the last step), ``rollout``, ``rewards``
    (those there are, by name), ``trajectories``, or ``trajectory``: then it is called for each of
    them, and its reward is linked to the last step of that one. A function of one parameter with
    another name gets the trajectory. It gives a number, numbers by name (the primary one first), or
    None, and may be ``async``.

    A function is known by its name and version: to do it again adds nothing. Where it raises, and
    whatever ends this, other rewards are kept. What still runs is left for the next time.

    Args:
        store: Where the spans are, and the rewards go.
        function: The reward function.
        version: Another one than before is asked about everything anew; it stands behind the names
            of its rewards, as in ``exact_match@2``.
        is_dry_run: Ask the function, and keep nothing.
        with_failed: Judge attempts, too, whose program failed or broke off.
        told: Called with each judgement.
        progress: Called with the numbers of attempts that are done, and of about all.
        **keywords: Attempts and credit, as :meth:`Store.transitions` takes them.

    Raises:
        ConfigError: The function asks for what there is not, or a keyword cannot be understood.
        StoreMissingError: There is no store.
        StoreError: The store cannot be written; what was given until then is kept.
    """
    opened = store if isinstance(store, Store) else Store(store)
    judge = RewardFunction.of(function, version)
    query = TransitionQuery.of(keywords).wanted
    rollouts, judged = _read_known(opened, judge)
    pending = {
        key
        for key, rollout in rollouts.items()
        if (query.rollout_ids is None or key[0] in query.rollout_ids)
        and (query.since_ns is None or rollout.created_ns >= query.since_ns)
        and (query.until_ns is None or rollout.created_ns < query.until_ns)
    }
    expected, applied = len(pending), Applied(judge.name, judge.version)
    paths = opened.trajectories(**keywords)
    for key, members in groupby(
        paths, key=lambda trajectory: (trajectory.rollout_id, trajectory.attempt_id)
    ):
        trajectories = tuple(members)
        pending.discard(key)
        applied.attempts += 1
        recorded = rollouts.get(key)
        # One that is not there began after the store was asked, and so cannot be over for sure.
        if recorded is None or recorded.status not in FINAL:
            applied.running += 1
        elif recorded.status == "failed" and not with_failed:
            applied.crashed += 1
        else:
            spans: list[Span] = []
            for case in _make_cases(judge, recorded, key[1], trajectories):
                identity = _case_id(judge, case)
                if identity in judged:
                    applied.held += 1
                    applied.changed += judged[identity] not in ("", judge.source)
                    continue
                judgement = _judge_case(judge, case, applied)
                if judgement.values:
                    spans.append(_make_span(judge, case, judgement.values, identity))
                if told is not None:
                    told(judgement)
            if spans and not is_dry_run:
                write_spans(opened, spans)
        if progress is not None:
            progress(applied.attempts, max(expected, applied.attempts))
    if query.wants_all and query.received:  # else what is left may have been left by choice
        applied.stepless = sum(
            rollouts[key].status in FINAL and rollouts[key].reason != INCOMPLETE_ROLLOUT
            for key in pending
        )
    return applied


def _read_known(
    store: Store, judge: RewardFunction
) -> tuple[dict[tuple[str, str], Rollout], dict[str, str]]:
    # One connection for both: each costs as much as its queries.
    con = store.source.connect(("spans", "rollouts"), (*NARROW_COLUMNS, "attributes"))
    rows = con.execute(_ROLLOUTS).fetchall()
    rewards = con.execute(_HELD, [judge.name]).fetchall()
    rollouts: dict[tuple[str, str], Rollout] = {}
    for rollout_id, attempt_id, status, task, agents, reward, start_ns, end_ns in rows:
        broke_off = status == "incomplete"
        rollouts[rollout_id, attempt_id] = Rollout(
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
    return rollouts, {span_id: source or "" for span_id, source in rewards}


def _make_cases(
    judge: RewardFunction, rollout: Rollout, attempt_id: str, trajectories: tuple[Trajectory, ...]
) -> Iterator[Case]:
    rewards = _sum_rewards(trajectories)
    mode = trajectories[0].transitions[0].mode
    if mode in get_args(Mode):
        rollout = replace(rollout, mode=mode)  # type: ignore[arg-type]  # it is one of them
    last = max(trajectories, key=lambda trajectory: trajectory.transitions[-1].end_ns)
    for trajectory in trajectories if judge.judges_each_trajectory else (last,):
        yield Case(rollout, attempt_id, trajectories, rewards, trajectory)


def _sum_rewards(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    numbers: dict[str, list[float]] = {}
    for step in distinct_steps(trajectories):
        for name, value in step.rewards.items():
            numbers.setdefault(name, []).append(value)
    return {name: add_decimals(values) for name, values in numbers.items()}


def _judge_case(judge: RewardFunction, case: Case, applied: Applied) -> Judgement:
    result = judge.judge(case)
    judgement = Judgement(case.rollout.rollout_id, case.attempt_id, case.trajectory.agent, {})
    if isinstance(result, RewardFailure):
        applied.failed[result.kind] += 1
        return judgement._replace(failure=result.message)
    if not result:
        applied.none += 1
        return judgement
    applied.rewards += 1
    applied.total += next(iter(result.values()))
    return judgement._replace(values=result)


def _case_id(judge: RewardFunction, case: Case) -> str:
    """Return the span id of a judgement: the same each time."""
    where = (case.trajectory.agent, case.trajectory.branch) if judge.judges_each_trajectory else ()
    key = (judge.name, judge.version, case.rollout.rollout_id, case.attempt_id, *where)
    return derive_span_id(json.dumps(key))


def _make_span(
    judge: RewardFunction, case: Case, values: Mapping[str, float], identity: str
) -> Span:
    link = case.trajectory.transitions[-1].span_id if judge.judges_each_trajectory else None
    span = reward_span(values, rollout_id=case.rollout.rollout_id, span_id=link)
    attributes: dict[str, Any] = {
        c.ATTEMPT_ID: case.attempt_id,
        c.REWARD_FUNCTION: judge.name,
        c.REWARD_VERSION: judge.version,
        c.REWARD_SOURCE: judge.source,
        c.REWARD_PROMPT: judge.prompt,
        c.EVALUATION_EXPLANATION: getattr(next(iter(values.values())), "explanation", ""),
    }
    return replace_span_id(
        span, identity, {name: text for name, text in attributes.items() if text}
    )
