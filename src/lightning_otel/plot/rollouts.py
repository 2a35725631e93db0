"""Curves of what rollouts came to: reward, success, length, tokens, duration."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_otel import conventions as c
from lightning_otel.adapter.selection import Selection
from lightning_otel.plot.curves import (
    MOST_POINTS,
    Axis,
    Chart,
    Point,
    Series,
    Value,
    make_series,
    mean_of,
    standard_error,
)
from lightning_otel.store.earnings import LAST_REWARD
from lightning_otel.store.source import overview
from lightning_otel.store.sql import ROLLOUT, quoted
from lightning_otel.types.wording import count_noun

if TYPE_CHECKING:
    from lightning_otel.dataset import Store

MOST_VERSIONS: Final = 400
MOST_LINES: Final = 6
"""Lines of versions in one chart: as many as there are colours."""
OTHERS: Final = "others"
"""Name of the line of all versions without one of their own."""


class _Metric(NamedTuple):
    """A measure of a rollout: its title, SQL over its last attempt, a note on those without."""

    title: str
    value: str
    lacks: str


_UNCOUNTED: Final = "not over yet, or without counted tokens"
METRICS: Final[Mapping[str, _Metric]] = {
    "reward": _Metric("reward", "reward", "without a reward"),
    "success_rate": _Metric("success rate", "reward", "without a reward"),
    "length": _Metric("length, calls to a model", "calls", "not over yet"),
    "tokens": _Metric("tokens, in and out", "input_tokens + output_tokens", _UNCOUNTED),
    "input_tokens": _Metric("tokens in", "input_tokens", _UNCOUNTED),
    "output_tokens": _Metric("tokens out", "output_tokens", _UNCOUNTED),
    "duration": _Metric("duration, seconds", "(end_ns - start_ns) / 1e9", "not over yet"),
}
_VERSION_KEYS: Final = (c.RESOURCE_VERSION, c.RESOURCES)


def read_charts(
    store: "Store",
    metrics: Sequence[str],
    axis: Axis,
    *,
    selection: Selection,
    success: float,
    window: int | None = None,
) -> list[Chart]:
    """Read a chart a metric; without a series where there is no value.

    Args:
        store: Where the rollouts are.
        metrics: Names of ``METRICS``.
        axis: ``rollout``, ``time`` or ``version``.
        selection: Rollouts; of its fields those of time and mode count.
        success: The reward from which on a rollout has succeeded.
        window: Values in a moving mean; by default a tenth of them, and at least five.

    Raises:
        StoreMissingError: There is no store.
    """
    text, parameters = _make_query(metrics, selection)
    (row,) = overview(store.source, text, parameters)
    columns = {name: values or [] for name, values in row.items()}
    charts = []
    for name in metrics:
        rows = [
            _Row(start_ns, version or "", _read_number(value))
            for start_ns, version, value in zip(
                columns["start_ns"], columns["version"], columns[name], strict=True
            )
        ]
        title = METRICS[name].title
        if name == "success_rate":
            title = f"success rate, reward from {success:g} on"
            rows = [
                row if row.value is None else row._replace(value=float(row.value >= success))
                for row in rows
            ]
        is_by_version = axis == "version"
        lacking = sum(row.value is None and bool(row.version or not is_by_version) for row in rows)
        notes = [f"{count_noun(lacking, 'rollout')} {METRICS[name].lacks}"] if lacking else []
        draw = _compare_versions if is_by_version else _draw_lines
        series, more = draw(rows, axis, window)
        charts.append(Chart(name, title, axis, tuple(series), (*notes, *more)))
    return charts


class _Row(NamedTuple):
    start_ns: int
    version: str
    value: float | None


def _read_number(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _make_query(metrics: Sequence[str], selection: Selection) -> tuple[str, list[object]]:
    """Return SQL whose one row has a list a column, of all rollouts in the order they began."""
    bounds = [
        ("start_ns >= ?", selection.since_ns),
        ("start_ns < ?", selection.until_ns),
        ("mode = ?", selection.mode),
    ]
    given = [(condition, value) for condition, value in bounds if value is not None]
    keys = (*_VERSION_KEYS, c.MODE) if selection.mode is not None else _VERSION_KEYS
    paths = ", ".join(quoted(f'$."{key}"') for key in keys)
    # To look for the text of a key costs a third of parsing the JSON, which few spans need.
    has = " OR ".join(f"contains(attributes::VARCHAR, {quoted(key)})" for key in keys)
    values = {
        name: METRICS[name].value
        if METRICS[name].value == "reward"
        else f"CASE WHEN status <> 'running' THEN {METRICS[name].value} END"
        for name in metrics
    }
    columns = {"start_ns": "start_ns", "version": "version", **values}
    lists = ", ".join(
        f"list({value} ORDER BY start_ns, rollout_id) AS {name}" for name, value in columns.items()
    )
    text = f"""
WITH own AS MATERIALIZED (
  SELECT rollout_id, max(start_ns) AS start_ns, arg_max(end_ns, start_ns) AS end_ns,
    arg_max(status, start_ns) AS status, {LAST_REWARD} AS reward,
    arg_max(calls, start_ns) AS calls,
    arg_max_null(input_tokens, start_ns) AS input_tokens,
    arg_max_null(output_tokens, start_ns) AS output_tokens
  FROM rollouts GROUP BY rollout_id
),
stamps AS MATERIALIZED (
  SELECT rollout_id, arg_min(coalesce(stamp[1], stamp[2]), start_ns) AS version,
    arg_min(stamp[3], start_ns) AS mode
  FROM (SELECT {ROLLOUT} AS rollout_id, start_ns,
    json_extract_string(attributes, [{paths}]) AS stamp FROM spans WHERE {has})
  GROUP BY 1
)
SELECT {lists} FROM own LEFT JOIN stamps USING (rollout_id)
WHERE {" AND ".join(condition for condition, _ in given) or "true"}"""
    return text, [value for _, value in given]


def _draw_lines(
    rows: Sequence[_Row], axis: Axis, window: int | None
) -> tuple[list[Series], list[str]]:
    """Draw rollouts in their order: one line, or one a version where versions act side by side.

    Where each version came after the one before, as in training, their succession is the curve.
    """
    held = [row for row in rows if row.value is not None]
    counts = Counter(row.version for row in held)  # in the order they first acted
    named = [version for version in counts if version]
    own = _versions_with_lines(held, named)
    total, lines = len(held), min(len(counts), MOST_LINES) if own else 1
    slots = MOST_POINTS // lines
    from_ns, to_ns = (held[0].start_ns, held[-1].start_ns) if held else (0, 0)
    values: dict[str, list[Value]] = {version: [] for version in own}
    for place, row in enumerate(held):
        if axis == "time":
            x = row.start_ns
            slot = min(slots - 1, (x - from_ns) * slots // max(1, to_ns - from_ns))
        else:
            x, slot = place + 1, place * min(slots, total) // total
        line = row.version if row.version in own else ""
        values.setdefault(line, []).append((slot, x, row.value or 0.0))
    values[""] = values.pop("", [])  # the rest comes last
    size = window or max(5, *(len(line) // 10 for line in values.values()))
    series = [
        make_series(version_label(line) or (OTHERS if own else ""), held_of, size)
        for line, held_of in values.items()
        if held_of
    ]
    if not own:
        is_told = len(named) > 1
        told = f"{len(named):,} versions, one after the other; by version they are compared"
        return series, [told] if is_told else []
    merged = len(named) - len(own)
    others = [count_noun(merged, "earlier version")] if merged else []
    others += _word_unstamped(counts[""])
    return series, [f"{OTHERS}: {' and '.join(others)}"] if others else []


def _versions_with_lines(held: Sequence[_Row], named: Sequence[str]) -> Sequence[str]:
    """Return the newest versions if some acted side by side, else none."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for place, row in enumerate(held):
        first.setdefault(row.version, place)
        last[row.version] = place
    ends = accumulate((last[version] for version in named), max)
    if not any(first[later] < end for later, end in zip(named[1:], ends, strict=False)):
        return ()
    return named if len(first) <= MOST_LINES else named[1 - MOST_LINES :]


def _compare_versions(
    rows: Sequence[_Row], _: Axis, __: int | None
) -> tuple[list[Series], list[str]]:
    """Draw a point a version, in the order they first acted, with its standard error."""
    values: dict[str, list[float]] = {}
    for row in rows:
        held = values.setdefault(row.version, [])
        if row.value is not None:
            held.append(row.value)
    notes = list(_word_unstamped(sum(not row.version for row in rows)))
    named = [(version, held) for version, held in values.items() if version and held]
    drawn = list(enumerate(named, 1))[-MOST_VERSIONS:]
    if len(named) > len(drawn):
        notes.append(f"{len(named) - len(drawn):,} earlier versions are not drawn")
    points = tuple(
        Point(x, mean_of(held), min(held), max(held), len(held), mean_of(held), len(held),
              error=standard_error(held), label=version_label(version))
        for x, (version, held) in drawn
    )  # fmt: skip
    return [Series("", points)] if points else [], notes


def _word_unstamped(count: int) -> Iterable[str]:
    return [f"{count_noun(count, 'rollout')} without a resource version"] if count else []


def version_label(text: str) -> str:
    """Return a version as it was stamped, or each resource of a JSON stamp as ``name@version``."""
    if not text.startswith("{"):
        return text
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(found, dict) or not all(isinstance(held, dict) for held in found.values()):
        return text
    return ", ".join(
        f"{'' if agents == '*' else f'{agents}/'}{name}@{version}"
        for agents, held in sorted(found.items())
        for name, version in sorted(held.items())
    )
