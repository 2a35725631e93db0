"""Steps, rewards, tokens, time and cost of one rollout, as its outline has them. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from math import isfinite
from typing import Any, Final, NamedTuple, TypeAlias

from lightning_otel import conventions as c
from lightning_otel.adapter.outline import Node, Outline, SpanId
from lightning_otel.errors import ConfigError
from lightning_otel.markup import one_line
from lightning_otel.messages import plain_text
from lightning_otel.types import Transition

Prices: TypeAlias = Mapping[str, tuple[float, float]]
"""Prices of a million tokens in and out, by name or glob of a model."""

_SHORT: Final = 200
_DUPLICATE: Final = "duplicate"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of it.

    Attributes:
        label: A short name, such as ``planner #3``.
        observation: The last that the agent saw before it acted, in short.
        action: Its action, in short.
        reward: Its credit; None without any.
        credit: The value and the rule of each reward in that.
        advantage: Its rollout against its group; None if not asked for, or none.
        duration_s: Seconds that the model took; None if not recorded.
        cost: At the prices given; None where no price or no count of tokens is known.
    """

    label: str
    attempt_id: str
    agent: str
    branch: int
    step: int
    observation: str
    action: str
    reward: float | None
    credit: tuple[str, ...]
    advantage: float | None
    model: str | None
    capture: str
    inexact: str
    input_tokens: int | None
    output_tokens: int | None
    duration_s: float | None
    cost: float | None
    finish_reason: str | None
    span_id: str
    trace_id: str


@dataclass(frozen=True, slots=True)
class Given:
    """A reward, and the steps it was credited to by a rule, or the reason why to none.

    Its name is empty for the usual one, its value as it was recorded.
    """

    name: str
    value: Any
    steps: tuple[str, ...]
    by: str
    left_out: str
    span_id: str


class Totals(NamedTuple):
    """Sums over the calls to models, those that are in no step as well.

    Attributes:
        calls: Their number; what two instrumentors recorded counts once.
        input_tokens: Of those that say so.
        output_tokens: Likewise.
        uncounted: Calls without a count of tokens.
        duration_s: From the first start to the last end of anything but rewards, seconds.
        model_s: Seconds of the calls, each by itself.
        cost: At the prices given; None if there are none.
        unpriced: Calls without a price or a count of tokens: they are not in ``cost``.
    """

    calls: int
    input_tokens: int
    output_tokens: int
    uncounted: int
    duration_s: float
    model_s: float
    cost: float | None
    unpriced: int


def steps_of(
    found: Outline, prices: Prices, advantages: Mapping[SpanId, float | None]
) -> list[Step]:
    """Return the steps in the order of their trajectories, one that several share once."""
    labels = found.labels()
    places = {
        (node.step.trace_id, node.step.span_id): position
        for position, node in enumerate(found.nodes)
        if node.step is not None
    }
    credit: dict[int, list[str]] = {}
    for node in found.nodes:
        for target in node.credited:
            credit.setdefault(target, []).append(
                f"{_shorten_text(_reward_value(node))} by {node.by}"
            )
    steps: dict[SpanId, Step] = {}
    for path in found.trajectories:
        for each in path.transitions:
            name = (each.trace_id, each.span_id)
            if name not in steps and name in places:
                at = places[name]
                steps[name] = _make_step(
                    found.nodes[at], each, labels[at], tuple(credit.get(at, ())), prices,
                    advantages.get(name),
                )  # fmt: skip
    return list(steps.values())


def _make_step(
    node: Node,
    each: Transition,
    label: str,
    credit: tuple[str, ...],
    prices: Prices,
    advantage: float | None,
) -> Step:
    counts = _count_tokens(node)
    return Step(
        label=label,
        attempt_id=each.attempt_id,
        agent=each.agent,
        branch=node.branch,
        step=each.step,
        observation=one_line(plain_text(each.observation[-1:]), _SHORT),
        action=one_line(plain_text(each.action[:1]), _SHORT),
        reward=each.reward,
        credit=credit,
        advantage=advantage,
        model=each.model,
        capture=each.capture,
        inexact=each.inexact,
        input_tokens=counts.input,
        output_tokens=counts.output,
        duration_s=duration_s(node) if node.kind == "call" else None,
        cost=_cost_of(node, prices),
        finish_reason=each.finish_reason,
        span_id=each.span_id,
        trace_id=each.trace_id,
    )


def rewards_of(found: Outline) -> list[Given]:
    """Return the rewards, in the order of the tree."""
    labels = found.labels()
    return [
        Given(
            name="" if (name := _name_of(node)) == c.PRIMARY_REWARD else name,
            value=_reward_value(node),
            steps=tuple(labels[target] for target in node.credited),
            by=node.by,
            left_out=node.left_out,
            span_id=node.span.span_id,
        )
        for node in found.nodes
        if node.kind == "reward"
    ]


def totals_of(found: Outline, prices: Prices) -> Totals:
    """Return the sums over the calls."""
    calls = [node for node in found.nodes if is_counted(node)]
    counts = [_count_tokens(node) for node in calls]
    costs = [_cost_of(node, prices) for node in calls]
    work = [node.span for node in found.nodes if node.kind != "reward"]
    ends = [max(span.start_ns, span.end_ns or 0) for span in work]
    started = min((span.start_ns for span in work), default=0)
    return Totals(
        calls=len(calls),
        input_tokens=sum(count.input or 0 for count in counts),
        output_tokens=sum(count.output or 0 for count in counts),
        uncounted=sum(count.input is None and count.output is None for count in counts),
        duration_s=(max(ends, default=0) - started) / 1e9,
        model_s=sum(duration_s(node) or 0.0 for node in calls),
        cost=sum(cost for cost in costs if cost is not None) if prices else None,
        unpriced=sum(cost is None for cost in costs) if prices else 0,
    )


def is_counted(node: Node) -> bool:
    """Return True for a call to a model that is not another record of one."""
    return node.kind == "call" and not node.left_out.startswith(_DUPLICATE)


def duration_s(node: Node) -> float | None:
    """Return the seconds that a span took; None if it never ended."""
    span = node.span
    return None if span.end_ns is None else (span.end_ns - span.start_ns) / 1e9


class _Tokens(NamedTuple):
    input: int | None
    output: int | None


def _count_tokens(node: Node) -> _Tokens:
    """Return the counts of the server, else of its token ids."""
    step, get = node.step, node.span.attributes.get
    given = get(c.INPUT_TOKENS), get(c.OUTPUT_TOKENS)
    ids = (len(step.prompt_ids), len(step.response_ids)) if step is not None else (0, 0)
    return _Tokens(*(
        count if isinstance(count, int) and not isinstance(count, bool) else known or None
        for count, known in zip(given, ids, strict=True)
    ))  # fmt: skip


def _cost_of(node: Node, prices: Prices) -> float | None:
    counts = _count_tokens(node)
    get = node.span.attributes.get
    models = [str(get(key)) for key in (c.RESPONSE_MODEL, c.REQUEST_MODEL) if get(key)]
    for pattern, (price_in, price_out) in prices.items():
        if any(model == pattern or fnmatchcase(model, pattern) for model in models or [""]):
            if counts.input is None and counts.output is None:
                return None
            return ((counts.input or 0) * price_in + (counts.output or 0) * price_out) / 1e6
    return None


def checked(prices: Mapping[str, Sequence[float]] | None) -> Prices:
    """Return valid prices.

    Raises:
        ConfigError: One is negative, or no pair of numbers.
    """
    found: dict[str, tuple[float, float]] = {}
    for pattern, pair in (prices or {}).items():
        try:
            price_in, price_out = map(float, pair)
        except (TypeError, ValueError) as exc:
            raise ConfigError(_WRONG.format(pair, pattern)) from exc
        if not all(isfinite(price) and price >= 0 for price in (price_in, price_out)):
            raise ConfigError(_WRONG.format(pair, pattern))
        found[pattern] = (price_in, price_out)
    return found


_WRONG: Final = (
    "the price of {1!r} is {0!r}; give two numbers from 0 on, of a million tokens in and out"
)


def calls_of_tools(step: Transition) -> Iterator[str]:
    """Yield each tool call of a step as text that can be compared."""
    for message in step.action[:1]:
        parts = message.get("parts")
        for part in parts if isinstance(parts, (list, tuple)) else ():
            if isinstance(part, Mapping) and part.get("type") == "tool_call":
                given = part.get("arguments")
                try:
                    text = json.dumps(given, sort_keys=True, ensure_ascii=False, default=str)
                except (RecursionError, ValueError):
                    continue
                yield f"{part.get('name')}({text})"


def as_json(values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return dataclasses for programs."""
    return [asdict(value) for value in values]


def _reward_value(node: Node) -> Any:
    return node.span.attributes.get(c.REWARD_VALUE)


def _name_of(node: Node) -> str:
    return str(node.span.attributes.get(c.REWARD_NAME) or c.PRIMARY_REWARD)


def _shorten_text(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else one_line(value, 40)
