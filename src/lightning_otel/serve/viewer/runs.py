"""Training runs: where they stand, what they measured, what they published and kept."""

import json
import time
from collections.abc import Mapping
from typing import Final, NamedTuple

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.dataset import Store
from lightning_otel.errors import NotFoundError
from lightning_otel.plot.curves import Chart
from lightning_otel.plot.svg import svg
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.beside import required, state_of
from lightning_otel.types import Resource

ROWS: Final = 50
"""Runs on a page."""
CURVES: Final = 12
"""Metrics drawn at once; the others by name."""
KEPT: Final = 50
"""Checkpoints that are listed."""
SILENT_S: Final = 300
"""A run that says it goes on, and was not heard of for so long, may have died."""
_FIRST: Final = ("reward", "loss", "val/reward", "val/live", "val/candidate")


class Living(NamedTuple):
    """A resource of which several versions are given at once, or one.

    Attributes:
        share: The part of all that is given the canary.
    """

    name: str
    live: Resource | None
    canary: Resource | None
    share: float


def listed(store: Store, number: int) -> Mapping[str, object]:
    """A page of the runs, the newest first, and the versions that agents are given now."""
    state = state_of(store)
    if state is None:
        return {"rows": [], "total": 0, "size": ROWS, "number": number, "living": []}
    from lightning_otel.state.runs import Runs

    every = Runs(state).all()
    shown = every[(number - 1) * ROWS : number * ROWS]
    return {
        "rows": [(run, is_silent(run.status, run.seen_ns)) for run in shown],
        "total": len(every),
        "size": ROWS,
        "number": number,
        "living": living(store),
    }


def is_silent(status: str, seen_ns: int) -> bool:
    """Return whether a run that says it goes on was silent for long."""
    return status == "running" and time.time_ns() - seen_ns > SILENT_S * 1_000_000_000


def living(store: Store) -> list[Living]:
    """List the live resources by name."""
    state = state_of(store)
    if state is None:
        return []
    from lightning_otel.resources import Resources

    standings = Resources(state).standings()
    return [
        Living(name, each.live, each.canary, each.weight or 0.0)
        for name, each in sorted(standings.items())
    ]


def read(store: Store, run_id: str, metric: str = "") -> Mapping[str, object]:
    """One run.

    Args:
        store: Where it is.
        run_id: Its id, or the beginning of it.
        metric: The metric that alone is drawn; empty for the usual ones.

    Raises:
        NotFoundError: There is no such run or metric.
    """
    from lightning_otel.plot import runs as plotting
    from lightning_otel.resources import Resources
    from lightning_otel.state.runs import Runs

    state = required(store, f"training run {run_id!r}")
    opened = Runs(state)
    run = opened.get(run_id)
    names = sorted(plotting.logged_metrics(state, (run.run_id,)), key=_metric_rank)
    if metric and metric not in names:
        raise NotFoundError(f"the run measured no {metric!r}; choose one of its metrics")
    drawn = [metric] if metric else names[:CURVES]
    charts = plotting.read_charts(state, drawn, runs=(run.run_id,))
    checkpoints = opened.checkpoints(run.run_id)
    resources = Resources(state)
    made = [
        each
        for name in resources.names()
        for each in resources.versions(name)
        if each.run_id == run.run_id
    ]
    aliases = {name: resources.aliases(name) for name in {each.name for each in made}}
    return {
        "title": f"Training run {run.run_id}",
        "run": run,
        "is_silent": is_silent(run.status, run.seen_ns),
        "config": json.dumps(dict(run.config), ensure_ascii=False, indent=2, sort_keys=True),
        "names": names,
        "drawn": drawn,
        "metric": metric,
        # Our own drawing, in which every text is escaped already.
        "pictures": [Markup(svg([chart], is_styled=False)) for chart in charts],
        "last": _last_values(charts),
        "made": made,
        "aliases": aliases,
        "checkpoints": checkpoints[:KEPT],
        "checkpoints_total": len(checkpoints),
        "living": [each for each in living(store) if each.name in aliases],
    }


def _metric_rank(name: str) -> tuple[int, str]:
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)


def _last_values(charts: list[Chart]) -> list[tuple[str, float, float]]:
    """Return each metric with its first and last value."""
    found = []
    for chart in charts:
        for series in chart.series:
            found.append((chart.metric, series.points[0].value, series.points[-1].value))
    return found


async def runs(request: Request) -> Response:
    """The list."""
    number = page.integer(request, "page", 1, 1, 1_000_000)
    return await page.answer(
        request, "runs.html", lambda store: listed(store, number), title="Training runs"
    )


async def run(request: Request) -> Response:
    """One of them."""
    run_id = request.path_params["run_id"]
    metric = page.text(request, "metric")
    return await page.answer(request, "run.html", lambda store: read(store, run_id, metric))


ROUTES: Final[list[Route]] = [
    Route("/runs", runs, methods=["GET"]),
    Route("/runs/{run_id:path}", run, methods=["GET"]),
]
