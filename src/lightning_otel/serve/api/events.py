"""Server-Sent Events of traces, rollouts, rewards and runs.

Source: HTML Living Standard, 9.2 "Server-sent events".
"""

from collections.abc import AsyncIterator
from typing import Annotated, Final

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.serve.api.hub import Hub, Listener
from lightning_otel.serve.api.operation import Answer, Asked, Operation, query_of, routes
from lightning_otel.serve.streaming import HeldAnswer

EVENTS: Final = "text/event-stream"
HEARTBEAT_S: Final = 10.0
"""How long a listener hears nothing at most: a proxy may close what is silent."""
_LAST: Final = "last-event-id"


class EventsQuery(Asked):
    """From where on."""

    last_event_id: Annotated[str, Field(max_length=64)] = ""
    """The id of the last event that was seen; the header `Last-Event-ID`, which a browser sends by
    itself, is the same and counts more."""


async def events(request: Request) -> Response:
    """Events from now on, or from behind the last one that was seen."""
    asked = query_of(request, EventsQuery)
    hub: Hub = request.app.state.hub
    listener = await hub.listen(request.headers.get(_LAST, asked.last_event_id)[:64])
    headers = {"X-Accel-Buffering": "no"}
    return HeldAnswer(_send_events(hub, listener), lambda: hub.leave(listener), EVENTS, headers)


async def _send_events(hub: Hub, listener: Listener) -> AsyncIterator[bytes]:
    yield b"retry: 2000\n\n"
    yield _format_event(hub, listener.greeting, listener.number - 1, b"{}")
    while not hub.is_closed:
        found = await hub.next(listener, HEARTBEAT_S)
        if found:
            yield b"".join(_format_event(hub, each.kind, each.number, each.data) for each in found)
        elif not hub.is_closed:
            yield b": still here\n\n"


def _format_event(hub: Hub, kind: str, number: int, data: bytes) -> bytes:
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (hub.id_of(number).encode(), kind.encode(), data)


OPERATIONS: Final = (
    Operation(
        "GET", "/v1/events", events,
        "Server-Sent Events of what happens, resumed by `Last-Event-ID`.\n\n"
        "`trace`: spans of a trace ended. `rollout`: one ended. `reward`: one was given. `run`: a "
        "training run began, went on or ended. `ready` comes first; `reset` says that something "
        "was missed, so that what is shown is to be read anew.",
        {
            200: Answer("The events, until either side ends.", {EVENTS: {"type": "string"}}),
            503: Answer("Too many listen."),
        },
        query=EventsQuery,
    ),
)  # fmt: skip
ROUTES: Final[list[Route]] = routes(OPERATIONS)
