"""Who may come in, checked before any route: host, origin, token, content type, form.

A page in the user's own browser is the attacker meant by most of it: it can post to loopback, and
by rebinding its name to 127.0.0.1 it could read, too.
"""

import asyncio
import ipaddress
import re
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightning_otel.receivers import DEFAULT_LIMITS
from lightning_otel.serve.answers import CONTENT_TYPES, RefusalError, base_type, refused

BODY_S: Final = 30.0
"""How long a sender may take for its body."""
_MOST_DRAINED: Final = 3
"""Bodies of the longest allowed length that are read and thrown away to be able to answer."""
_HELD_BYTES: Final = 128 << 20
"""Of all bodies that are being received; beyond it senders are asked to come again."""
_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/@\s]+)(?::\d{1,5})?")
_OWN_SITES: Final = frozenset({"same-origin", "none"})
_ALWAYS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may come in.

    Attributes:
        hosts: Names by which this server may be called, lower case.
        token: What a request must carry; empty where everybody on this machine may come in.
        is_open: Whether it listens beyond this machine: then any IP address is its name as well.
            None of them can be rebound, and without the token nothing is served.
    """

    hosts: frozenset[str]
    token: str = ""
    is_open: bool = False

    def knows(self, host: str) -> bool:
        """Whether a Host header, or the authority of an Origin, names this server."""
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found[1].lower()
        return name in self.hosts or (self.is_open and _is_address(name))


class Guard:
    """Lets through only requests that are what they should be."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        """Stand before an app."""
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(item for item in _ALWAYS if item[0] not in present),
                ]
            await send(message)

        request = Request(scope)
        try:
            self._check(request)
        except RefusalError as refusal:
            answer = refused(base_type(request.headers.get("content-type")), refusal)
            await answer(scope, receive, send_safely)
            return
        await self._app(scope, receive, send_safely)

    def _check(self, request: Request) -> None:
        """Refuse what may not come in.

        Raises:
            RefusalError: Why.
        """
        headers = request.headers
        if not request.scope["http_version"].startswith("1."):
            raise RefusalError(505, "this server speaks HTTP/1.1")
        if not request.scope["raw_path"].startswith(b"/"):
            raise RefusalError(400, "ask for a path, not for a whole address")
        # Two readers could disagree on where such a request ends.
        if "transfer-encoding" in headers and "content-length" in headers:
            raise RefusalError(400, "a body has a length or is chunked, not both")
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            raise RefusalError(400, "one Host header is needed")
        if not self._access.knows(hosts[0]):
            raise RefusalError(421, "this server is not called so; see: serve --allow-host")
        self._check_origin(request)
        self._check_token(headers.get("authorization", ""))
        if request.method == "POST" and base_type(headers.get("content-type")) not in CONTENT_TYPES:
            raise RefusalError(415, f"send {' or '.join(CONTENT_TYPES)}")

    def _check_origin(self, request: Request) -> None:
        site = request.headers.get("sec-fetch-site", "none")
        origin = request.headers.get("origin")
        if site not in _OWN_SITES:
            raise RefusalError(403, "no other site may ask this server")
        if origin is not None and not self._access.knows(_authority(origin)):
            raise RefusalError(403, "no other site may ask this server")

    def _check_token(self, authorization: str) -> None:
        if not self._access.token:
            return
        scheme, _, token = authorization.partition(" ")
        given = token.strip().encode("latin-1", "replace")
        is_right = secrets.compare_digest(given, self._access.token.encode("latin-1", "replace"))
        if scheme.lower() != "bearer" or not is_right:
            message = "this server wants its token: Authorization: Bearer TOKEN"
            raise RefusalError(401, message, {"WWW-Authenticate": "Bearer"})


class Bodies:
    """Reads bodies within limits of length, time, and memory for all of them together."""

    def __init__(self, most_bytes: int = DEFAULT_LIMITS.body_bytes) -> None:
        """Allow bodies up to a length, as they are sent."""
        self._most_bytes = most_bytes
        self._held_bytes = 0

    async def read(self, request: Request) -> bytes:
        """The body of a request.

        Raises:
            RefusalError: It is too long or too slow, or there is no room for it now.
        """
        try:
            async with asyncio.timeout(BODY_S):
                return await self._read(request)
        except TimeoutError as exc:
            raise RefusalError(408, f"the body took longer than {BODY_S:.0f} s") from exc

    async def _read(self, request: Request) -> bytes:
        parts: list[bytes] = []
        length = 0
        try:
            async for part in _parts(request):
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


def busy() -> RefusalError:
    """The refusal of one request too many at a time, which may come again."""
    return RefusalError(503, "too much at once; come again", {"Retry-After": "1"})


async def _parts(request: Request) -> AsyncIterator[bytes]:
    while True:
        message = await request.receive()
        if message["type"] != "http.request":
            raise RefusalError(400, "the body is cut off")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _authority(origin: str) -> str:
    """Host and port of an origin; empty where it is no web page's."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return ""
    return parts.netloc if parts.scheme in ("http", "https") else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
