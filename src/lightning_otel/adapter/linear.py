"""The linear walk: attempts in which one call comes after the other, as nearly all do.

Each call continues its agent's last one, or all of them begin anew: one path an agent, and a reward
goes to the latest call. :mod:`assembly` answers the same where both have an answer.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise, zip_longest
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

from lightning_otel.adapter.advantages import Advantage, AttemptOutcome, group_of
from lightning_otel.adapter.attempts import AttemptKey, Ordered, order_by_time
from lightning_otel.adapter.attributes import has_id
from lightning_otel.adapter.awards import is_from_outside
from lightning_otel.adapter.calls import (
    HOSTS,
    HistoryParser,
    make_transition,
    read_call,
    seems_call,
)
from lightning_otel.adapter.continuations import goes_on
from lightning_otel.adapter.histories import find_choice, message_key
from lightning_otel.adapter.identities import identify
from lightning_otel.adapter.rewards import (
    NO_CALL_BEFORE,
    OUTCOME,
    SEVERAL,
    add_decimals,
    add_named,
    discount_rewards,
    read_reward,
)
from lightning_otel.adapter.tokens import NO_IDS, notes_of
from lightning_otel.types import (
    Call,
    Credit,
    Credited,
    Dropped,
    Report,
    Reward,
    Span,
    Trajectory,
    Transition,
)
from lightning_otel.types import conventions as c

_OTHER, _CALL, _TOOL = range(3)
_Kind: TypeAlias = int | Reward
"""The kind of a span; of a reward what it says."""
_ALL: Final = ""
"""Stands for whichever agent acted last; no agent has an empty name."""
_MODEL: Final = "assistant"
_SECOND: Final = itemgetter(1)
_MARKS: Final = (c.SPAN_ACTION, c.SPAN_OBSERVATION)


class Linear(NamedTuple):
    """A linear attempt by the positions of its spans.

    Attributes:
        members: The positions of each agent's calls.
        rewards: The named rewards of each call that has some.
        placed: Each reward that was placed, with its call; ``dropped`` are those before any call.
        agents: The agent of each span.
        parents: The span above each one; -1 for none.
    """

    calls: dict[int, Call]
    members: dict[str, list[int]]
    rewards: dict[int, dict[str, float]]
    placed: dict[int, int]
    dropped: list[int]
    agents: list[str]
    parents: list[int]


def walk(order: Ordered, kinds: Sequence[_Kind]) -> Linear | None:
    """Walk over the spans of an attempt, in order of their start; None if it is not linear."""
    starts, ends = order.starts, list(map(max, order.starts, order.ends))
    index: dict[str, int] = {}
    over: list[int] = []  # when the first of a span and those above it ended
    tools: list[tuple[str, ...]] = []
    path: list[int] = []
    latest: dict[str, int] = {}
    responses: set[object] = set()
    parsers: defaultdict[str, HistoryParser] = defaultdict(HistoryParser)
    result = Linear({}, {}, {}, {}, [], [], [])
    calls, members, rewards, placed, dropped, agents, parents = result
    for position, (span, kind) in enumerate(zip(order.spans, kinds, strict=True)):
        parent_id, name = span.parent_span_id, span.attributes.get(c.AGENT_NAME)
        above = index.get(parent_id) if parent_id and has_id(parent_id) else -1
        # What began before its parent, or lacks it, and ids that come twice are repaired.
        if above is None or index.setdefault(span.span_id, position) != position:
            return None
        start, end, is_below = starts[position], ends[position], above >= 0
        agent = (isinstance(name, str) and name) or (agents[above] if is_below else "")
        parents.append(above)
        agents.append(agent)
        over.append(min(over[above], end) if is_below else end)
        tools.append(tools[above] if is_below else ())
        if not isinstance(kind, Reward) and kind != _CALL:
            if kind == _TOOL:
                tools[position] += (agent,)
            continue
        if path and parents[path[-1]] == above:  # mostly so
            last, path[-1] = path[-1], position
            is_after = ends[last] < start
        else:
            path, before = [position], path
            while (node := parents[path[-1]]) >= 0:
                path.append(node)
            path.reverse()
            is_after = _is_after(starts, ends, before, path)
        if not is_after:
            return None
        if not isinstance(kind, Reward):
            call = _take_call(span, agent, parsers, responses)
            # What an agent's tools ask is apart from what it asks itself.
            if call is None or agent in tools[position]:
                return None
            calls[position] = call
            members.setdefault(agent, []).append(position)
            latest[agent] = latest[_ALL] = position
            continue
        if is_below and (isinstance(kinds[above], Reward) or kinds[above] == _CALL):
            return None
        if is_below and over[above] < start:
            return None
        if agent == _ALL and len(members) > 1:  # it may be the outcome of one of them
            return None
        target = latest.get(agent)
        if target is None:
            dropped.append(position)
        elif target in rewards:  # which of them counts first says their rank
            return None
        else:
            rewards[target] = dict(kind.values)
            placed[position] = target
    return result


def _is_after(
    starts: Sequence[int], ends: Sequence[int], before: Sequence[int], path: Sequence[int]
) -> bool:
    """Return whether whatever held the step before, and not this one, ended before it."""
    for place, (one, other) in enumerate(zip(before, path, strict=False)):
        if one != other:
            return all(ends[node] < starts[other] for node in before[place:])
    return not before  # else this one lies within the one before


def _take_call(
    span: Span, agent: str, parsers: Mapping[str, HistoryParser], responses: set[object]
) -> Call | None:
    response_id = span.attributes.get(c.RESPONSE_ID)
    if goes_on(span):
        return None  # what it goes on from is told elsewhere
    if type(response_id) is str:
        if response_id in responses:  # one request, or a server that repeats its ids
            return None
        responses.add(response_id)
    call = read_call(span, agent, parsers[agent])
    return call if isinstance(call, Call) else None


class Adaptation(NamedTuple):
    """Trajectories, the funnel that led to them, and the reward of each attempt.

    ``credited`` says where each reward went that is not left out; ``parts`` are the attempts with
    their spans, each once, and what was made of each alone.
    """

    trajectories: list[Trajectory]
    report: Report
    credited: Sequence[Credited] = ()
    outcomes: Sequence[AttemptOutcome] = ()
    parts: "Sequence[tuple[AttemptKey, Sequence[Span], Adaptation]]" = ()


def adapt_linear(
    key: AttemptKey, records: Iterable[Span], how: Advantage | None, credit: Credit, gamma: float
) -> Adaptation | None:
    """Adapt an attempt by the usual rules; None if it is not linear."""
    order = order_by_time(list(records))
    spans, kinds = order.spans, _find_kinds(order)
    result = None if kinds is None else walk(order, kinds)
    if result is None or len({*result.agents, ""}) > 2 or (result.dropped and not result.calls):
        return None
    if credit != "previous" and not _is_judged_once(result):
        return None
    calls = result.calls
    firsts = [next(iter(numbers.values())) for numbers in result.rewards.values()]
    value = add_decimals(firsts) if firsts else None
    trajectories = []
    moved: set[int] = set()
    for agent, members in result.members.items():
        turns = [calls[position] for position in members]
        is_grown = all(
            find_choice(before.observation, before.action, call.observation) is not None
            for before, call in pairwise(turns)
        )
        if not is_grown and not _are_anew(turns):
            return None
        # Of unnamed calls that repeat nothing each identity begins anew.
        names = [agent] * len(members) if agent or is_grown else list(map(identify, turns))
        runs = [
            (name, [at for at, _ in run])
            for name, run in groupby(zip(members, names, strict=True), _SECOND)
        ]
        main = max([run for _, run in runs], key=len)
        if len(runs) > 1 and (
            credit != "previous" or not _move_outcome(spans, result, main[-1], moved)
        ):
            return None
        if credit == "step":
            for numbers in [*result.rewards.values()]:
                result.rewards.update({position: dict(numbers) for position in members})
        prior = set[object]()
        for branch, (name, run) in enumerate(runs):
            rewards = [result.rewards.get(position, {}) for position in run]
            values = [next(iter(numbers.values()), None) for numbers in rewards]
            if credit == "discounted":
                values = discount_rewards(values, range(-1, len(run) - 1), gamma)
            after = [calls[position].observation for position in run[1:]]
            steps = [
                make_transition(
                    key, calls[position], step, values[step], following, rewards[step],
                    is_last=following is None,
                )
                for step, (position, following) in enumerate(zip_longest(run, after))
            ]  # fmt: skip
            is_guess = not (order.is_counted or is_grown or len(run) == 1) or name in prior
            prior.add(name)
            trajectories.append(
                Trajectory(*key, agent, branch, tuple(steps), is_guess, reward=value)
            )
    dropped = [
        Dropped(spans[at].span_id, spans[at].trace_id, "reward", NO_CALL_BEFORE)
        for at in result.dropped
    ]
    report = count_steps(
        [step for path in trajectories for step in path.transitions],
        spans=len(spans),
        calls=len(calls),
        rewards=len(result.placed) + len(dropped),
        rewards_placed=len(result.placed),
        dropped=tuple(dropped),
    )
    credited = [
        Credited(
            spans[at].span_id,
            spans[at].trace_id,
            tuple([spans[call].span_id for call in (calls if credit == "step" else [target])]),
            OUTCOME if at in moved else "previous" if credit == "discounted" else credit,
        )
        for at, target in result.placed.items()
    ]
    start_ns = min(span.start_ns for span in spans)
    group_id = "" if how is None else group_of(spans, how.group_by)
    totals = add_named(result.rewards.values())
    outcome = AttemptOutcome(key, group_id, start_ns, totals, value, has_steps=bool(calls))
    return Adaptation(trajectories, report, credited, (outcome,))


def count_steps(steps: Sequence[Transition], *, is_composed: bool = False, **counts: Any) -> Report:
    """Return the report of an attempt, given its steps, each once, and all other counts."""
    reasons = [step.inexact or NO_IDS for step in steps if step.capture != "exact"]
    notes = [note for step in steps for note in notes_of(step)]
    if not is_composed:
        notes += [SEVERAL.format(", ".join(s.rewards)) for s in steps if len(s.rewards) > 1]
    return Report(
        transitions=len(steps),
        exact=len(steps) - len(reasons),
        rewarded=sum([step.reward is not None for step in steps]),
        inexact=dict(Counter(reasons).most_common()) if reasons else {},
        notes=(dict(Counter(notes).most_common()) if notes else {}) | counts.pop("notes", {}),
        **counts,
    )


def _find_kinds(order: Ordered) -> list[_Kind] | None:
    """Return the kind of each span; None where one of them must be looked at closely."""
    trace_id, process = order.spans[0].trace_id, order.spans[0].process
    kinds: list[_Kind] = []
    makes, hosts = set[str](), set[str]()
    is_rooted = True
    kind: _Kind
    for span in order.spans:
        attributes, parent_id = span.attributes, span.parent_span_id
        if (
            span.end_ns is None
            or span.trace_id != trace_id
            or span.name in _MARKS
            or c.SESSION in attributes
            or c.EXECUTED in attributes
            or not has_id(span.span_id)
            or not (
                order.is_counted
                or (span.sequence == span.end_sequence == -1 and span.process == process)
            )
        ):
            return None
        operation, kind = attributes.get(c.OPERATION), _OTHER
        if c.REWARD_VALUE in attributes or span.name == c.SPAN_ANNOTATION:
            reward = read_reward(span)
            if isinstance(reward, str) or (
                reward and (reward.links or reward.steps or operation is not None)
            ):
                return None
            kind = reward or kind
        if isinstance(operation, str):
            if operation in c.CALL_OPERATIONS:
                if span.name == c.SPAN_ROLLOUT or span.status == "ERROR":
                    return None
                kind = _CALL
                makes.add(span.scope)
                is_rooted = is_rooted and bool(parent_id) and has_id(str(parent_id))
            elif operation in HOSTS:
                kind = _TOOL if operation == c.EXECUTE_TOOL else _OTHER
                hosts.add(span.scope)
        if kind != _CALL and span.scope != c.SCOPE and seems_call(span):
            return None
        kinds.append(kind)
    # Records of several makes may be one request, and a call without a parent within an agent.
    return None if len(makes) > 1 or not (is_rooted or hosts <= makes) else kinds


def _is_judged_once(result: Linear) -> bool:
    """Return whether one agent made all calls, and at most one reward follows, for all of them."""
    if len(result.members) > 1 or result.dropped or len(result.placed) > 1:
        return False
    last, parents = max(result.calls, default=-1), result.parents
    return all(
        last < at
        and (parents[at] < 0 or (parents[at] == 0 and all(up >= 0 for up in parents[1:at])))
        for at in result.placed
    )


def _move_outcome(spans: Sequence[Span], result: Linear, call: int, moved: set[int]) -> bool:
    """Give the reward of the whole to the only call; return whether that is all."""
    last, placed, rewards, parents = (
        max(result.calls),
        result.placed,
        result.rewards,
        result.parents,
    )
    if any(is_from_outside(spans[at]) for at in placed):
        return False
    early = {name for at, other in placed.items() if at < last for name in rewards[other]}
    late = [(at, other) for at, other in placed.items() if at > last]
    if all(not early.isdisjoint(rewards[other]) for _, other in late):
        return True
    if len(result.members) > 1 or len(placed) > 1 or result.dropped or len(spans) > last + 2:
        return False
    ((at, other),) = late
    site = parents[at]
    if site >= 0 and (
        parents[site] >= 0
        or spans[site].name == c.SPAN_OPERATION
        or spans[site].attributes.get(c.OPERATION) in HOSTS
        or min(result.calls) < site
    ):
        return False
    if other != call:
        placed[at] = call
        moved.add(at)
        rewards[call] = rewards.pop(other)
    return True


def _are_anew(calls: Sequence[Call]) -> bool:
    """Return whether none was given what another one answered, or goes on with a longer prompt."""
    if any(len(one.observation) < len(other.observation) for one, other in pairwise(calls)):
        return False
    choices = [choice for call in calls for choice in call.action]
    keys = {message_key(choice) for choice in choices}
    return all(choice.get("role") == _MODEL for choice in choices) and not any(
        message.get("role") == _MODEL and message_key(message) in keys
        for call in calls
        for message in call.observation
    )
