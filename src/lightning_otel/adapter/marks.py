"""Actions and observations marked by hand, read as if they were calls.

For code without any known client: each action is a step, and what was observed since the previous
action is what it answered. What was observed after the last action is its next observation.
"""

from collections.abc import Sequence
from dataclasses import replace

from lightning_otel import conventions as c
from lightning_otel.adapter import exactness
from lightning_otel.adapter.attributes import shown
from lightning_otel.adapter.tree import Tree
from lightning_otel.messages import message, text_part
from lightning_otel.types import Call, Message, Span


def is_mark(span: Span) -> bool:
    """Return whether the span is an action or observation marked by hand."""
    return span.name in (c.SPAN_ACTION, c.SPAN_OBSERVATION)


def read_marks(tree: Tree, marked: Sequence[int]) -> tuple[dict[int, Call], list[int]]:
    """Return the calls that marks make, by the position of their action, and what is left over.

    Observations of agents that never acted are left over.

    Args:
        tree: The attempt's spans.
        marked: Positions of the marks, in order.
    """
    actions: dict[int, Call] = {}
    seen: dict[str, list[int]] = {}
    latest: dict[str, int] = {}
    for position in marked:
        span, agent = tree.spans[position], tree.agents[position]
        if span.name == c.SPAN_OBSERVATION:
            seen.setdefault(agent, []).append(position)
            continue
        observation = _read_messages(tree, seen.pop(agent, []))
        actions[position] = Call(
            span, agent, observation, (message_of(span),), inexact=exactness.MARKED
        )
        latest[agent] = position
    idle = []
    for agent, positions in seen.items():
        if agent in latest:
            call = actions[latest[agent]]
            actions[latest[agent]] = replace(call, ending=_read_messages(tree, positions))
        else:
            idle += positions
    return actions, idle


def _read_messages(tree: Tree, positions: Sequence[int]) -> tuple[Message, ...]:
    return tuple(message_of(tree.spans[position]) for position in positions)


def message_of(span: Span) -> Message:
    """Return a mark's message: the agent speaks in actions, the world in observations."""
    value = span.attributes.get(c.OBJECT_JSON, span.attributes.get(c.OBJECT_LITERAL, ""))
    role = "assistant" if span.name == c.SPAN_ACTION else "user"
    return message(role, [text_part(shown(value))], name=span.attributes.get(c.MARK_NAME))
