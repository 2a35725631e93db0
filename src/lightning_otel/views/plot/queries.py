"""Choice of curves, and where they are read: rollouts in the store, metrics in the state."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple, get_args

from lightning_otel.adapter.advantages import SUCCESS
from lightning_otel.adapter.selection import StepSelection
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.store.layout import find_state
from lightning_otel.store.lookup import LAST
from lightning_otel.store.source import read_overview
from lightning_otel.store.sql import ROLLOUT, attribute_sql
from lightning_otel.store.views import LAST_REWARD
from lightning_otel.types import conventions as c
from lightning_otel.types.text import count_noun
from lightning_otel.types.values import parse_json
from lightning_otel.views.plot.curves import (
    MOST_POINTS,
    Axis,
    Chart,
    Point,
    Series,
    Split,
    Value,
    make_series,
    mean_of,
    standard_error,
)  # fmt: skip

if TYPE_CHECKING:
    from lightning_otel.dataset import Store

MOST_VERSIONS: Final = 400
MOST_LINES: Final = 6
"""Lines of versions in one chart: as many as there are colours."""
OTHERS: Final = "others"
"""Name of the line of all versions without one of their own."""
_ALIASES: Final = {"success": "success_rate", "steps": "length", "rewards": "reward"}
_USUAL: Final = ("reward", "success_rate", "length", "tokens")
_USUAL_OF_RUNS: Final = ("reward", "loss")
_VERSION: Final = f"coalesce({attribute_sql(c.RESOURCE_VERSION)}, {attribute_sql(c.RESOURCES)})"


class _Measure(NamedTuple):
    """A measure of a rollout: its title, SQL over its last attempt, a note on those without."""

    title: str
    value: str
    lacks: str


_UNCOUNTED: Final = "not over yet, or without counted tokens"
METRICS: Final[Mapping[str, _Measure]] = {
    "reward": _Measure("reward", "reward", "without a reward"),
    "success_rate": _Measure("success rate", "reward", "without a reward"),
    "length": _Measure("length, calls to a model", "calls", "not over yet"),
    "tokens": _Measure("tokens, in and out", "input_tokens + output_tokens", _UNCOUNTED),
    "input_tokens": _Measure("tokens in", "input_tokens", _UNCOUNTED),
    "output_tokens": _Measure("tokens out", "output_tokens", _UNCOUNTED),
    "duration": _Measure("duration, seconds", "(end_ns - start_ns) / 1e9", "not over yet"),
}


@dataclass(frozen=True, slots=True)
class PlotQuery:
    """Choice of curves.

    Attributes:
        metrics: Names of ``METRICS``, or of what runs logged; by default the usual ones.
        axis: By default steps for what only runs logged, else rollouts.
        runs: Prefixes of run ids, or ``@last``; then all metrics are those of runs.
        selection: Rollouts, by time and mode.
        success: The reward from which on a rollout has succeeded.
        window: Values in a moving mean; by default a tenth of them.
        split: ``agent`` draws a line each, of the rollouts in which the agent took part.
    """

    metrics: Sequence[str] = ()
    axis: Axis | None = None
    runs: Sequence[str] = ()
    selection: StepSelection = field(default_factory=StepSelection)
    success: float = SUCCESS
    window: int | None = None
    split: Split | None = None

    def __post_init__(self) -> None:
        if self.axis not in (None, *get_args(Axis)):
            raise ConfigError(
                f"nothing can be drawn by {self.axis!r}; by {', '.join(get_args(Axis))}"
            )
        if self.runs and self.axis not in (None, "step"):
            raise ConfigError(
                f"a run has steps, and cannot be drawn by {self.axis}; leave that out"
            )
        if self.split not in (None, *get_args(Split)):
            raise ConfigError(f"curves cannot be split by {self.split!r}; by agent")
        if self.split and (self.runs or self.axis in ("step", "version")):
            raise ConfigError("a line an agent is drawn by rollout or by time; leave the rest out")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window is {self.window}; it must be at least 1")


def read_charts(store: "Store", query: PlotQuery) -> list[Chart]:
    """Read the charts of a query, in its order; without a series where there is no value.

    Raises:
        ConfigError: No metric has such a name, or SQLAlchemy is not installed to look for it.
        NotFoundError: A named run logged nothing.
        StoreMissingError: There is no store.
    """
    names = list(dict.fromkeys(_ALIASES.get(name, name) for name in query.metrics))
    is_of_runs = query.axis == "step" or bool(query.runs)
    rollout_metrics = [] if is_of_runs else [name for name in names or _USUAL if name in METRICS]
    run_metrics = [name for name in names if name not in rollout_metrics]
    charts = _read_rollouts(store, rollout_metrics, query) if rollout_metrics else []
    if run_metrics or not names:
        charts += _read_runs(
            store, query, run_metrics, is_of_runs=is_of_runs, is_alone=not rollout_metrics
        )
    return sorted(charts, key=lambda chart: names.index(chart.metric)) if names else charts


def _read_runs(
    store: "Store", query: PlotQuery, names: Sequence[str], *, is_of_runs: bool, is_alone: bool
) -> list[Chart]:
    """Read the metrics named, else the usual ones that runs logged.

    One that no run logged is an empty chart beside others, and an error alone.
    """
    place = find_state(store)
    logged: Sequence[str] = ()
    lacking = list(query.runs)
    # Without SQLAlchemy, the curves of rollouts are drawn alone.
    if place is not None and (names or is_of_runs or find_spec("sqlalchemy")):
        from lightning_otel.state import State
        from lightning_otel.views.plot import runs

        state = State(place)
        run_ids = [runs.newest_run(state) if run == LAST else run for run in query.runs]
        lacking = [run for run in run_ids if not run or not runs.logged_metrics(state, (run,))]
        logged = runs.logged_metrics(state, run_ids)
    if lacking:
        missing = ", ".join(repr(run or LAST) for run in lacking)
        raise NotFoundError(
            f"no training run {missing} has logged anything; lightning-otel train --list shows them"
        )
    unknown = [name for name in names if name not in logged]
    if names and is_alone and len(unknown) == len(names):
        raise ConfigError(_explain_unknown(unknown, logged))
    if len(unknown) < len(names) and query.axis not in (None, "step"):
        raise ConfigError(
            f"{', '.join(names)} was logged by steps, and cannot be drawn by {query.axis}; "
            "leave that out"
        )
    if not names:
        usual = _USUAL_OF_RUNS if is_of_runs else ("loss",)
        names = [name for name in usual if name in logged and (is_of_runs or query.axis is None)]
        names = names or (logged if is_of_runs else ())
    charts = [
        Chart(name, name, "step", (), (_explain_unknown([name], logged),)) for name in unknown
    ]
    if logged_names := [name for name in names if name in logged]:
        charts += runs.read_charts(state, logged_names, runs=run_ids, window=query.window)
    return charts


def _explain_unknown(names: Sequence[str], logged: Sequence[str]) -> str:
    choices = dict.fromkeys([*METRICS, *logged])
    return f"no metric {', '.join(map(repr, names))}; there are {', '.join(choices)}"


class _PlotPoint(NamedTuple):
    """A rollout: its number and start, its version or agent or an empty text, a value or None."""

    number: int
    start_ns: int
    line: str
    value: float | None


def _read_rollouts(store: "Store", metrics: Sequence[str], query: PlotQuery) -> list[Chart]:
    (columns,) = read_overview(store.source, *_make_query(metrics, query.selection))
    axis = query.axis or "rollout"
    is_by_version = axis == "version"
    charts = []
    for name in metrics:
        title, is_success = METRICS[name].title, name == "success_rate"
        rows = list[_PlotPoint]()
        kind = query.split or "version"
        for rank, (start_ns, version, value) in enumerate(zip(
            *(columns[key] or () for key in ("start_ns", kind, name)), strict=True
        )):  # fmt: skip
            number = float(value) if value is not None and math.isfinite(value) else None
            if is_success and number is not None:
                number = float(number >= query.success)
            names = (version or "").split(", ") if query.split else (version or "",)
            rows += (_PlotPoint(rank, start_ns, name, number) for name in names)
        if is_success:
            title = f"success rate, reward from {query.success:g} on"
        valueless = (row for row in rows if row.value is None)
        lacking = len({row.number for row in valueless if row.line or not is_by_version})
        notes = [f"{count_noun(lacking, 'rollout')} {METRICS[name].lacks}"] if lacking else []
        series, more = _compare_versions(rows) if is_by_version else _draw_lines(rows, axis, query)
        charts.append(Chart(name, title, axis, tuple(series), (*notes, *more)))
    return charts


def _make_query(metrics: Sequence[str], selection: StepSelection) -> tuple[str, list[object]]:
    """Return SQL whose one row has a list a column, of all rollouts in the order they began."""
    bounds = {
        "start_ns >= ?": selection.since_ns, "start_ns < ?": selection.until_ns,
        "mode = ?": selection.mode,
    }  # fmt: skip
    conditions = {condition: value for condition, value in bounds.items() if value is not None}
    columns = {"start_ns": "start_ns", "version": "version", "agent": "agents"}
    for name in metrics:
        value = METRICS[name].value
        is_reward = value == "reward"
        columns[name] = value if is_reward else f"CASE WHEN status <> 'running' THEN {value} END"
    lists = ", ".join(
        f"list({value} ORDER BY start_ns, rollout_id) AS {name}" for name, value in columns.items()
    )
    text = f"""
WITH own AS MATERIALIZED (
  SELECT rollout_id, max(start_ns) AS start_ns, arg_max(end_ns, start_ns) AS end_ns,
    arg_max(status, start_ns) AS status, {LAST_REWARD} AS reward,
    arg_max(calls, start_ns) AS calls, arg_max(agents, start_ns) AS agents,
    arg_max_null(input_tokens, start_ns) AS input_tokens,
    arg_max_null(output_tokens, start_ns) AS output_tokens,
    arg_max_null(mode, start_ns) AS mode
  FROM rollouts GROUP BY rollout_id
),
stamps AS MATERIALIZED (
  SELECT {ROLLOUT} AS rollout_id, arg_min({_VERSION}, start_ns) AS version
  FROM spans WHERE contains(attributes::VARCHAR, 'lightning.resource') GROUP BY 1
)
SELECT {lists} FROM own LEFT JOIN stamps USING (rollout_id)
WHERE {" AND ".join(conditions) or "true"}"""
    return text, list(conditions.values())


def _draw_lines(
    rows: Sequence[_PlotPoint], axis: Axis, query: PlotQuery
) -> tuple[list[Series], list[str]]:
    valued, window = [row for row in rows if row.value is not None], query.window
    counts = Counter(row.line for row in valued)  # in the order they first acted
    versions = [version for version in counts if version]
    if query.split:
        names = [name for name, _ in counts.most_common(MOST_LINES)]
        valued = [row for row in valued if row.line in names]
        parallel: Sequence[str] = [name for name in names if name]
    else:
        parallel = _versions_with_lines(valued, versions)
    places = {number: place for place, number in enumerate(dict.fromkeys(r.number for r in valued))}
    total, lines = len(places), min(len(counts), MOST_LINES) if parallel else 1
    slots = MOST_POINTS // lines
    from_ns, to_ns = (valued[0].start_ns, valued[-1].start_ns) if valued else (0, 0)
    values: dict[str, list[Value]] = {version: [] for version in parallel}
    for row in valued:
        place = places[row.number]
        if axis == "time":
            x = row.start_ns
            slot = min(slots - 1, (x - from_ns) * slots // max(1, to_ns - from_ns))
        else:
            x, slot = place + 1, place * min(slots, total) // total
        line = row.line if row.line in parallel else ""
        values.setdefault(line, []).append((slot, x, row.value or 0.0))
    values[""] = values.pop("", [])  # the rest comes last
    size = window or max(5, *(len(line) // 10 for line in values.values()))
    series = [
        make_series(version_label(line) or (OTHERS if parallel else ""), held_of, size)
        for line, held_of in values.items()
        if held_of
    ]
    if query.split:
        hidden = len(counts) - len(series)
        return series, [f"{count_noun(hidden, 'more agent')} not drawn"] if hidden else []
    if not parallel:
        note = f"{len(versions):,} versions in sequence (compare: by version)"
        return series, [note] if len(versions) > 1 else []
    merged = len(versions) - len(parallel)
    others = [count_noun(merged, "earlier version")] if merged else []
    others += _word_unstamped(counts[""])
    return series, [f"{OTHERS}: {' and '.join(others)}"] if others else []


def _versions_with_lines(rows: Sequence[_PlotPoint], versions: Sequence[str]) -> Sequence[str]:
    """Return the newest versions if some acted side by side, else none."""
    last = {row.line: place for place, row in enumerate(rows)}
    first = {row.line: len(rows) - back for back, row in enumerate(reversed(rows), 1)}
    ends = accumulate((last[version] for version in versions), max)
    if not any(first[version] < end for version, end in zip(versions[1:], ends, strict=False)):
        return ()
    return versions if len(first) <= MOST_LINES else versions[1 - MOST_LINES :]


def _compare_versions(rows: Sequence[_PlotPoint]) -> tuple[list[Series], list[str]]:
    values: dict[str, list[float]] = {}
    for row in rows:
        ys = values.setdefault(row.line, [])
        if row.value is not None:
            ys.append(row.value)
    notes = list(_word_unstamped(sum(not row.line for row in rows)))
    groups = [(version, ys) for version, ys in values.items() if version and ys]
    drawn = list(enumerate(groups, 1))[-MOST_VERSIONS:]
    if len(groups) > len(drawn):
        notes.append(f"{len(groups) - len(drawn):,} earlier versions are not drawn")
    points = tuple(
        Point(x, mean_of(ys), min(ys), max(ys), len(ys), mean_of(ys), len(ys),
              error=standard_error(ys), label=version_label(version))
        for x, (version, ys) in drawn
    )  # fmt: skip
    return [Series("", points)] if points else [], notes


def _word_unstamped(count: int) -> Iterable[str]:
    return [f"{count_noun(count, 'rollout')} without a resource version"] if count else []


def version_label(text: str) -> str:
    """Return a version as it was stamped, or each resource of a JSON stamp as ``name@version``."""
    agents_by = parse_json(text)
    if not isinstance(agents_by, dict) or not all(
        isinstance(part, dict) for part in agents_by.values()
    ):
        return text
    return ", ".join(
        f"{'' if agents == '*' else f'{agents}/'}{name}@{version}"
        for agents, part in sorted(agents_by.items())
        for name, version in sorted(part.items())
    )
