"""The first page: whether it learns, the data funnel, what is newest.

The summary and the breakdown are there at once, as the last facts tell them, and renewed after.
The curve and the funnel look at the whole store: they come when the page is there already.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Final, TypeAlias
from urllib.parse import urlencode

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.config import list_settings
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, StoreMissingError
from lightning_otel.serve.api.cache import CachedRead
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.runs import list_live_resources
from lightning_otel.serve.viewer.traces import COLUMNS
from lightning_otel.store.prices import read_prices
from lightning_otel.store.source import with_last_facts
from lightning_otel.store.views import DIMENSIONS
from lightning_otel.types import Report
from lightning_otel.views.doctor import check_calls, examine
from lightning_otel.views.plot import PlotQuery, read_charts, svg
from lightning_otel.views.summary import PERIODS, group_failures, read_summaries
from lightning_otel.views.table import Listing
from lightning_otel.views.traces import TRACES

_NEWEST: Final = 10
_GROUPS: Final = 5
"""Kinds of failures, and names of a breakdown, that are shown."""
_NAMES: Final = 12
_PROGRESS: Final = """
SELECT count(*) FILTER (NOT is_current) AS behind, max(end_ns) FILTER (is_current) AS until_ns
FROM rollouts"""
_AXES: Final = ("rollout", "time", "step", "version")
_METRICS: Final = ("reward", "success_rate", "tokens")
_LOGGED: Final = "step"
_LINES: Final = ("all", "agent")
"""One curve of all rollouts, or one an agent."""


async def home(request: Request) -> Response:
    """The page."""
    curve, choices = _read_curve(request), _read_choices(request)

    def read(store: Store) -> Mapping[str, object]:
        newest = _read_newest(store)
        is_any = newest is not None and newest.total
        return {
            **curve,
            **choices,
            "axes": _AXES,
            "metrics": _METRICS,
            "dimensions": DIMENSIONS,
            "periods": PERIODS,
            "parts": list(_read_parts(request, store, choices)) if is_any else (),
            "newest": newest,
            "columns": COLUMNS,
            "living": list_live_resources(request),
            "server": f"{request.url.scheme}://{request.url.netloc}",
        }

    return await page.answer(request, "home.html", read, title="Home")


async def curve(request: Request) -> Response:
    """The curve, as a part of the page or a page of its own."""
    choices = _read_curve(request)

    def read(store: Store) -> Mapping[str, object]:
        if choices["by"] == _LOGGED:  # beside the store, whose files tell nothing of it
            return _draw_curve(store, **choices)
        key = tuple(choices.values())
        cached: CachedRead[Mapping[str, object]] = request.app.state.curves[key]
        return cached.of(store, lambda store: _draw_curve(store, **choices))

    return await page.answer(request, "home_curve.html", read, title="Reward curve", is_long=True)


async def funnel(request: Request) -> Response:
    """Show the funnel, as a part of the page or a page of its own."""

    def read(store: Store) -> Mapping[str, object]:
        cached: CachedRead[Mapping[str, object]] = request.app.state.funnel
        return cached.of(store, _read_funnel)

    return await page.answer(request, "home_funnel.html", read, title="Data funnel", is_long=True)


def _read_curve(request: Request) -> dict[str, str]:
    """Return the axis and the metric of the curve, and its lines where rollouts stand apart."""
    by, metric = page.choice(request, "by", _AXES), page.choice(request, "metric", _METRICS)
    lines = page.choice(request, "lines", _LINES)
    return {"by": by, "metric": metric, "lines": lines if by in _AXES[:2] else _LINES[0]}


def _read_choices(request: Request) -> dict[str, str]:
    period = page.choice(request, "period", ("24h", *PERIODS))
    return {"period": period, "split": page.choice(request, "split", DIMENSIONS)}


async def part(request: Request) -> Response:
    """Show what a period came to, beside the one before; or its rollouts by agent or such."""
    name, choices = request.url.path.rpartition("/")[2], _read_choices(request)

    def read(store: Store) -> Mapping[str, object]:
        return {"part": _cache_of(request, name, choices).of(store, partial(read_part, **choices))}

    title, read_part = _PARTS[name]
    return await page.answer(request, f"home_{name}.html", read, title=title, is_long=True)


def _cache_of(
    request: Request, name: str, choices: Mapping[str, str]
) -> CachedRead[Mapping[str, object]]:
    key = (name, *choices.values(), read_prices().rows)
    cached: CachedRead[Mapping[str, object]] = request.app.state.summaries[key]
    return cached


def _read_parts(
    request: Request, store: Store, choices: Mapping[str, str]
) -> Iterator[Mapping[str, object]]:
    """Yield the parts as they were last read, else as the last facts tell them."""
    passive = cache(lambda: with_last_facts(store))

    def read(name: str) -> tuple[Mapping[str, object], bool]:
        (progress,) = passive().sql(_PROGRESS)
        return {**_PARTS[name][1](passive(), **choices), **progress}, not progress["behind"]

    for name in _PARTS:
        answer: tuple[Mapping[str, object], float, bool] = {}, 0.0, False
        with suppress(ConfigError):  # the part itself tells of prices that are none
            answer = _cache_of(request, name, choices).last(store, partial(read, name))
        content, age_s, is_valid = answer
        yield {
            "path": f"/home/{name}?{urlencode(choices)}", "content": content, "is_valid": is_valid,
            "read_ns": time.time_ns() - int(age_s * 1e9),
        }  # fmt: skip


def _summarize(store: Store, *, period: str, split: str) -> Mapping[str, object]:
    now, before = read_summaries(store, period)
    groups = group_failures(store, {"since": _since_ns(period)})
    return {
        "now": now, "before": before, "period": period, "split": split,
        "groups": groups[:_GROUPS], "kinds": len(groups),
    }  # fmt: skip


def _break_down(store: Store, *, period: str, split: str) -> Mapping[str, object]:
    rows = store.breakdown(split, since=_since_ns(period)).rows()
    return {"rows": rows[:_NAMES], "total": len(rows), "period": period, "split": split}


def _since_ns(period: str) -> int:
    return time.time_ns() - PERIODS[period] * 1_000_000_000


_Read: TypeAlias = Callable[..., Mapping[str, object]]
_PARTS: Final[Mapping[str, tuple[str, _Read]]] = {
    "tiles": ("Summary", _summarize), "breakdown": ("Breakdown", _break_down),
}  # fmt: skip
"""Parts that are there at once, as the last facts tell them, and renewed after."""


def _draw_curve(store: Store, *, by: str, metric: str, lines: str) -> Mapping[str, object]:
    # What training runs logged has names of its own.
    metrics, split = () if by == _LOGGED else (metric,), None if lines == _LINES[0] else lines
    query = PlotQuery(metrics, axis=by, split=split)  # type: ignore[arg-type]  # they are choices
    charts = read_charts(store, query)
    # What plot draws is escaped by it, and holds no script, link or style.
    drawn = Markup(svg(charts, is_styled=False))
    has_values = any(chart.series for chart in charts)
    return {"by": by, "metric": metric, "drawn": drawn, "has_values": has_values}


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
    *(Route(f"/home/{name}", part, methods=["GET"]) for name in _PARTS),
    Route("/home/funnel", funnel, methods=["GET"]),
    Route("/settings", settings, methods=["GET"]),
]
