"""The rules by which rewards without a link reach calls, each a function of its own.

A rule looks at calls of the reward's agent that had ended before it; a reward given outside any
agent may judge every agent's. It gives a reward to calls or leaves it with a reason, and never to
an earlier call because the right one has a reward already.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, overload

from lightning_otel.adapter.finished import Finished, Ranks
from lightning_otel.adapter.placement import Placement
from lightning_otel.adapter.tree import NO_PARENT, Tree
from lightning_otel.errors import ConfigError
from lightning_otel.types import Call, CreditRule, Reward

NO_CALL_BEFORE: Final = "no call of the same agent came before it"
NOT_FINAL: Final = "only the rollout's final reward counts under the rule 'last'"
NO_SIBLING: Final = "no call of the same agent with the same parent came before it"
NOT_CHOSEN: Final = "the credit function chose no call for it"
CUSTOM: Final = "custom"

Rewards = Sequence[tuple[int, Reward]]
"""Rewards with their positions, in order."""
Rule = Callable[[Placement, Tree, Sequence[int], Rewards], None]
"""Places rewards: the tree, the positions of the calls in order, and the rewards in order."""


def last(done: Placement, tree: Tree, calls: Sequence[int], rewards: Rewards) -> None:
    """The final reward to the last call; the others are reported."""
    for _, reward in rewards[:-1]:
        done.leave(reward, NOT_FINAL)
    for position, reward in rewards[-1:]:
        agent = tree.agents[position]
        own = (call for call in reversed(calls) if agent in ("", tree.agents[call]))
        done.give(next(own, None), reward, "last", NO_CALL_BEFORE)


def sibling(done: Placement, tree: Tree, calls: Sequence[int], rewards: Rewards) -> None:
    """To the latest call before the reward that has the same parent."""
    latest: dict[tuple[str, int, str], int] = {}
    for position, reward in _in_time(tree, calls, rewards):
        # Roots of different traces are no siblings.
        parent = tree.parents[position]
        trace_id = tree.spans[position].trace_id if parent == NO_PARENT else ""
        agent = tree.agents[position]
        if reward is not None:
            done.give(latest.get((trace_id, parent, agent)), reward, "sibling", NO_SIBLING)
        else:
            latest[trace_id, parent, agent] = latest[trace_id, parent, ""] = position


def following(done: Placement, tree: Tree, calls: Sequence[int], rewards: Rewards) -> None:
    """To the latest call before the reward, within the smallest part of the tree that has one."""
    for position, reward, finished in _with_finished(tree, calls, rewards):
        call = None if finished is None else finished.nearest(position)
        done.give(call, reward, "previous", NO_CALL_BEFORE)


def step(done: Placement, tree: Tree, calls: Sequence[int], rewards: Rewards) -> None:
    """To every call of the step: those of the smallest part since its last reward of that name."""
    waiting: dict[tuple[str, frozenset[str]], _Waiting] = {}
    for position, reward, finished in _with_finished(tree, calls, rewards):
        if finished is None or not len(finished):
            done.leave(reward, NO_CALL_BEFORE)
            continue
        key = (tree.agents[position], frozenset(reward.values))
        if key not in waiting:
            waiting[key] = _Waiting(finished)
        found = waiting[key].take(finished.part(position))
        done.give_all(found, reward, "step")


def agents(done: Placement, tree: Tree, calls: Sequence[int], rewards: Rewards) -> None:
    """Credit as ``previous`` does; a reward outside any agent goes to each agent's latest call."""
    by_agent: dict[str, list[int]] = {}
    for call in calls:
        by_agent.setdefault(tree.agents[call], []).append(call)
    each = {agent: Finished(tree, own) for agent, own in by_agent.items()}
    everyone = Finished(tree, calls)
    for position, reward in _in_time(tree, calls, rewards):
        agent = tree.agents[position]
        if reward is None:
            each[agent].add(position)
            everyone.add(position)
        elif agent:
            own = each.get(agent)
            nearest = None if own is None else own.nearest(position)
            done.give(nearest, reward, "agents", NO_CALL_BEFORE)
        elif not len(everyone):
            done.leave(reward, NO_CALL_BEFORE)
        else:
            part = everyone.part(position)
            latest = (finished.last_within(part) for finished in each.values())
            done.give_all(sorted(at for at in latest if at is not None), reward, "agents")


NAMED: Final[Mapping[str, Rule]] = {
    "previous": following,
    "discounted": following,
    "last": last,
    "sibling": sibling,
    "step": step,
    "agents": agents,
}


def custom(rule: CreditRule, known: Mapping[int, Call]) -> Rule:
    """A user's function as a rule.

    Args:
        rule: The function.
        known: The calls by position.
    """

    def place(done: Placement, tree: Tree, calls: Sequence[int], rewards: Rewards) -> None:
        positions = {id(call): position for position, call in known.items()}
        ended: dict[str, list[Call]] = {"": []}
        for position, reward in _in_time(tree, calls, rewards):
            agent = tree.agents[position]
            if reward is None:
                for name in {agent, ""}:
                    ended.setdefault(name, []).append(known[position])
                continue
            chosen = rule(reward, _Before(ended.get(agent, [])))
            if chosen is None or isinstance(chosen, str):
                done.leave(reward, chosen or NOT_CHOSEN)
                continue
            found = [chosen] if isinstance(chosen, Call) else list(chosen)
            if any(id(call) not in positions for call in found):
                raise ConfigError(
                    f"the credit function gave {chosen!r:.200} for a reward; return one or more of "
                    "the calls it was given, a text that says why none, or None"
                )
            if found:
                done.give_all(sorted({positions[id(call)] for call in found}), reward, CUSTOM)
            else:
                done.leave(reward, NOT_CHOSEN)

    return place


class _Before(Sequence[Call]):
    """The calls of a growing list that are in it by now."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls
        self._length = len(calls)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Call: ...
    @overload
    def __getitem__(self, index: slice) -> list[Call]: ...
    def __getitem__(self, index: int | slice) -> Call | list[Call]:
        if isinstance(index, slice):
            return [self._calls[each] for each in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError("no such call")
        return self._calls[index % self._length]


class _Waiting:
    """Calls that wait for a reward of some names, and those that have one."""

    def __init__(self, finished: Finished) -> None:
        self._finished = finished
        self._open = Ranks(finished.size)
        self._rewarded = Ranks(finished.size)
        self._known = 0

    def take(self, part: int) -> list[int]:
        """The calls of a part that ended since the last one in it that has such a reward.

        If there are none, that last one.
        """
        finished = self._finished
        for place, rank in finished.entries(self._known):
            self._open.put(place, rank)
        self._known = len(finished)
        low, high = finished.interval(part)
        latest = self._rewarded.best(low, high)
        found: list[int] = []
        while (rank := self._open.best(low, high)) > latest:
            place = finished.place(rank)
            self._open.put(place, 0)
            self._rewarded.put(place, rank)
            found.append(finished.ranked(rank))
        return sorted(found) if found else [finished.ranked(latest)]


def _with_finished(
    tree: Tree, calls: Sequence[int], rewards: Rewards
) -> Iterator[tuple[int, Reward, Finished | None]]:
    """Each reward with the calls it may judge that had ended; None if its agent makes none."""
    by_agent: dict[str, list[int]] = {"": list(calls)}
    for call in calls:
        if tree.agents[call]:
            by_agent.setdefault(tree.agents[call], []).append(call)
    finished = {agent: Finished(tree, own) for agent, own in by_agent.items()}
    for position, reward in _in_time(tree, calls, rewards):
        agent = tree.agents[position]
        if reward is not None:
            yield position, reward, finished.get(agent)
            continue
        for name in {agent, ""}:
            finished[name].add(position)


def _in_time(
    tree: Tree, calls: Sequence[int], rewards: Rewards
) -> Iterable[tuple[int, Reward | None]]:
    """Ends of calls and starts of rewards in time; at the same instant the call comes first."""
    events: list[tuple[int, bool, int, Reward | None]] = []
    events += [(tree.ends[call], False, call, None) for call in calls]
    events += [(tree.starts[position], True, position, reward) for position, reward in rewards]
    events.sort(key=lambda event: event[:3])
    return ((position, reward) for _, _, position, reward in events)
