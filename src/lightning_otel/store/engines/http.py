"""A store behind ``lightning-otel serve`` on another machine: spans out as Arrow, a few spans in.

``http://host:4318``, ``https://…``; a token stands before the host (``http://:token@host``), or in
``LIGHTNING_OTEL_TOKEN``. Reading needs ``nanoarrow`` (extra ``remote``).
"""

import http.client
import urllib.parse
from collections.abc import Iterable, Sequence
from typing import Final

import orjson

from lightning_otel import config
from lightning_otel.errors import ConfigError, StoreError
from lightning_otel.store.engines.ipc import Arrival
from lightning_otel.store.engines.otlp import request_of, resource_spans
from lightning_otel.store.engines.selections import text_of_selection
from lightning_otel.store.source import Selection
from lightning_otel.types import Span

SCHEMES: Final = ("http", "https")
FETCH_PATH: Final = "/v1/fetch"
ADD_PATH: Final = "/v1/traces"
ADD_BYTES: Final = 4 << 20
"""Spans are sent in requests of about this size, which any server takes."""
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
        parts: list[bytes] = []
        size_bytes = 0
        for span in spans:
            parts.append(resource_spans(span))
            size_bytes += len(parts[-1])
            if size_bytes >= ADD_BYTES:
                self._send(parts)
                parts, size_bytes = [], 0
        if parts:
            self._send(parts)

    def _send(self, parts: Sequence[bytes]) -> None:
        answer = self._post(ADD_PATH, request_of(parts))
        try:
            said = orjson.loads(answer.read() or b"{}")
            refused = said.get("partialSuccess") or {}
            count = int(refused.get("rejectedSpans", 0))
        except (OSError, http.client.HTTPException, ValueError, AttributeError, TypeError) as exc:
            raise StoreError(
                f"{self.name} did not say whether it keeps the spans: {exc}; try again: what comes "
                "twice counts once"
            ) from exc
        finally:
            answer.close()
        if count:
            raise StoreError(
                f"{self.name} rejected {count} of {len(parts)} spans "
                f"({refused.get('errorMessage', '')}); the others are kept"
            )

    def _post(self, path: str, body: bytes) -> "_Answer":
        token = self._token or config.token()
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        connect = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = connect(self._host, timeout=TIMEOUT_S)
        try:
            connection.request("POST", self._path + path, body, headers)
            answer = _Answer(connection, connection.getresponse())
            if answer.status != http.HTTPStatus.OK:
                raise self._refused(answer)
        except (OSError, http.client.HTTPException) as exc:
            connection.close()
            raise StoreError(
                f"cannot reach {self.name}: {str(exc) or type(exc).__name__}; "
                "is `lightning-otel serve` running there?"
            ) from exc
        except StoreError:
            connection.close()
            raise
        return answer

    def _refused(self, answer: "_Answer") -> StoreError:
        said = _said(answer.read(_SAID))
        hints = {
            401: "set LIGHTNING_OTEL_TOKEN to the token that the server was given",
            403: "give the server a token, and set LIGHTNING_OTEL_TOKEN to it here",
            404: "is that `lightning-otel serve`, of this version or a later one?",
            413: "send fewer spans at once",
            429: "it is busy; try again",
            503: "it is busy; try again",
        }
        hint = hints.get(answer.status, "is that `lightning-otel serve`?")
        return StoreError(f"{self.name} answers {answer.status} {said}".rstrip() + f"; {hint}")


class _Answer:
    """An answer that goes on arriving, with the connection it comes over."""

    def __init__(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        self.status = response.status
        self._connection = connection
        self._response = response

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes of the body."""
        return self._response.read(None if size < 0 else size)

    def close(self) -> None:
        """Hang up."""
        self._response.close()
        self._connection.close()


def _said(body: bytes) -> str:
    """The first line of an error, or the message in one of ours."""
    try:
        found = orjson.loads(body)
        return str(found["message"])
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return body.decode("utf-8", "replace").strip().partition("\n")[0]
