"""Which call each reward belongs to: explicit link, then parentage, then a rule.

A reward is placed once or reported with a reason; it never slides to an earlier call because the
right one has a reward already, and a call without a reward has None, never 0.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from lightning_otel.adapter import rules
from lightning_otel.adapter.calls import is_call
from lightning_otel.adapter.finished import Finished
from lightning_otel.adapter.links import Targets
from lightning_otel.adapter.placement import (
    ALREADY_REWARDED,
    UNKNOWN_TARGET,
    WRONG_LENGTH,
    Placement,
)
from lightning_otel.adapter.rules import (
    NO_CALL_BEFORE,
    NO_SIBLING,
    NOT_CHOSEN,
    NOT_FINAL,
    Rewards,
)
from lightning_otel.adapter.tree import NO_PARENT, Tree
from lightning_otel.types import Call, Credit, CreditRule, Reward

__all__ = [
    "ALREADY_REWARDED",
    "NOT_CHOSEN",
    "NOT_FINAL",
    "NO_CALL_BEFORE",
    "NO_SIBLING",
    "PASSED_OVER",
    "UNKNOWN_TARGET",
    "UNUSED_PARENT",
    "UNUSED_TARGET",
    "WRONG_LENGTH",
    "discounted",
    "passed_over",
    "place",
]

UNUSED_PARENT: Final = "the call it was given in made no transition"
UNUSED_TARGET: Final = "its link names a span or response that made no transition"
PASSED_OVER: Final = "reward beyond a lost call: a later call that came to nothing stood before it"


def place(
    tree: Tree,
    calls: Mapping[int, Call],
    duplicates: Mapping[int, int],
    rewards: Rewards,
    rule: Credit | CreditRule,
) -> Placement:
    """Give each reward to what it judges.

    Args:
        tree: The attempt's spans.
        calls: What became transitions, by position, in order.
        duplicates: For each call dropped as a duplicate the one that was kept.
        rewards: Rewards with their positions, in order.
        rule: For rewards without a link; ``discounted`` places them like ``previous``.
    """
    done = Placement()
    if not rewards:
        return done
    own = list(calls)
    sites = _Sites(tree, own, duplicates, rewards)
    by_rule = [each for each in rewards if not sites.settle(done, *each)]
    if by_rule:
        run = rules.custom(rule, calls) if callable(rule) else rules.NAMED[rule]
        run(done, tree, own, by_rule)
    if not calls:
        done.judge_whole()
    return done


class _Sites:
    """The calls that a reward says it judges: by its link, its place in the tree, or its length."""

    def __init__(
        self, tree: Tree, calls: Sequence[int], duplicates: Mapping[int, int], rewards: Rewards
    ) -> None:
        self._tree = tree
        self._calls = calls
        self._known = {**dict(zip(calls, calls, strict=True)), **duplicates}
        self._targets = Targets(tree, rewards, self._known)
        self._inside = Finished(tree, calls, calls)

    def settle(self, done: Placement, position: int, reward: Reward) -> bool:
        """Place a reward that needs no rule, or leave it; whether it is done with."""
        parent = self._tree.parents[position]
        if reward.links:
            target = self._targets.find(position, reward)
            if target is None:
                done.leave(reward, UNKNOWN_TARGET)
            elif target in self._known or not reward.steps:
                self._give(done, self._call(target), reward, "link", UNUSED_TARGET)
            else:
                self._give_each(done, self._within(target), reward, UNUSED_TARGET)
        elif position in self._known:
            self._give(done, self._known[position], reward, "parent", UNUSED_PARENT)
        elif parent != NO_PARENT and (parent in self._known or is_call(self._tree.spans[parent])):
            self._give(done, self._known.get(parent), reward, "parent", UNUSED_PARENT)
        elif reward.steps:
            self._give_each(done, self._before(position), reward, NO_CALL_BEFORE)
        else:
            return False
        return True

    def _call(self, target: int) -> int | None:
        """The call that a span stands for: if it is none, the last one inside it."""
        return self._known[target] if target in self._known else self._inside.last_within(target)

    def _within(self, target: int) -> list[int]:
        return sorted(self._inside.all_within(target))

    @staticmethod
    def _give(done: Placement, call: int | None, reward: Reward, by: str, otherwise: str) -> None:
        if reward.steps and call is not None:
            done.give_each((call,), reward)
        else:
            done.give(call, reward, by, otherwise)

    @staticmethod
    def _give_each(done: Placement, calls: Sequence[int], reward: Reward, otherwise: str) -> None:
        if calls:
            done.give_each(calls, reward)
        else:
            done.leave(reward, otherwise)

    def _before(self, position: int) -> list[int]:
        """The calls of a reward's agent that had ended, in the smallest part around it with any."""
        tree = self._tree
        agent, start = tree.agents[position], tree.starts[position]
        own = [
            call
            for call in self._calls
            if tree.ends[call] <= start and agent in ("", tree.agents[call])
        ]
        part = Finished(tree, own, own).part(position)
        return own if part == NO_PARENT else [call for call in own if tree.contains(part, call)]


def passed_over(
    tree: Tree, done: Placement, rewards: Rewards, lost: Iterable[int]
) -> frozenset[int]:
    """Calls with a reward that a rule gave them although a later call of the agent ended before it.

    Args:
        tree: The attempt's spans.
        done: Where the rewards went.
        rewards: Rewards with their positions.
        lost: Positions of the calls that made no transition.
    """
    ends: dict[str, list[int]] = {}
    for call in sorted(lost, key=tree.ends.__getitem__):
        for agent in {tree.agents[call], ""}:
            ends.setdefault(agent, []).append(tree.ends[call])
    places = {id(reward): position for position, reward in rewards} if ends else {}
    found: set[int] = set()
    for reward, calls, by in done.placed if ends else ():
        if by in rules.NAMED and not reward.links:
            position = places[id(reward)]
            before = ends.get(tree.agents[position], [])
            latest = bisect_right(before, tree.starts[position]) - 1
            if latest >= 0 and before[latest] > max(map(tree.ends.__getitem__, calls)):
                found.update(calls)
    return frozenset(found)


def discounted(
    rewards: Sequence[float | None], before: Sequence[int], gamma: float
) -> list[float | None]:
    """The discounted return of each step of one agent.

    Where several steps follow one, their mean return counts: they are samples of what comes next.

    Args:
        rewards: Reward of each step; None where there is none.
        before: The step that each step follows, which stands earlier; -1 for none.
        gamma: Discount per step, 0 to 1.

    Returns:
        For each step the sum of the rewards from there on, each times gamma to the power of its
        distance; None where no reward follows.

    Source: Sutton and Barto, Reinforcement Learning, 2nd edition, equation 3.8.
    """
    returns = list(rewards)
    totals = [0.0] * len(rewards)
    counts = [0] * len(rewards)
    for step in range(len(rewards) - 1, -1, -1):
        reward = rewards[step]
        if counts[step]:
            following = gamma * totals[step] / counts[step]
            returns[step] = following if reward is None else reward + following
        found = returns[step]
        if found is not None and before[step] >= 0:
            totals[before[step]] += found
            counts[before[step]] += 1
    return returns
