"""The linear walk: attempts in which one call comes after the other, as nearly all do.

Each call continues its agent's last one, or all of them begin anew: one path an agent, and a reward
goes to the latest call. :mod:`assembly` answers the same where both have an answer.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, pairwise, zip_longest
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

from lightning_otel.adapter.advantages import Advantage, Outcome, group_of
from lightning_otel.adapter.attempts import AttemptKey, order_by_time
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
    add_decimals,
    add_named,
    discount_rewards,
    note_choice,
    read_reward,
)
from lightning_otel.adapter.tokens import NO_IDS, notes_of
from lightning_otel.types import (
    Call,
    Credit,
    Credited,
    Dropped,
    Report,
    Span,
    Trajectory,
    Transition,
)
from lightning_otel.types import conventions as c

OTHER, CALL, REWARD, TOOL = 0, 1, 2, 4
"""Kinds of rows."""
_ALL: Final = ""
"""Stands for whichever agent acted last; no agent has an empty name."""
_MODEL: Final = "assistant"
_SECOND: Final = itemgetter(1)
_MARKS: Final = (c.SPAN_ACTION, c.SPAN_OBSERVATION)

Row: TypeAlias = tuple[Any, ...]
"""A span: a plain tuple, as there are many. In order: its id, its parent's id or None, clocks of
its start and end, the agent it names or None, its kind, and of a reward its values by name."""
_ID, _PARENT, _START, _END, _AGENT, _KIND = range(6)

ReadCall: TypeAlias = Callable[[int, str], bool]
"""Takes the call at a position, of an agent, and tells whether the walk may go on."""


class Linear(NamedTuple):
    """A linear attempt by the positions of its spans.

    Attributes:
        rewards: The named rewards of each call that has some.
        placed: Each reward that was placed, with its call; ``dropped`` are those before any call.
        value: The sum of what the calls have for a primary reward; None if none has.
        agents: The agent of each span.
    """

    calls: dict[str, list[int]]
    rewards: dict[int, dict[str, float]]
    placed: list[tuple[int, int]]
    dropped: list[int]
    value: float | None
    agents: list[str]


def walk(rows: Sequence[Row], read_call: ReadCall) -> Linear | None:
    """Walk over the spans of an attempt, in order of their start; None if it is not linear."""
    index: dict[str, int] = {}
    parents, agents = list[int](), list[str]()
    over: list[float] = []  # when the first of a span and those above it ended
    tools: list[tuple[str, ...]] = []
    path: list[int] = []
    latest: dict[str, int] = {}
    members: dict[str, list[int]] = {}
    rewards: dict[int, dict[str, float]] = {}
    placed, dropped = list[tuple[int, int]](), list[int]()
    for position, (span_id, parent_id, start, end, agent, kind, numbers) in enumerate(rows):
        above = index.get(parent_id) if parent_id else -1
        # What began before its parent, or lacks it, and ids that come twice are repaired.
        if above is None or index.setdefault(span_id, position) != position:
            return None
        parents.append(above)
        agents.append(agent or (agents[above] if above >= 0 else ""))
        over.append(min(over[above], end) if above >= 0 else end)
        tools.append(tools[above] if above >= 0 else ())
        if kind == TOOL:
            tools[position] += (agents[position],)
        if kind not in (CALL, REWARD):
            continue
        if path and parents[path[-1]] == above:  # mostly so
            last, path[-1] = path[-1], position
            is_after = bool(rows[last][_END] < start)
        else:
            path, before = [position], path
            while (node := parents[path[-1]]) >= 0:
                path.append(node)
            path.reverse()
            is_after = _is_after(rows, before, path)
        if not is_after:
            return None
        agent = agents[position]
        if kind == CALL:
            # What an agent's tools ask is apart from what it asks itself.
            if agent in tools[position] or not read_call(position, agent):
                return None
            members.setdefault(agent, []).append(position)
            latest[agent] = latest[_ALL] = position
            continue
        if above >= 0 and (rows[above][_KIND] in (CALL, REWARD) or over[above] < start):
            return None
        if agent == _ALL and len(members) > 1:  # it may be the outcome of one of them
            return None
        call = latest.get(agent)
        if call is None:
            dropped.append(position)
        elif call in rewards:  # which of them counts first says their rank
            return None
        else:
            rewards[call] = dict(numbers)
            placed.append((position, call))
    values = [next(iter(numbers.values())) for numbers in rewards.values()]
    value = add_decimals(values) if values else None
    return Linear(members, rewards, placed, dropped, value, agents)


def _is_after(rows: Sequence[Row], before: Sequence[int], path: Sequence[int]) -> bool:
    """Return whether whatever held the step before, and not this one, ended before it."""
    for place, (one, other) in enumerate(zip(before, path, strict=False)):
        if one != other:
            start = rows[other][_START]
            return all(rows[node][_END] < start for node in before[place:])
    return not before  # else this one lies within the one before


class Adaptation(NamedTuple):
    """Trajectories, the funnel that led to them, and the reward of each attempt.

    ``credited`` says where each reward went that is not left out; ``parts`` are the attempts with
    their spans, each once, and what was made of each alone.
    """

    trajectories: list[Trajectory]
    report: Report
    credited: Sequence[Credited] = ()
    outcomes: Sequence[Outcome] = ()
    parts: "Sequence[tuple[AttemptKey, Sequence[Span], Adaptation]]" = ()


def adapt_linear(
    key: AttemptKey, records: Iterable[Span], how: Advantage | None, credit: Credit, gamma: float
) -> Adaptation | None:
    """Adapt an attempt by the usual rules; None if it is not linear."""
    spans, starts, ends, is_counted = order_by_time(list(records))
    rows = _make_rows(spans, starts, ends, is_counted=is_counted)
    if rows is None:
        return None
    calls: dict[int, Call] = {}
    parsers: defaultdict[str, HistoryParser] = defaultdict(HistoryParser)
    responses: set[object] = set()

    def take_call(position: int, agent: str) -> bool:
        span = spans[position]
        response_id = span.attributes.get(c.RESPONSE_ID)
        if type(response_id) is str:
            if response_id in responses:  # one request, or a server that repeats its ids
                return False
            responses.add(response_id)
        # What a call goes on from is told elsewhere.
        call = None if goes_on(span) else read_call(span, agent, parsers[agent])
        if isinstance(call, Call):
            calls[position] = call
        return position in calls

    result = walk(rows, take_call)
    if result is None or len({*result.agents, ""}) > 2 or (result.dropped and not calls):
        return None
    if credit != "previous" and not _is_judged_once(rows, result):
        return None
    trajectories = []
    moved: dict[int, int] = {}
    for agent, members in result.calls.items():
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
            credit != "previous" or not _move_outcome(spans, rows, result, main[-1], moved)
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
            is_guess = not (is_counted or is_grown or len(run) == 1) or name in prior
            prior.add(name)
            trajectories.append(
                Trajectory(*key, agent, branch, tuple(steps), is_guess, reward=result.value)
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
    judged = {at: [moved.get(at, call)] for at, call in result.placed}
    if credit == "step":
        judged = {at: members for at in judged for members in result.calls.values()}
    credited = [
        Credited(
            spans[at].span_id,
            spans[at].trace_id,
            tuple([spans[position].span_id for position in positions]),
            OUTCOME if at in moved else "previous" if credit == "discounted" else credit,
        )
        for at, positions in judged.items()
    ]
    start_ns = min(span.start_ns for span in spans)
    group_id = "" if how is None else group_of(spans, how.group_by)
    totals = add_named(result.rewards.values())
    outcome = Outcome(key, group_id, start_ns, totals, result.value, has_steps=bool(calls))
    return Adaptation(trajectories, report, credited, (outcome,))


def count_steps(steps: Sequence[Transition], *, is_composed: bool = False, **counts: Any) -> Report:
    """Return the report of an attempt, given its steps, each once, and all other counts."""
    reasons = [step.inexact or NO_IDS for step in steps if step.capture != "exact"]
    notes = [note for step in steps for note in notes_of(step)]
    if not is_composed:
        notes += [note for step in steps for note in note_choice(step.rewards)]
    return Report(
        transitions=len(steps),
        exact=len(steps) - len(reasons),
        rewarded=sum([step.reward is not None for step in steps]),
        inexact=dict(Counter(reasons).most_common()) if reasons else {},
        notes=(dict(Counter(notes).most_common()) if notes else {}) | counts.pop("notes", {}),
        **counts,
    )


def _make_rows(
    spans: Sequence[Span], starts: Sequence[int], ends: Sequence[int], *, is_counted: bool
) -> list[Row] | None:
    """Return the rows of spans in order; None where one of them must be looked at closely."""
    trace_id, process = spans[0].trace_id, spans[0].process
    rows: list[Row] = []
    makes, hosts = set[str](), set[str]()
    is_rooted = True
    for span, start, end in zip(spans, starts, ends, strict=True):
        attributes, parent_id = span.attributes, span.parent_span_id
        if (
            span.end_ns is None
            or span.trace_id != trace_id
            or span.name in _MARKS
            or c.SESSION in attributes
            or c.EXECUTED in attributes
            or not has_id(span.span_id)
            or not (
                is_counted or (span.sequence == span.end_sequence == -1 and span.process == process)
            )
        ):
            return None
        parent_id = parent_id if parent_id and has_id(parent_id) else None
        operation, agent = attributes.get(c.OPERATION), attributes.get(c.AGENT_NAME)
        kind, rewards = OTHER, None
        if c.REWARD_VALUE in attributes or span.name == c.SPAN_ANNOTATION:
            reward = read_reward(span)
            if isinstance(reward, str) or (
                reward and (reward.links or reward.steps or operation is not None)
            ):
                return None
            if reward:
                kind, rewards = REWARD, reward.values
        if isinstance(operation, str):
            if operation in c.CALL_OPERATIONS:
                if span.name == c.SPAN_ROLLOUT or span.status == "ERROR":
                    return None
                kind = CALL
                makes.add(span.scope)
                is_rooted = is_rooted and parent_id is not None
            elif operation in HOSTS:
                kind = TOOL if operation == c.EXECUTE_TOOL else OTHER
                hosts.add(span.scope)
        if kind != CALL and span.scope != c.SCOPE and seems_call(span):
            return None
        agent = agent if isinstance(agent, str) else None
        rows.append((span.span_id, parent_id, start, max(start, end), agent, kind, rewards))
    # Records of several makes may be one request, and a call without a parent within an agent.
    return None if len(makes) > 1 or not (is_rooted or hosts <= makes) else rows


def _is_judged_once(rows: Sequence[Row], result: Linear) -> bool:
    """Return whether one agent made all calls, and at most one reward follows, for all of them."""
    if len(result.calls) > 1 or result.dropped or len(result.placed) > 1:
        return False
    return all(
        members[-1] < at
        and (
            rows[at][_PARENT] is None
            or (rows[at][_PARENT] == rows[0][_ID] and all(row[_PARENT] for row in rows[1:at]))
        )
        for at, _ in result.placed
        for members in result.calls.values()
    )


def _move_outcome(
    spans: Sequence[Span], rows: Sequence[Row], result: Linear, call: int, moved: dict[int, int]
) -> bool:
    """Give the reward of the whole to the only call; return whether that is all."""
    last = max(position for members in result.calls.values() for position in members)
    late = [(at, other) for at, other in result.placed if at > last]
    if any(is_from_outside(spans[at]) for at, _ in result.placed):
        return False
    early = {name for at, _ in result.placed if at < last for name in rows[at][-1]}
    if all(not early.isdisjoint(rows[at][-1]) for at, _ in late):
        return True
    if len(result.calls) > 1 or len(result.placed) > 1 or result.dropped or len(rows) > last + 2:
        return False
    parent_id = rows[last + 1][_PARENT]
    site = next((at for at in range(last) if rows[at][_ID] == parent_id), None)
    if parent_id is not None and (
        site is None
        or rows[site][_PARENT] is not None
        or spans[site].name == c.SPAN_OPERATION
        or spans[site].attributes.get(c.OPERATION) in HOSTS
        or any(members[0] < site for members in result.calls.values())
    ):
        return False
    ((at, other),) = late
    if other != call:
        moved[at] = call
        result.rewards[call] = result.rewards.pop(other)
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
