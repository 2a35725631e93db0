"""Templates: where they are, and what each of them may use."""

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request

from lightning_otel.markup import visible
from lightning_otel.serve.session import placed
from lightning_otel.serve.viewer.addresses import path_of, resource_page
from lightning_otel.serve.viewer.static import address
from lightning_otel.types.wording import count_noun


class Place(NamedTuple):
    """A page that the navigation leads to."""

    path: str
    name: str
    key: str


PLACES: Final = (
    Place("/", "Home", "h"),
    Place("/traces", "Traces", "t"),
    Place("/conversations", "Conversations", "c"),
    Place("/transitions", "Transitions", "s"),
    Place("/rollouts", "Rollouts", "r"),
    Place("/resources", "Resources", "p"),
    Place("/runs", "Runs", "u"),
    Place("/sql", "SQL", "q"),
    Place("/settings", "Settings", "e"),
)


def render(request: Request, template: str, shown: Mapping[str, object]) -> str:
    """A template with what it shows."""
    from lightning_otel.serve.viewer.page import url

    path = request.url.path
    text = _ENVIRONMENT.get_template(template).render(
        {
            "here": path,
            "url": partial(url, request),
            "query": request.query_params,
            **shown,
        }
    )
    return placed(request.scope, text)


def ago(start_ns: int) -> str:
    """Word the time since then, in one unit."""
    found = max(0.0, time.time() - start_ns / 1e9)
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if found < limit:
            return f"{found / size:.0f} {unit} ago"
    return f"{found / 86_400:.0f} d ago"


def moment(time_ns: int) -> str:
    """A time in full, in UTC."""
    return datetime.fromtimestamp(time_ns // 1_000_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def duration(length_ns: int) -> str:
    """A duration in the unit people would say it in."""
    found = length_ns / 1e9
    if found < 1:
        return f"{found * 1e3:.0f} ms"
    return f"{found:.1f} s" if found < 120 else f"{found / 60:.0f} min"


def number(value: float | None) -> str:
    """A whole number with its thousands apart, another in four digits; a dash for none."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def size(length_bytes: int) -> str:
    """A size in the unit people would say it in."""
    if length_bytes < 1_000_000:
        return f"{length_bytes / 1e3:.0f} kB"
    return f"{length_bytes / 1e6:,.1f} MB"


def json_text(value: object, indent: int | None = 2) -> str:
    """A value as JSON for people; it is escaped like any text."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=str)


def _make_environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        auto_reload=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "ago": ago, "moment": moment, "duration": duration, "number": number, "size": size,
        "json": json_text,
        "visible": visible,
    }  # fmt: skip
    found.globals |= {
        "static": address,
        "places": PLACES,
        "count": count_noun,
        "path_of": path_of,
        "resource_page": resource_page,
        "program_version": version("lightning-otel"),
    }
    return found


_ENVIRONMENT: Final = _make_environment()
