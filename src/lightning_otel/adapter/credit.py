"""Credit of rewards to calls: by explicit link, then parentage, then a rule.

A rule looks at calls of the reward's agent that had ended before it; a reward given outside any
agent may judge every agent's. A reward is placed once or reported with a reason; it never slides to
an earlier call because the right one has a reward already, and a call without a reward has None,
never 0.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

from lightning_otel.adapter.attributes import matched_text
from lightning_otel.adapter.awards import (
    OUTSIDE,
    UNKNOWN_TARGET,
    Awards,
    Claim,
    Placed,
    Precedence,
    Rewards,
    award_calls,
    judge_whole,
    order_rewards,
)
from lightning_otel.adapter.calls import HOSTS, is_call
from lightning_otel.adapter.ordering import NO_PARENT
from lightning_otel.adapter.parts import EndedCalls, Ranks
from lightning_otel.adapter.rewards import NO_CALL_BEFORE, OUTCOME
from lightning_otel.adapter.tree import Tree
from lightning_otel.errors import ConfigError
from lightning_otel.types import Call, Credit, CreditRule, Reward, Span
from lightning_otel.types import conventions as c

NOT_FINAL: Final = "only the rollout's final reward counts under the rule 'last'"
NOT_CHOSEN: Final = "the credit function chose no call for it"
UNUSED_PARENT: Final = "the call it was given in made no transition"
UNUSED_TARGET: Final = "its link names a span or response that made no transition"
PASSED_OVER: Final = "reward skipped a failed call"

Conversation = tuple[str, str, int]
"""A conversation: its agent, the executed program that asked, and which one of these."""


def place_rewards(
    tree: Tree,
    calls: Mapping[int, Call],
    duplicates: Mapping[int, int],
    rewards: Rewards,
    rule: Credit | CreditRule,
    conversations: Mapping[int, Conversation],
) -> Awards:
    """Give each reward to what it judges; ``discounted`` places them like ``previous``.

    ``duplicates`` has for each call dropped as a duplicate the one that was kept.
    """
    if not rewards:
        return Awards()
    order = order_rewards(tree.spans, tree.starts, rewards)
    claims = list(_claim_calls(tree, calls, duplicates, rewards))
    by_rule = {**rewards}
    for claim in claims:
        del by_rule[claim.position]
    whole = _JudgedCalls(tree, calls, conversations)
    if rule != "last":
        claims += _CreditRules(whole, tree, calls, rule, claims, order).claim_calls(by_rule)
    else:
        # The program's last one, and of those from outside, which never take its place, theirs.
        finals = {order[position].rank == OUTSIDE: position for position in by_rule}.values()
        for position, reward in by_rule.items():
            main = whole.main(tree.agents[position] or None)[-1:] if position in finals else ()
            reason = NO_CALL_BEFORE if position in finals else NOT_FINAL
            claims.append(Claim(position, reward, main, "last", reason, is_ruled=True))
    return award_calls(claims, order) if calls else judge_whole(claims, order)


def _claim_calls(
    tree: Tree, calls: Mapping[int, Call], duplicates: Mapping[int, int], rewards: Rewards
) -> Iterator[Claim]:
    """Yield the claims of rewards that say themselves what they judge."""
    owners = {**{call: call for call in calls}, **duplicates}
    targets = _find_targets(tree, rewards, owners)
    inside = EndedCalls(tree, calls, sorted(calls, key=tree.ends.__getitem__))
    for position, reward in rewards.items():
        parent = tree.parents[position]
        if reward.links and position not in targets:
            yield Claim(position, reward, (), "link", UNKNOWN_TARGET)
        elif reward.links or position in owners or parent in owners:
            target = targets.get(position, position if position in owners else parent)
            last = inside.last_within(target)
            judged = [] if last is None else [last]
            if target in owners:
                judged = [owners[target]]
            elif reward.steps:
                judged = sorted(inside.list_within(target))
            by, reason = ("link", UNUSED_TARGET) if reward.links else ("parent", UNUSED_PARENT)
            yield Claim(position, reward, judged, by, reason)
        elif parent != NO_PARENT and is_call(tree.spans[parent]):
            yield Claim(position, reward, (), "parent", UNUSED_PARENT)
        elif reward.steps:
            judged = _calls_before(tree, calls, position)
            yield Claim(position, reward, judged, "sequence", NO_CALL_BEFORE)


def _find_targets(tree: Tree, rewards: Rewards, calls: Container[int]) -> dict[int, int]:
    """Return the span that each linked reward names, by position, where there is one.

    A server may repeat its ids, and many spans have one attribute: the latest of them before the
    reward is meant, else the first. No reward is a target unless it is a call.
    """
    matches: dict[tuple[tuple[str, str], ...], list[int]]
    matches = {reward.links: [] for reward in rewards.values() if reward.links}
    linked_keys = {tuple(key for key, _ in links) for links in matches}
    for position, span in enumerate(tree.spans if matches else ()):
        if position in rewards and position not in calls:
            continue
        for keys in linked_keys:
            answer = tuple([(key, _value_at(span, key)) for key in keys])
            if answer in matches and all(value for _, value in answer):
                matches[answer].append(position)
    return {
        position: spans[max(bisect_left(spans, position) - 1, 0)]
        for position, reward in rewards.items()
        if (spans := matches.get(reward.links))
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
    pool = [call for call in calls if tree.ends[call] <= start and agent in ("", tree.agents[call])]
    part = EndedCalls(tree, pool, pool).part(position)
    return pool if part == NO_PARENT else [call for call in pool if tree.contains(part, call)]


class _CreditRules:
    """The rule by which rewards claim calls that they do not name."""

    def __init__(
        self,
        whole: "_JudgedCalls",
        tree: Tree,
        calls: Mapping[int, Call],
        rule: Credit | CreditRule,
        claims: Iterable[Claim],
        order: Mapping[int, Precedence],
    ) -> None:
        """Take the claims of rewards that name their calls, and the precedence of all."""
        self._whole, self._tree, self._calls = whole, tree, calls
        self._rule, self._order = rule, order
        groups: dict[str | None, list[int]] = {None: list(calls)}
        for call in calls:
            groups.setdefault(tree.agents[call], []).append(call)
        self._ended = {agent: EndedCalls(tree, group) for agent, group in groups.items()}
        self._places = {id(call): position for position, call in calls.items()}
        self._rewarded: dict[tuple[str, frozenset[str], bool], Ranks] = {}
        # Names that judge steps; to the program those from outside do not count.
        self._judged: dict[bool, set[str]] = {False: set(), True: set()}
        for claim in claims:
            if claim.calls:
                self._note_names(claim.position, claim.reward)

    def claim_calls(self, rewards: Rewards) -> list[Claim]:
        """Return the claims of rewards, in order of time."""
        tree, ended = self._tree, self._ended
        claims: list[Claim] = []
        # At the same instant the call comes first.
        events = [(tree.ends[call], 0, call) for call in self._calls]
        events += [(tree.starts[position], 1, position) for position in rewards]
        for _, is_reward, position in sorted(events):
            if is_reward:
                claims.append(self._claim(position, rewards[position]))
            else:
                for agent in (tree.agents[position], None):
                    ended[agent].add(position)
        return claims

    def _claim(self, position: int, reward: Reward) -> Claim:
        agent = self._tree.agents[position]
        ended = self._ended.get(agent or None)
        is_outside = self._order[position].rank == OUTSIDE
        is_outcome = (
            len(self._ended[None].calls) == len(self._calls) > 0
            and self._judged[is_outside].isdisjoint(reward.values)
            and self._whole.is_judged(position)
        )
        if not is_outcome:
            self._note_names(position, reward)
        calls: Iterable[int | None] = ()
        by, reason = "previous", NO_CALL_BEFORE
        if callable(self._rule):
            before = [self._calls[call] for call in ended.calls] if ended else ()
            calls, reason = _choose_calls(self._rule, reward, tuple(before), self._places)
            by = "custom"
        elif ended and ended.calls:
            main = self._whole.main(agent or None)[-1:] if is_outcome else []
            part = ended.part(position)
            if self._rule == "agents":
                by, calls = self._rule, self._end_agents(agent, part, is_outcome=is_outcome)
            elif self._rule == "step":
                key = agent, frozenset(reward.values), is_outside
                by, ranks = self._rule, self._rewarded.setdefault(key, Ranks(ended.places))
                calls = ended.take(part, ranks)
                if is_outcome:
                    calls = self._leave_side_calls(calls, agent) or main
            else:
                calls = [ended.last_within(part)]
                if main and main != calls:
                    by, calls = OUTCOME, main
        chosen = sorted({call for call in calls if call is not None})
        return Claim(position, reward, chosen, by, reason, is_ruled=True)

    def _end_agents(self, agent: str, part: int, *, is_outcome: bool) -> list[int | None]:
        """Return the latest call of an agent, or of each; of an outcome their main ones'."""
        names = [agent] if agent else [name for name in self._ended if name is not None]
        if is_outcome:
            mains = [self._whole.main(name) for name in names]
            return [main[-1] for main in mains if main]
        return [self._ended[name].last_within(part) for name in names]

    def _leave_side_calls(self, calls: Iterable[int], agent: str) -> list[int]:
        """Return the calls of named agents and of the main conversation."""
        main = self._whole.main(agent or None)
        return [call for call in calls if self._tree.agents[call] or call in main]

    def _note_names(self, position: int, reward: Reward) -> None:
        self._judged[True].update(reward.values)
        if self._order[position].rank != OUTSIDE:
            self._judged[False].update(reward.values)


class _JudgedCalls:
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
    choices = [chosen] if isinstance(chosen, Call) else list(chosen)
    if any(id(call) not in places for call in choices):
        raise ConfigError(
            f"the credit function gave {chosen!r:.200} for a reward; return one or more of "
            "the calls it was given, a text that says why none, or None"
        )
    return [places[id(call)] for call in choices], NOT_CHOSEN


def count_passed_over(tree: Tree, placed: Iterable[Placed], lost: Sequence[int]) -> int:
    """Count the calls that a rule rewarded although a later, lost call ended before the reward."""
    ends: dict[str, list[int]] = {}
    for call in sorted(lost, key=tree.ends.__getitem__):
        for agent in {tree.agents[call], ""}:
            ends.setdefault(agent, []).append(tree.ends[call])
    targets: set[int] = set()
    for position, calls, by in placed if ends else ():
        if by not in ("link", "parent", "sequence", "custom"):
            before = ends.get(tree.agents[position], [])
            latest = bisect_right(before, tree.starts[position]) - 1
            if latest >= 0 and before[latest] > max(map(tree.ends.__getitem__, calls)):
                targets.update(calls)
    return len(targets)
