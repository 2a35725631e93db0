"""Charts and stores for the tests of curves."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.adapter.forest import reward_attributes

from lightning_otel import Store
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.views.plot.curves import Axis, Chart, Point, Series

SECOND = 1_000_000_000
START_NS = 1_700_000_000 * SECOND


def series_of(values: Sequence[float], name: str = "", label: str = "") -> Series:
    """A line through values, each a point of its own."""
    points = tuple(
        Point(x, value, value, value, 1, value, 1, label=label and f"{label}{x}")
        for x, value in enumerate(values, 1)
    )
    return Series(name, points)


def chart_of(*lines: Sequence[float], axis: Axis = "rollout") -> Chart:
    """A chart of lines of values; a line without values is left out."""
    named = [(values, f"run-{n}" if len(lines) > 1 else "") for n, values in enumerate(lines, 1)]
    return Chart("reward", "reward", axis, tuple(series_of(*one) for one in named if one[0]))


def rollout(
    number: int,
    reward: float | None,
    *,
    calls: int = 1,
    tokens: tuple[int, int] | None = (10, 5),
    stamps: Mapping[str, Any] | None = None,
) -> Iterable[Span]:
    """A rollout that begins so many seconds after the start: calls of 100 ms, then a reward."""
    name, start = f"r{number:05d}", START_NS + number * SECOND
    own = {c.ROLLOUT_ID: name, **(stamps or {})}
    usage = {} if tokens is None else {c.INPUT_TOKENS: tokens[0], c.OUTPUT_TOKENS: tokens[1]}
    for index in range(calls):
        at = start + index * SECOND // 10
        attributes = {**own, **usage, c.OPERATION: c.CHAT}
        yield _span(name, index, "chat", at, at + SECOND // 10, attributes)
    if reward is not None:
        end = start + calls * SECOND // 10
        yield _span(
            name, 1000, c.SPAN_ANNOTATION, end, end, {**own, **reward_attributes(reward)}
        )  # fmt: skip


def _span(
    rollout_id: str, index: int, name: str, start: int, end: int, attributes: Mapping[str, Any]
) -> Span:
    trace_id = f"{int(rollout_id[1:]):032x}"
    return Span(trace_id, f"{index:016x}", None, name, start, end, attributes=attributes)


def fill(store: Store, rewards: Iterable[float | None], **options: Any) -> Store:
    store.add(
        span for number, reward in enumerate(rewards, 1)
        for span in rollout(number, reward, **options)
    )  # fmt: skip
    return store
