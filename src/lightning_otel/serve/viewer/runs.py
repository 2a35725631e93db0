"""Training runs: where they stand, what they measured, what they published and kept."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.dataset import Store
from lightning_otel.errors import NotFoundError
from lightning_otel.serve.responses import RefusalError
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.templating import json_text
from lightning_otel.types.text import count_noun
from lightning_otel.views.plot.curves import Chart
from lightning_otel.views.plot.svg import svg

CURVES: Final = 12
"""Metrics drawn at once; the others by name."""
_SILENT_S: Final = 300
"""A run that says it goes on, and was not heard of for so long, may have died."""
_FIRST: Final = ("reward", "loss", "val/reward", "val/live", "val/candidate")


def list_live_resources(request: Request) -> list[dict[str, Any]]:
    """List the resources of which a version is given, or two at once, by name."""
    repositories = request.app.state.repositories
    standings = repositories.resources.standings() if repositories.is_made else {}
    return [
        {"name": name, "live": row.live, "canary": row.canary, "share": row.weight or 0.0}
        for name, row in sorted(standings.items())
    ]


def _is_silent(run: Any) -> bool:
    silent_ns: int = time.time_ns() - run.seen_ns
    return bool(run.status == "running" and silent_ns > _SILENT_S * 1_000_000_000)


async def runs(request: Request) -> Response:
    """The list, the newest first, and the versions that agents are given now."""
    repositories = request.app.state.repositories

    def read(_: Store) -> Mapping[str, object]:
        items = repositories.runs.all() if repositories.is_made else []
        part = page.show_part(request, items)
        rows = [(run, _is_silent(run)) for run in part["rows"]]
        return {**part, "rows": rows, "living": list_live_resources(request)}

    return await page.answer(request, "runs.html", read, title="Training runs")


async def run(request: Request) -> Response:
    """One of them, by its id or the beginning of it; one metric alone is drawn if it is named."""
    run_id = request.path_params["run_id"]
    metric = page.text(request, "metric")

    def read(_: Store) -> Mapping[str, object]:
        from lightning_otel.views.plot import runs as plotting

        repositories = page.require_state(request, f"training run {run_id!r}")
        run, resources = repositories.runs.get(run_id), repositories.resources
        names = sorted(plotting.logged_metrics(repositories.state, (run.run_id,)), key=_rank_metric)
        if metric and metric not in names:
            raise NotFoundError(f"the run measured no {metric!r}; choose one of its metrics")
        drawn = [metric] if metric else names[:CURVES]
        charts = plotting.read_charts(repositories.state, drawn, runs=(run.run_id,))
        checkpoints = repositories.runs.checkpoints(run.run_id)
        versions = [
            version
            for name in resources.names()
            for version in resources.versions(name)
            if version.run_id == run.run_id
        ]
        aliases = {name: resources.aliases(name) for name in {version.name for version in versions}}
        return {
            "title": f"Training run {run.run_id}",
            "run": run,
            "is_silent": _is_silent(run),
            "config": json.dumps(dict(run.config), ensure_ascii=False, indent=2, sort_keys=True),
            "names": names,
            "drawn": drawn,
            "metric": metric,
            # Our own drawing, in which every text is escaped already.
            "pictures": [Markup(svg([chart], is_styled=False)) for chart in charts],
            "last": [
                (chart.metric, series.points[0].value, series.points[-1].value)
                for chart in charts
                for series in chart.series
            ],
            "made": versions,
            "aliases": aliases,
            "checkpoints": checkpoints[: page.ROWS],
            "checkpoints_total": len(checkpoints),
            "living": [row for row in list_live_resources(request) if row["name"] in aliases],
        }

    return await page.answer(request, "run.html", read)


async def compare(request: Request) -> Response:
    """Two of them: what differs in their settings, their metrics side by side and overlaid."""
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    if len(names) != 2:
        raise RefusalError(400, f"{count_noun(len(names), 'run')} chosen; choose two to compare")

    def read(_: Store) -> Mapping[str, object]:
        from lightning_otel.views.plot import runs as plotting

        repositories = page.require_state(request, f"training run {names[0]!r}")
        pair = [repositories.runs.get(name) for name in names]
        pair.sort(key=lambda run: run.created_ns)
        ids = [run.run_id for run in pair]
        metrics = sorted(plotting.logged_metrics(repositories.state, ids), key=_rank_metric)
        charts = plotting.read_charts(repositories.state, metrics[:CURVES], runs=ids)
        settings = [{"algorithm": run.algorithm, **run.config} for run in pair]
        texts = [{key: json_text(value, None) for key, value in each.items()} for each in settings]
        keys = sorted({*texts[0], *texts[1]})
        rows = [(key, [each.get(key, "–") for each in texts]) for key in keys]
        return {
            "runs": pair,
            "settings": [(key, values) for key, values in rows if values[0] != values[1]],
            "count": len(keys),
            "figures": [_compare_series(chart, ids) for chart in charts],
            "others": metrics[CURVES:],
            "pictures": [Markup(svg([chart], is_styled=False)) for chart in charts],
        }

    return await page.answer(request, "runs_compare.html", read, title="Compare training runs")


def _compare_series(chart: Chart, run_ids: Sequence[str]) -> Mapping[str, object]:
    series = {line.name: line.points for line in chart.series}
    values = [
        (points[0].value, points[-1].mean) if (points := series.get(run_id)) else None
        for run_id in run_ids
    ]
    ends = [value[1] for value in values if value is not None]
    change = ends[1] - ends[0] if len(ends) == len(run_ids) else None
    return {"metric": chart.metric, "values": values, "change": change}


def _rank_metric(name: str) -> tuple[int, str]:
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)


ROUTES: Final[list[Route]] = [
    Route("/runs", runs, methods=["GET"]),
    Route("/runs/compare", compare, methods=["GET"]),
    Route("/runs/{run_id:path}", run, methods=["GET"]),
]
