"""Spans of ours as other tools show them, for OTLP, and back to what the store holds.

A rollout, ``agentlightning.rollout``, leaves as ``invoke_workflow`` with its input and output, a
reward also as an evaluation. OpenInference's keys are for Phoenix and MLflow.

Source: the GenAI semantic conventions, spans ``gen_ai.invoke_workflow.internal`` and event
``gen_ai.evaluation.result``; OpenInference's semantic conventions.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from lightning_otel.adapter.attributes import get_text
from lightning_otel.adapter.rewards import read_reward
from lightning_otel.messages import message, parse_messages, plain_text, text_part
from lightning_otel.types import Event, Reward, Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import parse_json

SHOWN: Final = 1 << 16
"""Characters of a copied text: the whole one goes out under its own key."""
_KIND: Final = "openinference.span.kind"
_INPUT: Final = "input.value"
_OUTPUT: Final = "output.value"
_SIDES: Final = (
    (c.TASK, "user", None, c.INPUT_MESSAGES, _INPUT),
    (c.OPERATION_OUTPUT, "assistant", "stop", c.OUTPUT_MESSAGES, _OUTPUT),
)
"""Where the store has what a rollout was given or gave, and who says it under which keys."""
_WORKFLOW_KEYS: Final = frozenset(
    {
        c.OPERATION, c.WORKFLOW_NAME, c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, _KIND, _INPUT, _OUTPUT,
    }
)  # fmt: skip
_KINDS: Final = {c.INVOKE_AGENT: "AGENT", c.INVOKE_WORKFLOW: "CHAIN"}
_VIEW_KEYS: Final = frozenset({_KIND, _INPUT, _OUTPUT})
_EVALUATION_KEYS: Final = frozenset({_KIND, _OUTPUT})


def to_conventions(span: Span, *, with_content: bool) -> Span:
    """Return a stored span as it leaves."""
    if span.name == c.SPAN_ROLLOUT:
        return _to_workflow(span, with_content=with_content)
    if span.scope == c.SCOPE and (kind := _KINDS.get(str(span.attributes.get(c.OPERATION)))):
        return _to_view(span, kind, with_content=with_content)
    reward = read_reward(span) if span.name == c.SPAN_ANNOTATION else None
    if not isinstance(reward, Reward) or c.EVALUATION_NAME in span.attributes:
        return span
    shared: dict[str, Any] = {}
    keys = (c.FEEDBACK_TEXT, c.EVALUATION_EXPLANATION) if with_content else ()
    if text := next(filter(None, (get_text(span.attributes, key) for key in keys)), None):
        shared[c.EVALUATION_EXPLANATION] = text
    if response_id := dict(reward.links).get(c.RESPONSE_ID):
        shared[c.RESPONSE_ID] = response_id
    events = [
        Event(
            c.EVENT_EVALUATION, span.start_ns,
            {c.EVALUATION_NAME: name, c.EVALUATION_SCORE: value, **shared},
        )
        for name, value in reward.values.items()
    ]  # fmt: skip
    view = {_KIND: "EVALUATOR", _OUTPUT: json.dumps(dict(reward.values), ensure_ascii=False)}
    return replace(span, attributes={**view, **span.attributes}, events=(*span.events, *events))


def _to_workflow(span: Span, *, with_content: bool) -> Span:
    attributes = span.attributes
    name = get_text(attributes, c.OPERATION_NAME)
    added: dict[str, Any] = {c.OPERATION: c.INVOKE_WORKFLOW, _KIND: "CHAIN"}
    if name:
        added[c.WORKFLOW_NAME] = name
    for source, role, reason, messages, key in _SIDES if with_content else ():
        words = _words_of(attributes, source)
        if words is not None:
            turn = message(role, [text_part(words)], finish_reason=reason)
            added |= {key: words, messages: json.dumps([turn], ensure_ascii=False)}
    called = f"{c.INVOKE_WORKFLOW} {name}" if name else c.INVOKE_WORKFLOW
    return replace(span, name=called, attributes={**added, **attributes})


def _to_view(span: Span, kind: str, *, with_content: bool) -> Span:
    """Return a framework's agent or workflow with the texts that Phoenix shows of it."""
    added = {_KIND: kind}
    for *_, source, key in _SIDES if with_content else ():
        if messages := parse_messages(span.attributes.get(source)):
            added[key] = plain_text(messages[-1:])[:SHOWN]
    return replace(span, attributes={**added, **span.attributes})


def _words_of(attributes: Mapping[str, Any], key: str) -> str | None:
    text = get_text(attributes, key)
    if text is None:
        return None
    value = parse_json(text)
    return (value if isinstance(value, str) else text)[:SHOWN]


def from_conventions(span: Span) -> Span:
    """Return a received span as it was stored where it was recorded; a foreign one as it is."""
    name, attributes, events = span.name, span.attributes, span.events
    if name == c.SPAN_ANNOTATION and attributes.get(_KIND) == "EVALUATOR":
        derived = _EVALUATION_KEYS
        events = tuple(event for event in events if event.name != c.EVENT_EVALUATION)
    elif span.scope == c.SCOPE and attributes.get(c.OPERATION) in _KINDS:
        derived = _VIEW_KEYS
        if attributes[c.OPERATION] == c.INVOKE_WORKFLOW and c.OPERATION_NAME in attributes:
            name, derived = c.SPAN_ROLLOUT, _WORKFLOW_KEYS
    else:
        return span
    values = {key: value for key, value in attributes.items() if key not in derived}
    return replace(span, name=name, attributes=values, events=events)
