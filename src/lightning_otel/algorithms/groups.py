"""Rollouts to learn from: grouped for comparison, read and adapted for a step."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_otel.adapter import Advantage, TripletAdapter
from lightning_otel.adapter.advantages import AttemptOutcome
from lightning_otel.adapter.selection import StepSelection
from lightning_otel.adapter.tokens import NO_IDS, PENALISED, TRUNCATED, notes_of
from lightning_otel.dataset.formats.format import NO_LOGPROBS
from lightning_otel.errors import StoreMissingError
from lightning_otel.store.selection import INDEX_COLUMNS, read_batches
from lightning_otel.types import Span, Trajectory, Transition

if TYPE_CHECKING:
    from lightning_otel.algorithms.base import BaseAlgorithm
    from lightning_otel.dataset import Store
    from lightning_otel.dataset.query import TransitionQuery
    from lightning_otel.state.queue import Queue
    from lightning_otel.types import Rollout

BROKE_OFF: Final = "broke off: its process died in it"
NO_REWARD: Final = "no reward"
NO_DIFFERENCE: Final = "no difference: all rollouts of its group earned the same"
LEFT_ALONE: Final = "left alone: the others of its group cannot be used"
NO_STEPS: Final = "no transitions: no call of a model was recorded, or none is selected"
RAW: Final = (
    "logprobs of the wrong mode: raw ones at a temperature other than 1; serve with "
    "--logprobs-mode processed_logprobs, or sample at 1"
)
UNKNOWN: Final = (
    "logprobs of an unknown mode: the temperature is not 1; say it: "
    "OTEL_RESOURCE_ATTRIBUTES=lightning.logprobs.mode=processed"
)
GREEDY: Final = "not sampled: temperature 0 has one answer; sample with the trainer's temperature"
WHOLE: Final = (
    "sample with top_p=1, top_k=-1, min_p=0, repetition_penalty=1 and without penalties, all said "
    "in the request: what it leaves out the server fills from the model's generation_config.json"
)

_RECORDED: Final = """
SELECT rollout_id, attempt_id, status, reward, end_ns, coalesce(task_id, task), mode FROM rollouts
WHERE (?::VARCHAR[] IS NULL OR list_contains(?::VARCHAR[], rollout_id))
  AND start_ns >= ? AND start_ns < ?
ORDER BY start_ns, rollout_id"""
_LATEST_NS: Final = (1 << 63) - 1


class Member(NamedTuple):
    """The facts of a rollout that decide if it can be learnt from."""

    rollout_id: str
    attempt_id: str  # the last, which counts
    reward: float | None
    status: str  # as the queue, or else the store, has it
    ended_ns: int | None
    lost: str = ""  # the reason why it can never be learnt from
    task: str = ""  # the id of its task; by default the task as JSON text
    mode: str | None = None
    is_queued: bool = False  # it was put into the queue, so that its whole group is known

    @property
    def is_over(self) -> bool:
        """True if it has ended; rewards may still come."""
        return self.status not in ("queuing", "running")


Groups = dict[str, tuple[Member, ...]]
"""Rollouts that are compared with each other, the oldest first, by group."""


def read_members(store: "Store", selection: "StepSelection") -> dict[str, Member]:
    """Return a store's selected rollouts, the oldest first; none without a store."""
    ids = None if selection.rollout_ids is None else list(selection.rollout_ids)
    try:
        con = store.source.connect(("spans", "rollouts"), (*INDEX_COLUMNS, "attributes"))
    except StoreMissingError:
        return {}
    parameters = [ids, ids, selection.since_ns or 0, selection.until_ns or _LATEST_NS]
    members: dict[str, Member] = {}
    for rollout_id, attempt_id, status, reward, end_ns, task, mode in con.execute(
        _RECORDED, parameters
    ).fetchall():
        lost = BROKE_OFF if status == "incomplete" and reward is None else ""
        ended_ns = None if status == "running" else end_ns
        members[rollout_id] = Member(
            rollout_id, attempt_id, reward, status, ended_ns, lost, task or "", mode
        )
    return members


def read_judged_members(
    store: "Store", query: "TransitionQuery", without: Collection[str] = ()
) -> dict[str, Member]:
    """Return the same; the query's adapter judges those without a reward."""
    members = read_members(store, query.wanted)
    silent = {
        key: member
        for key, member in members.items()
        if member.is_over and not member.lost and member.reward is None and key not in without
    }
    adapter = query.adapter
    # Only of our own rule do the store's views know the rewards.
    if silent and (not isinstance(adapter, TripletAdapter) or adapter.is_reward is not None):
        selection = replace(query.wanted, rollout_ids=tuple(silent))
        for spans in read_batches(store.source, selection):
            outcomes = adapter.explain(query.wanted.spans(spans)).outcomes
            for key, reward in _match_rewards(outcomes, silent).items():
                members[key] = silent[key]._replace(reward=reward)
    return members


def _match_rewards(
    outcomes: Iterable[AttemptOutcome], members: Mapping[str, Member]
) -> dict[str, float]:
    return {
        outcome.key.rollout_id: outcome.value
        for outcome in outcomes
        if outcome.value is not None
        and (member := members.get(outcome.key.rollout_id)) is not None
        and outcome.key.attempt_id == member.attempt_id
    }


def find_outcomes(store: "Store", rollouts: Sequence["Rollout"]) -> list["Rollout"]:
    """Return rollouts as a store has them: over, or to be tried again after a kill."""
    rows = read_members(
        store, StepSelection(rollout_ids=tuple(item.rollout_id for item in rollouts))
    )
    stand: list[Rollout] = []
    for item in rollouts:
        if (row := rows.get(item.rollout_id)) is not None:
            item = replace(item, attempts=int(row.attempt_id))
            if row.status == "succeeded":
                item = replace(item, status="succeeded", ended_ns=row.ended_ns)
            elif item.attempts >= item.max_attempts:
                item = replace(item, status="failed", reason=row.status, ended_ns=row.ended_ns)
        stand.append(item)
    return stand


def make_member(rollout: "Rollout", row: Member | None = None) -> Member:
    """Return a queue's rollout with the reward that the store has by now."""
    lost = ""
    if rollout.status in ("failed", "cancelled"):
        lost = f"{rollout.status}: {rollout.reason}" if rollout.reason else rollout.status
    attempt_id, reward = str(max(rollout.attempts, 1)), rollout.reward
    if row is not None and row.reward is not None and row.attempt_id == attempt_id:
        reward = row.reward
    task = "" if row is None else row.task
    return Member(
        rollout.rollout_id, attempt_id, reward, rollout.status, rollout.ended_ns, lost, task,
        rollout.mode, is_queued=True,
    )  # fmt: skip


def find_groups(
    store: "Store",
    queue: "Queue",
    query: "TransitionQuery",
    *,
    is_grouped: bool,
    without: Collection[str],
) -> Groups:
    """Return the groups of a store's and a queue's rollouts, without some, the oldest first.

    Without a mode, those of validation and testing are left out.
    """
    choice = query.wanted
    rows = read_judged_members(store, query, without)
    table = {rollout.rollout_id: rollout for rollout in queue.rollouts()}
    modes = (None, "train") if choice.mode is None else (choice.mode,)
    # Those that wait or were cancelled have no spans, and still belong to their groups.
    ids = [
        rollout_id
        for rollout_id in dict.fromkeys([*rows, *table] if choice.rollout_ids is None else rows)
        if rollout_id not in without and (table.get(rollout_id) or rows[rollout_id]).mode in modes
    ]
    return group_rollouts(ids, table, rows, is_grouped=is_grouped)


def group_rollouts(
    rollout_ids: Iterable[str],
    table: Mapping[str, "Rollout"],
    rows: Mapping[str, Member],
    *,
    is_grouped: bool,
) -> Groups:
    """Return queued and recorded rollouts in their groups."""
    groups: dict[str, list[Member]] = {}
    for rollout_id in rollout_ids:
        rollout = table.get(rollout_id)
        row = rows.get(rollout_id)
        key = ""
        if is_grouped and rollout is not None:
            key = rollout.group_id
        elif is_grouped and row is not None and row.task:
            key = f"task-{hashlib.sha256(row.task.encode()).hexdigest()[:16]}"
        member = rows[rollout_id] if rollout is None else make_member(rollout, row)
        groups.setdefault(key or rollout_id, []).append(member)
    return {key: tuple(members) for key, members in groups.items()}


def find_ready(groups: Groups, algorithm: "BaseAlgorithm", before_ns: int) -> Groups:
    """Return the groups that an algorithm can learn from, each with its usable rollouts.

    A group is whole when each of its rollouts is over and has a reward, or ended before
    ``before_ns`` and will never have one.
    """
    ready: Groups = {}
    needs_reward = algorithm.needs_reward
    for key, members in groups.items():
        usable = tuple(
            item
            for item in members
            if item.is_over and not item.lost and (item.reward is not None or not needs_reward)
        )
        waits = any(
            needs_reward and item.reward is None and (item.ended_ns or 0) >= before_ns
            if item.is_over
            # Of a task that comes again and again, one rollout or another always runs.
            else members[0].is_queued
            for item in members
            if not item.lost
        )
        if usable and len(usable) >= algorithm.group_size and not waits:
            ready[key] = usable
    return ready


class LoadedGroups(NamedTuple):
    """Trajectories, rewards, and why a rollout is of no use, by its id."""

    trajectories: Mapping[str, Sequence[Trajectory]]
    rewards: Mapping[str, float]
    faults: Mapping[str, str]


def load_groups(
    store: "Store",
    query: "TransitionQuery",
    groups: Mapping[str, Collection[Member]],
    algorithm: "BaseAlgorithm | None" = None,
) -> LoadedGroups:
    """Return the trajectories of usable rollouts, with advantages within each group."""
    needs_reward = algorithm is not None and algorithm.needs_reward
    needs_steps = algorithm is None or algorithm.needs_steps
    group_of = {member.rollout_id: key for key, group in groups.items() for member in group}
    members = {member.rollout_id: member for group in groups.values() for member in group}
    selection = replace(query.wanted, rollout_ids=tuple(group_of))
    adapter = query.adapter

    def group_by(spans: Sequence[Span]) -> str | None:
        ids = (span.rollout_id for span in spans)
        return next((group_of[rollout_id] for rollout_id in ids if rollout_id in group_of), None)

    if isinstance(adapter, TripletAdapter):  # one of the user's own compares as it likes
        how = adapter.comparison() or Advantage()
        adapter = replace(adapter, advantage=replace(how, group_by=group_by))
    # Advantages compare a whole group: all of them are adapted at once.
    spans = chain.from_iterable(read_batches(store.source, selection))
    explained = adapter.explain(query.wanted.spans(spans))
    paths: dict[str, list[Trajectory]] = {}
    for path in explained.trajectories:
        member = members.get(path.rollout_id)
        if member is None or path.attempt_id != member.attempt_id:
            continue
        if any(map(query.wanted.wants, path.transitions)):
            paths.setdefault(path.rollout_id, []).append(path)
    rewards: dict[str, float] = {}
    if not needs_steps:
        rewards = {key: item.reward for key, item in members.items() if item.reward is not None}
    rewards |= _match_rewards(explained.outcomes, members)
    faults = {key: NO_STEPS for key in members if needs_steps and key not in paths}
    if needs_reward:
        faults |= {key: NO_REWARD for key in members if key not in rewards and key not in faults}
    return LoadedGroups(paths, rewards, faults)


def find_token_fault(
    step: Transition,
    *,
    needs_logprobs: bool = True,
    filled: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Return why a step's tokens cannot be trained on, and what to do; empty if they can.

    Logprobs must be those of the model's own distribution; the server ``filled`` in sampling
    settings that a request left out.
    """
    if step.capture != "exact":
        return f"text only: {step.inexact or NO_IDS}"
    if not needs_logprobs:
        return ""
    if len(step.logprobs) != len(step.response_ids):
        return NO_LOGPROBS
    if filled:
        step = replace(step, sampling={**filled, **step.sampling})
    if moved := {TRUNCATED, PENALISED} & set(notes_of(step)):
        return f"{max(moved)}; {WHOLE}"
    temperature, mode = step.sampling.get("temperature", 1.0), step.sampling.get("logprobs_mode")
    if temperature == 0.0:
        return GREEDY
    if temperature == 1.0 or mode == "processed":
        return ""
    return RAW if mode == "raw" else UNKNOWN


def count_reasons(reasons: Mapping[str, int]) -> str:
    """Return reasons with their counts, the most frequent first."""
    common = Counter(dict(reasons)).most_common(4)
    return ", ".join(f"{count} × {reason}" for reason, count in common)
