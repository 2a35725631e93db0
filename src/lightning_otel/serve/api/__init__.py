"""The HTTP API: members with operations, each of which is a route and its documentation.

A member is imported with the first request for one of its addresses: together they take 30 MB.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Final

from starlette.concurrency import run_in_threadpool
from starlette.routing import BaseRoute, Match, Router
from starlette.types import Receive, Scope, Send

if TYPE_CHECKING:
    from lightning_otel.serve.api.operation import ApiOperation

MEMBERS: Final[Mapping[str, tuple[str, ...]]] = {
    "status": ("/healthz", "/v1/status", "/v1/summary", "/metrics", "/v1/events", "/openapi.json"),
    "feedback": ("/v1/feedback", "/feedback"),
    "data": ("/v1/transitions", "/v1/rollouts", "/v1/fetch"),
    "resources": ("/v1/resources",),
    "training": ("/training", "/optimize"),
}
"""Modules in here, each with the addresses at and below which its operations are; OTLP, which
``status`` tells of, comes in by ``serve/otlp.py`` and needs none of this."""


def operations(names: Iterable[str] = tuple(MEMBERS)) -> "list[ApiOperation]":
    """Return every operation of some members."""
    from lightning_otel.serve.api.operation import ApiOperation

    modules = (import_module(f"{__name__}.{name}") for name in names)
    values = (value for module in modules for value in vars(module).values())
    return [value for value in values if isinstance(value, ApiOperation)]


class LazyRoutes(BaseRoute):
    """The routes of a member, imported with the first request for one of them."""

    def __init__(self, name: str, roots: Iterable[str]) -> None:
        self._name = name
        self._roots = tuple(roots)
        self._router: Router | None = None

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match every request below the API; its own routes decide the rest."""
        path = scope["path"]
        is_own = any(path == root or path.startswith(f"{root}/") for root in self._roots)
        return (Match.FULL if is_own and scope["type"] == "http" else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if self._router is None:
            operations_here = await run_in_threadpool(operations, [self._name])
            self._router = Router([operation.route for operation in operations_here])
        await self._router(scope, receive, send)


ROUTES: Final[list[BaseRoute]] = [
    LazyRoutes(name, roots) for name, roots in MEMBERS.items() if roots
]
