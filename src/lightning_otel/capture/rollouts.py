"""The rollouts of a process that records all it does: its own, and one for each request it serves.

A span of kind SERVER without a local parent begins one, and one of kind CONSUMER whose message
comes from another process.
"""

from collections.abc import Mapping
from typing import Any, Final

from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from lightning_otel.capture import begin_rollout, process, state_of
from lightning_otel.types import conventions as c

_MOST_TRACES: Final = 4096
_rollouts: dict[int, Mapping[str, AttributeValue]] = {}
"""Stamps by trace, of the latest traces: a message comes back with nothing but the trace's id."""


def find_rollout(
    span: Any, of_process: Mapping[str, AttributeValue]
) -> Mapping[str, AttributeValue]:
    """Return the stamps of the rollout of an SDK span; ``of_process`` are the process's own."""
    state = state_of(span.context)
    if state.rollout is None:
        parent = span.parent
        if parent is None or parent.is_remote:
            state.rollout = _begin_trace(span, of_process)
        else:
            state.rollout = state_of(parent).rollout
            if state.rollout is None:  # the parent's start was not seen
                state.rollout = _rollouts.get(parent.trace_id, of_process)
    return state.rollout


def _begin_trace(
    span: Any, of_process: Mapping[str, AttributeValue]
) -> Mapping[str, AttributeValue]:
    trace_id, parent, frame = span.context.trace_id, span.parent, process.frame
    rollout = _rollouts.get(trace_id)
    if parent is not None and frame is not None and frame.sink is not None:
        rollout = frame.sink.stamps_of(trace_id, parent.span_id) or rollout
    if span.kind is SpanKind.SERVER and rollout == of_process:
        return begin_rollout()  # the process asks itself
    if rollout is None:
        rollout = of_process
        if span.kind is SpanKind.SERVER or (
            span.kind is SpanKind.CONSUMER and (rollout := _rollout_of_producer(span)) is None
        ):
            rollout = {c.ROLLOUT_ID: format(trace_id, "032x")}
        _rollouts[trace_id] = rollout
        if len(_rollouts) > _MOST_TRACES:
            _rollouts.pop(next(iter(_rollouts)), None)
    return rollout


def _rollout_of_producer(span: Any) -> Mapping[str, AttributeValue] | None:
    candidates = (_rollouts.get(link.context.trace_id) for link in span.links)
    return next((rollout for rollout in candidates if rollout is not None), None)
