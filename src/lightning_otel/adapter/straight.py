"""The common attempt without its content: one call after the other, each continuing the last.

Nothing of the general way is built for it: no spans, tree, calls or branches. Whatever is not
plainly so is not decided here, and takes the general way; that both say the same is a test. Nothing
in here looks at a message: what must be known of them comes as two numbers a call.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias, cast

import orjson

from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter, credit, trajectories
from lightning_otel.adapter.attempts import AttemptKey
from lightning_otel.adapter.attributes import has_id
from lightning_otel.adapter.exactness import Tokens, read_tokens, tally
from lightning_otel.adapter.rewards import read_reward
from lightning_otel.adapter.tracking import is_tracked
from lightning_otel.types import Call, CaptureLevel, Dropped, Report, Span, Transition

OTHER: Final = 0
CALL: Final = 1
REWARD: Final = 2
TOOL: Final = 4
"""Kinds of rows; any other kind sends the attempt the general way."""
_BETWEEN: Final = (OTHER, TOOL)
_ALL: Final = ""
"""Stands for whichever agent acted last; no agent has an empty name."""


Row: TypeAlias = tuple[Any, ...]
"""A span without its content: a plain tuple, which costs a tenth of a class of its own and is no
work for the garbage collector. In order: its rollout; the positions of its start and its end in its
process; its id, its parent's and that of its trace; the agent it names itself, or None; its kind;
and of a call or reward its attributes as JSON, the times of its start and end, and, of a call, two
numbers (the one stands for its messages and its answer, the other for its messages up to the last
of a model, None if there is none), OpenTelemetry's resource as JSON, and the texts of prompt ids,
response ids and logprobs, or None.
"""
(_START, _END, _ID, _PARENT, _TRACE, _AGENT, _KIND, _ATTRIBUTES, _START_NS, _END_NS, _LEAVES,
 _CONTINUES, _RESOURCE, _TOKENS) = range(1, 15)  # fmt: skip
_TOKEN_KEYS: Final = (c.PROMPT_TOKEN_IDS, c.RESPONSE_TOKEN_IDS, c.RESPONSE_LOGPROBS)


class Straight(NamedTuple):
    """Transitions of an attempt, each agent's on its first and only branch, and their funnel."""

    transitions: list[Transition]
    report: Report


@lru_cache(maxsize=64)
def _parsed(text: str | None) -> Mapping[str, Any]:
    """A process's resource, which all its spans have."""
    return orjson.loads(text) if text else {}


class _Span:
    """What is read of a span in here."""

    __slots__ = (
        "attributes", "end_ns", "name", "otel_resource", "span_id", "start_ns", "trace_id",
    )  # fmt: skip

    def __init__(self, row: Row, name: str = "") -> None:
        self.trace_id: str = row[_TRACE]
        self.span_id: str = row[_ID]
        self.name = name
        self.start_ns: int = row[_START_NS]
        self.end_ns: int = row[_END_NS]
        self.attributes: dict[str, Any] = orjson.loads(row[_ATTRIBUTES])
        self.otel_resource = _parsed(row[_RESOURCE])
        for key, text in zip(_TOKEN_KEYS, row[_TOKENS:], strict=True):
            if text is not None:
                self.attributes[key] = text


class _Call:
    """What is read of a call in here."""

    __slots__ = ("agent", "capture", "inexact", "span")
    observation = action = tools = prompt_ids = response_ids = logprobs = ()
    ending = None

    def __init__(self, span: Span, agent: str, capture: CaptureLevel, inexact: str) -> None:
        self.span = span
        self.agent = agent
        self.capture = capture
        self.inexact = inexact


@dataclass(slots=True)
class _Walk:
    """What is known of an attempt so far."""

    rows: Sequence[Row]
    parents: list[int] = field(default_factory=list)
    agents: list[str] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    latest: dict[str, int] = field(default_factory=dict)
    own: dict[str, list[int]] = field(default_factory=dict)
    calls: dict[int, Call] = field(default_factory=dict)
    tokens: dict[int, Tokens] = field(default_factory=dict)
    responses: set[object] = field(default_factory=set)
    rewards: dict[int, dict[str, float]] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)
    given: int = 0
    placed: int = 0


def can_stand_for(adapter: object) -> bool:
    """Whether an adapter makes of a straight attempt what this does."""
    return (
        isinstance(adapter, TripletAdapter)
        and replace(adapter, gamma=TripletAdapter().gamma) == TripletAdapter()
    )


def adapt(key: AttemptKey, rows: Iterable[Row]) -> Straight | None:
    """Return an attempt's transitions by the rule ``previous``; None if it must go the general way.

    Args:
        key: The attempt.
        rows: All its spans, of one trace and process, each ended and counted.
    """
    walk = _Walk(sorted(rows, key=itemgetter(_START)))
    index: dict[str, int] = {}
    parents, agents = walk.parents, walk.agents
    for position, row in enumerate(walk.rows):
        above = index.get(row[_PARENT]) if row[_PARENT] else -1
        # What began before its parent or lacks it, and ids that are none or come twice, are not
        # judged here.
        if above is None or row[_ID] in index or row[_END] < row[_START] or not has_id(row[_ID]):
            return None
        index[row[_ID]] = position
        parents.append(above)
        agents.append(row[_AGENT] or (agents[above] if above >= 0 else ""))
        kind = row[_KIND]
        if kind in _BETWEEN:
            continue
        if kind not in _STEPS or not (
            _is_after_all(walk, position) and _STEPS[kind](walk, position)
        ):
            return None
    if walk.given == len(walk.rows):
        return None  # rewards alone may wait for what they judge
    return _made(key, walk)


def _is_after_all(walk: _Walk, position: int) -> bool:
    """Whether every part of the tree that held the one before had ended before this one's began."""
    rows, parents = walk.rows, walk.parents
    path = [position]
    while (above := parents[path[-1]]) >= 0:
        path.append(above)
    path.reverse()
    before, walk.path = walk.path, path
    place = 0
    for place, (one, other) in enumerate(zip(before, path, strict=False)):
        if one != other:
            start = rows[other][_START]
            return all(rows[node][_END] < start for node in before[place:])
    return not before  # else this one lies within the one before


def _follows(walk: _Walk, position: int) -> bool:
    """Whether a call continues its agent's latest, or begins a conversation; it becomes that."""
    row, agent = walk.rows[position], walk.agents[position]
    own = walk.own.setdefault(agent, [])
    if own and not _is_plain(walk, own, row):
        return False
    if any(walk.rows[above][_KIND] == TOOL and walk.agents[above] == agent for above in walk.path):
        return False  # what an agent's tools ask is apart from what it asks itself
    span = _Span(row)
    if not is_tracked(agent, span.attributes.get(c.TRACK_ONLY)):
        return False
    response_id = span.attributes.get(c.RESPONSE_ID)
    if response_id in walk.responses:
        return False  # whether it is one request or a server repeats its ids is not seen here
    walk.responses.add(response_id)
    own.append(position)
    walk.latest[agent] = walk.latest[_ALL] = position
    walk.tokens[position] = tokens = read_tokens(span.attributes)
    walk.calls[position] = _call(cast(Span, span), agent, tokens)
    return True


def _is_plain(walk: _Walk, own: Sequence[int], row: Row) -> bool:
    """Whether an agent's calls are one conversation, or each of them is one of its own.

    Of a mixture only the messages tell whether something was asked again, or a conversation cut.
    """
    before = walk.rows[own[-1]]
    if row[_CONTINUES] is None:
        return before[_CONTINUES] is None
    is_second = len(own) == 1
    return row[_CONTINUES] == before[_LEAVES] and (is_second or before[_CONTINUES] is not None)


def _is_given(walk: _Walk, position: int) -> bool:
    """Whether a reward is one for the latest call before it, or for none; it is placed."""
    row = walk.rows[position]
    above = walk.parents[position]
    if above >= 0 and walk.rows[above][_KIND] not in _BETWEEN:
        return False
    reward = read_reward(cast(Span, _Span(row, c.SPAN_ANNOTATION)))
    walk.given += 1
    if reward is None or isinstance(reward, str):
        return False
    call = walk.latest.get(walk.agents[position])
    held = walk.rewards.setdefault(call, {}) if call is not None else None
    if held is None or held.keys() & reward.values.keys():
        reason = credit.NO_CALL_BEFORE if held is None else credit.ALREADY_REWARDED
        walk.dropped.append(Dropped(row[_ID], row[_TRACE], "reward", reason))
    else:
        held.update(reward.values)
        walk.placed += 1
    return True


_STEPS: Final = {CALL: _follows, REWARD: _is_given}


def _call(span: Span, agent: str, tokens: Tokens) -> Call:
    is_exact = bool(len(tokens.prompt_ids) and len(tokens.response_ids))
    capture: CaptureLevel = "exact" if is_exact else "text"
    return cast(Call, _Call(span, agent, capture, tokens.inexact))


def _made(key: AttemptKey, walk: _Walk) -> Straight:
    found: list[Transition] = []
    rewarded = 0
    tokens: list[Tokens] = []
    for positions in walk.own.values():
        calls = [walk.calls[position] for position in positions]
        tokens += [walk.tokens[position] for position in positions]
        last = len(calls) - 1
        for step, position in enumerate(positions):
            named = walk.rewards.get(position, {})
            rewarded += bool(named)
            found.append(
                trajectories.transition(
                    key,
                    calls[step],
                    calls[step + 1] if step < last else None,
                    step=step,
                    done=step == last,
                    reward=next(iter(named.values()), None),
                    rewards=named,
                    is_shared=False,
                )
            )
    told = tally(found, tokens)
    report = Report(
        spans=len(walk.rows),
        calls=len(found),
        transitions=len(found),
        exact=told.exact,
        rewards=walk.given,
        rewards_placed=walk.placed,
        rewarded=rewarded,
        dropped=tuple(walk.dropped),
        inexact=told.inexact,
        notes=told.notes,
    )
    return Straight(found, report)
