"""The session of browsers that opened the link with the key, kept from other servers.

Browsers send a cookie to every port of its host, but not to every path: pages lie below one that is
drawn anew with each start, as is the cookie's value. The key is in neither.
"""

import re
import secrets
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

_COOKIE: Final = "lightning_otel"
_PREFIX: Final = "lightning_otel.prefix"
_ADDRESS: Final = re.compile(
    r'(\s(?:href|src|(?:form)?action|data-(?:href|load|part|spans|events|base))=")(?=/(?!static/))'
)
"""An address of a page in a page's markup, in which no text holds a bare quotation mark."""


class Session:
    """The session that all browsers share, below the path ``prefix``, until the server ends."""

    def __init__(self) -> None:
        self.prefix = f"/v-{secrets.token_urlsafe(16)}"
        self._cookie = secrets.token_urlsafe(32)

    def entered(self, scope: Scope) -> Scope:
        """A request as the rest of the server knows it: its path without the prefix, or empty."""
        prefix = self.prefix.encode()
        raw: bytes = scope["raw_path"]
        if raw != prefix and not raw.startswith(prefix + b"/"):
            return scope
        return {
            **scope,
            "path": scope["path"][len(self.prefix) :],
            "raw_path": raw[len(prefix) :],
            _PREFIX: self.prefix,
        }

    def knows(self, request: Request) -> bool:
        """Return whether the browser has the session's cookie."""
        cookie = request.cookies.get(_COOKIE, "").encode("utf-8", "replace")
        return bool(prefix_of(request.scope)) and secrets.compare_digest(
            cookie, self._cookie.encode()
        )

    def admit(self, answer: Response) -> None:
        """Have the browser that gets an answer known from now on."""
        path = self.prefix
        answer.set_cookie(_COOKIE, self._cookie, path=path, httponly=True, samesite="strict")


def prefix_of(scope: Scope) -> str:
    """The path below which a request's browser finds all; empty without such a browser."""
    prefix: str = scope.get(_PREFIX, "")
    return prefix


def placed(scope: Scope, markup: str) -> str:
    """A page whose addresses lead to where its browser finds them."""
    prefix = prefix_of(scope)
    return _ADDRESS.sub(rf"\g<1>{prefix}", markup) if prefix else markup
