"""Choice of curves, and where they are read: rollouts in the store, metrics in the state."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, get_args

from lightning_otel.adapter.composition import SUCCESS
from lightning_otel.adapter.selection import Selection
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.plot import rollouts
from lightning_otel.plot.curves import Axis, Chart
from lightning_otel.store.find import LAST
from lightning_otel.store.layout import state_place

if TYPE_CHECKING:
    from lightning_otel.dataset import Store

_ALIASES: Final = {"success": "success_rate", "steps": "length", "rewards": "reward"}
_USUAL: Final = ("reward", "success_rate", "length", "tokens")
_USUAL_OF_RUNS: Final = ("reward", "loss")


@dataclass(frozen=True, slots=True)
class PlotQuery:
    """Choice of curves.

    Attributes:
        metrics: Names of ``rollouts.METRICS``, or of what runs logged; by default the usual ones.
        axis: The axis; by default steps for what only runs logged, else rollouts.
        runs: Prefixes of run ids, or ``@last``; then all metrics are those of runs.
        selection: Rollouts, by time and mode.
        success: The reward from which on a rollout has succeeded.
        window: Values in a moving mean; by default a tenth of them.
    """

    metrics: Sequence[str] = ()
    axis: Axis | None = None
    runs: Sequence[str] = ()
    selection: Selection = field(default_factory=Selection)
    success: float = SUCCESS
    window: int | None = None

    def __post_init__(self) -> None:
        if self.axis not in (None, *get_args(Axis)):
            raise ConfigError(
                f"nothing can be drawn by {self.axis!r}; by {', '.join(get_args(Axis))}"
            )
        if self.runs and self.axis not in (None, "step"):
            raise ConfigError(
                f"a run has steps, and cannot be drawn by {self.axis}; leave that out"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window is {self.window}; it must be at least 1")


def read_charts(store: "Store", query: PlotQuery) -> list[Chart]:
    """Read the charts of a query, in its order.

    Raises:
        ConfigError: No metric has such a name, or SQLAlchemy is not installed to look for it.
        NotFoundError: A named run logged nothing.
        StoreMissingError: There is no store.
    """
    names = list(dict.fromkeys(_ALIASES.get(name, name) for name in query.metrics))
    is_of_runs = query.axis == "step" or bool(query.runs)
    own = [] if is_of_runs else [name for name in names or _USUAL if name in rollouts.METRICS]
    rest = [name for name in names if name not in own]
    charts: list[Chart] = []
    if own:
        charts += rollouts.read_charts(
            store, own, query.axis or "rollout", selection=query.selection, success=query.success,
            window=query.window,
        )  # fmt: skip
    if rest or not names:
        charts += _charts_of_runs(store, query, rest, is_of_runs=is_of_runs, is_alone=not own)
    return sorted(charts, key=lambda chart: names.index(chart.metric)) if names else charts


def _charts_of_runs(
    store: "Store", query: PlotQuery, names: Sequence[str], *, is_of_runs: bool, is_alone: bool
) -> list[Chart]:
    """Read the metrics named, else the usual ones that runs logged.

    One that no run logged is an empty chart beside others, and an error alone.
    """
    place = state_place(store)
    logged: Sequence[str] = ()
    # Without SQLAlchemy, the curves of rollouts are drawn alone.
    if place is not None and (names or is_of_runs or find_spec("sqlalchemy")):
        from lightning_otel.state import State

        state = State(place)
        from lightning_otel.plot import runs

        wanted = [runs.newest_run(state) if run == LAST else run for run in query.runs]
        lacking = [run for run in wanted if not run or not runs.logged_metrics(state, (run,))]
        logged = runs.logged_metrics(state, wanted)
    else:
        lacking = list(query.runs)
    if lacking:
        shown = ", ".join(repr(run or LAST) for run in lacking)
        raise NotFoundError(
            f"no training run {shown} has logged anything; lightning-otel train --list shows them"
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
    known = [name for name in names if name in logged]
    charts = [
        Chart(each, each, "step", (), (_explain_unknown([each], logged),)) for each in unknown
    ]
    if known:
        charts += runs.read_charts(state, known, runs=wanted, window=query.window)
    return charts


def _explain_unknown(names: Sequence[str], logged: Sequence[str]) -> str:
    known = dict.fromkeys([*rollouts.METRICS, *logged])
    return f"no metric {', '.join(map(repr, names))}; there are {', '.join(known)}"
