"""People's feedback on an answer, as one reward between -1 and 1, stored once."""

import hashlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from opentelemetry.util.types import AttributeValue

from lightning_otel import capture, config
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, NotFoundError, StoreError, disk_remedy
from lightning_otel.rewards import labels
from lightning_otel.store.schema import NARROW_COLUMNS
from lightning_otel.store.selection import INDEX_COLUMNS
from lightning_otel.store.sql import CALL_OPERATIONS, ROLLOUT, attribute_sql, quote_text
from lightning_otel.tracing.emitters import emit_reward, reward_span
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

log = logging.getLogger(__name__)

Noun: TypeAlias = Literal["response", "rollout", "trace", "span", "conversation"]
"""A target of feedback."""
NAME: Final = "feedback"
"""The name of the reward."""
_STEPS: Final = {"satisfied": 0.2, "used_result": 0.1}
_KEYS: Final = {
    "quality_score": c.FEEDBACK_QUALITY,
    "rating": c.FEEDBACK_RATING,
    "satisfied": c.FEEDBACK_SATISFIED,
    "used_result": c.FEEDBACK_USED,
}
_IS_CALL: Final = f"(operation IN ({CALL_OPERATIONS}) OR name = {quote_text(c.SPAN_ACTION)})"
_COLUMNS: Final[Mapping[Noun, str]] = {
    "response": "response_id",
    "rollout": ROLLOUT,
    "trace": "trace_id",
    "span": "span_id",
    "conversation": attribute_sql(c.CONVERSATION_ID),
}
# What a conversation came to when it was judged: its latest call then, else the first after that.
_FOUND: Final = f"""
SELECT n,
  coalesce(arg_max(home, start_ns) FILTER (is_before), arg_min(home, start_ns)),
  coalesce(arg_max(span_id, start_ns) FILTER (is_before), arg_min(span_id, start_ns)),
  max(end_ns)
FROM (
  SELECT asked.n, {ROLLOUT} AS home, span_id, start_ns, coalesce(end_ns, start_ns) AS end_ns,
    {{is_conversation}} AND start_ns <= asked.given_ns AS is_before
  FROM spans JOIN (
    SELECT unnest(?::INTEGER[]) AS n, unnest(?::VARCHAR[]) AS id, unnest(?::BIGINT[]) AS given_ns
  ) AS asked ON {{column}} = asked.id
  WHERE {{condition}}
) GROUP BY n"""
_HELD: Final = f"""
SELECT span_id, reward, {ROLLOUT} FROM spans
WHERE span_id IN (SELECT unnest(?::VARCHAR[])) AND reward IS NOT NULL"""

Keep: TypeAlias = Callable[[Sequence[Span]], None]


@dataclass(frozen=True, slots=True)
class Feedback:
    """Feedback of one person, as a reward."""

    noun: Noun
    target: str  # its whole id
    value: float  # the reward, -1 to 1
    given_ns: int  # Unix nanoseconds
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    feedback_id: str = ""  # under which it is stored once


class StoredReward(NamedTuple):
    """A stored reward: its span and rollout, and True if it is new."""

    span_id: str
    rollout_id: str
    is_new: bool


class Conflict(NamedTuple):
    """The refusal of feedback whose id other feedback has."""

    reason: str


class _Target(NamedTuple):
    rollout_id: str
    span_id: str
    end_ns: int


def reward_from_feedback(
    *,
    quality_score: float | None = None,
    rating: float | None = None,
    satisfied: bool | None = None,
    used_result: bool | None = None,
) -> float:
    """Return the reward of feedback, between -1 and 1.

    The base is the quality score or the rating, scaled to -1…1; of both, 0.4 times the score plus
    0.6 times the rating. ``satisfied`` adds 0.2 and ``used_result`` 0.1. Where neither number was
    given, ``False`` subtracts as much; else it changes nothing.

    Args:
        quality_score: 0 to 100.
        rating: Stars, 0 to 5.
        satisfied: True if they were.
        used_result: True if they used what they got.

    Raises:
        ConfigError: Nothing was said, or something that cannot be.
    """
    answers = {"satisfied": satisfied, "used_result": used_result}
    for name, value, most in (("quality_score", quality_score, 100.0), ("rating", rating, 5.0)):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value <= most):
            raise ConfigError(f"{name} is {value!r}; it must be a number from 0 to {most:g}")
    for name, answer in answers.items():
        if answer is not None and not isinstance(answer, bool):
            raise ConfigError(f"{name} is {answer!r}; it must be True or False")
    if quality_score is not None or rating is not None:
        return feedback_reward(
            quality_score, rating, satisfied=bool(satisfied), used_result=bool(used_result)
        )
    answered = [(name, answer) for name, answer in answers.items() if answer is not None]
    if not answered:
        raise ConfigError(
            "there is no feedback; give quality_score, rating, satisfied or used_result"
        )
    return math.fsum(_STEPS[name] if answer else -_STEPS[name] for name, answer in answered)


def feedback_reward(
    quality_score: float | None,
    rating: float | None = None,
    *,
    satisfied: bool = False,
    used_result: bool = False,
) -> float:
    """Return the reward of what was measured, raised by what else was said, to 1 at most."""
    quality = None if quality_score is None else quality_score / 100.0 * 2.0 - 1.0
    stars = None if rating is None else rating / 5.0 * 2.0 - 1.0
    if quality is not None and stars is not None:
        total = quality * 0.4 + stars * 0.6
    else:
        total = quality if quality is not None else stars or 0.0
    for name, is_said in (("satisfied", satisfied), ("used_result", used_result)):
        total = min(total + _STEPS[name], 1.0) if is_said else total
    return max(-1.0, min(1.0, total))


def emit_feedback(
    *,
    quality_score: float | None = None,
    rating: float | None = None,
    satisfied: bool | None = None,
    used_result: bool | None = None,
    text: str | None = None,
    name: str | None = None,
    author: str | None = None,
    response_id: str | None = None,
    rollout_id: str | None = None,
    trace_id: str | None = None,
    span_id: str | None = None,
    conversation_id: str | None = None,
    feedback_id: str | None = None,
    store: Store | None = None,
) -> str | None:
    """Store feedback as a reward, now or days later, from this process or another.

    Its span keeps the answers. Without a target it judges the rollout that is being recorded.

    Args:
        quality_score: With the three after it as :func:`reward_from_feedback` takes them.
        rating: Stars, 0 to 5.
        satisfied: True if they were.
        used_result: True if they used what they got.
        text: Their words.
        name: The reward's name; by default ``feedback``.
        author: Their name: a label, which takes the place of their earlier one of that name.
        response_id: The model response it judges, such as ``chatcmpl-…``.
        rollout_id: The rollout it judges; or a trace or span instead.
        trace_id: The trace it judges.
        span_id: The span it judges.
        conversation_id: The conversation it judges, by its latest call so far.
        feedback_id: An id of the caller's, under which feedback is stored once.
        store: The store of the target; by default the default store.

    Returns:
        The reward's span id; None if nothing is recorded, here or at all.

    Raises:
        ConfigError: Nothing was said, or something that cannot be; several targets are named; or
            an id was given to other feedback before.
        NotFoundError: The store does not hold the target.
        StoreError: The store cannot be read or written.
    """
    answers: dict[str, Any] = {
        "quality_score": quality_score,
        "rating": rating,
        "satisfied": satisfied,
        "used_result": used_result,
    }
    ids = (response_id, rollout_id, trace_id, span_id, conversation_id)
    targets = [(noun, name) for noun, name in zip(get_args(Noun), ids, strict=True) if name]
    if len(targets) > 1:
        raise ConfigError(
            f"feedback judges one thing, and {' and '.join(noun for noun, _ in targets)} are "
            "named; name one of them"
        )
    judged: tuple[Noun, str] = targets[0] if targets else ("rollout", "")
    feedback = make_feedback(
        *judged, text=text, feedback_id=feedback_id or "", name=name, author=author, **answers
    )
    if not targets:
        if feedback_id is not None:
            raise ConfigError(
                f"feedback {feedback_id!r} names nothing that it judges; give response_id, "
                "rollout_id, trace_id, span_id or conversation_id"
            )
        own_name = str(feedback.attributes.get(c.REWARD_NAME, NAME))
        return emit_reward(own_name, feedback.value, attributes=feedback.attributes)
    if not config.is_enabled():
        return None
    opened = store if store is not None else Store()
    (reward,) = give(opened, [feedback])
    if reward is None:
        raise NotFoundError(
            f"{opened.name} holds no {feedback.noun} {feedback.target!r}; is it the store that the "
            "agent records into?"
        )
    if isinstance(reward, Conflict):
        raise ConfigError(f"{reward.reason}; give an id of its own to what was said later")
    if not reward.is_new:
        log.debug("feedback %s is kept already", feedback_id)
    return reward.span_id


def make_feedback(
    noun: Noun,
    target: str,
    *,
    feedback_id: str = "",
    text: str | None = None,
    reward: float | None = None,
    name: str | None = None,
    author: str | None = None,
    **answers: Any,
) -> Feedback:
    """Return feedback as every door takes it: ``answers`` are those of ``reward_from_feedback``."""
    answered = {name: answer for name, answer in answers.items() if answer is not None}
    number = reward_from_feedback(**answered) if answered or reward is None else 0.0
    value = float(number if reward is None else reward)
    attributes = {_KEYS[name]: answer for name, answer in answered.items()}
    if text is not None:
        attributes[c.FEEDBACK_TEXT] = text
    attributes |= labels.describe_author(name, author)
    return Feedback(noun, target, value, time.time_ns(), attributes, feedback_id)


def give(
    store: Store,
    feedback: Sequence[Feedback],
    keep: Keep | None = None,
    known: Mapping[str, str] = MappingProxyType({}),
) -> list[StoredReward | Conflict | None]:
    """Store feedback as rewards of its targets; return None for those that the store lacks.

    Feedback on spans of ``known`` rollouts alone, whose ids are all new, is given without a look at
    the store. ``keep`` keeps spans in its place.
    """
    if not feedback:
        return []
    ids = [
        derive_span_id(f"{NAME} {piece.feedback_id}") if piece.feedback_id else secrets.token_hex(8)
        for piece in feedback
    ]
    if all(item.noun == "span" and item.target in known for item in feedback):
        homes = {n: _Target(known[item.target], item.target, 0) for n, item in enumerate(feedback)}
        rewards: dict[str, tuple[float, str]] = {}
    else:
        homes, rewards = _look_up(store, feedback, ids)
    results: list[StoredReward | Conflict | None] = []
    spans: list[Span] = []
    for n, (piece, span_id) in enumerate(zip(feedback, ids, strict=True)):
        home = homes.get(n)
        if home is None:
            results.append(None)
        elif span_id in rewards:
            results.append(_answer_repeat(piece, span_id, home, *rewards[span_id]))
        else:
            spans.append(_make_span(piece, span_id, home))
            results.append(StoredReward(span_id, home.rollout_id, is_new=True))
    if spans:
        spans += labels.retract_earlier(store, spans)
        (keep or partial(write_spans, store))(spans)
    return results


def _look_up(
    store: Store, feedback: Sequence[Feedback], span_ids: Sequence[str]
) -> tuple[dict[int, _Target], dict[str, tuple[float, str]]]:
    """Return targets by position, and rewards that are there already."""
    nouns = {piece.noun for piece in feedback}
    columns = (*NARROW_COLUMNS, "attributes") if "conversation" in nouns else INDEX_COLUMNS
    con = store.source.connect(("spans",), columns)
    homes: dict[int, _Target] = {}
    for noun in nouns:
        is_conversation = noun == "conversation"
        query = _FOUND.format(
            is_conversation=str(is_conversation).lower(),
            column=_COLUMNS[noun],
            condition=_IS_CALL if is_conversation else "true",
        )
        pieces = [(n, piece) for n, piece in enumerate(feedback) if piece.noun == noun]
        values = [
            [n for n, _ in pieces],
            [piece.target for _, piece in pieces],
            [piece.given_ns for _, piece in pieces],
        ]
        for n, rollout_id, span_id, end_ns in con.execute(query, values).fetchall():
            homes[n] = _Target(str(rollout_id), str(span_id), int(end_ns))
    rows = con.execute(_HELD, [list(span_ids)]).fetchall()
    return homes, {span_id: (float(value), str(rollout)) for span_id, value, rollout in rows}


def _answer_repeat(
    feedback: Feedback, span_id: str, home: _Target, value: float, rollout_id: str
) -> StoredReward | Conflict:
    notice = f"feedback {feedback.feedback_id!r} was kept"
    if value != feedback.value:
        return Conflict(f"{notice} as {value:g} and cannot become {feedback.value:g}")
    if rollout_id != home.rollout_id:
        return Conflict(f"{notice} of rollout {rollout_id!r} and cannot go to {home.rollout_id!r}")
    return StoredReward(span_id, rollout_id, is_new=False)


def _make_span(feedback: Feedback, span_id: str, home: _Target) -> Span:
    linked = {"span": feedback.target, "conversation": home.span_id}.get(feedback.noun)
    span = reward_span(
        {NAME: feedback.value},
        rollout_id=home.rollout_id,
        span_id=linked,
        response_id=feedback.target if feedback.noun == "response" else None,
    )
    attributes = dict(feedback.attributes)
    if feedback.feedback_id:
        attributes[c.FEEDBACK_ID] = feedback.feedback_id
    if feedback.noun == "conversation":
        attributes[c.FEEDBACK_CONVERSATION] = feedback.target
    # It judges all that there is of it, be that from a machine whose clock is ahead of ours.
    given_ns = max(feedback.given_ns, home.end_ns)
    return replace_span_id(replace(span, start_ns=given_ns, end_ns=given_ns), span_id, attributes)


def write_spans(store: Store, spans: Iterable[Span]) -> None:
    """Write spans; raise StoreError if the store cannot be written."""
    spans = map(capture.storable_span, spans)
    if store.layout is None:
        store.add(spans)
        return
    try:
        store.writer().add_all(spans)
    except OSError as exc:
        raise StoreError(
            f"{store.name} refuses it: {exc.strerror or exc}; "
            + disk_remedy(exc, "see: lightning-otel doctor")
        ) from exc


def derive_span_id(text: str) -> str:
    """Return a span id made of a text: the same of the same."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def replace_span_id(span: Span, span_id: str, attributes: Mapping[str, Any]) -> Span:
    """Return the span with an id of one's own, and further attributes."""
    return replace(
        span,
        trace_id=span_id + derive_span_id(span_id),
        span_id=span_id,
        attributes={**span.attributes, **attributes},
    )
