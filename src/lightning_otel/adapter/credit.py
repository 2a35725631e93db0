"""Which call each reward belongs to: explicit link, then parentage, then a rule.

A reward is placed once or reported with a reason; it never slides to an earlier call because the
right one has a reward already, and a call without a reward has None, never 0.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_otel import conventions as c
from lightning_otel.adapter.attributes import text
from lightning_otel.adapter.calls import is_call
from lightning_otel.adapter.tree import NO_PARENT, Tree
from lightning_otel.types import Credit, Reward

NO_CALL_BEFORE = "no call of the same agent came before it"
ALREADY_REWARDED = "its call already has a reward of that name, and the first one counts"
NOT_FINAL = "only the rollout's final reward counts under the rule 'last'"
NO_SIBLING = "no call of the same agent with the same parent came before it"
UNUSED_PARENT = "the call it was given in made no transition"
UNKNOWN_TARGET = "its link names a span or response that is not there"
UNUSED_TARGET = "its link names a span or response that made no transition"


@dataclass(slots=True)
class Placement:
    """Where rewards went.

    Attributes:
        rewards: Named rewards of each call, by the call's position in the tree; primary first.
        sources: Span ids of the rewards each call was given, likewise.
        placed: How many reward spans found their call.
        unplaced: Each other reward with the reason.
    """

    rewards: dict[int, dict[str, float]] = field(default_factory=dict)
    sources: dict[int, list[str]] = field(default_factory=dict)
    placed: int = 0
    unplaced: list[tuple[Reward, str]] = field(default_factory=list)

    def give(self, call: int | None, reward: Reward, otherwise: str) -> None:
        """Place a reward whole, or report it."""
        if call is None:
            self.unplaced.append((reward, otherwise))
            return
        held = self.rewards.setdefault(call, {})
        if held.keys() & reward.values.keys():
            self.unplaced.append((reward, ALREADY_REWARDED))
            return
        held.update(reward.values)
        self.sources.setdefault(call, []).append(reward.span.span_id)
        self.placed += 1


Rewards = Sequence[tuple[int, Reward]]
"""Rewards with their positions, in order."""


def place(
    tree: Tree, calls: Sequence[int], duplicates: Mapping[int, int], rewards: Rewards, rule: Credit
) -> Placement:
    """Give each reward to a call.

    Args:
        tree: The attempt's spans.
        calls: Positions of the calls that became transitions, in order.
        duplicates: For each call dropped as a duplicate the one that was kept.
        rewards: Rewards with their positions, in order.
        rule: For rewards without a link; ``discounted`` places them like ``next``.
    """
    done = Placement()
    by_rule: list[tuple[int, Reward]] = []
    kept = {**dict(zip(calls, calls, strict=True)), **duplicates}
    targets = _Targets(tree, calls, kept, rewards)
    for position, reward in rewards:
        parent = tree.parents[position]
        if reward.response_id or reward.span_id:
            target = targets.find(position, reward)
            call = None if target is None else targets.call(target)
            done.give(call, reward, UNKNOWN_TARGET if target is None else UNUSED_TARGET)
        elif position in kept:
            done.give(kept[position], reward, UNUSED_PARENT)
        elif parent != NO_PARENT and (parent in kept or is_call(tree.spans[parent])):
            done.give(kept.get(parent), reward, UNUSED_PARENT)
        else:
            by_rule.append((position, reward))
    if rule == "last":
        _place_last(done, tree, calls, by_rule)
    elif rule == "sibling":
        _place_siblings(done, tree, calls, by_rule)
    else:
        _place_next(done, tree, calls, by_rule)
    return done


class _Targets:
    """Spans that links name; one that is no call stands for the last call inside it."""

    def __init__(
        self, tree: Tree, calls: Sequence[int], kept: Mapping[int, int], rewards: Rewards
    ) -> None:
        self._kept = kept
        self._inside = _Calls(tree, calls)
        for call in calls:
            self._inside.add(call)
        wanted = {r.span_id for _, r in rewards} | {r.response_id for _, r in rewards}
        self._spans: dict[str, list[int]] = {}
        self._responses: dict[str, list[int]] = {}
        if wanted == {None}:
            return
        for position, span in enumerate(tree.spans):
            if span.span_id in wanted:
                self._spans.setdefault(span.span_id, []).append(position)
            response_id = text(span.attributes, c.RESPONSE_ID)
            if response_id is not None and response_id in wanted:
                self._responses.setdefault(response_id, []).append(position)

    def find(self, position: int, reward: Reward) -> int | None:
        """The span that a reward's link names."""
        found = (
            self._responses.get(reward.response_id)
            if reward.response_id
            else self._spans.get(reward.span_id or "")
        )
        # A server may repeat its ids: the latest before the reward is meant, else the first.
        return found[max(bisect_left(found, position) - 1, 0)] if found else None

    def call(self, target: int) -> int | None:
        """The call that a span stands for."""
        return self._kept[target] if target in self._kept else self._inside.last_within(target)


def _place_last(done: Placement, tree: Tree, calls: Sequence[int], rewards: Rewards) -> None:
    for _, reward in rewards[:-1]:
        done.unplaced.append((reward, NOT_FINAL))
    for position, reward in rewards[-1:]:
        agent = tree.agents[position]
        own = (call for call in reversed(calls) if agent in ("", tree.agents[call]))
        done.give(next(own, None), reward, NO_CALL_BEFORE)


def _place_siblings(done: Placement, tree: Tree, calls: Sequence[int], rewards: Rewards) -> None:
    """To the latest call before the reward that has the same parent."""
    latest: dict[tuple[str, int, str], int] = {}
    for _, _, position, reward in _merged(tree, calls, rewards):
        # Roots of different traces are no siblings.
        parent = tree.parents[position]
        trace_id = tree.spans[position].trace_id if parent == NO_PARENT else ""
        agent = tree.agents[position]
        if reward is not None:
            done.give(latest.get((trace_id, parent, agent)), reward, NO_SIBLING)
        else:
            latest[trace_id, parent, agent] = latest[trace_id, parent, ""] = position


def _place_next(done: Placement, tree: Tree, calls: Sequence[int], rewards: Rewards) -> None:
    """To the latest call before the reward, within the smallest part of the tree that has one."""
    by_agent: dict[str, list[int]] = {
        "": list(calls)
    }  # given outside any agent: whoever acted last
    for call in calls:
        if tree.agents[call]:
            by_agent.setdefault(tree.agents[call], []).append(call)
    finished = {agent: _Calls(tree, own) for agent, own in by_agent.items()}
    for _, _, position, reward in _merged(tree, calls, rewards):
        agent = tree.agents[position]
        if reward is None:
            for name in {agent, ""}:
                finished[name].add(position)
        elif agent in finished:
            done.give(finished[agent].nearest(position), reward, NO_CALL_BEFORE)
        else:
            done.give(None, reward, NO_CALL_BEFORE)


def _merged(
    tree: Tree, calls: Sequence[int], rewards: Rewards
) -> Iterable[tuple[bool, int, int, Reward | None]]:
    """Ends of calls and starts of rewards in time; at the same instant the call comes first."""
    events: list[tuple[bool, int, int, Reward | None]] = []
    events += [(False, tree.ends[call], call, None) for call in calls]
    events += [(True, tree.starts[position], position, reward) for position, reward in rewards]
    events.sort(key=lambda event: (event[1], event[0], event[2]))
    return events


class _Calls:
    """Calls in the order they were added, and the last of those within a part of the tree.

    A subtree is an interval of the walk, and its last call a maximum over a segment tree.
    """

    def __init__(self, tree: Tree, calls: Iterable[int]) -> None:
        """Take the calls that will be added, in any order."""
        self._tree = tree
        self._places = sorted(tree.first[call] for call in calls)
        self._ranks = [0] * (2 * len(self._places))
        self._added: list[int] = []
        self._entered = 0  # how many are in the segment tree; the newest is mostly enough

    def add(self, call: int) -> None:
        self._added.append(call)

    def nearest(self, position: int) -> int | None:
        """The last one within the smallest part around a span that has any."""
        if not self._added:
            return None
        tree = self._tree
        node = tree.climb(tree.parents[position], lambda n: self.last_within(n) is not None)
        return self._added[-1] if node == NO_PARENT else self.last_within(node)

    def last_within(self, node: int) -> int | None:
        """The last one in a subtree."""
        if self._added and self._tree.contains(node, self._added[-1]):
            return self._added[-1]
        for rank in range(self._entered, len(self._added)):
            self._enter(rank + 1)
        self._entered = len(self._added)
        low = bisect_left(self._places, self._tree.first[node])
        high = bisect_right(self._places, self._tree.last[node])
        rank = self._best(low, high)
        return self._added[rank - 1] if rank else None

    def _enter(self, rank: int) -> None:
        place = bisect_left(self._places, self._tree.first[self._added[rank - 1]])
        slot = place + len(self._places)
        while slot:
            self._ranks[slot] = rank  # ranks only grow, so the newest is the maximum
            slot //= 2

    def _best(self, low: int, high: int) -> int:
        best = 0
        low += len(self._places)
        high += len(self._places)
        while low < high:
            if low & 1:
                best = max(best, self._ranks[low])
                low += 1
            if high & 1:
                high -= 1
                best = max(best, self._ranks[high])
            low //= 2
            high //= 2
        return best


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
