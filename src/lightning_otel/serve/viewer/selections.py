"""Data sets: selections saved under a name, the first rows of a version, and two compared."""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.dataset import Store
from lightning_otel.dataset.selections import (
    SelectionDiff,
    list_newest,
    list_versions,
    read_version,
)
from lightning_otel.errors import ConfigError
from lightning_otel.serve.bodies import form
from lightning_otel.serve.responses import refusal_of
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.selection import read_selection
from lightning_otel.serve.viewer.traces import choose_rollouts
from lightning_otel.serve.viewer.transitions import PARAMETERS, shorten_step
from lightning_otel.serve.viewer.urls import page_path
from lightning_otel.views.options import TRANSITIONS

ROWS: Final = 10
"""First rows of a version that are shown."""
_MOST: Final = 50
"""Steps of each kind that a comparison lists."""


def _choose_options(request: Request) -> Callable[[Store], dict[str, Any]]:
    """Return what finds the options that the address of a list, or of transitions, stands for."""
    if request.query_params.get("of") == "transitions":
        others = ("of", *PARAMETERS)
        return lambda store: dict(read_selection(request, store, others, TRANSITIONS).keywords)
    find = choose_rollouts(request, ("reward",))
    return lambda store: {"rollout_id": find(store)[0]}


async def selections(request: Request) -> Response:
    """The list, and the form that saves what an address chooses."""
    return await _show_form(request, dict(request.query_params))


async def _show_form(
    request: Request, fields: Mapping[str, str], fault: ConfigError | None = None
) -> Response:
    is_saving = bool(request.query_params)

    def read(store: Store) -> Mapping[str, object]:
        return {
            "versions": list_newest(store),
            "is_saving": is_saving,
            "fields": fields,
            "fault": fault,
        }

    status = refusal_of(fault).status if fault else 200
    return await page.answer(request, "selections.html", read, title="Data sets", status=status)


async def save(request: Request) -> Response:
    """Save what the address chooses as the next version; the form tells why it cannot be."""
    fields, choose = await form(request), _choose_options(request)
    name, reward = (fields.get(key, "").strip() for key in ("name", "reward"))
    # A text that was searched for may be what redaction will remove.
    source = "" if request.query_params.get("q") else page.url(request).removeprefix("/selections")

    def work(store: Store) -> object:
        options = choose(store) | ({"reward": reward} if reward else {})
        return store.save_selection(name, source=source, **options)

    try:
        await page.run(request, work, is_long=True)
    except ConfigError as exc:
        return await _show_form(request, fields, exc)
    return page.see(page_path("selections", name))


async def selection(request: Request) -> Response:
    """One version: its first rows, and how it differs from another one."""
    name = request.path_params["name"]
    number = page.integer(request, "version", 0, 0, 10**9)
    other = page.integer(request, "with", 0, 0, 10**9)

    def read(store: Store) -> Mapping[str, object]:
        version = read_version(store, f"{name}@{number}" if number else name)
        numbers = list_versions(store)[name]
        before = other or max((n for n in numbers if n < version.version), default=0)
        earlier = read_version(store, f"{name}@{before}") if before else None
        steps = islice(store.transitions(selection=str(version)), ROWS)
        return {
            "title": str(version),
            "version": version,
            "numbers": numbers,
            "earlier": earlier,
            "difference": SelectionDiff.of(earlier, version) if earlier else None,
            "most": _MOST,
            "rows": [(step, shorten_step(step, {})) for step in steps],
        }

    return await page.answer(request, "selection.html", read, is_long=True)


ROUTES: Final[list[Route]] = [
    Route("/selections", selections, methods=["GET"]),
    Route("/selections", save, methods=["POST"]),
    Route("/selections/{name:str}", selection, methods=["GET"]),
]
