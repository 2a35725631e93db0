"""Which call each reward belongs to: explicit link, then parentage, then time.

A reward is placed once or reported with a reason; it never slides to an earlier call because the
right one has a reward already, and a call without a reward has None, never 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_otel.adapter.tree import NO_PARENT, Tree
from lightning_otel.types import Credit, Reward

NO_CALL_BEFORE = "no call of the same agent and branch came before it"
ALREADY_REWARDED = "its call already has a reward of that name, and the first one counts"
NOT_FINAL = "only the rollout's final reward counts under the rule 'last'"
NO_SIBLING = "no call with the same parent came before it"


@dataclass(slots=True)
class Placement:
    """Where rewards went.

    Attributes:
        rewards: Named rewards of each call, by the call's position in the tree; primary first.
        placed: How many reward spans found their call.
        unplaced: Each other reward with the reason.
    """

    rewards: dict[int, dict[str, float]] = field(default_factory=dict)
    placed: int = 0
    unplaced: list[tuple[Reward, str]] = field(default_factory=list)


def place(
    tree: Tree, calls: Sequence[int], rewards: Sequence[tuple[int, Reward]], rule: Credit
) -> Placement:
    """Give each reward to a call.

    Args:
        tree: The attempt's spans.
        calls: Positions of the calls that became transitions, in order.
        rewards: Rewards with their positions, in order.
        rule: For rewards without a link; ``discounted`` places them like ``next``.
    """
    done = Placement()
    by_rule = []
    targets = _Targets(tree, calls)
    known = set(calls)
    for position, reward in rewards:
        if tree.parents[position] in known:
            _give(done, tree.parents[position], reward)
        elif reward.span_id is None and reward.response_id is None:
            by_rule.append((position, reward))
        elif (call := targets.linked(reward)) is not None:
            _give(done, call, reward)
        else:
            target = reward.span_id or reward.response_id
            done.unplaced.append((reward, f"its link names {target}, which made no transition"))
    if rule == "last":
        _place_last(done, calls, by_rule)
    elif rule == "sibling":
        _place_siblings(done, tree, calls, by_rule)
    else:
        _place_next(done, tree, calls, by_rule)
    return done


def _give(done: Placement, call: int, reward: Reward) -> None:
    held = done.rewards.setdefault(call, {})
    new = {name: value for name, value in reward.values.items() if name not in held}
    if not new:
        done.unplaced.append((reward, ALREADY_REWARDED))
        return
    held.update(new)
    done.placed += 1


class _Targets:
    """Calls by span id and response id; a link to another span means the last call inside it."""

    def __init__(self, tree: Tree, calls: Sequence[int]) -> None:
        self._tree = tree
        self._calls = sorted(calls, key=tree.first.__getitem__)
        self._by_span = {tree.spans[call].span_id: call for call in calls}
        self._by_response = {
            str(response_id): call
            for call in calls
            if (response_id := tree.spans[call].attributes.get("gen_ai.response.id"))
        }
        self._positions: dict[str, int] | None = None

    def linked(self, reward: Reward) -> int | None:
        if reward.response_id is not None:
            return self._by_response.get(reward.response_id)
        assert reward.span_id is not None
        if reward.span_id in self._by_span:
            return self._by_span[reward.span_id]
        if self._positions is None:
            self._positions = {span.span_id: i for i, span in enumerate(self._tree.spans)}
        position = self._positions.get(reward.span_id)
        return None if position is None else self._last_inside(position)

    def _last_inside(self, position: int) -> int | None:
        low, high = self._tree.first[position], self._tree.last[position]
        inside = [call for call in self._calls if low <= self._tree.first[call] <= high]
        return max(inside, key=self._tree.starts.__getitem__, default=None)


def _place_last(
    done: Placement, calls: Sequence[int], rewards: Sequence[tuple[int, Reward]]
) -> None:
    for _, reward in rewards[:-1]:
        done.unplaced.append((reward, NOT_FINAL))
    for _, reward in rewards[-1:]:
        if calls:
            _give(done, calls[-1], reward)
        else:
            done.unplaced.append((reward, NO_CALL_BEFORE))


def _place_siblings(
    done: Placement, tree: Tree, calls: Sequence[int], rewards: Sequence[tuple[int, Reward]]
) -> None:
    """To the latest call before the reward that has the same parent."""
    latest: dict[tuple[str, int], int] = {}
    for is_reward, _, position, reward in _merged(tree, calls, rewards):
        # Roots of different traces are no siblings.
        parent = tree.parents[position]
        family = (tree.spans[position].trace_id if parent == NO_PARENT else "", parent)
        if not is_reward:
            latest[family] = position
        elif reward is not None and family in latest:
            _give(done, latest[family], reward)
        elif reward is not None:
            done.unplaced.append((reward, NO_SIBLING))


def _place_next(
    done: Placement, tree: Tree, calls: Sequence[int], rewards: Sequence[tuple[int, Reward]]
) -> None:
    """To the latest call before the reward, within the smallest part of the tree that has one."""
    finished = _FinishedCalls(tree)
    for is_reward, _, position, reward in _merged(tree, calls, rewards):
        if not is_reward:
            finished.add(position)
        elif reward is not None:
            call = finished.nearest(position)
            if call is None:
                done.unplaced.append((reward, NO_CALL_BEFORE))
            else:
                _give(done, call, reward)


def _merged(
    tree: Tree, calls: Sequence[int], rewards: Sequence[tuple[int, Reward]]
) -> list[tuple[bool, int, int, Reward | None]]:
    """Ends of calls and starts of rewards in time; at the same instant the call comes first."""
    events: list[tuple[bool, int, int, Reward | None]] = []
    events += [(False, tree.ends[call], call, None) for call in calls]
    events += [(True, tree.starts[position], position, reward) for position, reward in rewards]
    events.sort(key=lambda event: (event[1], event[0]))
    return events


class _FinishedCalls:
    """The calls that ended so far, for each agent and for all of them."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._everyone = _Latest(tree)
        self._agents: dict[str, _Latest] = {}

    def add(self, call: int) -> None:
        self._everyone.add(call)
        agent = self._tree.agents[call]
        if agent:
            self._agents.setdefault(agent, _Latest(self._tree)).add(call)

    def nearest(self, position: int) -> int | None:
        agent = self._tree.agents[position]
        if not agent:  # given outside any agent: it may judge whichever acted last
            return self._everyone.nearest(position)
        latest = self._agents.get(agent)
        return latest.nearest(position) if latest is not None else None


class _Latest:
    """Finds the latest-ended call in the smallest enclosing subtree that has one.

    A span above a finished call is marked once, so marking costs one step a span in all. A subtree
    is an interval of the walk, and its latest call a maximum over a segment tree.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._marked = bytearray(len(tree.spans))
        self._size = max(1, len(tree.spans))
        self._ranks = [0] * (2 * self._size)
        self._calls: list[int | None] = [None]  # by rank, which counts from 1

    def add(self, call: int) -> None:
        rank = len(self._calls)
        self._calls.append(call)
        node = call
        while node != NO_PARENT and not self._marked[node]:
            self._marked[node] = 1
            node = self._tree.parents[node]
        slot = self._tree.first[call] + self._size
        while slot:
            self._ranks[slot] = rank  # ranks only grow, so the newest is the maximum
            slot //= 2

    def nearest(self, position: int) -> int | None:
        node = position
        while node != NO_PARENT and not self._marked[node]:
            node = self._tree.parents[node]
        if node == NO_PARENT:  # nothing near: the latest of all, by time alone
            return self._calls[-1]
        return self._calls[self._best(self._tree.first[node], self._tree.last[node])]

    def _best(self, low: int, high: int) -> int:
        best = 0
        low += self._size
        high += self._size + 1
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


def discounted(rewards: Sequence[float | None], gamma: float) -> list[float | None]:
    """The discounted return of each step of one trajectory.

    Args:
        rewards: Reward of each step; None where there is none.
        gamma: Discount per step, 0 to 1.

    Returns:
        For each step the sum of the rewards from there on, each times gamma to the power of its
        distance; None where no reward follows.

    Source: Sutton and Barto, Reinforcement Learning, 2nd edition, equation 3.8.
    """
    returns: list[float | None] = [None] * len(rewards)
    following: float | None = None
    for step in range(len(rewards) - 1, -1, -1):
        reward = rewards[step]
        if reward is not None:
            following = reward + (gamma * following if following is not None else 0.0)
        elif following is not None:
            following = gamma * following
        returns[step] = following
    return returns
