"""Batches: rollouts run or waited for, claimed in whole groups, read, and checked."""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from lightning_otel.algorithms.batch import Batch
from lightning_otel.algorithms.groups import (
    NO_DIFFERENCE,
    NO_REWARD,
    Group,
    Member,
    find_groups,
    queued,
    ready,
    recorded,
    why_left,
    with_spans,
)
from lightning_otel.algorithms.loading import Loaded, capture_fault, load, told
from lightning_otel.algorithms.setting import Setting
from lightning_otel.algorithms.working import work
from lightning_otel.dataset.query import Asked
from lightning_otel.errors import TrainingError
from lightning_otel.state.runs import Claimable, Claims
from lightning_otel.types import Rollout

if TYPE_CHECKING:
    from lightning_otel.algorithms.base import BaseAlgorithm

log = logging.getLogger(__name__)

_FOREVER_NS: Final = (1 << 63) - 1
_PATIENCE: Final = 5
"""How many times as long as a look takes there is rest before the next one."""

_MOST: Final = 1024
"""Rollouts in a batch whose size nobody named: they are in memory with all their messages."""

Taken = dict[str, tuple[Member, ...]]
"""Rollouts by group."""


class Collector:
    """Gathers batch after batch of what one run has not trained on."""

    def __init__(
        self,
        setting: Setting,
        algorithm: "BaseAlgorithm",
        claims: Claims,
        stop: threading.Event,
        versions: Callable[[], Mapping[str, int]],
    ) -> None:
        """Begin.

        Args:
            setting: Of the run.
            algorithm: What the batches are for.
            claims: The run's.
            stop: When to give up waiting.
            versions: What the next rollouts are pinned to.
        """
        self._setting = setting
        self._algorithm = algorithm
        self._claims = claims
        self._stop = stop
        self._versions = versions
        self._asked = Asked.of(setting.select)  # type: ignore[arg-type]  # checked there
        self._is_first = True
        self._known: list[Group] = []
        self.counts: Counter[str] = Counter()

    def next(self, number: int) -> Batch | None:
        """The batch of a step; None if there is none, or it is time to stop.

        Args:
            number: The step, from 1.

        Raises:
            TrainingError: There is nothing that the algorithm can learn from, and why.
        """
        batch = self._run_tasks(number) if self._setting.train else self._wait_for_batch(number)
        self._is_first = self._is_first and batch is None
        return batch

    def _run_tasks(self, number: int) -> Batch | None:
        rollouts = self._queue_step(number)
        rollouts = work(self._setting, [each.rollout_id for each in rollouts], self._stop)
        groups = self._wait_for_groups(rollouts)
        if self._stop.is_set() and not all(m.is_over for group in groups for m in group.members):
            return None
        chosen = dict(self._choose_groups(groups, _FOREVER_NS))
        loaded = self._claim_groups(chosen)
        self._leave_rest(groups, chosen)
        if not loaded:
            raise self._explain_nothing(rollouts, number)
        return self._make_batch(number, [loaded])

    def _queue_step(self, number: int) -> list[Rollout]:
        """The rollouts of a step; those that were put before a kill are not put again."""
        setting, prefix = self._setting, f"{self._claims.run_id}/{number}/"
        known = [each for each in setting.queue.rollouts() if each.group_id.startswith(prefix)]
        if known:
            return known
        tasks = self._pick_tasks(number)
        return setting.queue.put(
            tasks,
            mode="train",
            agent=None if setting.agent is None else setting.agent.name,
            samples=setting.samples,
            max_attempts=setting.max_attempts,
            timeout_s=setting.timeout_s,
            resources=self._versions(),
            group_ids=[f"{prefix}{index}" for index in range(len(tasks))],
        )

    def _pick_tasks(self, number: int) -> list[object]:
        """The tasks of a step: every task once an epoch, in an order of its own."""
        train, wanted = self._setting.train, self._setting.min_batch_size
        size = len(train) if wanted is None else -(-wanted // self._setting.samples)
        found: list[object] = []
        start = (number - 1) * size
        while len(found) < size:
            epoch, place = divmod(start + len(found), len(train))
            order = list(range(len(train)))
            random.Random(f"{self._setting.seed}/{epoch}").shuffle(order)
            found.extend(train[index] for index in order[place : place + size - len(found)])
        return found

    def _wait_for_groups(self, rollouts: Sequence[Rollout]) -> list[Group]:
        """Their groups, once every reward is there or was waited for."""
        until = time.monotonic() + self._setting.reward_timeout_s
        while True:
            groups = self._groups_of(rollouts)
            waits = self._algorithm.needs_reward and any(
                each.is_over and not each.lost and each.reward is None
                for group in groups
                for each in group.members
            )
            if not waits or time.monotonic() >= until or self._stop.wait(self._setting.poll_s):
                return groups

    def _groups_of(self, rollouts: Sequence[Rollout]) -> list[Group]:
        taken = self._claims.taken()  # what was left before a kill stays so
        rollouts = [each for each in rollouts if each.rollout_id not in taken]
        members = {each.rollout_id: queued(each) for each in rollouts}
        silent = [key for key, each in members.items() if each.reward is None and not each.lost]
        if silent:
            wanted = Asked.of({"rollout_id": silent}).wanted
            here = recorded(self._setting.store, wanted)
            for key in silent:
                if key in here:
                    members[key] = with_spans(members[key], here[key].member)
        groups: dict[str, list[Member]] = {}
        is_grouped = self._algorithm.group_size > 1
        for each in rollouts:
            key = each.group_id if is_grouped else each.rollout_id
            groups.setdefault(key, []).append(members[each.rollout_id])
        return [Group(key, tuple(held), is_closed=True) for key, held in groups.items()]

    def _explain_nothing(self, rollouts: Sequence[Rollout], number: int) -> TrainingError:
        reasons = Counter(f"{each.status}: {each.reason}" for each in rollouts if each.reason)
        silent = sum(each.status == "succeeded" and each.reward is None for each in rollouts)
        if silent:
            reasons[NO_REWARD] = silent
        why = told(reasons) or told(self.counts) or "none is in a group that is large enough"
        return TrainingError(
            f"none of the {len(rollouts)} rollouts of step {number} can be learnt from ({why}); "
            "the agent must return or emit a reward, and "
            f"samples={self._algorithm.group_size} or more is needed"
        )

    def _wait_for_batch(self, number: int) -> Batch | None:
        held: list[tuple[Taken, Loaded]] = []
        wanted = self._setting.min_batch_size or 1
        if self._algorithm.takes_newest:
            self._known = []  # newer ones may be there than were seen at the step before
        while not self._stop.is_set():
            started = time.monotonic()
            groups, chosen = self._find_offered(wanted - _count_rollouts(held))
            loaded = self._claim_groups(chosen) if chosen else None
            if loaded:
                held.append(loaded)
                closed = [each for each in groups if each.is_closed and each.group_id in loaded[0]]
                self._leave_rest(closed, chosen)
            if _count_rollouts(held) >= wanted:
                return self._make_batch(number, held)
            if chosen:
                continue
            if not self._setting.follows:
                if self._is_first:
                    self._give_back(held)
                    raise self._too_few(groups, wanted)
                break
            rest_s = max(self._setting.poll_s, _PATIENCE * (time.monotonic() - started))
            self._stop.wait(rest_s)
        self._give_back(held)
        return None

    def _find_offered(self, short: int) -> tuple[list[Group], Taken]:
        """Return groups that are not taken; look anew only if there are too few."""
        taken = self._claims.taken().keys()
        known = [
            group
            for group in self._known
            if taken.isdisjoint(each.rollout_id for each in group.members)
        ]
        chosen = self._pick_enough(known, short)
        if chosen:
            return known, chosen
        setting = self._setting
        self._known = find_groups(
            setting.store,
            setting.queue,
            self._asked.wanted,
            is_grouped=self._algorithm.group_size > 1,
            without=taken,
        )
        return self._known, self._pick_enough(self._known, short)

    def _pick_enough(self, groups: Sequence[Group], short: int) -> Taken:
        """Whole groups, by age, until they are enough; none if all are too few.

        Where nobody said what is enough, it is all there are, within reason.
        """
        waited_ns = self._setting.queue.state.now_ns() - int(self._setting.reward_timeout_s * 1e9)
        before_ns = waited_ns if self._setting.follows else _FOREVER_NS
        found: Taken = {}
        size = 0
        most = _MOST if self._setting.min_batch_size is None else short
        ready = self._choose_groups(groups, before_ns)
        if self._algorithm.takes_newest:
            ready.sort(key=lambda each: max(m.ended_ns or 0 for m in each[1]), reverse=True)
        for key, members in ready:
            if size >= most:
                break
            found[key] = members
            size += len(members)
        return found if size >= short else {}

    def _too_few(self, groups: Sequence[Group], wanted: int) -> TrainingError:
        everyone = [each for group in groups for each in group.members]
        rewarded = sum(each.reward is not None for each in everyone)
        over = sum(each.is_over for each in everyone)
        least = self._algorithm.group_size
        taken = told({**self._claims.counts(), **self.counts})
        sizes = Counter(sum(each.reward is not None for each in group.members) for group in groups)
        if rewarded >= wanted and least > 1:
            return TrainingError(
                f"{rewarded} rewarded rollouts are in groups of at most {max(sizes)}, and "
                f"{self._name} compares {least} or more of one task; run each task several times "
                "(samples=4), or take an algorithm that compares none"
            )
        return TrainingError(
            f"{self._name} needs {wanted} rewarded rollouts for a step: {self._setting.store.name} "
            f"has {len(everyone)} new ones, {over} of them over and {rewarded} with a reward"
            f"{f' ({taken})' if taken else ''}; record or reward more, or lower min_batch_size"
        )

    @property
    def _name(self) -> str:
        return self._algorithm.name or type(self._algorithm).__name__

    def _choose_groups(
        self, groups: Sequence[Group], before_ns: int
    ) -> list[tuple[str, tuple[Member, ...]]]:
        size, needs_reward = self._algorithm.group_size, self._algorithm.needs_reward
        found = ready(groups, size=size, needs_reward=needs_reward, before_ns=before_ns)
        return [(group.group_id, usable) for group, usable in found]

    def _claim_groups(self, chosen: Taken) -> tuple[Taken, Loaded] | None:
        """Claim groups and read them; what cannot be used is left, with the reason."""
        offered = {
            key: [Claimable(each.rollout_id, each.reward) for each in members]
            for key, members in chosen.items()
        }
        claimed = set(self._claims.claim(offered))
        groups = {key: members for key, members in chosen.items() if key in claimed}
        if not groups:
            return None
        found = self._load_groups(groups)
        faults = {**self._find_unfit(found), **self._capture_faults(found), **found.faults}
        kept: Taken = {}
        for key, members in groups.items():
            good = tuple(each for each in members if each.rollout_id not in faults)
            if len(good) < max(self._algorithm.group_size, 1):
                self._leave_group(key, good, "left alone: the others of its group cannot be used")
                good = ()
            is_flat = len({found.rewards.get(each.rollout_id) for each in good}) == 1
            if is_flat and self._algorithm.needs_difference and not self._setting.train:
                self._leave_group(key, good, NO_DIFFERENCE)
                good = ()
            for each in members:
                if each.rollout_id in faults:
                    self._leave_group(key, [each], faults[each.rollout_id])
            if good:
                kept[key] = good
        if not kept:
            return None
        # Advantages compare those that are trained on, and no others.
        left = any(len(kept.get(key, ())) < len(members) for key, members in groups.items())
        return kept, self._load_groups(kept) if left else found

    def _load_groups(self, groups: Taken) -> Loaded:
        return load(
            self._setting.store,
            self._asked,
            groups,
            needs_reward=self._algorithm.needs_reward,
            needs_steps=self._algorithm.needs_steps,
        )

    def _find_unfit(self, found: Loaded) -> dict[str, str]:
        """Rollouts that the algorithm itself has no use for, such as stale ones."""
        faults = {
            rollout_id: fault
            for rollout_id, paths in found.trajectories.items()
            if (fault := self._algorithm.unfit(paths))
        }
        for fault, count in Counter(faults.values()).items():
            if fault not in self.counts:  # once a run, as it may wait for better ones for long
                log.warning("%d rollouts are left out: %s", count, fault)
        return faults

    def _capture_faults(self, found: Loaded) -> dict[str, str]:
        """Rollouts whose tokens the algorithm cannot use.

        Raises:
            TrainingError: There are some before anything was trained on: better told than guessed.
        """
        algorithm = self._algorithm
        if algorithm.needs != "exact":
            return {}
        faults = {
            rollout_id: fault
            for rollout_id, paths in found.trajectories.items()
            if (fault := capture_fault(paths, needs_logprobs=algorithm.needs_logprobs))
        }
        if faults and self._is_first:
            self._claims.release(list({**found.trajectories, **found.faults}))
            count = len(found.trajectories)
            mixed = "mixed capture levels: " if len(faults) < count else ""
            raise TrainingError(
                f"{self._name} trains on exact tokens, and {mixed}{len(faults)} of {count} rollouts"
                f" have none that fit ({told(Counter(faults.values()))}); record with "
                "enable_retokenization_fix=True against a server that gives token ids and "
                "logprobs, at temperature 1 with neutral sampling, or select others with select="
            )
        return faults

    def _leave_group(self, key: str, members: Sequence[Member], reason: str) -> None:
        if members:
            given = [Claimable(each.rollout_id, each.reward) for each in members]
            self._claims.leave(key, given, reason)
            self.counts[reason] += len(given)

    def _leave_rest(self, groups: Sequence[Group], chosen: Taken) -> None:
        """Say what became of the rollouts of a step that are in no batch."""
        for group in groups:
            used = {each.rollout_id for each in chosen.get(group.group_id, ())}
            for each in group.members:
                if each.rollout_id not in used:
                    self._leave_group(
                        group.group_id,
                        [each],
                        why_left(each, needs_reward=self._algorithm.needs_reward),
                    )

    def _make_batch(self, number: int, held: Sequence[tuple[Taken, Loaded]]) -> Batch:
        groups = {key: members for taken, _ in held for key, members in taken.items()}
        return Batch(
            (
                path
                for taken, loaded in held
                for members in taken.values()
                for each in members
                for path in loaded.trajectories.get(each.rollout_id, ())
            ),
            number=number,
            rewards={key: value for _, loaded in held for key, value in loaded.rewards.items()},
            groups={key: [each.rollout_id for each in members] for key, members in groups.items()},
            store=self._setting.store,
        )

    def _give_back(self, held: Sequence[tuple[Taken, Loaded]]) -> None:
        ids = [m.rollout_id for taken, _ in held for members in taken.values() for m in members]
        if ids:
            self._claims.release(ids)


def _count_rollouts(held: Sequence[tuple[Taken, Loaded]]) -> int:
    return sum(len(members) for taken, _ in held for members in taken.values())
