"""Spans read into rewards, and what they are linked to; what cannot be read gets a reason.

An evaluation noted as an event becomes a reward's span of its own where spans are kept.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from lightning_otel.adapter.attributes import get_text, link_pairs, to_number
from lightning_otel.types import Reward, Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import parse_json

ALREADY_REWARDED: Final = "its call already has a reward of that name, and the first one counts"
NO_CALL_BEFORE: Final = "no call of the same agent came before it"
NO_STEP_BEFORE: Final = "every call of the same agent that came before it failed or broke off"
OUTCOME: Final = "outcome: the last step of the main conversation"
"""By what a reward was placed that judges the rollout, where another call came later."""
NOT_A_NUMBER = "the reward's value is not a number"
NOT_FINITE = "the reward's value is not finite"
NO_PRIMARY = "the reward names values, but its first and primary one is missing"
RETRACTED: Final = "it was retracted"
NO_SEQUENCE = "the reward's steps are not a list of numbers and nulls under one name"

SEVERAL: Final = "the first of several rewards counts ({}); name one with --reward"

_DECIMALS: Final = 9
_FIRST_LINK = f"{c.LINK_PREFIX}.0.key_match"
_SHARED: Final = (c.ROLLOUT_ID, c.ATTEMPT_ID, c.RECEIVED)
"""What a reward has of the span whose event it was."""


class Retracted(dict[str, Any]):
    """Attributes of a reward that was retracted."""


def read_reward(span: Span) -> Reward | str | None:
    """The reward a span carries; None if it is no reward, a reason if it is a damaged one."""
    attributes = span.attributes
    if isinstance(attributes, Retracted):
        return RETRACTED
    if c.REWARD_VALUE not in attributes:
        is_damaged = span.name == c.SPAN_ANNOTATION and any(
            key.startswith(f"{c.REWARD_PREFIX}.") or key == c.REWARD_STEPS for key in attributes
        )
        return NO_PRIMARY if is_damaged else None
    values: dict[str, float] = {}
    key, index = c.REWARD_VALUE, 0
    while key in attributes:
        value = to_number(attributes[key])
        if value is None:
            is_number = type(attributes[key]) in (int, float)
            return NOT_FINITE if is_number else NOT_A_NUMBER
        name = get_text(attributes, f"{c.REWARD_PREFIX}.{index}.name") or (
            c.PRIMARY_REWARD if index == 0 else f"reward_{index}"
        )
        values.setdefault(name, value)
        index += 1
        key = f"{c.REWARD_PREFIX}.{index}.value"
    steps = _read_sequence(attributes[c.REWARD_STEPS]) if c.REWARD_STEPS in attributes else ()
    if steps is None or (steps and len(values) > 1):
        return NO_SEQUENCE
    return Reward(
        span=span,
        values=values,
        value=next(iter(values.values())),
        links=link_pairs(attributes) if _FIRST_LINK in attributes else (),
        steps=steps,
    )


def reward_words(span: Span) -> str:
    """Return every number of a reward with its name; of a flawed one what stands for the first."""
    reward = read_reward(span)
    if not isinstance(reward, Reward):
        value = span.attributes.get(c.REWARD_VALUE, "")
        return f"{value:g}" if isinstance(value, float) else str(value)
    numbers = {"" if name == c.PRIMARY_REWARD else name: n for name, n in reward.values.items()}
    return ", ".join(f"{name} {value:g}".lstrip() for name, value in numbers.items())


def add_decimals(numbers: Collection[float]) -> float:
    """Return the sum of numbers, of few decimals as people add them: 0.1 + 0.2 is 0.3."""
    if len(numbers) == 1:
        return next(iter(numbers)) + 0.0
    try:
        total = math.fsum(numbers)
    except OverflowError:
        return sum(numbers)
    is_short = all(round(number, _DECIMALS) == number for number in numbers)
    return round(total, _DECIMALS) if is_short else total


def add_named(rewards: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of the numbers of each name, likewise."""
    numbers: dict[str, list[float]] = {}
    for reward in rewards:
        for name, number in reward.items():
            numbers.setdefault(name, []).append(number)
    return {name: add_decimals(values) for name, values in numbers.items()}


def discount_rewards(
    rewards: Sequence[float | None], before: Sequence[int], gamma: float
) -> list[float | None]:
    """Return the discounted return of each step of one agent; None where no reward follows.

    Where several steps follow one, their mean return counts: they are samples of what comes next.

    Args:
        rewards: Reward of each step; None where there is none.
        before: The step that each step follows, which stands earlier; -1 for none.
        gamma: Discount per step, 0 to 1.

    Source: Sutton and Barto, Reinforcement Learning, 2nd edition, equation 3.8.
    """
    returns = list(rewards)
    following: list[list[float]] = [[] for _ in rewards]
    for step in range(len(rewards) - 1, -1, -1):
        if after := following[step]:
            future = gamma * sum(after) / len(after)
            returns[step] = future + (rewards[step] or 0.0)
        value = returns[step]
        if value is not None and before[step] >= 0:
            following[before[step]].append(value)
    return returns


def with_evaluations(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield spans, and after each the rewards that its events tell."""
    for span in spans:
        yield span
        if span.events:
            yield from evaluations_of(span)


def evaluations_of(span: Span) -> Iterator[Span]:
    """Yield a reward for each ``gen_ai.evaluation.result`` of a span that has a number.

    Its ids follow from the event's place, so that a span which comes again brings no second one.
    Source: the GenAI semantic conventions, event ``gen_ai.evaluation.result``.
    """
    if c.REWARD_VALUE in span.attributes:
        return
    shared = {key: span.attributes[key] for key in _SHARED if key in span.attributes}
    for place, event in enumerate(span.events):
        value = to_number(event.attributes.get(c.EVALUATION_SCORE))
        if event.name != c.EVENT_EVALUATION or value is None:
            continue
        text = f"{span.trace_id} {span.span_id} {place}".encode()
        time_ns = event.time_ns or span.end_ns or span.start_ns
        attributes = {
            **event.attributes,
            **shared,
            f"{c.REWARD_PREFIX}.0.name": get_text(event.attributes, c.EVALUATION_NAME)
            or c.PRIMARY_REWARD,
            c.REWARD_VALUE: value,
            _FIRST_LINK: c.LINK_SPAN_ID,
            c.LINK_VALUE: span.span_id,
        }
        yield Span(
            span.trace_id, hashlib.sha256(text).hexdigest()[:16], span.span_id, c.SPAN_ANNOTATION,
            time_ns, time_ns, attributes=attributes, otel_resource=span.otel_resource,
            scope=span.scope,
        )  # fmt: skip


def _read_sequence(value: object) -> tuple[float | None, ...] | None:
    """Return the numbers of a sequence; None if they cannot be read, or it has none."""
    values = parse_json(value)
    if not isinstance(values, (list, tuple)):
        return None
    numbers = tuple(None if item is None else to_number(item) for item in values)
    is_sound = numbers.count(None) == values.count(None) < len(values)
    return numbers if is_sound else None
