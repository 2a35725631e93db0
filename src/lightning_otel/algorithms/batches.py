"""Batches: run or wait for rollouts, claim whole groups, read and check them."""

import logging
import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from lightning_otel.algorithms.base import BaseAlgorithm, Batch, name_of
from lightning_otel.algorithms.groups import (
    LEFT_ALONE,
    NO_DIFFERENCE,
    NO_REWARD,
    Groups,
    LoadedGroups,
    Member,
    count_reasons,
    find_groups,
    find_outcomes,
    find_ready,
    find_token_fault,
    group_rollouts,
    load_groups,
    read_judged_members,
)
from lightning_otel.algorithms.options import RunConfig
from lightning_otel.algorithms.tasks import POLL_S, make_task_rollouts, run_rollouts
from lightning_otel.dataset.query import TransitionQuery
from lightning_otel.errors import TrainingError
from lightning_otel.state.runs import Claimable, Claims
from lightning_otel.types import Rollout

log = logging.getLogger(__name__)

_FOREVER_NS: Final = (1 << 63) - 1
_PATIENCE: Final = 5
"""How many times as long as a look takes there is rest before the next one."""

_MOST: Final = 1024
"""Rollouts in a batch whose size nobody named: they are in memory with all their messages."""


class Collector:
    """Makes the batches of a run from rollouts that it has not trained on."""

    def __init__(
        self,
        config: RunConfig,
        algorithm: BaseAlgorithm,
        claims: Claims,
        versions: Mapping[str, int],
        counts: Counter[str],
        *,
        is_resumed: bool = False,
    ) -> None:
        """Prepare batches of rollouts pinned to ``versions``; ``counts`` collects exclusions."""
        self._config = config
        self._algorithm = algorithm
        self._claims = claims
        self._versions = versions
        self._query = TransitionQuery.of(config.select)  # type: ignore[arg-type]  # checked there
        self._is_first = True
        self._is_resumed = is_resumed
        self._known: Groups = {}
        self.counts = counts

    def next(self, number: int) -> Batch | None:
        """Return the batch of a step, from 1; None if there is none, or the run is stopped."""
        batch = self._run_tasks(number) if self._config.train else self._wait_for_batch(number)
        self._is_first = self._is_first and batch is None
        return batch

    def _run_tasks(self, number: int) -> Batch | None:
        config = self._config
        rollouts = run_rollouts(config, self._make_step(number))
        until = time.monotonic() + config.reward_timeout_s
        while True:
            groups = self._group_step(rollouts)
            everyone = [member for members in groups.values() for member in members]
            waits = self._algorithm.needs_reward and any(
                member.is_over and not member.lost and member.reward is None for member in everyone
            )
            if not waits or time.monotonic() >= until or config.stop.wait(POLL_S):
                break
        if config.stop.is_set() and not all(member.is_over for member in everyone):
            return None
        chosen = find_ready(groups, self._algorithm, _FOREVER_NS)
        batch = Batch((), number=number, rewards={}, groups={}, store=config.store)
        self._claim_groups(chosen, batch)
        self._leave_rest(groups, chosen)
        if not batch.groups:
            raise self._explain_nothing(rollouts, number)
        return batch

    def _make_step(self, number: int) -> list[Rollout]:
        config, tasks = self._config, self._pick_tasks(number)
        prefix = f"{self._claims.run_id}-{number}"
        group_ids = [f"{prefix}-{index}" for index in range(len(tasks))]
        rollouts = [
            replace(rollout, rollout_id=f"{rollout.group_id}-{index % config.samples}")
            for index, rollout in enumerate(
                make_task_rollouts(
                    config, tasks, self._versions, "train", config.samples, group_ids
                )
            )
        ]
        return find_outcomes(config.store, rollouts) if self._is_resumed else rollouts

    def _pick_tasks(self, number: int) -> list[object]:
        train, least = self._config.train, self._config.min_batch_size
        size = len(train) if least is None else -(-least // self._config.samples)
        picked: list[object] = []
        start = (number - 1) * size
        while len(picked) < size:
            epoch, place = divmod(start + len(picked), len(train))
            order = list(range(len(train)))
            random.Random(f"{self._config.seed}/{epoch}").shuffle(order)
            picked.extend(train[index] for index in order[place : place + size - len(picked)])
        return picked

    def _group_step(self, rollouts: Sequence[Rollout]) -> Groups:
        claims = self._claims.read_taken()  # what was left before a kill stays so
        free = {item.rollout_id: item for item in rollouts if item.rollout_id not in claims}
        silent = [
            key
            for key, item in free.items()
            if item.reward is None and item.status not in ("failed", "cancelled")
        ]
        selection = TransitionQuery.of({"rollout_id": silent}).wanted
        query = self._query._replace(wanted=selection)
        judged = read_judged_members(self._config.store, query) if silent else {}
        return group_rollouts(free, free, judged, is_grouped=self._algorithm.group_size > 1)

    def _explain_nothing(self, rollouts: Sequence[Rollout], number: int) -> TrainingError:
        reasons = Counter(f"{item.status}: {item.reason}" for item in rollouts if item.reason)
        silent = sum(item.status == "succeeded" and item.reward is None for item in rollouts)
        if silent:
            reasons[NO_REWARD] = silent
        why = count_reasons(reasons) or count_reasons(self.counts)
        return TrainingError(
            f"none of the {len(rollouts)} rollouts of step {number} can be learnt from "
            f"({why or 'none is in a group that is large enough'}); "
            "the agent must return or emit a reward, and "
            f"samples={self._algorithm.group_size} or more is needed"
        )

    def _wait_for_batch(self, number: int) -> Batch | None:
        config = self._config
        batch = Batch((), number=number, rewards={}, groups={}, store=config.store)
        size = config.min_batch_size or 1
        if self._algorithm.takes_newest:
            self._known = {}  # newer ones may be there than were seen at the step before
        patient_until_s = time.monotonic() + config.reward_timeout_s
        while not config.stop.is_set():
            started = time.monotonic()
            groups, chosen = self._find_offered(size - len(batch.rollout_ids))
            claimed = self._claim_groups(chosen, batch)
            closed = {key: groups[key] for key in claimed if groups[key][0].is_queued}
            self._leave_rest(closed, chosen)
            if len(batch.rollout_ids) >= size:
                return batch
            if chosen:
                continue
            if not config.follows:
                if self._is_first:
                    self._claims.release(batch.rollout_ids)
                    raise self._explain_too_few(groups, size)
                break
            if started > patient_until_s:
                patient_until_s = math.inf  # once a batch
                log.warning("the run waits: %s", self._explain_too_few(groups, size))
            config.stop.wait(max(POLL_S, _PATIENCE * (time.monotonic() - started)))
        self._claims.release(batch.rollout_ids)
        return None

    def _find_offered(self, short: int) -> tuple[Groups, Groups]:
        claim_ids = self._claims.read_taken().keys()
        self._known = {
            key: members
            for key, members in self._known.items()
            if claim_ids.isdisjoint(member.rollout_id for member in members)
        }
        chosen = self._pick_enough(self._known, short)
        if not chosen:
            self._known = find_groups(
                self._config.store,
                self._config.queue,
                self._query,
                is_grouped=self._algorithm.group_size > 1,
                without=claim_ids,
            )
            chosen = self._pick_enough(self._known, short)
        return self._known, chosen

    def _pick_enough(self, groups: Groups, short: int) -> Groups:
        """Return enough whole groups, by age, or none; without a size all, within reason."""
        config = self._config
        waited_ns = config.state.now_ns() - int(config.reward_timeout_s * 1e9)
        before_ns = waited_ns if config.follows else _FOREVER_NS
        ready = find_ready(groups, self._algorithm, before_ns)
        ordered = list(ready.items())
        if self._algorithm.takes_newest:
            ordered.sort(key=lambda group: max(m.ended_ns or 0 for m in group[1]), reverse=True)
        most = _MOST if config.min_batch_size is None else short
        picked: Groups = {}
        size = 0
        for key, members in ordered:
            if size >= most:
                break
            picked[key] = members
            size += len(members)
        return picked if size >= short else {}

    def _explain_too_few(self, groups: Groups, size: int) -> TrainingError:
        everyone = [item for members in groups.values() for item in members]
        sizes = [sum(item.reward is not None for item in members) for members in groups.values()]
        least, name = self._algorithm.group_size, name_of(self._algorithm)
        if sum(sizes) >= size and least > 1:
            return TrainingError(
                f"{sum(sizes)} rewarded rollouts are in groups of at most {max(sizes)}, and "
                f"{name} compares {least} or more of one task; run each task several times "
                "(samples=4), or take an algorithm that compares none"
            )
        exclusions = count_reasons({**self._claims.counts(), **self.counts})
        over = sum(item.is_over for item in everyone)
        return TrainingError(
            f"{name} needs {size} rewarded rollouts for a step: {self._config.store.name} "
            f"has {len(everyone)} new ones, {over} of them over and {sum(sizes)} with a reward"
            f"{f' ({exclusions})' if exclusions else ''}; record or reward more, or lower "
            "min_batch_size"
        )

    def _claim_groups(self, chosen: Groups, batch: Batch) -> Groups:
        algorithm = self._algorithm
        offered = {
            key: [Claimable(member.rollout_id, member.reward) for member in members]
            for key, members in chosen.items()
        }
        claimed = set(self._claims.claim(offered) if chosen else ())
        groups = {key: members for key, members in chosen.items() if key in claimed}
        if not groups:
            return {}
        loaded = load_groups(self._config.store, self._query, groups, algorithm)
        faults = {**self._find_faults(loaded), **loaded.faults}
        pool: Groups = {}
        for key, members in groups.items():
            good = tuple(member for member in members if member.rollout_id not in faults)
            is_flat = len({loaded.rewards.get(member.rollout_id) for member in good}) == 1
            if len(good) < max(algorithm.group_size, 1):
                self._leave_members(key, good, LEFT_ALONE)
            elif is_flat and algorithm.needs_difference and not self._config.train:
                self._leave_members(key, good, NO_DIFFERENCE)
            else:
                pool[key] = good
            for member in members:
                if member.rollout_id in faults:
                    self._leave_members(key, [member], faults[member.rollout_id])
        if pool and pool != groups:  # advantages compare those that are trained on, and no others
            loaded = load_groups(self._config.store, self._query, pool, algorithm)
        for key, members in pool.items():
            ids = [member.rollout_id for member in members]
            batch.groups[key] = (*batch.groups.get(key, ()), *ids)
            batch.extend(path for id_ in ids for path in loaded.trajectories.get(id_, ()))
        if pool:
            batch.rewards.update(loaded.rewards)
        return pool

    def _find_faults(self, loaded: LoadedGroups) -> dict[str, str]:
        algorithm, paths = self._algorithm, loaded.trajectories
        unfit = {key: fault for key, part in paths.items() if (fault := algorithm.unfit(part))}
        for fault, count in Counter(unfit.values()).items():
            if fault not in self.counts:  # once a run, as it may wait for better ones for long
                log.warning("%d rollouts are left out: %s", count, fault)
        if algorithm.needs != "exact":
            return unfit
        of_tokens = {}
        for key, part in paths.items():
            steps = (step for path in part for step in path.transitions)
            faults = (find_token_fault(s, needs_logprobs=algorithm.needs_logprobs) for s in steps)
            if fault := next(filter(None, faults), ""):
                of_tokens[key] = fault.partition(";")[0]
        if of_tokens and self._is_first:
            self._claims.release(list({**paths, **loaded.faults}))
            mixed = "mixed capture levels: " if len(of_tokens) < len(paths) else ""
            reasons = count_reasons(Counter(of_tokens.values()))
            raise TrainingError(
                f"{name_of(algorithm)} trains on exact tokens, and {mixed}{len(of_tokens)} of "
                f"{len(paths)} rollouts have none that fit ({reasons}); record with "
                "enable_retokenization_fix=True against a server that gives token ids and "
                "logprobs, at temperature 1 with neutral sampling, or select others with select="
            )
        return {**unfit, **of_tokens}

    def _leave_members(self, key: str, members: Sequence[Member], reason: str) -> None:
        if members:
            claimables = [Claimable(member.rollout_id, member.reward) for member in members]
            self._claims.exclude(key, claimables, reason)
            self.counts[reason] += len(claimables)

    def _leave_rest(self, groups: Groups, chosen: Groups) -> None:
        for key, members in groups.items():
            for member in members:
                if member not in chosen.get(key, ()):
                    reason = member.lost.partition(":")[0] or LEFT_ALONE
                    if not member.lost and member.reward is None and self._algorithm.needs_reward:
                        reason = f"{NO_REWARD} in time"
                    self._leave_members(key, [member], reason)
