"""What is asked of curves, and where its answer lies: in the store's views or in the runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, get_args

from lightning_otel.adapter.composition import SUCCESS
from lightning_otel.adapter.selection import Selection
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.plot import rollouts
from lightning_otel.plot.curves import Axis, Chart
from lightning_otel.store.beside import state_place
from lightning_otel.store.find import LAST

if TYPE_CHECKING:
    from lightning_otel.state import State
    from lightning_otel.store import Store

_ALIASES: Final = {"success": "success_rate", "steps": "length", "rewards": "reward"}
_USUAL: Final = ("reward", "success_rate", "length", "tokens")
_USUAL_OF_RUNS: Final = ("reward", "loss")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be drawn.

    Attributes:
        metrics: Names of ``rollouts.METRICS``, or of what runs logged; none are the usual ones.
        axis: What lies along the charts; None is the steps for what only runs logged, else the
            rollouts.
        runs: Beginnings of run ids, or ``@last``; then all metrics are those of runs.
        wanted: Which rollouts, by time and mode.
        success: The reward from which on a rollout has succeeded.
        window: Values in a moving mean; None for a tenth of them.
        bins: Points of a line at most.
    """

    metrics: Sequence[str] = ()
    axis: Axis | None = None
    runs: Sequence[str] = ()
    wanted: Selection = field(default_factory=Selection)
    success: float = SUCCESS
    window: int | None = None
    bins: int = 400

    def __post_init__(self) -> None:
        if self.axis not in (None, *get_args(Axis)):
            raise ConfigError(
                f"nothing can be drawn by {self.axis!r}; by {', '.join(get_args(Axis))}"
            )
        if self.runs and self.axis not in (None, "step"):
            raise ConfigError(
                f"a run has steps, and cannot be drawn by {self.axis}; leave that out"
            )
        for name, value in (("window", self.window), ("bins", self.bins)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")


def charts(store: "Store", asked: Asked) -> list[Chart]:
    """The charts asked for, in order.

    Raises:
        ConfigError: There is no metric of any name, or SQLAlchemy is not installed to look for it.
        NotFoundError: A run that was named logged nothing.
        StoreMissingError: There is no store.
    """
    names = [_ALIASES.get(name, name) for name in asked.metrics]
    is_of_runs = asked.axis == "step" or bool(asked.runs)
    own = [] if is_of_runs else [name for name in names or _USUAL if name in rollouts.METRICS]
    rest = [name for name in dict.fromkeys(names) if name not in own]
    found: dict[str, Chart] = {}
    if own:
        given = rollouts.Asked(asked.wanted, asked.success, asked.window, asked.bins)
        of_rollouts = rollouts.charts(
            store, list(dict.fromkeys(own)), asked.axis or "rollout", given
        )
        found |= {chart.metric: chart for chart in of_rollouts}
    if rest or not names:
        of_runs = _of_runs(store, asked, rest, is_of_runs=is_of_runs, is_alone=not own)
        found |= {chart.metric: chart for chart in of_runs}
    return list(found.values()) if not names else [found[name] for name in dict.fromkeys(names)]


def _of_runs(
    store: "Store", asked: Asked, names: Sequence[str], *, is_of_runs: bool, is_alone: bool
) -> list[Chart]:
    """Charts of runs: of the metrics named, else of the usual ones that were logged.

    One that no run logged is an empty chart beside others, and an error alone.
    """
    state = _state_of(store)
    if state is None:
        if asked.runs:
            raise NotFoundError(_no_run(asked.runs))
        if is_alone and names:
            raise ConfigError(_unknown(names, ()))
        return [_lacking(name, ()) for name in names]
    from lightning_otel.plot import runs

    wanted = [runs.newest(state) if run == LAST else run for run in asked.runs]
    if lacking := [run for run in wanted if not run or not runs.logged(state, (run,))]:
        raise NotFoundError(_no_run(lacking))
    there = runs.logged(state, wanted)
    unknown = [name for name in names if name not in there]
    if unknown and is_alone and len(unknown) == len(names):
        raise ConfigError(_unknown(unknown, there))
    if names and asked.axis not in (None, "step"):
        raise ConfigError(
            f"{', '.join(names)} was logged by steps, and cannot be drawn by {asked.axis}; "
            "leave that out"
        )
    if not names:
        usual = _USUAL_OF_RUNS if is_of_runs else ("loss",)
        names = [name for name in usual if name in there and (is_of_runs or asked.axis is None)]
        names = names or (there if is_of_runs else [])
    known = [name for name in names if name not in unknown]
    drawn = runs.charts(state, known, runs=wanted, window=asked.window, bins=asked.bins)
    return [*drawn, *(_lacking(name, there) for name in unknown)]


def _lacking(name: str, there: Sequence[str]) -> Chart:
    return Chart(name, name, "step", (), (_unknown([name], there),))


def _no_run(named: Sequence[str]) -> str:
    shown = ", ".join(repr(run or LAST) for run in named)
    return f"no training run {shown} has logged anything; lightning-otel train --list shows them"


def _unknown(names: Sequence[str], there: Sequence[str]) -> str:
    known = [*rollouts.METRICS, *(name for name in there if name not in rollouts.METRICS)]
    return f"no metric {', '.join(map(repr, names))}; there are {', '.join(known)}"


def _state_of(store: "Store") -> "State | None":
    """The state that the runs of a store lie in; None if there is none: to ask would make it."""
    place = state_place(store)
    if place is None:
        return None
    from lightning_otel.state import State

    return State(place)
