"""Credit of rewards to calls: by explicit link, then parentage, then a rule.

A rule looks at calls of the reward's agent that had ended before it; a reward given outside any
agent may judge every agent's. A reward is placed once or reported with a reason; it never slides to
an earlier call because the right one has a reward already, and a call without a reward has None,
never 0.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from lightning_otel.adapter.calls import is_call
from lightning_otel.adapter.finished import Finished, Ranks
from lightning_otel.adapter.links import find_targets
from lightning_otel.adapter.tree import NO_PARENT, Tree
from lightning_otel.errors import ConfigError
from lightning_otel.types import Call, Credit, CreditRule, Reward

ALREADY_REWARDED: Final = "its call already has a reward of that name, and the first one counts"
UNKNOWN_TARGET: Final = "its link matches no span of the attempt it belongs to"
WRONG_LENGTH: Final = "its sequence has {} numbers for {} steps"
NO_CALL_BEFORE: Final = "no call of the same agent came before it"
NOT_FINAL: Final = "only the rollout's final reward counts under the rule 'last'"
NO_SIBLING: Final = "no call of the same agent with the same parent came before it"
NOT_CHOSEN: Final = "the credit function chose no call for it"
UNUSED_PARENT: Final = "the call it was given in made no transition"
UNUSED_TARGET: Final = "its link names a span or response that made no transition"
PASSED_OVER: Final = "reward beyond a lost call: a later call that came to nothing stood before it"
_SAID: Final = frozenset({"link", "parent", "sequence", "custom"})
"""Ways to a call that a reward names itself, or that a user's function decides."""

Rewards = Sequence[tuple[int, Reward]]
"""Rewards with their positions, in order."""


class Placed(NamedTuple):
    """A reward, the positions of the calls it went to, in order, and by what."""

    reward: Reward
    calls: tuple[int, ...]
    by: str


@dataclass(slots=True)
class Placement:
    """The credited rewards, by call.

    Attributes:
        rewards: Named rewards of each call, by the call's position in the tree; primary first.
        placed: Each reward that found calls.
        unplaced: Each other reward with the reason.
        totals: The sum of all placed rewards by name; one that went to several calls counts once.
        value: The sum of what the calls have for a primary reward, likewise; None if none has.
    """

    rewards: dict[int, dict[str, float]] = field(default_factory=dict)
    placed: list[Placed] = field(default_factory=list)
    unplaced: list[tuple[Reward, str]] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)
    value: float | None = None

    def leave(self, reward: Reward, reason: str) -> None:
        """Report a reward that goes nowhere."""
        self.unplaced.append((reward, reason))

    def give(self, calls: Sequence[int], reward: Reward, by: str, otherwise: str) -> None:
        """Place a reward at each call that has none of its names, or each number at its call.

        Args:
            calls: Positions of the calls, in order.
            reward: The reward.
            by: The way it found them.
            otherwise: The reason where there are none.
        """
        if not calls:
            self.leave(reward, otherwise)
            return
        shares: list[tuple[int, Mapping[str, float]]] = [(call, reward.values) for call in calls]
        if reward.steps:
            if len(calls) != len(reward.steps):
                self.leave(reward, WRONG_LENGTH.format(len(reward.steps), len(calls)))
                return
            (name,) = reward.values
            pairs = zip(calls, reward.steps, strict=True)
            shares = [(call, {name: number}) for call, number in pairs if number is not None]
        free = [
            (call, values)
            for call, values in shares
            if values.keys().isdisjoint(self.rewards.get(call, ()))
        ]
        if not free or (reward.steps and len(free) < len(shares)):
            self.leave(reward, ALREADY_REWARDED)
            return
        for call, values in free if reward.steps else free[-1:]:
            if call not in self.rewards:
                self.value = (self.value or 0.0) + next(iter(values.values()))
            self._add_values(values)
        for call, values in free:
            self.rewards.setdefault(call, {}).update(values)
        by = "sequence" if reward.steps else by
        self.placed.append(Placed(reward, tuple([call for call, _ in free]), by))

    def judge_whole(self) -> None:
        """Have the rewards of an attempt without a step judge it as a whole.

        Those of the first one's name are its value; of several that name one span the first counts.
        """
        known = [each for each, reason in self.unplaced if reason != UNKNOWN_TARGET]
        known.sort(key=lambda each: (each.span.start_ns, each.span.span_id))
        for reward in {each.links or each.span.span_id: each for each in reversed(known)}.values():
            self._add_values(reward.values)
        if known:
            self.value = self.totals[next(iter(known[0].values))]

    def _add_values(self, values: Mapping[str, float]) -> None:
        for name, number in values.items():
            self.totals[name] = self.totals.get(name, 0.0) + number


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
    known = {**dict.fromkeys(calls), **duplicates}
    targets = find_targets(tree, rewards, known)
    inside = Finished(tree, calls, list(calls))
    by_rule: list[tuple[int, Reward]] = []
    for position, reward in rewards:
        parent = tree.parents[position]
        if reward.links:
            target = targets.get(position)
            if target is None:
                done.leave(reward, UNKNOWN_TARGET)
                continue
            found = _calls_at(target, known, inside, is_whole=bool(reward.steps))
            done.give(found, reward, "link", UNUSED_TARGET)
        elif position in known:
            done.give(_calls_at(position, known, inside), reward, "parent", UNUSED_PARENT)
        elif parent in known:
            done.give(_calls_at(parent, known, inside), reward, "parent", UNUSED_PARENT)
        elif parent != NO_PARENT and is_call(tree.spans[parent]):
            done.leave(reward, UNUSED_PARENT)
        elif reward.steps:
            done.give(_calls_before(tree, calls, position), reward, "", NO_CALL_BEFORE)
        else:
            by_rule.append((position, reward))
    if by_rule:
        _place_by_rule(done, tree, calls, by_rule, rule)
    if not calls:
        done.judge_whole()
    return done


def _calls_at(
    target: int, known: Mapping[int, int | None], inside: Finished, *, is_whole: bool = False
) -> list[int]:
    """The call that a span stands for; of a span that is none the last call in it, or all."""
    if target in known:
        kept = known[target]
        return [target if kept is None else kept]
    if is_whole:
        return sorted(inside.all_within(target))
    last = inside.last_within(target)
    return [] if last is None else [last]


def _calls_before(tree: Tree, calls: Iterable[int], position: int) -> list[int]:
    """The calls of a reward's agent that had ended, in the smallest part around it with any."""
    agent, start = tree.agents[position], tree.starts[position]
    own = [call for call in calls if tree.ends[call] <= start and agent in ("", tree.agents[call])]
    part = Finished(tree, own, own).part(position)
    return own if part == NO_PARENT else [call for call in own if tree.contains(part, call)]


def _place_by_rule(
    done: Placement,
    tree: Tree,
    calls: Mapping[int, Call],
    rewards: Rewards,
    rule: Credit | CreditRule,
) -> None:
    if rule == "last":
        for _, early in rewards[:-1]:
            done.leave(early, NOT_FINAL)
        position, final = rewards[-1]
        own = [call for call in calls if tree.agents[position] in ("", tree.agents[call])]
        done.give(own[-1:], final, "last", NO_CALL_BEFORE)
        return

    def site_of(position: int) -> tuple[str, int]:
        """Return the key that siblings share; roots of different traces share none."""
        if rule != "sibling":
            return "", NO_PARENT
        parent = tree.parents[position]
        return tree.spans[position].trace_id if parent == NO_PARENT else "", parent

    # Each agent's calls, and under None those of all agents.
    groups: dict[tuple[str | None, tuple[str, int]], list[int]] = {}
    for call in calls:
        for agent in (tree.agents[call], None):
            groups.setdefault((agent, site_of(call)), []).append(call)
    finished = {key: Finished(tree, own) for key, own in groups.items()}
    places = {id(call): position for position, call in calls.items()}
    before: dict[str, list[Call]] = {}
    waiting: dict[tuple[str, frozenset[str]], _Waiting] = {}
    for position, reward in _in_time(tree, calls, rewards):
        agent, site = tree.agents[position], site_of(position)
        if reward is None:
            finished[agent, site].add(position)
            finished[None, site].add(position)
            for name in {agent, ""}:
                before.setdefault(name, []).append(calls[position])
            continue
        ended = finished.get((agent or None, site))
        by, otherwise = "previous", NO_CALL_BEFORE
        found: Sequence[int | None] = ()
        if callable(rule):
            by = "custom"
            found, otherwise = _choose_calls(rule, reward, tuple(before.get(agent, ())), places)
        elif rule == "sibling":
            by, otherwise = rule, NO_SIBLING
            found = [ended.last_within(NO_PARENT)] if ended else ()
        elif not ended:
            pass
        elif rule == "step":
            by, key = rule, (agent, frozenset(reward.values))
            if key not in waiting:
                waiting[key] = _Waiting(ended)
            found = waiting[key].take(ended.part(position))
        elif rule == "agents":
            by, part = rule, ended.part(position)
            names = {name for name, _ in finished if name is not None} if not agent else {agent}
            found = [finished[name, site].last_within(part) for name in names]
        else:
            found = [ended.nearest(position)]
        done.give(sorted(at for at in found if at is not None), reward, by, otherwise)


def _choose_calls(
    rule: CreditRule, reward: Reward, before: Sequence[Call], places: Mapping[int, int]
) -> tuple[list[int], str]:
    """Return the positions of the calls that a user's function chose, or why it chose none."""
    chosen = rule(reward, before)
    if chosen is None or isinstance(chosen, str):
        return [], chosen or NOT_CHOSEN
    found = [chosen] if isinstance(chosen, Call) else list(chosen)
    if any(id(call) not in places for call in found):
        raise ConfigError(
            f"the credit function gave {chosen!r:.200} for a reward; return one or more of "
            "the calls it was given, a text that says why none, or None"
        )
    return sorted({places[id(call)] for call in found}), NOT_CHOSEN


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


def _in_time(
    tree: Tree, calls: Iterable[int], rewards: Rewards
) -> Iterable[tuple[int, Reward | None]]:
    """Ends of calls and starts of rewards in time; at the same instant the call comes first."""
    events: list[tuple[int, bool, int, Reward | None]] = []
    events += [(tree.ends[call], False, call, None) for call in calls]
    events += [(tree.starts[position], True, position, reward) for position, reward in rewards]
    events.sort(key=lambda event: event[:3])
    return ((position, reward) for _, _, position, reward in events)


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
        if by not in _SAID:
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
