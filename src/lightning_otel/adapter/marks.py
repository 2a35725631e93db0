"""Actions and observations marked by hand, read as if they were calls.

For code without any known client: each action is a step, and what was observed since the previous
action is what it answered. What was observed after the last action is its next observation.
"""

from collections.abc import Container
from dataclasses import replace
from typing import Final

from lightning_otel.adapter import exactness
from lightning_otel.adapter.agent_patterns import is_tracked
from lightning_otel.adapter.attributes import shown
from lightning_otel.adapter.calls import NOT_TRACKED
from lightning_otel.adapter.tree import Tree
from lightning_otel.messages import message, text_part
from lightning_otel.types import Call, Message, Span
from lightning_otel.types import conventions as c

BESIDE_CALLS: Final = "marked by hand beside model calls: the calls make the transitions"
INCOMPLETE: Final = "incomplete: the mark never ended"
IDLE: Final = "idle: its agent saw something and never acted"


def is_mark(span: Span) -> bool:
    """Return whether the span is an action or observation marked by hand."""
    return span.name in (c.SPAN_ACTION, c.SPAN_OBSERVATION)


def read_marks(
    tree: Tree, callers: Container[str]
) -> tuple[dict[int, Call], list[tuple[Span, str]]]:
    """Return calls by the position of their action, and why other marks make none.

    Args:
        tree: The attempt's spans.
        callers: Agents with model calls, whose marks make none.
    """
    actions: dict[int, Call] = {}
    seen: dict[str, list[Span]] = {}
    latest: dict[str, int] = {}
    dropped: list[tuple[Span, str]] = []
    for position, span in enumerate(tree.spans):
        if not is_mark(span):
            continue
        agent = tree.agents[position]
        if agent in callers:
            dropped.append((span, BESIDE_CALLS))
        elif span.is_incomplete:
            dropped.append((span, INCOMPLETE))
        elif not is_tracked(agent, span.attributes.get(c.TRACK_ONLY)):
            dropped.append((span, NOT_TRACKED))
        elif span.name == c.SPAN_OBSERVATION:
            seen.setdefault(agent, []).append(span)
        else:
            observation = tuple(map(message_of, seen.pop(agent, ())))
            actions[position] = Call(
                span, agent, observation, (message_of(span),), inexact=exactness.MARKED
            )
            latest[agent] = position
    for agent, spans in seen.items():
        if agent in latest:
            at = latest[agent]
            actions[at] = replace(actions[at], ending=tuple(map(message_of, spans)))
        else:
            dropped += [(span, IDLE) for span in spans]
    return actions, dropped


def message_of(span: Span) -> Message:
    """Return a mark's message: the agent speaks in actions, the world in observations."""
    value = span.attributes.get(c.OBJECT_JSON, span.attributes.get(c.OBJECT_LITERAL, ""))
    role = "assistant" if span.name == c.SPAN_ACTION else "user"
    return message(role, [text_part(shown(value))], name=span.attributes.get(c.MARK_NAME))
