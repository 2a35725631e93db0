"""The transitions in a trainer's format: what would be left out and why, and then the rows."""

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.dataset import Store, formats
from lightning_otel.dataset.export import Exported
from lightning_otel.dataset.formats.format import Format
from lightning_otel.errors import ConfigError
from lightning_otel.serve.streaming import PARQUET, Streams, join_lines, parquet_parts
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.selection import (
    FILTERS,
    list_formats,
    read_selection,
)
from lightning_otel.store.snapshot import Snapshot
from lightning_otel.store.table import json_line

OPTION: Final = "option."
"""What comes before the name of a format's own option in a query."""


def options_of(made: Format, query: Mapping[str, str]) -> dict[str, Any]:
    """A format's own options in a query."""
    known = made.options()
    found: dict[str, Any] = {}
    for key, text in query.items():
        if not key.startswith(OPTION) or not text.strip():
            continue
        name = key.removeprefix(OPTION)
        if name not in known:
            raise ConfigError(f"the format has no option {name[:60]!r}; see docs/exports.md")
        found[name] = _parse_option(name, text.strip(), known[name])
    return found


def _parse_option(name: str, text: str, default: object) -> object:
    if isinstance(default, bool):
        if text not in ("True", "False"):
            raise ConfigError(f"{name} is {text[:40]!r}; it is True or False")
        return text == "True"
    if isinstance(default, str):
        return text[:1000]
    value = page.parse_number(name, text)
    if isinstance(default, int):
        if not value.is_integer() or abs(value) >= math.ldexp(1.0, 53):
            raise ConfigError(f"{name} is {text[:40]!r}; it is a whole number")
        return int(value)
    return value


_KINDS: Final = {"jsonl": "application/x-ndjson", "parquet": PARQUET}
_DOWNLOADS: Final = Streams(2)
"""Each looks at the whole store."""
_MOST_COUNTS: Final = 16
"""Selections whose rows stay counted."""


def _choose_format(request: Request) -> str:
    return page.choice(request, "format", tuple(name for name, _ in list_formats()))


def _deliver_feedback(request: Request) -> None:
    state = request.app.state
    state.repositories.deliver_feedback(state.ingester.keep)


async def export(request: Request) -> Response:
    """The page that says what would be written."""
    name = _choose_format(request)
    request.state.faults = {}

    def work(store: Store) -> Mapping[str, object]:
        _deliver_feedback(request)
        made = formats.get(name)
        options = options_of(made, request.query_params)
        fields: dict[str, object] = {
            "title": f"Export as {name}",
            "format": name,
            "made": made,
            "formats": list_formats(),
            "options": [(key, options.get(key, each)) for key, each in made.options().items()],
        }
        asked = read_selection(request, store)
        fields |= {"filters": FILTERS, "shared": asked.query}
        if page.faults_of(request):
            return fields
        done = _count_rows(request, store, name, {**asked.keywords, **options})
        more = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        own = {f"{OPTION}{key}": str(value) for key, value in options.items()}
        return {
            **fields,
            "done": done,
            "lost": sum(each.noun == "call" for each in done.report.dropped),
            "query_of": {**asked.query, "format": name, **own},
            "command": asked.command(store, name, *more),
        }

    return await page.answer(request, "export.html", work, is_long=True)


def _count_rows(request: Request, store: Store, name: str, keywords: Mapping[str, Any]) -> Exported:
    """Count the rows that would be written, once while the store stays as it is."""
    if store.layout is None:
        return store.export(name, None, **keywords)
    store.layout.require()
    counts: dict[str, tuple[Snapshot, Exported]] = request.app.state.export_counts
    key, snapshot = repr((name, sorted(keywords.items()))), Snapshot.take(store.layout).fix()
    known = counts.get(key)
    if known is None or known[0] != snapshot:
        if len(counts) > _MOST_COUNTS:
            counts.clear()
        known = counts[key] = snapshot, store.export(name, None, **keywords)
    return known[1]


async def download(request: Request) -> Response:
    """The rows as a file."""
    name, kind = _choose_format(request), page.choice(request, "as", tuple(_KINDS))

    def begin(store: Store) -> Iterator[bytes]:
        _deliver_feedback(request)
        if store.layout is not None:
            store.layout.require()
        options = options_of(formats.get(name), request.query_params)
        keywords = {**read_selection(request, store).keywords, **options}
        if kind == "parquet":
            return parquet_parts(lambda path: store.export(name, path, kind="parquet", **keywords))
        return join_lines(map(json_line, store.rows(name, **keywords)))

    headers = {"Content-Disposition": f'attachment; filename="{name}.{kind}"'}
    parts = await page.run(request, begin, is_long=True)

    def run(make_first: Callable[[], bytes]) -> Awaitable[bytes]:
        return page.run(request, lambda _: make_first(), is_long=True)

    return await _DOWNLOADS.answer(parts, _KINDS[kind], headers, run)


ROUTES: Final[list[Route]] = [
    Route("/transitions/export", export, methods=["GET"]),
    Route("/transitions/download", download, methods=["GET"]),
]
