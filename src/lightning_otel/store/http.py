"""A store behind ``lightning-otel serve`` on another machine: spans out as Arrow, a few spans in.

``http://host:4318``, ``https://…``; a token stands before the host (``http://:token@host``), or in
``LIGHTNING_OTEL_TOKEN``. Reading needs ``nanoarrow`` (extra ``remote``).
"""

import http.client
import urllib.parse
from collections.abc import Iterable
from typing import Final

from lightning_otel import config
from lightning_otel.errors import ConfigError, StoreError
from lightning_otel.store.ipc import MEDIA_TYPE, Arrival
from lightning_otel.store.lines import line_of
from lightning_otel.store.schema import record_of_span
from lightning_otel.store.selections import text_of_selection
from lightning_otel.store.source import Selection
from lightning_otel.types import Span

SCHEMES: Final = ("http", "https")
FETCH_PATH: Final = "/v1/fetch"
ADD_PATH: Final = "/v1/spans"
LINES_TYPE: Final = "application/x-ndjson"
ADD_BYTES: Final = 4 << 20
"""Lines are sent in bodies of about this size; one span may have 8 MiB."""
TIMEOUT_S: Final = 60.0
_SAID: Final = 300


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
        return Arrival(self._post(FETCH_PATH, body, "application/json"), self.name)

    def add(self, spans: Iterable[Span]) -> None:
        """Have the server keep spans; they are durable when it has answered.

        Raises:
            StoreError: The server cannot be reached, or refuses.
        """
        lines: list[bytes] = []
        size = 0
        for span in spans:
            lines.append(line_of(record_of_span(span)))
            size += len(lines[-1])
            if size >= ADD_BYTES:
                self._post(ADD_PATH, b"".join(lines), LINES_TYPE).read()
                lines, size = [], 0
        if lines:
            self._post(ADD_PATH, b"".join(lines), LINES_TYPE).read()

    def _post(self, path: str, body: bytes, kind: str) -> http.client.HTTPResponse:
        token = self._token or config.token()
        headers = {"Content-Type": kind, "Accept": MEDIA_TYPE}
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
        said = response.read(_SAID).decode("utf-8", "replace").strip().partition("\n")[0]
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
