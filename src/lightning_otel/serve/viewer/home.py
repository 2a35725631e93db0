"""The first page: whether it learns, the data funnel, what is newest.

The curve and the funnel look at the whole store: they come when the page is there already.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.config import list_settings
from lightning_otel.dataset import Store
from lightning_otel.errors import StoreMissingError
from lightning_otel.serve.api.cache import CachedRead
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.runs import list_live_resources
from lightning_otel.store.prices import read_prices
from lightning_otel.types import Report
from lightning_otel.views.doctor import check_calls, examine
from lightning_otel.views.plot import PlotQuery, read_charts, svg
from lightning_otel.views.summary import PERIODS, list_failures, read_summaries
from lightning_otel.views.table import Listing
from lightning_otel.views.traces import TRACES

_NEWEST: Final = 10
_AXES: Final = ("rollout", "time", "step", "version")
_METRICS: Final = ("reward", "success_rate", "tokens")
_LOGGED: Final = "step"


async def home(request: Request) -> Response:
    """The page."""
    by, metric = page.choice(request, "by", _AXES), page.choice(request, "metric", _METRICS)
    period = page.choice(request, "period", ("24h", *PERIODS))

    def read(store: Store) -> Mapping[str, object]:
        return {
            **_name_curve(by, metric),
            "period": period,
            "periods": PERIODS,
            "newest": _read_newest(store),
            "living": list_live_resources(request),
            "server": f"{request.url.scheme}://{request.url.netloc}",
        }

    return await page.answer(request, "home.html", read, title="Home")


async def curve(request: Request) -> Response:
    """The curve, as a part of the page or a page of its own."""
    by, metric = page.choice(request, "by", _AXES), page.choice(request, "metric", _METRICS)

    def read(store: Store) -> Mapping[str, object]:
        if by == _LOGGED:  # beside the store, whose files tell nothing of it
            return _draw_curve(store, by=by, metric=metric)
        cache: CachedRead[Mapping[str, object]] = request.app.state.curves[by, metric]
        return cache.of(store, partial(_draw_curve, by=by, metric=metric))

    return await page.answer(request, "home_curve.html", read, title="Reward curve", is_long=True)


async def funnel(request: Request) -> Response:
    """Show the funnel, as a part of the page or a page of its own."""

    def read(store: Store) -> Mapping[str, object]:
        cache: CachedRead[Mapping[str, object]] = request.app.state.funnel
        return cache.of(store, _read_funnel)

    return await page.answer(request, "home_funnel.html", read, title="Data funnel", is_long=True)


async def tiles(request: Request) -> Response:
    """Show the summary of a period beside the one before, and the last failures."""
    period = page.choice(request, "period", ("24h", *PERIODS))

    def read(store: Store) -> Mapping[str, object]:
        cache: CachedRead[Mapping[str, object]] = request.app.state.summaries[
            period, read_prices().rows
        ]
        return cache.of(store, partial(_summarize, period=period))

    return await page.answer(request, "home_tiles.html", read, title="Summary", is_long=True)


def _summarize(store: Store, *, period: str) -> Mapping[str, object]:
    now, before = read_summaries(store, period)
    failures = list(list_failures(store))
    return {
        "now": now, "before": before, "period": period, "periods": PERIODS, "failures": failures,
    }  # fmt: skip


def _draw_curve(store: Store, *, by: str, metric: str) -> Mapping[str, object]:
    # What training runs logged has names of its own.
    query = PlotQuery(() if by == _LOGGED else (metric,), axis=by)  # type: ignore[arg-type]  # one of _AXES
    charts = read_charts(store, query)
    # What plot draws is escaped by it, and holds no script, link or style.
    drawn = Markup(svg(charts, is_styled=False))
    return {**_name_curve(by, metric), "drawn": drawn, "has_values": any(c.series for c in charts)}


def _name_curve(by: str, metric: str) -> Mapping[str, object]:
    return {"by": by, "metric": metric, "axes": _AXES, "metrics": _METRICS}


def _read_newest(store: Store) -> Listing | None:
    try:
        return TRACES.read(store, limit=_NEWEST)
    except StoreMissingError:
        return None


def _read_funnel(store: Store) -> Mapping[str, object]:
    report, accounting = store.report(), store.accounting()
    return {
        "steps": list(_list_steps(report)),
        "left_out": report.reasons(),
        "inexact": report.inexact,
        "notes": report.notes,
        "accounting": accounting,
        "findings": list(check_calls(store)) if report.spans else (),
    }


def _list_steps(report: Report) -> Iterator[dict[str, object]]:
    for name, number, whole, note, lost, path in (
        ("Spans", report.spans, 0, "", "", ""),
        ("Rollouts", report.rollouts, 0, "", "", ""),
        ("Model calls", report.calls, 0, "", "", ""),
        ("Transitions", report.transitions, report.calls, "of calls", "dropped", "#dropped"),
        ("With a reward", report.rewarded, report.transitions, "of transitions",
         "without", "?rewarded=no"),
        ("Exact token ids", report.exact, report.transitions, "of transitions",
         "text only", "?capture=text"),
        ("Rewards", report.rewards, 0, "", "", ""),
        ("Rewards credited", report.rewards_placed, report.rewards, "of rewards",
         "not credited", "#dropped"),
    ):  # fmt: skip
        yield {
            "name": name, "number": number, "note": note, "share": share_of(number, whole),
            "lost": max(0, whole - number), "word": lost, "path": f"/transitions{path}",
        }  # fmt: skip


def share_of(number: int, whole: int) -> str:
    """The share of the whole in percent, for SVG; below 100 if one is missing."""
    if not whole:
        return ""
    return "100%" if number >= whole else f"{min(100 * number / whole, 99.9):.1f}%"


async def settings(request: Request) -> Response:
    """The doctor's findings and the settings."""

    def read(store: Store) -> Mapping[str, object]:
        findings = examine(store)
        ranks = ("problem", "note", "ok")
        return {
            "findings": sorted(findings, key=lambda finding: ranks.index(finding.level)),
            "problems": sum(finding.level == "problem" for finding in findings),
            "settings": list_settings(),
        }

    return await page.answer(request, "settings.html", read, title="Settings and doctor")


ROUTES: Final[list[Route]] = [
    Route("/", home, methods=["GET"]),
    Route("/home/curve", curve, methods=["GET"]),
    Route("/home/tiles", tiles, methods=["GET"]),
    Route("/home/funnel", funnel, methods=["GET"]),
    Route("/settings", settings, methods=["GET"]),
]
