"""Curves of what rollouts came to: reward, success, length, tokens, duration; by SQL on the views.

However many rollouts there are, what leaves the database is as many points as can be drawn.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_otel import conventions as c
from lightning_otel.adapter.composition import SUCCESS
from lightning_otel.adapter.selection import Selection
from lightning_otel.plot.curves import Axis, Chart, Point, Series
from lightning_otel.store.earnings import LAST_REWARD
from lightning_otel.store.overview import overview
from lightning_otel.store.sql import ROLLOUT, quoted

if TYPE_CHECKING:
    from lightning_otel.store import Store

MOST_VERSIONS: Final = 400
MOST_LINES: Final = 6
"""Lines of versions in one chart: as many as there are colours."""
OTHERS: Final = "others"
"""Names the line of what has none of its own."""
_SCALE: Final = float(1 << 40)
"""Means are taken of that part of each value, as sums of huge ones would be infinite; it is a power
of two, and changes no digit."""


class _Metric(NamedTuple):
    """What is measured of a rollout.

    Attributes:
        title: In words.
        value: SQL over ``own``; NULL where the rollout has none.
        lacks: What is said of rollouts without one.
    """

    title: str
    value: str
    lacks: str


_IS_OVER: Final = "status <> 'running'"
METRICS: Final[Mapping[str, _Metric]] = {
    "reward": _Metric("reward", "reward", "without a reward"),
    "success_rate": _Metric(
        "success rate", "CASE WHEN reward IS NOT NULL THEN (reward >= $success)::INT END",
        "without a reward",
    ),
    "length": _Metric(
        "length, calls to a model", f"CASE WHEN {_IS_OVER} THEN calls END", "not over yet"
    ),
    "tokens": _Metric(
        "tokens, in and out", f"CASE WHEN {_IS_OVER} THEN input_tokens + output_tokens END",
        "not over yet, or without counted tokens",
    ),
    "input_tokens": _Metric(
        "tokens in", f"CASE WHEN {_IS_OVER} THEN input_tokens END",
        "not over yet, or without counted tokens",
    ),
    "output_tokens": _Metric(
        "tokens out", f"CASE WHEN {_IS_OVER} THEN output_tokens END",
        "not over yet, or without counted tokens",
    ),
    "duration": _Metric(
        "duration, seconds", f"CASE WHEN {_IS_OVER} THEN (end_ns - start_ns) / 1e9 END",
        "not over yet",
    ),
}  # fmt: skip
"""What can be measured of every rollout, by the name it is asked for."""

_OWN: Final = f"""
own AS MATERIALIZED (
  SELECT rollout_id, max(start_ns) AS start_ns, arg_max(end_ns, start_ns) AS end_ns,
    arg_max(status, start_ns) AS status, {LAST_REWARD} AS reward,
    arg_max(calls, start_ns) AS calls,
    arg_max_null(input_tokens, start_ns) AS input_tokens,
    arg_max_null(output_tokens, start_ns) AS output_tokens
  FROM rollouts GROUP BY rollout_id
)"""
_VERSION_KEYS: Final = (c.RESOURCE_VERSION, c.RESOURCES)


class Asked(NamedTuple):
    """Which rollouts, and how their values become points.

    Attributes:
        wanted: Of its fields those of time and mode count.
        success: The reward from which on a rollout has succeeded.
        window: Values in a moving mean; None for a tenth of them, and at least five.
        bins: Points at most.
    """

    wanted: Selection = Selection()
    success: float = SUCCESS
    window: int | None = None
    bins: int = 400


def charts(store: "Store", metrics: Sequence[str], axis: Axis, asked: Asked) -> list[Chart]:
    """A chart a metric, in the order asked for; without a series where there is no value.

    Args:
        store: Where the rollouts are.
        metrics: Names of ``METRICS``.
        axis: ``rollout``, ``time`` or ``version``.
        asked: Which rollouts.

    Raises:
        StoreMissingError: There is no store.
    """
    is_version = axis == "version"
    query = _by_version(metrics, asked) if is_version else _in_order(metrics, axis, asked)
    found: dict[str, list[Mapping[str, Any]]] = {name: [] for name in metrics}
    given = _parameters(query, asked)
    for row in overview(store.source, given.text, given.values):
        found[row["metric"]].append(row)
    return [_chart(name, axis, found[name], asked) for name in metrics]


class _Query(NamedTuple):
    text: str
    values: list[object]


def _parameters(text: str, asked: Asked) -> _Query:
    """The query with its parameters in the order they stand in it, as the store takes them."""
    given: dict[str, object] = {
        "$success": asked.success,
        "$window": asked.window,
        "$bins": asked.bins,
        "$since": asked.wanted.since_ns,
        "$until": asked.wanted.until_ns,
        "$mode": asked.wanted.mode,
        "$versions": MOST_VERSIONS,
    }
    places = sorted(
        (at, name) for name in given for at in _places(text, name)
    )  # no name begins with another
    for name in given:
        text = text.replace(name, "?")
    return _Query(text, [given[name] for _, name in places])


def _places(text: str, name: str) -> Iterable[int]:
    at = text.find(name)
    while at >= 0:
        yield at
        at = text.find(name, at + 1)


def _finite(value: str) -> str:
    return f"CASE WHEN isfinite(({value})::DOUBLE) THEN ({value})::DOUBLE END"


def _stamps(keys: Sequence[str]) -> str:
    """A common table expression: ``stamps`` has of each rollout the first version and mode."""
    paths = ", ".join(quoted(f'$."{key}"') for key in keys)
    # To look for the text of a key costs a third of parsing the JSON, which few spans need.
    has = " OR ".join(f"contains(attributes::VARCHAR, {quoted(key)})" for key in keys)
    return f"""
stamps AS MATERIALIZED (
  SELECT rollout_id, arg_min(coalesce(stamp[1], stamp[2]), start_ns) AS version,
    arg_min(stamp[3], start_ns) AS mode
  FROM (SELECT {ROLLOUT} AS rollout_id, start_ns,
    json_extract_string(attributes, [{paths}]) AS stamp FROM spans WHERE {has})
  GROUP BY 1
)"""


def _long(metrics: Sequence[str], asked: Asked) -> str:
    """Common table expressions: ``counted`` holds a row a rollout and metric, with its value."""
    rows = " UNION ALL ".join(
        f"SELECT '{name}' AS metric, rollout_id, start_ns, version, "
        f"{_finite(METRICS[name].value)} AS value FROM wanted"
        for name in metrics
    )
    is_moded = asked.wanted.mode is not None
    return f"""
WITH {_OWN}, {_stamps((*_VERSION_KEYS, c.MODE) if is_moded else _VERSION_KEYS)},
wanted AS MATERIALIZED (
  SELECT own.*, coalesce(version, '') AS version FROM own LEFT JOIN stamps USING (rollout_id)
  WHERE start_ns >= coalesce($since::BIGINT, start_ns)
    AND start_ns < coalesce($until::BIGINT, start_ns + 1)
    {"AND mode = $mode" if is_moded else ""}
),
counted AS ({rows})"""


_LINES: Final = f"""
held AS (
  SELECT *, row_number() OVER (PARTITION BY metric ORDER BY start_ns, rollout_id) AS place,
    count(*) OVER (PARTITION BY metric) AS total,
    min(start_ns) OVER (PARTITION BY metric) AS from_ns,
    max(start_ns) OVER (PARTITION BY metric) AS to_ns
  FROM counted WHERE value IS NOT NULL
),
acted AS (
  SELECT metric, version, version <> '' AS is_named, count(*) AS count,
    min(place) AS first, max(place) AS last
  FROM held GROUP BY metric, version
),
turns AS (
  SELECT *, is_named AND first < max(last) OVER (PARTITION BY metric, is_named ORDER BY first
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS is_beside
  FROM acted
),
ranked AS (
  SELECT *, coalesce(bool_or(is_beside) OVER (PARTITION BY metric), false) AS are_beside,
    row_number() OVER (PARTITION BY metric ORDER BY is_named DESC, first DESC) AS age,
    count(*) OVER (PARTITION BY metric) AS every
  FROM turns
),
lines AS (
  SELECT *, CASE WHEN are_beside THEN least(every, {MOST_LINES}) ELSE 1 END AS lines,
    CASE WHEN are_beside AND is_named AND (age < {MOST_LINES} OR every = {MOST_LINES})
      THEN first END AS line
  FROM ranked
)"""
"""Common table expressions: ``held`` has the values in their order, and ``lines`` of each version
the line that draws it, by the place of its first rollout; none for the one line of all others. A
version has its own where some acted side by side and it is one of the newest. Where each came after
the one before, as in training, their succession is what one wants to see: it is one line."""


def _in_order(metrics: Sequence[str], axis: Axis, asked: Asked) -> str:
    """One row a metric, line and bin, and of each metric one without, which counts what lacks."""
    slot = (
        "least(slots - 1, (start_ns - from_ns)::HUGEINT * slots // greatest(1, to_ns - from_ns))"
        if axis == "time"
        else "(place - 1) * least(slots, total) // total"
    )
    x = "max(start_ns)" if axis == "time" else "max(place)"
    return f"""{_long(metrics, asked)},{_LINES},
sized AS (
  SELECT metric, coalesce($window::BIGINT, greatest(5, max(count) // 10)) AS size
  FROM (SELECT metric, sum(count) AS count FROM lines GROUP BY metric, line) GROUP BY metric
),
moving AS (
  SELECT held.*, line, $bins // lines AS slots, size,
    CASE WHEN line IS NOT NULL THEN version END AS name,
    avg(value / {_SCALE}) OVER near * {_SCALE} AS mean, count(*) OVER near AS mean_count
  FROM held JOIN lines USING (metric, version) JOIN sized USING (metric)
  WINDOW near AS (PARTITION BY metric, line ORDER BY place
    ROWS BETWEEN (size - 1) PRECEDING AND CURRENT ROW)
),
binned AS (
  SELECT metric, line, any_value(name) AS name, {slot} AS bin, {x} AS x,
    avg(value / {_SCALE}) * {_SCALE} AS value, min(value) AS low, max(value) AS high,
    count(*) AS count, arg_max(mean, place) AS mean, arg_max(mean_count, place) AS mean_count,
    any_value(size) AS size
  FROM moving GROUP BY metric, line, bin
),
lacking AS (
  SELECT metric, count(*) FILTER (value IS NULL) AS count FROM counted GROUP BY metric
),
named AS (
  SELECT metric, any_value(are_beside) AS are_beside, count(*) FILTER (is_named) AS versions,
    count(*) FILTER (is_named AND line IS NULL) AS merged,
    sum(count) FILTER (NOT is_named) AS unstamped
  FROM lines GROUP BY metric
)
SELECT * FROM binned
UNION ALL BY NAME
SELECT * FROM lacking LEFT JOIN named USING (metric)
ORDER BY metric, line NULLS LAST, bin NULLS LAST"""


def _by_version(metrics: Sequence[str], asked: Asked) -> str:
    """One row a metric and version, the same beside them for what lacks a value or is too much."""
    return f"""{_long(metrics, asked)},
grouped AS (
  SELECT metric, version AS label, avg(value / {_SCALE}) * {_SCALE} AS value, min(value) AS low,
    max(value) AS high, count(value) AS count, min(start_ns) AS first_ns,
    stddev_samp(value / {_SCALE}) * {_SCALE} / sqrt(count(value)) AS error
  FROM counted WHERE version <> '' GROUP BY metric, version HAVING count(value) > 0
),
ranked AS (
  SELECT *, row_number() OVER (PARTITION BY metric ORDER BY first_ns, label) AS x,
    count(*) OVER (PARTITION BY metric) - row_number() OVER (
      PARTITION BY metric ORDER BY first_ns, label) AS later
  FROM grouped
)
SELECT metric, x, label, value, low, high, count, error, value AS mean, count AS mean_count,
  1 AS size, x AS bin FROM ranked WHERE later < $versions
UNION ALL BY NAME
SELECT metric, count(*) FILTER (version <> '' AND value IS NULL) AS count,
  count(*) FILTER (version = '') AS unstamped,
  count(DISTINCT version) FILTER (version <> '' AND value IS NOT NULL) AS versions
FROM counted GROUP BY metric
ORDER BY metric, bin NULLS LAST"""


def _chart(name: str, axis: Axis, rows: Sequence[Mapping[str, Any]], asked: Asked) -> Chart:
    lines = groupby((row for row in rows if row["bin"] is not None), lambda row: row.get("line"))
    series = [_series(list(own)) for _, own in lines]
    if len(series) > 1 and not series[-1].name:
        series[-1] = replace(series[-1], name=OTHERS)
    title = METRICS[name].title
    if name == "success_rate":
        title = f"success rate, reward from {asked.success:g} on"
    notes: list[str] = []
    for row in rows:
        if row["bin"] is None:
            drawn = sum(len(each.points) for each in series)
            notes += _lacking(name, row)
            notes += _left_out(row, drawn) if axis == "version" else _together(row)
    return Chart(name, title, axis, tuple(series), tuple(notes))


def _series(rows: Sequence[Mapping[str, Any]]) -> Series:
    name = version_label(rows[0].get("name") or "")
    return Series(name, tuple(map(_point, rows)), int(rows[0]["size"]))


def _point(row: Mapping[str, Any]) -> Point:
    return Point(
        x=int(row["x"]),
        value=row["value"],
        low=row["low"],
        high=row["high"],
        count=int(row["count"]),
        mean=row["mean"],
        mean_count=int(row["mean_count"]),
        error=row.get("error"),
        label=version_label(row["label"]) if row.get("label") else "",
    )


def _lacking(name: str, row: Mapping[str, Any]) -> Iterable[str]:
    if row["count"]:
        yield f"{_counted(row['count'], 'rollout')} {METRICS[name].lacks}"


def _left_out(row: Mapping[str, Any], drawn: int) -> Iterable[str]:
    """What a chart of versions leaves out."""
    if row["unstamped"]:
        yield f"{_counted(row['unstamped'], 'rollout')} without a resource version"
    if row["versions"] > drawn:
        yield f"{row['versions'] - drawn:,} earlier versions are not drawn"


def _together(row: Mapping[str, Any]) -> Iterable[str]:
    """Which versions have no line of their own."""
    if not row["are_beside"]:
        if (row["versions"] or 0) > 1:
            yield f"{row['versions']:,} versions, one after the other; by version they are compared"
        return
    others = [_counted(row["merged"], "earlier version")] if row["merged"] else []
    if row["unstamped"]:
        others.append(f"{_counted(row['unstamped'], 'rollout')} without a resource version")
    if others:
        yield f"{OTHERS}: {' and '.join(others)}"


def _counted(count: int, noun: str) -> str:
    return f"{int(count):,} {noun}{'' if count == 1 else 's'}"


def version_label(text: str) -> str:
    """A version as people write it: as it was stamped, or each resource as ``name@version``."""
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
