"""The transitions in a trainer's format: what would be left out and why, and then the rows."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.dataset import Store, formats
from lightning_otel.dataset.export import Exported
from lightning_otel.dataset.formats.format import Format
from lightning_otel.serve.streaming import PARQUET, Streams, join_lines, parquet_parts
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.selection import list_formats, read_selection
from lightning_otel.store.snapshot import Snapshot
from lightning_otel.store.table import json_line
from lightning_otel.views.options import TRANSITIONS, list_format_options
from lightning_otel.views.table import Filter

_KINDS: Final = {"jsonl": "application/x-ndjson", "parquet": PARQUET}
_DOWNLOADS: Final = Streams(2)
"""Each looks at the whole store."""
_MOST_COUNTS: Final = 16
"""Selections whose rows stay counted."""


def _choose_format(request: Request) -> str:
    return page.choice(request, "format", tuple(name for name, _ in list_formats()))


def _list_options(name: str) -> tuple[Format, dict[str, Filter]]:
    format = formats.get(name)
    return format, {**list_format_options(format), **TRANSITIONS}


def _deliver_feedback(request: Request) -> None:
    state = request.app.state
    state.repositories.deliver_feedback(state.ingester.keep)


async def export(request: Request) -> Response:
    """The page that says what would be written."""
    name = _choose_format(request)
    request.state.faults = {}

    def work(store: Store) -> Mapping[str, object]:
        _deliver_feedback(request)
        format, filters = _list_options(name)
        fields: dict[str, object] = {
            "title": f"Export as {name}",
            "format": name,
            "made": format,
            "formats": list_formats(),
            "filters": filters,
        }
        selection = read_selection(request, store, ("format",), filters)
        fields["shared"] = selection.query
        if page.faults_of(request):
            return fields
        exported = _count_rows(request, store, name, selection.keywords)
        return {
            **fields,
            "done": exported,
            "lost": sum(drop.noun == "call" for drop in exported.report.dropped),
            "query_of": {**request.query_params, "format": name},
            "command": selection.command(store, name),
        }

    return await page.answer(request, "export.html", work, is_long=True)


def _count_rows(request: Request, store: Store, name: str, keywords: Mapping[str, Any]) -> Exported:
    if store.layout is None:
        return store.export(name, None, **keywords)
    store.layout.require()
    counts: dict[str, tuple[Snapshot, Exported]] = request.app.state.export_counts
    key, snapshot = repr((name, sorted(keywords.items()))), Snapshot.take(store.layout).fix()
    cached = counts.get(key)
    if cached is None or cached[0] != snapshot:
        if len(counts) > _MOST_COUNTS:
            counts.clear()
        cached = counts[key] = snapshot, store.export(name, None, **keywords)
    return cached[1]


async def download(request: Request) -> Response:
    """The rows as a file."""
    name, kind = _choose_format(request), page.choice(request, "as", tuple(_KINDS))

    def begin(store: Store) -> Iterator[bytes]:
        _deliver_feedback(request)
        if store.layout is not None:
            store.layout.require()
        _, filters = _list_options(name)
        keywords = read_selection(request, store, ("format", "as"), filters).keywords
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
