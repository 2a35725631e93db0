"""A store behind ``lightning-otel serve`` on another machine: spans out as Arrow, a few spans in.

``http://host:4318``, ``https://…``; a token stands before the host (``http://:token@host``), or in
``LIGHTNING_OTEL_TOKEN``. Reading needs ``nanoarrow`` (extra ``remote``).
"""

import http.client
import itertools
import urllib.parse
from collections.abc import Iterable
from typing import Final

import orjson

from lightning_otel import config
from lightning_otel.errors import ConfigError, StoreError
from lightning_otel.store.ipc import Arrival
from lightning_otel.store.otlp import request_of
from lightning_otel.store.selections import text_of_selection
from lightning_otel.store.source import Selection
from lightning_otel.types import Span

SCHEMES: Final = ("http", "https")
FETCH_PATH: Final = "/v1/fetch"
ADD_PATH: Final = "/v1/traces"
ADD_SPANS: Final = 256
"""Spans sent in one request."""
TIMEOUT_S: Final = 60.0
_SAID: Final = 2000


class Server:
    """The engine: a served store."""

    def __init__(self, url: str) -> None:
        """Name a server; nothing is opened yet.

        Args:
            url: As in the module's description.

        Raises:
            ConfigError: It cannot be understood.
        """
        parts = urllib.parse.urlsplit(url)
        try:
            port = parts.port
        except ValueError as exc:
            raise ConfigError(f"{parts.scheme}://{parts.hostname}: {exc}; name a port") from exc
        if not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(
                f"{parts.scheme}://{parts.hostname or ''}… is no server; write http://host:4318"
            )
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self._is_tls = parts.scheme == "https"
        self._host = host if port is None else f"{host}:{port}"
        self._path = parts.path.rstrip("/")
        self._token = urllib.parse.unquote(parts.password or parts.username or "")
        self.name = f"{parts.scheme}://{self._host}{self._path}"

    def fetch(self, selection: Selection) -> Arrival:
        """The selected spans as Arrow.

        Raises:
            StoreError: The server cannot be reached, or refuses.
        """
        body = text_of_selection(selection).encode()
        return Arrival(self._post(FETCH_PATH, body), self.name)

    def add(self, spans: Iterable[Span]) -> None:
        """Have the server keep spans; they are durable when it has answered.

        Raises:
            StoreError: The server cannot be reached, or refuses.
        """
        waiting = iter(spans)
        while sent := list(itertools.islice(waiting, ADD_SPANS)):
            answer = orjson.loads(self._post(ADD_PATH, request_of(sent)).read() or b"{}")
            refused = answer.get("partialSuccess") or {}
            if int(refused.get("rejectedSpans", 0)):
                raise StoreError(
                    f"{self.name} rejected {refused['rejectedSpans']} of {len(sent)} spans: "
                    f"{refused.get('errorMessage', '')}; the others are kept"
                )

    def _post(self, path: str, body: bytes) -> http.client.HTTPResponse:
        token = self._token or config.token()
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        connect = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = connect(self._host, timeout=TIMEOUT_S)
        try:
            connection.request("POST", self._path + path, body, headers)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise self._refused(response)
        except (OSError, http.client.HTTPException) as exc:
            connection.close()
            raise StoreError(
                f"cannot reach {self.name}: {str(exc) or type(exc).__name__}; "
                "is `lightning-otel serve` running there?"
            ) from exc
        except StoreError:
            connection.close()
            raise
        return response

    def _refused(self, response: http.client.HTTPResponse) -> StoreError:
        said = _said(response.read(_SAID))
        hints = {
            401: "set LIGHTNING_OTEL_TOKEN to the token that the server was given",
            403: "set LIGHTNING_OTEL_TOKEN to the token that the server was given",
            404: "is that `lightning-otel serve`, of this version or a later one?",
            413: "send fewer spans at once",
            429: "it is busy; try again",
            503: "it is busy; try again",
        }
        hint = hints.get(response.status, "is that `lightning-otel serve`?")
        return StoreError(f"{self.name} answers {response.status} {said}".rstrip() + f"; {hint}")


def _said(body: bytes) -> str:
    """The first line of an error, or the message in one of ours."""
    try:
        found = orjson.loads(body)
        return str(found["message"])
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return body.decode("utf-8", "replace").strip().partition("\n")[0]
