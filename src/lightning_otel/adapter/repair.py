"""Parents that several tracers left broken, mended by the rules of docs/transitions.md.

The first rule that applies to a span decides; each span that moved is reported. Nothing is dropped
here, and no time is changed.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from lightning_otel import conventions as c
from lightning_otel.adapter.attempts import may_move
from lightning_otel.adapter.attributes import has_id
from lightning_otel.adapter.calls import is_call
from lightning_otel.adapter.walk import NO_PARENT, Walk, cycles, walked
from lightning_otel.types import Repair, Span

ITSELF: Final = "self-parent: it named itself as its parent and became a root"
OTHER_TRACE: Final = "other trace: its parent lies in another trace of its attempt"
OTHER_TRACES: Final = "other traces: several spans have its parent's id, and it became a root"
NEVER_CAME: Final = "never came: its parent is not among the attempt's spans, and it became a root"
CIRCLE: Final = "circle: its parents led back to it, and it became a root"
ENCLOSED: Final = (
    "enclosed: no agent was its parent, and it went below the one agent or tool at work around it"
)
NO_ID: Final = "no id: its id is empty or zero, so nothing lies below it"
REPEATED: Final = "repeated id: another span has its ids, and this one was left out"

_HOSTS: Final = frozenset({c.INVOKE_AGENT, c.EXECUTE_TOOL, c.EXECUTE_TASK, c.INVOKE_WORKFLOW})
_MOST_AT_ONCE: Final = 64
"""How many agents and tools at work at once are looked at for one call: each one costs."""


def mend(
    spans: Sequence[Span], starts: Sequence[int], ends: Sequence[int]
) -> tuple[list[int], tuple[Repair, ...]]:
    """Return the position of each span's parent, or -1, and a repair for each span that moved.

    Args:
        spans: The spans, in order of their start.
        starts: A clock of starts, comparable with ``ends``; within a process it follows its count.
        ends: A clock of ends.
    """
    places = {(span.trace_id, span.span_id): i for i, span in enumerate(spans)}
    parents = [NO_PARENT] * len(spans)
    rules: dict[int, str] = {}
    missing = []
    for position, span in enumerate(spans):
        parent_id = span.parent_span_id
        if parent_id and has_id(parent_id):
            parent = places.get((span.trace_id, parent_id), NO_PARENT)
            if parent == NO_PARENT:
                missing.append(position)
            elif parent == position or parent_id == span.span_id:
                rules[position] = ITSELF
            else:
                parents[position] = parent
        if not has_id(span.span_id):
            rules.setdefault(position, NO_ID)
    if missing:
        _look_elsewhere(spans, missing, parents, rules)
    _cut_loops(parents, rules)
    # Some tracers put calls below the session that holds their agents, too.
    sessions = {position for position, span in enumerate(spans) if c.SESSION in span.attributes}
    homeless = [
        position
        for position, parent in enumerate(parents)
        if (parent == NO_PARENT and _may_be_enclosed(spans[position], rules.get(position)))
        or (parent in sessions and is_call(spans[position]))
    ]
    if homeless and _enclose_calls(spans, _Clocks(starts, ends), homeless, parents, rules):
        _cut_loops(parents, rules)
    repairs = [
        Repair(spans[position].span_id, spans[position].trace_id, rules[position])
        for position in sorted(rules)
    ]
    return parents, tuple(repairs)


class _Clocks(NamedTuple):
    starts: Sequence[int]
    ends: Sequence[int]


def _look_elsewhere(
    spans: Sequence[Span], missing: Iterable[int], parents: list[int], rules: dict[int, str]
) -> None:
    """Find parents that are not in their child's trace among the other traces."""
    wanted = {spans[position].parent_span_id for position in missing}
    holders: dict[str, list[int]] = {}
    for position, span in enumerate(spans):
        if span.span_id in wanted:
            holders.setdefault(span.span_id, []).append(position)
    for position in missing:
        span = spans[position]
        found = holders.get(span.parent_span_id or "", ())
        if len(found) == 1:
            parents[position] = found[0]
            rules[position] = OTHER_TRACE
        elif found:
            rules[position] = OTHER_TRACES
        elif span.name != c.SPAN_ROLLOUT and not may_move(span):
            rules[position] = NEVER_CAME


def _cut_loops(parents: list[int], rules: dict[int, str]) -> None:
    for position in cycles(parents):
        parents[position] = NO_PARENT
        rules[position] = CIRCLE


def _may_be_enclosed(span: Span, rule: str | None) -> bool:
    """Return whether a root is a call whose tracer knew no parent."""
    if rule in (OTHER_TRACES, NEVER_CAME) or not span.process:
        return False
    return is_call(span) and span.kind not in ("SERVER", "CONSUMER")


def _is_host(span: Span) -> bool:
    operation = span.attributes.get(c.OPERATION)
    return isinstance(operation, str) and operation in _HOSTS and has_id(span.span_id)


def _enclose_calls(
    spans: Sequence[Span],
    clocks: _Clocks,
    homeless: Iterable[int],
    parents: list[int],
    rules: dict[int, str],
) -> bool:
    """Put calls below the one agent or tool at work around them; whether any found one."""
    hosts = [
        position
        for position, span in enumerate(spans)
        if _is_host(span) and clocks.starts[position] < clocks.ends[position]
    ]
    if not hosts:
        return False
    events = [(clocks.starts[host], 1, host) for host in hosts]
    events += [(clocks.ends[host], 0, host) for host in hosts]
    events += [(clocks.starts[call], 2, call) for call in homeless]
    events.sort()
    walk = walked(parents)
    at_work: dict[str, dict[int, None]] = {}  # by process, in order of their start
    everyone: dict[int, None] = {}  # likewise, for calls that lie in a session
    has_moved = False
    for _, kind, position in events:
        working = at_work.setdefault(spans[position].process, {})
        if kind == 1:
            working[position] = everyone[position] = None
        elif kind == 0:
            working.pop(position, None)
            everyone.pop(position, None)
        else:
            session = parents[position]
            own = working if session == NO_PARENT else everyone
            host = _only_one(spans, walk, own, position, session)
            if host is not None and clocks.ends[position] <= clocks.ends[host]:
                parents[position] = host
                rules[position] = ENCLOSED
                has_moved = True
    return has_moved


def _only_one(
    spans: Sequence[Span], walk: Walk, working: dict[int, None], call: int, session: int
) -> int | None:
    """The innermost of those at work, if they lie in one another and none knew of the call."""
    if not working or len(working) > _MOST_AT_ONCE:
        return None
    inside = None
    innermost = None
    for host in reversed(working):
        if session != NO_PARENT and not walk.contains(session, host):
            continue
        is_known = session == NO_PARENT and spans[host].scope == spans[call].scope
        if is_known or walk.contains(call, host):
            return None
        if inside is not None and not walk.contains(host, inside):
            return None
        if innermost is None:
            innermost = host
        inside = host
    return innermost
