"""Credit of rewards to calls: by explicit link, then parentage, then a rule.

A rule looks at calls of the reward's agent that had ended before it; a reward given outside any
agent may judge every agent's. A reward is placed once or reported with a reason; it never slides to
an earlier call because the right one has a reward already, and a call without a reward has None,
never 0.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from lightning_otel.adapter.attributes import matched_text
from lightning_otel.adapter.calls import is_call
from lightning_otel.adapter.linear import HOSTS
from lightning_otel.adapter.ordering import NO_PARENT
from lightning_otel.adapter.parts import EndedCalls, Ranks
from lightning_otel.adapter.rewards import ALREADY_REWARDED, NO_CALL_BEFORE, OUTCOME
from lightning_otel.adapter.tree import Tree
from lightning_otel.errors import ConfigError
from lightning_otel.types import Call, Credit, CreditRule, Reward, Span
from lightning_otel.types import conventions as c

UNKNOWN_TARGET: Final = "its link matches no span of the attempt it belongs to"
WRONG_LENGTH: Final = "its sequence has {} numbers for {} steps"
NOT_FINAL: Final = "only the rollout's final reward counts under the rule 'last'"
NOT_CHOSEN: Final = "the credit function chose no call for it"
UNUSED_PARENT: Final = "the call it was given in made no transition"
UNUSED_TARGET: Final = "its link names a span or response that made no transition"
PASSED_OVER: Final = "reward skipped a failed call"

Rewards = Mapping[int, Reward]
"""Rewards by position, in order."""
Conversation = tuple[str, str, int]
"""A conversation: its agent, the executed program that asked, and which one of these."""


class Placed(NamedTuple):
    """A reward's position, the positions of the calls it went to, in order, and by what."""

    position: int
    calls: tuple[int, ...]
    by: str


@dataclass(slots=True)
class Placement:
    """The credited rewards, by call.

    Attributes:
        rewards: Named rewards of each call, by the call's position in the tree; primary first.
        placed: Where each reward went that found calls.
        unplaced: Each other reward with the reason.
        totals: The sum of all placed rewards by name; one that went to several calls counts once.
        value: The sum of what the calls have for a primary reward, likewise; None if none has.
        counted: The calls that have one in this sum.
    """

    rewards: dict[int, dict[str, float]] = field(default_factory=dict)
    placed: list[Placed] = field(default_factory=list)
    unplaced: list[tuple[Reward, str]] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)
    value: float | None = None
    counted: set[int] = field(default_factory=set)

    def give(
        self,
        position: int,
        reward: Reward,
        calls: Sequence[int],
        by: str,
        otherwise: str,
        latest: int | None = None,
    ) -> None:
        """Place a reward at each call that has none of its names, or each number at its call.

        One that judges the rollout counts in the sum as the latest call's, wherever it is placed:
        what a rollout earned does not depend on whose step was the last.
        """
        shares: list[tuple[int, Mapping[str, float]]] = [(call, reward.values) for call in calls]
        if calls and reward.steps:
            if len(calls) != len(reward.steps):
                reason = WRONG_LENGTH.format(len(reward.steps), len(calls))
                self.unplaced.append((reward, reason))
                return
            (name,) = reward.values
            pairs = zip(calls, reward.steps, strict=True)
            shares = [(call, {name: number}) for call, number in pairs if number is not None]
            by = "sequence"
        free = [
            (call, values)
            for call, values in shares
            if values.keys().isdisjoint(self.rewards.get(call, ()))
        ]
        if not free or (reward.steps and len(free) < len(shares)):
            self.unplaced.append((reward, ALREADY_REWARDED if calls else otherwise))
            return
        for call, values in free if reward.steps else free[-1:]:
            if (call if latest is None else latest) not in self.counted:
                self.value = (self.value or 0.0) + next(iter(values.values()))
            self._add_values(values)
        self.counted.update([call for call, _ in free] if latest is None else [latest])
        for call, values in free:
            self.rewards.setdefault(call, {}).update(values)
        self.placed.append(Placed(position, tuple([call for call, _ in free]), by))

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


def place_rewards(
    tree: Tree,
    calls: Mapping[int, Call],
    duplicates: Mapping[int, int],
    rewards: Rewards,
    rule: Credit | CreditRule,
    conversations: Mapping[int, Conversation],
) -> Placement:
    """Give each reward to what it judges; ``discounted`` places them like ``previous``.

    ``duplicates`` has for each call dropped as a duplicate the one that was kept.
    """
    done = Placement()
    if not rewards:
        return done
    known = {**{call: call for call in calls}, **duplicates}
    targets = _find_targets(tree, rewards, known)
    inside = EndedCalls(tree, calls, list(calls))
    by_rule: dict[int, Reward] = {}
    for position, reward in rewards.items():
        parent = tree.parents[position]
        if reward.links and position not in targets:
            done.unplaced.append((reward, UNKNOWN_TARGET))
        elif reward.links or position in known or parent in known:
            target = targets.get(position, position if position in known else parent)
            found: Iterable[int | None] = [known.get(target)]
            if target not in known:
                last = inside.last_within(target)
                found = sorted(inside.list_within(target)) if reward.steps else [last]
            by, reason = ("link", UNUSED_TARGET) if reward.links else ("parent", UNUSED_PARENT)
            done.give(position, reward, [at for at in found if at is not None], by, reason)
        elif parent != NO_PARENT and is_call(tree.spans[parent]):
            done.unplaced.append((reward, UNUSED_PARENT))
        elif reward.steps:
            done.give(position, reward, _calls_before(tree, calls, position), "", NO_CALL_BEFORE)
        else:
            by_rule[position] = reward
    if rule != "last":
        _place_by_rule(done, tree, calls, by_rule, rule, conversations)
    elif by_rule:
        position, final = by_rule.popitem()
        done.unplaced += [(early, NOT_FINAL) for early in by_rule.values()]
        main = _Rollout(tree, calls, conversations).main(tree.agents[position] or None)
        done.give(position, final, main[-1:], "last", NO_CALL_BEFORE)
    if not calls:
        done.judge_whole()
    return done


def _find_targets(tree: Tree, rewards: Rewards, calls: Container[int]) -> dict[int, int]:
    """Return the span that each linked reward names, by position, where there is one.

    A server may repeat its ids, and many spans have one attribute: the latest of them before the
    reward is meant, else the first. No reward is a target unless it is a call.
    """
    found: dict[tuple[tuple[str, str], ...], list[int]]
    found = {each.links: [] for each in rewards.values() if each.links}
    linked_keys = {tuple(key for key, _ in links) for links in found}
    for position, span in enumerate(tree.spans if found else ()):
        if position in rewards and position not in calls:
            continue
        for keys in linked_keys:
            answer = tuple([(key, _value_at(span, key)) for key in keys])
            if answer in found and all(value for _, value in answer):
                found[answer].append(position)
    return {
        position: spans[max(bisect_left(spans, position) - 1, 0)]
        for position, reward in rewards.items()
        if (spans := found.get(reward.links))
    }


def _value_at(span: Span, key: str) -> str:
    if key == c.LINK_SPAN_ID:
        return span.span_id
    if key == c.LINK_TRACE_ID:
        return span.trace_id
    return matched_text(span.attributes[key]) if key in span.attributes else ""


def _calls_before(tree: Tree, calls: Iterable[int], position: int) -> list[int]:
    """Return the calls of a reward's agent that had ended, in the smallest part with any."""
    agent, start = tree.agents[position], tree.starts[position]
    own = [call for call in calls if tree.ends[call] <= start and agent in ("", tree.agents[call])]
    part = EndedCalls(tree, own, own).part(position)
    return own if part == NO_PARENT else [call for call in own if tree.contains(part, call)]


def _place_by_rule(
    done: Placement,
    tree: Tree,
    calls: Mapping[int, Call],
    rewards: Rewards,
    rule: Credit | CreditRule,
    conversations: Mapping[int, Conversation],
) -> None:
    if not rewards:
        return
    whole = _Rollout(tree, calls, conversations)
    judged = {name for named in done.rewards.values() for name in named}
    groups: dict[str | None, list[int]] = {None: list(calls)}
    for call in calls:
        groups.setdefault(tree.agents[call], []).append(call)
    finished = {agent: EndedCalls(tree, own) for agent, own in groups.items()}
    places = {id(call): position for position, call in calls.items()}
    rewarded: dict[tuple[str, frozenset[str]], Ranks] = {}
    # At the same instant the call comes first.
    events = [(tree.ends[call], 0, call) for call in calls]
    events += [(tree.starts[position], 1, position) for position in rewards]
    for _, is_reward, position in sorted(events):
        agent = tree.agents[position]
        if not is_reward:
            for name in (agent, None):
                finished[name].add(position)
            continue
        reward, ended = rewards[position], finished.get(agent or None)
        by, otherwise = "previous", NO_CALL_BEFORE
        found: Iterable[int | None] = ()
        latest: int | None = None
        is_outcome = (
            len(finished[None].calls) == len(calls) > 0
            and judged.isdisjoint(reward.values)
            and whole.is_judged(position)
        )
        if callable(rule):
            by, before = "custom", [calls[call] for call in ended.calls] if ended else ()
            found, otherwise = _choose_calls(rule, reward, tuple(before), places)
        elif ended and ended.calls:
            part = ended.part(position)
            if rule == "agents":
                names = [agent] if agent else [name for name in finished if name is not None]
                by, found = rule, [finished[name].last_within(part) for name in names]
                if is_outcome:
                    found = [whole.main(name)[-1] for name in names if whole.main(name)]
            elif rule == "step":
                key = agent, frozenset(reward.values)
                by, seen = rule, rewarded.setdefault(key, Ranks(ended.places))
                found = ended.take(part, seen)
                if is_outcome:
                    main = whole.main(agent or None)
                    own = [call for call in found if tree.agents[call] or call in main]
                    found = own or main[-1:]
            else:
                latest = ended.last_within(part)
                found = [latest]
                if is_outcome and whole.main(agent or None)[-1] != latest:
                    by, found = OUTCOME, whole.main(agent or None)[-1:]
        chosen = sorted({at for at in found if at is not None})
        done.give(position, reward, chosen, by, otherwise, latest)
        if not is_outcome:
            judged.update(reward.values)


class _Rollout:
    """The calls of an attempt as one whole: which reward judges it, and by which call."""

    def __init__(
        self, tree: Tree, calls: Iterable[int], conversations: Mapping[int, Conversation]
    ) -> None:
        """Take the calls, and the conversation that each one belongs to."""
        self._tree = tree
        self._calls = sorted(calls)
        self._conversations = conversations
        self._mains: dict[str | None, list[int]] = {}
        places = [tree.first[call] for call in self._calls]
        self._first, self._last = (min(places), max(places)) if places else (0, 0)
        roots = [i for i, span in enumerate(tree.spans) if span.name == c.SPAN_ROLLOUT]
        # Of a program's own traces beside it, too, unless they are recordings of their own.
        self._root = roots[0] if len(roots) == 1 else NO_PARENT

    def is_judged(self, position: int) -> bool:
        """Return whether a reward was given beside all calls, in no agent, operation or block."""
        tree, site = self._tree, self._tree.parents[position]
        if site == NO_PARENT:
            return not tree.agents[position]
        span = tree.spans[site]
        is_block = span.name == c.SPAN_OPERATION or span.attributes.get(c.OPERATION) in HOSTS
        return (
            tree.parents[site] == NO_PARENT
            and tree.agents[site] == tree.agents[position]
            and not is_block
            and (
                site == self._root
                or (tree.first[site] <= self._first and self._last <= tree.last[site])
            )
        )

    def main(self, agent: str | None) -> list[int]:
        """Return the conversation that most of an agent's calls belong to, in order of their end.

        With None it is that of all agents' calls. Of equal ones it is the named agent's that ended
        last, else the first.
        """
        tree = self._tree
        if agent not in self._mains:
            groups: dict[Conversation, list[int]] = {}
            for call in self._calls:
                if agent in (None, tree.agents[call]):
                    groups.setdefault(self._conversations[call], []).append(call)
            for group in groups.values():
                group.sort(key=tree.ends.__getitem__)

            def rank(name: Conversation) -> tuple[bool, int, int]:
                asker, program, _ = name
                calls = groups[name]
                return not program, len(calls), tree.ends[calls[-1]] if asker else -1

            self._mains[agent] = groups[max(groups, key=rank)] if groups else []
        return self._mains[agent]


def _choose_calls(
    rule: CreditRule, reward: Reward, before: tuple[Call, ...], places: Mapping[int, int]
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
    return [places[id(call)] for call in found], NOT_CHOSEN


def count_passed_over(tree: Tree, placed: Iterable[Placed], lost: Sequence[int]) -> int:
    """Count the calls that a rule rewarded although a later, lost call ended before the reward."""
    ends: dict[str, list[int]] = {}
    for call in sorted(lost, key=tree.ends.__getitem__):
        for agent in {tree.agents[call], ""}:
            ends.setdefault(agent, []).append(tree.ends[call])
    found: set[int] = set()
    for position, calls, by in placed if ends else ():
        if by not in ("link", "parent", "sequence", "custom"):
            before = ends.get(tree.agents[position], [])
            latest = bisect_right(before, tree.starts[position]) - 1
            if latest >= 0 and before[latest] > max(map(tree.ends.__getitem__, calls)):
                found.update(calls)
    return len(found)


def discount_rewards(
    rewards: Sequence[float | None], before: Sequence[int], gamma: float
) -> list[float | None]:
    """Return the discounted return of each step of one agent; None where no reward follows.

    Where several steps follow one, their mean return counts: they are samples of what comes next.

    Args:
        rewards: Reward of each step; None where there is none.
        before: The step that each step follows, which stands earlier; -1 for none.
        gamma: Discount per step, 0 to 1.

    Source: Sutton and Barto, Reinforcement Learning, 2nd edition, equation 3.8.
    """
    returns = list(rewards)
    following: list[list[float]] = [[] for _ in rewards]
    for step in range(len(rewards) - 1, -1, -1):
        if after := following[step]:
            later = gamma * sum(after) / len(after)
            returns[step] = later + (rewards[step] or 0.0)
        found = returns[step]
        if found is not None and before[step] >= 0:
            following[before[step]].append(found)
    return returns
