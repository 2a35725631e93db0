"""What people say of an answer, as one reward between -1 and 1, given whenever they say it."""

import logging
import math
from collections.abc import Mapping
from typing import Final

from opentelemetry.util.types import AttributeValue

from lightning_otel import config
from lightning_otel import conventions as c
from lightning_otel.emitters import emit_reward, reward_span
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.rewarding.writing import add_surely, derived_id, identified
from lightning_otel.store import Store
from lightning_otel.store.find import rollout_of
from lightning_otel.store.source import INDEX_COLUMNS

log = logging.getLogger(__name__)

NAME: Final = "feedback"
"""What the reward is called."""
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
    times the one and 0.6 times the other; 0 where neither is known. ``satisfied`` adds 0.2 or takes
    it away, ``used_result`` 0.1. What was not said changes nothing.

    Args:
        quality_score: 0 to 100.
        rating: Stars, 0 to 5.
        satisfied: Whether they were.
        used_result: Whether they used what they got.

    Raises:
        ConfigError: Nothing was said, or something that cannot be.
    """
    quality = _scaled("quality_score", quality_score, _QUALITY)
    stars = _scaled("rating", rating, _RATING)
    steps = [
        _step("satisfied", satisfied, SATISFIED_STEP),
        _step("used_result", used_result, USED_STEP),
    ]
    if quality is None and stars is None and all(step is None for step in steps):
        raise ConfigError(
            "there is no feedback; give quality_score, rating, satisfied or used_result"
        )
    if quality is not None and stars is not None:
        base = QUALITY_WEIGHT * quality + RATING_WEIGHT * stars
    else:
        base = next((each for each in (quality, stars) if each is not None), 0.0)
    total = math.fsum([base, *(step for step in steps if step is not None)])
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
    said = {
        c.FEEDBACK_QUALITY: quality_score,
        c.FEEDBACK_RATING: rating,
        c.FEEDBACK_SATISFIED: satisfied,
        c.FEEDBACK_USED: used_result,
        c.FEEDBACK_TEXT: text,
        c.FEEDBACK_ID: feedback_id,
    }
    attributes = {key: given for key, given in said.items() if given is not None}
    named = {
        "response": response_id, "rollout": rollout_id, "trace": trace_id, "span": span_id
    }  # fmt: skip
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
                "rollout_id, trace_id or span_id"
            )
        return emit_reward(NAME, value, attributes=attributes)
    if not config.is_enabled():
        return None
    ((noun, given),) = targets
    return _keep(store if store is not None else Store(), noun, given, value, attributes)


def _keep(
    store: Store, noun: str, given: str, value: float, attributes: Mapping[str, AttributeValue]
) -> str:
    """Keep the reward in the store, unless it is there already; gives its span id."""
    con = store.source.connect(("spans",), INDEX_COLUMNS)
    try:
        rollout_id = rollout_of(con, noun, given)
    except NotFoundError as exc:
        raise NotFoundError(
            f"{store.name} holds no {noun} {given!r}; is it the store that the agent records into?"
        ) from exc
    made = reward_span(
        {NAME: value},
        rollout_id=rollout_id,
        span_id=given if noun == "span" else None,
        response_id=given if noun == "response" else None,
    )
    feedback_id = attributes.get(c.FEEDBACK_ID)
    span_id = made.span_id if feedback_id is None else derived_id(f"{NAME} {feedback_id}")
    if feedback_id is not None:
        held = con.execute("SELECT reward FROM spans WHERE span_id = ?", [span_id]).fetchone()
        if held is not None and held[0] != value:
            raise ConfigError(
                f"feedback {feedback_id!r} was kept as {held[0]:g} and cannot become {value:g}; "
                "give an id of its own to what was said later"
            )
        if held is not None:
            log.debug("feedback %s is kept already", feedback_id)
            return span_id
    add_surely(store, [identified(made, span_id, attributes)])
    return span_id


def _scaled(name: str, given: object, most: float) -> float | None:
    """A number from 0 to the most, brought to -1…1."""
    if given is None:
        return None
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if not is_number or not 0 <= given <= most:  # type: ignore[operator]  # it is a number then
        raise ConfigError(f"{name} is {given!r}; it must be a number from 0 to {most:g}")
    return 2 * float(given) / most - 1  # type: ignore[arg-type]


def _step(name: str, given: object, size: float) -> float | None:
    if given is None:
        return None
    if not isinstance(given, bool):
        raise ConfigError(f"{name} is {given!r}; it must be True or False")
    return size if given else -size
