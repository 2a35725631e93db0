"""The HTTP API: members with ``OPERATIONS``, each of which is a route and its documentation.

A member reads and writes by the rooms below, as everybody does; it checks what comes in, and says
what it does in the OpenAPI document. Nothing in here trains.
"""

from collections.abc import Iterable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from lightning_otel.serve.answers import JSON
from lightning_otel.serve.api import (
    events,
    feedback,
    resources,
    rollouts,
    status,
    training,
    transitions,
)
from lightning_otel.serve.api.document import document
from lightning_otel.serve.api.operation import Answer, Operation, told_plain

_MEMBERS: Final = (status, feedback, transitions, rollouts, resources, training, events)


def operations(others: Iterable[Operation] = ()) -> list[Operation]:
    """Every operation, and the one that describes them all.

    Args:
        others: Those of the server that stand elsewhere.
    """
    found = [*others, *(each for member in _MEMBERS for each in member.OPERATIONS)]

    async def openapi(request: Request) -> Response:
        """This document."""
        return told_plain(described)

    found.append(
        Operation(
            "GET", "/openapi.json", openapi, "This document.",
            {200: Answer("OpenAPI 3.1.", {JSON: {"type": "object"}})},
        )
    )  # fmt: skip
    described = document(found)
    return found
