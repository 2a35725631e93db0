"""Spans made by hand: rewards, marks, messages, objects, states, exceptions.

They have Agent Lightning's attribute keys. Outside a recording they warn once and do nothing; a
reward with an explicit target goes to the default store.
"""

import base64
import contextlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from lightning_otel import capture, config
from lightning_otel.adapter.attributes import matched_text
from lightning_otel.adapter.rewards import add_decimals
from lightning_otel.capture import operations
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, warn_once
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import check_finite

State = Literal["started", "finished", "failed"]
_SPAN_ID = re.compile(r"[0-9a-f]{16}")

_is_silenced = False


def emit_reward(
    reward: float | str | Mapping[str, float] | Sequence[float | None],
    value: float | Sequence[float | None] | None = None,
    /,
    *,
    score: float | None = None,
    primary: str | None = None,
    span_id: str | None = None,
    response_id: str | None = None,
    match: Mapping[str, AttributeValue] | None = None,
    rollout_id: str | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> str | None:
    """Give a reward to what the agent did, now or later, from this process or another.

    Args:
        reward: A number; a name, followed by its number; named numbers; or a list, with a number
            (or None) for each step so far of the agent, or of what it is linked to.
        value: The number or the list, where ``reward`` is a name.
        score: Another way to write ``value``.
        primary: The primary name; by default as rewards without one decide.
        span_id: The span it judges, 16 hex digits; by default credit decides.
        response_id: The model response it judges, such as ``chatcmpl-…``.
        match: Attributes that the judged span of the rollout must have.
        rollout_id: The rollout it judges, where that is not the current one.
        attributes: Further attributes of the reward's span.

    Returns:
        The reward's span id; None if nothing records here and no target was named.

    Raises:
        ConfigError: The reward is not a finite number, the primary one is not named, the span id is
            none, or ``match`` has no rollout to look in.
    """
    award = _reward_attributes(reward, score if value is None else value, primary)
    if span_id and not _SPAN_ID.fullmatch(str(span_id)):
        raise ConfigError(
            f"span_id={span_id!r:.60} is no span id; write its 16 hex digits, or leave it out"
        )
    targets = _target_attributes(span_id, response_id, rollout_id, match)
    facts = {**(attributes or {}), **award, **targets}
    if not (span_id or response_id or rollout_id or capture.is_wanted()):
        if match:
            raise ConfigError(
                f"match={match!r} is looked for in one rollout; name it: rollout_id=…"
            )
        return _emit_span("emit_reward", c.SPAN_ANNOTATION, facts)  # which says that none is kept
    return _keep_annotation("emit_reward", _make_instant(facts), rollout_id)


def retract_reward(span_id: str, /, *, rollout_id: str | None = None) -> str | None:
    """Retract a reward, now or later, from this process or another; return the span id.

    Args:
        span_id: The reward's span, as :func:`emit_reward` returns it and ``rewards`` lists it.
        rollout_id: The rollout it judges: retention drops the retraction with that.

    Raises:
        ConfigError: The span id is not 16 hex digits.
    """
    return _keep_annotation("retract_reward", retraction_span(span_id, rollout_id), rollout_id)


def retraction_span(span_id: str, rollout_id: str | None, received: str | None = None) -> Span:
    """A retraction as a finished span in a trace of its own; ``received`` says how it came."""
    if not _SPAN_ID.fullmatch(str(span_id)):
        raise ConfigError(
            f"{span_id!r:.60} is no span id; name a reward by the 16 hex digits that emit_reward() "
            "returned, or that the view rewards lists as span_id"
        )
    came = {c.RECEIVED: received} if received else {}
    target = _target_attributes(span_id, None, rollout_id)
    return _make_instant({**target, **came, c.REWARD_RETRACTED: True})


def reward_span(
    values: Mapping[str, float],
    *,
    rollout_id: str | None = None,
    span_id: str | None = None,
    response_id: str | None = None,
) -> Span:
    """Return a reward as a finished span in a trace of its own; the first value is primary."""
    primary = next(iter(values)) if len(values) > 1 else None
    award = _reward_attributes(values, None, primary)
    return _make_instant({**award, **_target_attributes(span_id, response_id, rollout_id)})


def _target_attributes(
    span_id: str | None,
    response_id: str | None,
    rollout_id: str | None,
    match: Mapping[str, AttributeValue] | None = None,
) -> dict[str, AttributeValue]:
    pairs = ((c.LINK_SPAN_ID, span_id), (c.RESPONSE_ID, response_id))
    links = [(key, target) for key, target in pairs if target]
    links += [(str(key), matched_text(value)) for key, value in (match or {}).items()]
    facts: dict[str, AttributeValue] = {c.ROLLOUT_ID: rollout_id} if rollout_id else {}
    for index, (key, target) in enumerate(links):
        facts[f"{c.LINK_PREFIX}.{index}.key_match"] = key
        facts[f"{c.LINK_PREFIX}.{index}.value_match"] = target
    return facts


def _keep_annotation(verb: str, span: Span, rollout_id: str | None) -> str | None:
    """Emit an annotation where something records here, else put it into the default store."""
    if capture.is_wanted():
        with _in_rollout(rollout_id):
            return _emit_span(verb, c.SPAN_ANNOTATION, span.attributes)
    is_kept = config.is_enabled() and capture.guard_call(_store_span, span)
    return span.span_id if is_kept else None


def _store_span(span: Span) -> bool:
    Store().add([capture.storable_span(span)])
    return True


def _make_instant(attributes: Mapping[str, AttributeValue]) -> Span:
    now_ns, ids = time.time_ns(), (os.urandom(16).hex(), os.urandom(8).hex())
    return Span(*ids, None, c.SPAN_ANNOTATION, now_ns, now_ns, attributes=attributes, scope=c.SCOPE)


def _reward_attributes(
    reward: object, value: object, primary: str | None
) -> dict[str, AttributeValue]:
    is_named = isinstance(reward, str)
    if value is not None and not is_named:
        raise ConfigError("emit_reward takes a second number only after a name")
    entry: Any = value if is_named else reward
    steps = None
    if isinstance(entry, (list, tuple)):
        steps = [
            None if number is None else check_finite(f"reward 'step {index}'", number)
            for index, number in enumerate(entry)
        ]
        if all(step is None for step in steps):
            raise ConfigError(f"reward {entry!r} has no number for any step; leave it out instead")
        entry = add_decimals([step for step in steps if step is not None])
    rewards: Mapping[Any, Any] = {reward if is_named else c.PRIMARY_REWARD: entry}
    if isinstance(entry, Mapping) and not is_named:
        rewards = entry
    values = {str(name): number for name, number in rewards.items()}
    if not values:
        raise ConfigError("emit_reward got no reward: the mapping is empty")
    if primary is None and len(values) > 1:
        raise ConfigError(
            f"several rewards ({', '.join(values)}) need primary=… to say which one counts"
        )
    first = primary if primary is not None else next(iter(values))
    if first not in values:
        raise ConfigError(f"primary={first!r} is none of the rewards: {', '.join(values)}")
    facts: dict[str, AttributeValue] = {}
    for index, name in enumerate(sorted(values, key=lambda name: name != first)):
        facts[f"{c.REWARD_PREFIX}.{index}.name"] = name
        facts[f"{c.REWARD_PREFIX}.{index}.value"] = check_finite(f"reward {name!r}", values[name])
    if steps is not None:
        facts[c.REWARD_STEPS] = json.dumps(steps)
    if primary is not None and len(values) == 1:
        facts[c.REWARD_PRIMARY] = True
    return facts


def _in_rollout(rollout_id: str | None) -> AbstractContextManager[None]:
    frame = capture.current_frame()
    if rollout_id is None or frame is None or frame.stamps.get(c.ROLLOUT_ID) == rollout_id:
        return contextlib.nullcontext()
    stamps = {c.ROLLOUT_ID: rollout_id}
    elsewhere = capture.Frame(frame.sink, stamps, transforms=frame.transforms)
    return capture.attach_context(capture.set_frame(elsewhere, Context()))


def emit_message(
    text: str, *, attributes: Mapping[str, AttributeValue] | None = None
) -> str | None:
    """Keep a line of text, as a log line of the rollout; gives the span id."""
    return _emit_span("emit_message", c.SPAN_MESSAGE, attributes, {c.MESSAGE_BODY: str(text)})


def emit_object(
    value: object, *, attributes: Mapping[str, AttributeValue] | None = None
) -> str | None:
    """Keep any value: text, numbers and bytes as they are, the rest as JSON; gives the span id."""
    return _emit_value("emit_object", c.SPAN_OBJECT, value, attributes or {})


def emit_action(name: object, value: object = None, /) -> str | None:
    """Mark an action, by an optional kind, without a known client; return the span id."""
    mark = {} if value is None else {c.MARK_NAME: str(name)}
    return _emit_value("emit_action", c.SPAN_ACTION, value if mark else name, mark)


def emit_observation(name: object, value: object = None, /) -> str | None:
    """Mark an observation, by an optional kind, without a known client; return the span id."""
    mark = {} if value is None else {c.MARK_NAME: str(name)}
    return _emit_value("emit_observation", c.SPAN_OBSERVATION, value if mark else name, mark)


def emit_state(state: State, *, message: str = "") -> str | None:
    """Mark that a piece of work started, finished or failed; gives the span id.

    Raises:
        ConfigError: The state is none of the three.
    """
    if state not in get_args(State):
        raise ConfigError(f"state is {state!r}; it must be one of {', '.join(get_args(State))}")
    body = {c.MESSAGE_BODY: message} if message else {}
    return _emit_span("emit_state", c.SPAN_STATE, {c.MARK_NAME: state}, body)


def emit_exception(exc: BaseException) -> str | None:
    """Keep an exception with its stack trace; gives the span id."""
    attributes: dict[str, AttributeValue] = {
        c.EXCEPTION_TYPE: operations.type_name(exc),
        c.EXCEPTION_MESSAGE: operations.message_of(exc),
        c.EXCEPTION_STACKTRACE: operations.stack_of(exc),
        c.EXCEPTION_ESCAPED: False,
    }
    return _emit_span("emit_exception", c.SPAN_EXCEPTION, attributes, is_error=True)


class SpanId(str):
    """The id of a span; empty, and so false, where nothing records."""

    __slots__ = ()

    @property
    def span_id(self) -> str | None:
        """The id as text; None where nothing records."""
        return str(self) or None


def emit_span(
    name: str,
    *,
    metadata: Mapping[str, object] | None = None,
    task_id: str | None = None,
) -> SpanId:
    """Record an instant of one's own; a reward that is linked to it counts for its rollout.

    It is no step of an agent: ``emit_observation`` and ``emit_action`` make one.

    Args:
        name: The span's name.
        metadata: Attributes; values OpenTelemetry does not know are kept as JSON text.
        task_id: The task it belongs to.

    Returns:
        The span id, to link rewards to; empty outside a recording.
    """
    attributes: dict[str, AttributeValue] = {
        str(key): value if isinstance(value, (str, bool, int, float)) else json_of(value)
        for key, value in (metadata or {}).items()
    }
    if task_id is not None:
        attributes[c.TASK_ID] = str(task_id)
    return SpanId(_emit_span("emit_span", name, attributes) or "")


def json_of(value: object) -> str:
    """A value as JSON text; what JSON does not know becomes its ``repr``."""

    def dump() -> str:
        try:
            return json.dumps(value, default=repr, ensure_ascii=False)
        except (TypeError, ValueError):  # keys that are no text, or a value that holds itself
            return json.dumps(repr(value), ensure_ascii=False)

    return capture.guard_call(dump) or f'"<{type(value).__name__}>"'


def _emit_value(
    verb: str, span_name: str, value: object, attributes: Mapping[str, AttributeValue]
) -> str | None:
    # The base class says it: what a subclass shows as its text may be anything.
    key = c.OBJECT_LITERAL
    if isinstance(value, str):
        kind, text = "str", str.__str__(value)
    elif isinstance(value, (bytes, bytearray)):
        kind, text = "bytes", base64.b64encode(value).decode("ascii")
    elif plain := next((kind for kind in (bool, int, float) if isinstance(value, kind)), None):
        kind, text = plain.__name__, plain.__repr__(value)
    else:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        key, text = c.OBJECT_JSON, json_of(value)
    return _emit_span(verb, span_name, {**attributes, c.OBJECT_TYPE: kind}, {key: text})


def span_id_of(operation: operations.Operation | None) -> str | None:
    """The id of an operation's span; None if there is none, or its provider records nothing."""
    if operation is None:
        return None
    context = operation.span.get_span_context()
    return format(context.span_id, "016x") if context.is_valid else None


def _emit_span(
    verb: str,
    name: str,
    attributes: Mapping[str, AttributeValue] | None,
    body: dict[str, str] | None = None,
    *,
    is_error: bool = False,
) -> str | None:
    if not capture.is_wanted():
        if config.is_enabled() and not _is_silenced:
            warn_once(
                f"{verb}() was called outside a recording, so nothing was kept; "
                "record with lightning_otel.auto_trace() or lightning-otel run"
            )
        return None
    span = capture.guard_call(operations.Operation, name, SpanKind.INTERNAL, attributes or {}, body)
    if span is not None:
        if is_error:
            span.span.set_status(Status(StatusCode.ERROR))
        capture.guard_call(span.stop)
    return span_id_of(span)


def silence_warning() -> None:
    """Say no more that nothing is recorded: there is a reason, and it was told."""
    global _is_silenced
    _is_silenced = True
