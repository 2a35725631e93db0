"""Engines that answer over HTTP, and a store behind ``lightning-otel serve`` as the first of them.

A served store is ``http://host:4318`` or ``https://…``; its token stands in the URL
(``http://:token@host``), or in ``LIGHTNING_OTEL_TOKEN``.
"""

import contextlib
import http.client
import shutil
import urllib.parse
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

import orjson
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # has no stubs
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from lightning_otel import config
from lightning_otel.errors import ConfigError, StoreError
from lightning_otel.store.engines.otlp import UnsendableError, encode_request
from lightning_otel.store.engines.remote import RemoteSource
from lightning_otel.store.selection import Selection
from lightning_otel.types import Span

SCHEMES: Final = ("http", "https")
FETCH_PATH: Final = "/v1/fetch"
ADD_PATH: Final = "/v1/traces"
ADD_BYTES: Final = 4 << 20
"""Spans are sent in requests of about this size, which any server takes."""
CONNECT_S: Final = 60.0
ANSWER_S: Final = 900.0
"""A server reads all the selected spans before it begins to answer."""
_PROTOBUF: Final = "application/x-protobuf"
_BYTES: Final = "application/octet-stream"
_MAX_REASON_BYTES: Final = 2000
_HINTS: Final = {
    401: "set LIGHTNING_OTEL_TOKEN to the token that the server was given",
    403: "give the server a token, and set LIGHTNING_OTEL_TOKEN to it here",
    404: "is that `lightning-otel serve`, of this version or a later one?",
    413: "send fewer spans at once",
    429: "it is busy; try again",
    503: "it is busy; try again",
}


class HttpSource(RemoteSource):
    """An engine that answers POST requests; the ``hint`` is for where nobody answers."""

    hint: str

    def __init__(self, parts: urllib.parse.SplitResult, *, is_tls: bool, port: int | None) -> None:
        try:
            port = parts.port or port
        except ValueError as exc:
            raise ConfigError(f"{parts.scheme}://{parts.hostname}: {exc}; name a port") from exc
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        self._host = f"{host}" if port is None else f"{host}:{port}"
        self._connect = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection

    @abstractmethod
    def _make_headers(self) -> dict[str, str]:
        """Return the headers that say who asks."""

    @abstractmethod
    def _make_error(self, status: int, text: bytes) -> StoreError:
        """Return the error for an answer other than 200."""

    def _download(self, path: str, body: bytes, file_path: Path, kind: str = _BYTES) -> None:
        with self._post(path, body, kind) as answer, file_path.open("wb") as file:
            shutil.copyfileobj(answer, file)

    @contextlib.contextmanager
    def _post(
        self, path: str, body: bytes, kind: str = _BYTES
    ) -> Iterator[http.client.HTTPResponse]:
        headers = {"Content-Type": kind, "Connection": "close", **self._make_headers()}
        connection = self._connect(self._host, timeout=CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(ANSWER_S)
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise self._make_error(answer.status, answer.read(_MAX_REASON_BYTES))
            yield answer
        except (OSError, http.client.HTTPException) as exc:
            reason = str(exc) or type(exc).__name__
            raise StoreError(f"cannot reach {self.name}: {reason}; {self.hint}") from exc
        finally:
            connection.close()


class ServedStore(HttpSource):
    """A served store."""

    hint = "is `lightning-otel serve` running there?"

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(
                f"{parts.scheme}://{parts.hostname or ''}… is no server; write http://host:4318"
            )
        super().__init__(parts, is_tls=parts.scheme == "https", port=None)
        self._path = parts.path.rstrip("/")
        self._token = urllib.parse.unquote(parts.password or parts.username or "")
        self.name = f"{parts.scheme}://{self._host}{self._path}"

    def send(self, selection: Selection, path: Path) -> None:
        """Write the selected spans to a Parquet file."""
        names = [field.name for field in fields(Selection) if field.name != "also"]
        selection = replace(selection, columns=list(selection.columns))
        body = orjson.dumps({name: getattr(selection, name) for name in names})
        self._download(self._path + FETCH_PATH, body, path, "application/json")

    def add(self, spans: Iterable[Span]) -> None:
        """Have the server keep spans; they are durable when it has answered."""
        # Messages of protobuf that stand one behind the other are one message.
        body, count, rejected, reasons = bytearray(), 0, 0, set[str]()
        for span in spans:
            count += 1
            try:
                body += encode_request([span], with_content=True)
            except UnsendableError as exc:
                rejected += 1
                reasons.add(str(exc))
            if len(body) >= ADD_BYTES:
                rejected += self._send_spans(bytes(body), reasons)
                body.clear()
        if body:
            rejected += self._send_spans(bytes(body), reasons)
        if rejected:
            raise StoreError(
                f"{self.name} rejected {rejected} of {count} spans ({'; '.join(sorted(reasons))}); "
                "the others are kept"
            )

    def _send_spans(self, body: bytes, reasons: set[str]) -> int:
        with self._post(self._path + ADD_PATH, body, _PROTOBUF) as answer:
            kind, text = answer.headers.get_content_type(), answer.read()
        try:
            partial = ExportTraceServiceResponse.FromString(text).partial_success
            is_receipt = kind == _PROTOBUF
        except DecodeError:
            is_receipt = False
        if not is_receipt:
            raise StoreError(
                f"{self.name} did not say whether it keeps the spans; try again: what comes twice "
                "counts once"
            )
        if partial.error_message:
            reasons.add(partial.error_message)
        return int(partial.rejected_spans)

    def _make_headers(self) -> dict[str, str]:
        token = self._token or config.TOKEN.read()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _make_error(self, status: int, text: bytes) -> StoreError:
        try:
            reason = str(orjson.loads(text)["message"])
        except (orjson.JSONDecodeError, TypeError, KeyError):
            reason = text.decode("utf-8", "replace").strip().partition("\n")[0]
        hint = _HINTS.get(status, "is that `lightning-otel serve`?")
        return StoreError(f"{self.name} answers {status} {reason}".rstrip() + f"; {hint}")
