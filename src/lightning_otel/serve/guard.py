"""The guard in front of every route: host, origin, key, content type, form.

Against a page in the user's own browser, which can post to loopback and rebind its name; and
against other users of the machine, who reach the port and not the files.
"""

import asyncio
import ipaddress
import logging
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightning_otel.serve.otlp import is_call
from lightning_otel.serve.responses import CONTENT_TYPES, FORM, RefusalError, base_type
from lightning_otel.serve.session import Session, prefix_of
from lightning_otel.types.html import render_link_page

log = logging.getLogger(__name__)

SEND_S: Final = 30.0
"""How long a reader may take for the next part of an answer."""
_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/@\s]+)(?::\d{1,5})?")
_OWN_SITES: Final = frozenset({"same-origin", "none"})
_OPEN: Final = frozenset(
    {
        ("POST", "/v1/traces"),
        ("POST", "/v1/metrics"),
        ("POST", "/v1/logs"),
        ("POST", "/v1/feedback"),
        ("POST", "/feedback"),
        ("GET", "/healthz"),
    }
)
"""What anybody on this machine may do where there is no token: give, and ask whether it is up."""
_STATIC: Final = "/static/"
"""The same for everybody everywhere; the page that asks for the key looks as the others do."""
_API: Final = "/v1/"
"""Below it there are no pages, and so no forms."""
_HANDED_ON: Final = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
"""Headers of which a proxy sends at least one."""
_KEY: Final = "key"
_ALONE: Final = {"Cross-Origin-Opener-Policy": "same-origin"}
"""What opened it can neither look at it nor at where it leads."""
_ALWAYS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of access.

    Attributes:
        hosts: Names by which this server may be called, lower case.
        token: What every request must carry; empty where everybody on this machine may send spans.
        key: What a request must carry that reads; where it is empty and there is no token, nothing
            is read.
        is_open: Whether it listens beyond this machine: then any IP address is its name as well.
            None of them can be rebound, and without the token nothing is served.
        is_keyless: Whether programs of this machine need no key: any user's, but no page of a
            browser's that is not of this server, and nothing that a proxy hands on.
    """

    hosts: frozenset[str]
    token: str = ""
    is_open: bool = False
    key: str = ""
    is_keyless: bool = False

    @property
    def reading_key(self) -> str:
        """The key that reads everything; empty if there is none."""
        return self.token or self.key

    def opens(self, token: str) -> bool:
        """Compare a key with the right one in constant time."""
        key = self.reading_key.encode()
        return bool(key) and secrets.compare_digest(token.encode("utf-8", "replace"), key)

    def admits(self, request: Request) -> bool:
        """Return whether a request carries the key."""
        key = request.query_params.get(_KEY, "") if request.method == "GET" else ""
        return self.opens(_bearer_token(request)) or self.opens(key)

    def knows(self, host: str) -> bool:
        """Return whether a Host header, or an Origin's authority, names this server."""
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1].lower()
        return name in self.hosts or (self.is_open and _is_address(name))


class Guard:
    """Lets through only requests that are what they should be."""

    def __init__(
        self, app: ASGIApp, access: Access, refuse: Callable[[Request, RefusalError], Response]
    ) -> None:
        self._app = app
        self._access = access
        self._refuse = refuse
        self._session = Session()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return

        scope = self._session.entered(scope)
        is_stalled = False

        async def send_safely(message: Message) -> None:
            nonlocal is_stalled
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *(_keep_location(item, prefix_of(scope)) for item in message["headers"]),
                    *(item for item in _ALWAYS if item[0] not in present),
                ]
            try:
                async with asyncio.timeout(SEND_S):
                    await send(message)
            except TimeoutError:
                is_stalled = True
                raise

        request = Request(scope)
        try:
            self._check_request(request)
            answer = self._enter_by_key(request)
        except RefusalError as refusal:
            answer = self._refuse(request, refusal)
        if answer is not None:
            await answer(scope, receive, send_safely)
            return
        try:
            await self._app(scope, receive, send_safely)
        except (TimeoutError, ExceptionGroup):
            if not is_stalled:
                raise
            log.debug("a reader of %s took too long, and was left", request.url.path)

    def _check_request(self, request: Request) -> None:
        headers = request.headers
        if not (request.scope["http_version"].startswith("1.") or is_call(request)):
            raise RefusalError(505, "this server speaks HTTP/1.1, and HTTP/2 for OTLP/gRPC alone")
        if not (request.scope["raw_path"] or b"/").startswith(b"/"):
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
        if _is_link(request):
            return  # it reads nothing: it leads on to where the key is asked for
        self._check_key(request)
        if request.method not in ("GET", "HEAD", "OPTIONS"):
            self._check_content_type(request)

    def _enter_by_key(self, request: Request) -> Response | None:
        """Answer a link that has the key: set a cookie and redirect to the address without the key.

        From another site it leads on by a page: after a redirect it would still be that site that
        asks.
        """
        key = request.query_params.get(_KEY, "")
        is_right = self._access.opens(key)  # what is open to everybody came here without the key
        before = self._session.prefix if is_right else prefix_of(request.scope)
        address = before + _address_without_key(request)
        if _is_link(request):
            answer: Response = HTMLResponse(render_link_page(address), headers=_ALONE)
        elif request.method == "GET" and key:
            answer = RedirectResponse(address, 303)
        elif not request.scope["raw_path"]:  # the session's prefix without its slash
            answer = RedirectResponse(address, 308)
        else:
            return None
        if is_right:
            self._session.admit(answer)
        return answer

    def _check_origin(self, request: Request) -> None:
        origin = request.headers.get("origin")
        is_known = origin is None or self._access.knows(_authority_of(origin))
        if not is_known or not (_is_own(request) or _is_link(request)):
            raise RefusalError(403, "no other site may ask this server")

    def _check_key(self, request: Request) -> None:
        if request.url.path.startswith(_STATIC) and request.method in ("GET", "HEAD"):
            return
        is_open = (request.method, request.url.path) in _OPEN or is_call(request)
        if not self._access.token and is_open:
            return
        if self._access.is_keyless and _is_local(request):
            return
        if not (self._access.admits(request) or self._session.knows(request)):
            raise RefusalError(
                401,
                "this needs the key: open the link that lightning-otel serve prints, or send "
                "Authorization: Bearer KEY",
                {"WWW-Authenticate": "Bearer"},
            )

    def _check_content_type(self, request: Request) -> None:
        """Refuse what a page elsewhere can send without asking, but for forms of our own."""
        kind = base_type(request.headers.get("content-type"))
        if kind in CONTENT_TYPES or is_call(request):
            return
        # A page elsewhere cannot send a header of its own without asking, either.
        is_program = _bearer_token(request) or (
            self._access.is_keyless and "origin" not in request.headers and _is_local(request)
        )
        if not kind and is_program and _has_no_body(request):
            return
        if kind != FORM or request.method != "POST" or request.url.path.startswith(_API):
            raise RefusalError(415, f"send {' or '.join(CONTENT_TYPES)}")
        origin, site = (request.headers.get(name) for name in ("origin", "sec-fetch-site"))
        # Another port of this machine is another user's, maybe: the names alone do not tell.
        is_ours = (
            site == "same-origin" if origin is None else _authority_of(origin) == _host_of(request)
        )
        if not is_ours and not _bearer_token(request):
            raise RefusalError(403, "a form is sent from a page of this server")


def _is_own(request: Request) -> bool:
    """Return whether a page of ours sends the request, or an address that somebody typed."""
    return request.headers.get("sec-fetch-site", "none") in _OWN_SITES


def _is_link(request: Request) -> bool:
    """Return whether the request follows a link of another site to a page, in a window of its own.

    A browser says so, and no script can: neither for a frame nor for what it fetches.
    """
    mode = request.headers.get("sec-fetch-mode"), request.headers.get("sec-fetch-dest")
    is_page = request.method == "GET" and not request.url.path.startswith(_API)
    return is_page and not _is_own(request) and mode == ("navigate", "document")


def _is_local(request: Request) -> bool:
    """Return whether a program of this machine asks over loopback, without a proxy's headers."""
    peer = request.client.host if request.client else ""
    host = _HOST.fullmatch(_host_of(request))
    return (
        _is_loopback(peer)
        and _is_loopback(host[1].lower() if host else "")
        and not any(header in request.headers for header in _HANDED_ON)
    )


def _is_loopback(name: str) -> bool:
    return name == "localhost" or (
        _is_address(name) and ipaddress.ip_address(name.strip("[]")).is_loopback
    )


def _address_without_key(request: Request) -> str:
    query = request.scope["query_string"].decode("latin-1")
    parameters = [item for item in parse_qsl(query, keep_blank_values=True) if item[0] != _KEY]
    # Two slashes at its beginning would name another server.
    path = "/" + request.scope["raw_path"].decode("latin-1").lstrip("/")
    return f"{path}?{urlencode(parameters)}" if parameters else path


def _bearer_token(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _keep_location(header: tuple[bytes, bytes], prefix: str) -> tuple[bytes, bytes]:
    name, text = header
    is_within = text.startswith(prefix.encode())
    if name.lower() != b"location" or is_within or not text.startswith(b"/"):
        return header
    return name, prefix.encode() + text


def _has_no_body(request: Request) -> bool:
    headers = request.headers
    return "transfer-encoding" not in headers and headers.get("content-length", "0") == "0"


def _host_of(request: Request) -> str:
    return request.headers.get("host", "")


def _authority_of(origin: str) -> str:
    """Return host and port of an origin; empty where it is no web page's."""
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
