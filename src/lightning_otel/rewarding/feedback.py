"""People's feedback on an answer, as one reward between -1 and 1."""

import logging
import math
import time
from typing import Final

from opentelemetry.util.types import AttributeValue

from lightning_otel import config
from lightning_otel import conventions as c
from lightning_otel.dataset import Store
from lightning_otel.emitters import emit_reward
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.rewarding.giving import NAME, Clash, Feedback, Noun, give

log = logging.getLogger(__name__)

QUALITY_WEIGHT: Final = 0.4
RATING_WEIGHT: Final = 0.6
SATISFIED_STEP: Final = 0.2
USED_STEP: Final = 0.1
_QUALITY: Final = 100.0
_RATING: Final = 5.0


def reward_from_feedback(
    *,
    quality_score: float | None = None,
    rating: float | None = None,
    satisfied: bool | None = None,
    used_result: bool | None = None,
) -> float:
    """One reward of what somebody said, between -1 and 1.

    Its base is what was measured, brought to -1…1: the quality score, the rating, or of both 0.4
    times the one and 0.6 times the other. ``satisfied`` adds 0.2 and ``used_result`` 0.1; that they
    were not takes as much away where nothing was measured, and else changes nothing.

    Args:
        quality_score: 0 to 100.
        rating: Stars, 0 to 5.
        satisfied: Whether they were.
        used_result: Whether they used what they got.

    Raises:
        ConfigError: Nothing was said, or something that cannot be.
    """
    quality = _check_number("quality_score", quality_score, _QUALITY)
    stars = _check_number("rating", rating, _RATING)
    liked, used = _check_answer("satisfied", satisfied), _check_answer("used_result", used_result)
    if quality is None and stars is None and liked is None and used is None:
        raise ConfigError(
            "there is no feedback; give quality_score, rating, satisfied or used_result"
        )
    if quality is None and stars is None:
        steps = ((liked, SATISFIED_STEP), (used, USED_STEP))
        return math.fsum(size if said else -size for said, size in steps if said is not None)
    return feedback_reward(quality, stars, satisfied=bool(liked), used_result=bool(used))


def feedback_reward(
    quality_score: float | None,
    rating: float | None = None,
    *,
    satisfied: bool = False,
    used_result: bool = False,
) -> float:
    """Return the reward of what was measured, and raise it by what else was said, to 1 at most.

    Args:
        quality_score: 0 to 100.
        rating: Stars, 0 to 5.
        satisfied: Whether they were.
        used_result: Whether they used what they got.
    """
    quality = None if quality_score is None else quality_score / _QUALITY * 2.0 - 1.0
    stars = None if rating is None else rating / _RATING * 2.0 - 1.0
    if quality is not None and stars is not None:
        total = quality * QUALITY_WEIGHT + stars * RATING_WEIGHT
    else:
        total = quality if quality is not None else stars or 0.0
    for is_said, size in ((satisfied, SATISFIED_STEP), (used_result, USED_STEP)):
        total = min(total + size, 1.0) if is_said else total
    return max(-1.0, min(1.0, total))


def emit_feedback(
    *,
    quality_score: float | None = None,
    rating: float | None = None,
    satisfied: bool | None = None,
    used_result: bool | None = None,
    text: str | None = None,
    response_id: str | None = None,
    rollout_id: str | None = None,
    trace_id: str | None = None,
    span_id: str | None = None,
    conversation_id: str | None = None,
    feedback_id: str | None = None,
    store: Store | None = None,
) -> str | None:
    """Give the reward that feedback comes to, now or days later, from this process or another.

    It is called ``feedback``, and its span keeps what was said beside it. Without a target it
    judges the rollout that is being recorded.

    Args:
        quality_score: As :func:`reward_from_feedback` takes it, like the next three.
        rating: Stars, 0 to 5.
        satisfied: Whether they were.
        used_result: Whether they used what they got.
        text: What they wrote.
        response_id: The model response it judges, such as ``chatcmpl-…``.
        rollout_id: The rollout it judges; or a trace or span instead.
        trace_id: The trace it judges.
        span_id: The span it judges.
        conversation_id: The conversation it judges, by its latest call so far.
        feedback_id: An id of the caller's: feedback that has it is kept once, however often it is
            sent.
        store: Where the target is; by default the store that is used where none is named.

    Returns:
        The reward's span id; None if nothing is recorded, here or at all.

    Raises:
        ConfigError: Nothing was said, or something that cannot be; several targets are named; or
            an id was given to other feedback before.
        NotFoundError: The store does not hold the target.
        StoreError: The store cannot be read or written.
    """
    value = reward_from_feedback(
        quality_score=quality_score, rating=rating, satisfied=satisfied, used_result=used_result
    )
    attributes = said_attributes(
        quality_score=quality_score,
        rating=rating,
        satisfied=satisfied,
        used_result=used_result,
        text=text,
    )
    named: dict[Noun, str | None] = {
        "response": response_id,
        "rollout": rollout_id,
        "trace": trace_id,
        "span": span_id,
        "conversation": conversation_id,
    }
    targets = [(noun, given) for noun, given in named.items() if given]
    if len(targets) > 1:
        raise ConfigError(
            f"feedback judges one thing, and {' and '.join(noun for noun, _ in targets)} are "
            "named; name one of them"
        )
    if not targets:
        if feedback_id is not None:
            raise ConfigError(
                f"feedback {feedback_id!r} names nothing that it judges; give response_id, "
                "rollout_id, trace_id, span_id or conversation_id"
            )
        return emit_reward(NAME, value, attributes=attributes)
    if not config.is_enabled():
        return None
    ((noun, given),) = targets
    return _keep_reward(
        store if store is not None else Store(),
        Feedback(noun, given, value, time.time_ns(), attributes, feedback_id or ""),
    )


def said_attributes(
    *,
    quality_score: float | None = None,
    rating: float | None = None,
    satisfied: bool | None = None,
    used_result: bool | None = None,
    text: str | None = None,
) -> dict[str, AttributeValue]:
    """Return the attributes that keep feedback beside its reward.

    Args:
        quality_score: As :func:`reward_from_feedback` takes it, like the next three.
        rating: Stars, 0 to 5.
        satisfied: Whether they were.
        used_result: Whether they used what they got.
        text: What they wrote.
    """
    said = {
        c.FEEDBACK_QUALITY: quality_score,
        c.FEEDBACK_RATING: rating,
        c.FEEDBACK_SATISFIED: satisfied,
        c.FEEDBACK_USED: used_result,
        c.FEEDBACK_TEXT: text,
    }
    return {key: given for key, given in said.items() if given is not None}


def _keep_reward(store: Store, feedback: Feedback) -> str:
    """Keep the reward in the store, unless it is there already; gives its span id."""
    (found,) = give(store, [feedback])
    if found is None:
        raise NotFoundError(
            f"{store.name} holds no {feedback.noun} {feedback.target!r}; is it the store that the "
            "agent records into?"
        )
    if isinstance(found, Clash):
        raise ConfigError(f"{found.reason}; give an id of its own to what was said later")
    if not found.is_new:
        log.debug("feedback %s is kept already", feedback.feedback_id)
    return found.span_id


def _check_number(name: str, given: object, most: float) -> float | None:
    """A number from 0 to the most."""
    if given is None:
        return None
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if not is_number or not 0 <= given <= most:  # type: ignore[operator]  # it is a number then
        raise ConfigError(f"{name} is {given!r}; it must be a number from 0 to {most:g}")
    return float(given)  # type: ignore[arg-type]


def _check_answer(name: str, given: object) -> bool | None:
    if given is not None and not isinstance(given, bool):
        raise ConfigError(f"{name} is {given!r}; it must be True or False")
    return given
