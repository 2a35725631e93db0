"""Bodies of requests and forms, read within limits."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Final
from urllib.parse import parse_qsl

from starlette.requests import Request

from lightning_otel.receivers import DEFAULT_LIMITS
from lightning_otel.serve.responses import FORM, RefusalError, base_type, busy

BODY_S: Final = 30.0
"""How long a sender may take for its body."""
PART_S: Final = 10.0
"""How long it may take for the next part of it."""
_MOST_DRAINED: Final = 3
"""Bodies of the longest allowed length that are read and thrown away to be able to answer."""
_FORM_BYTES: Final = 1 << 20
_HELD_BYTES: Final = 128 << 20
"""Of all bodies that are being received; beyond it senders are asked to come again."""


class Bodies:
    """Reads bodies within limits of length, time, and memory for all of them together."""

    def __init__(self, most_bytes: int = DEFAULT_LIMITS.body_bytes) -> None:
        self._most_bytes = most_bytes
        self._held_bytes = 0

    async def read(self, request: Request) -> bytes:
        """The body of a request."""
        try:
            async with asyncio.timeout(BODY_S):
                return await self._read_body(request)
        except TimeoutError as exc:
            raise RefusalError(408, "the body took too long; send it at once") from exc

    async def _read_body(self, request: Request) -> bytes:
        parts: list[bytes] = []
        length = 0
        try:
            async for part in _read_parts(request):
                length += len(part)
                if length <= self._most_bytes:
                    parts.append(part)
                    self._held_bytes += len(part)
                    if self._held_bytes > _HELD_BYTES:
                        raise busy()
                    continue
                # Read on, or the sender fails to write and never sees the answer.
                self._held_bytes -= sum(map(len, parts))
                parts.clear()
                if length > self._most_bytes * _MOST_DRAINED:
                    break
            if length > self._most_bytes:
                raise RefusalError(413, f"a body may have {self._most_bytes} bytes")
            return b"".join(parts)
        finally:
            self._held_bytes -= sum(map(len, parts))


async def _read_parts(request: Request) -> AsyncIterator[bytes]:
    while True:
        async with asyncio.timeout(PART_S):
            message = await request.receive()
        if message["type"] != "http.request":
            raise RefusalError(400, "the body is cut off")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def form(request: Request) -> Mapping[str, str]:
    """The fields of a form; of one that stands twice, the last."""
    if base_type(request.headers.get("content-type")) != FORM:
        raise RefusalError(415, f"send {FORM}")
    body = await request.app.state.bodies.read(request)
    if len(body) > _FORM_BYTES:
        raise RefusalError(413, f"a form may have {_FORM_BYTES} bytes")
    try:
        text = body.decode("ascii")
        return dict(parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=1000))
    except ValueError as exc:
        raise RefusalError(400, "this is no form as a browser sends it") from exc
