"""One request to a model: its span from the first attempt to the last byte of the answer."""

import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
from opentelemetry.context import Context

from lightning_otel import capture, debugging
from lightning_otel.capture import operations
from lightning_otel.instrumentors.openai.endpoints import (
    Attributes,
    Chat,
    Completions,
    Embeddings,
    Json,
)
from lightning_otel.instrumentors.openai.responses import Responses
from lightning_otel.instrumentors.wrappers import Run
from lightning_otel.types import conventions as c

_JSON_START = re.compile(rb"\s*\{")

_ENDPOINTS: Final[Mapping[str, Chat]] = {
    "/chat/completions": Chat(),
    "/responses": Responses(),
    "/completions": Completions(),
    "/embeddings": Embeddings(),
}


def endpoint_of(method: str, url: str) -> Chat | None:
    """The model endpoint a request goes to; None for everything else."""
    if method.lower() != "post":
        return None
    if url in _ENDPOINTS:  # as the client's own methods write it
        return _ENDPOINTS[url]
    path = f"/{urlsplit(url).path.strip('/')}"
    for suffix, endpoint in _ENDPOINTS.items():
        # The longest suffix stands first: "/chat/completions" also ends in "/completions".
        if path.endswith(suffix):
            return endpoint
    return None


def current_request() -> "ModelRequest | None":
    """The request being sent in this context."""
    operation = operations.operation_of()
    found = operation.request if operation is not None else None
    return found if isinstance(found, ModelRequest) else None


class ModelRequest(Run):
    """A call's span, fed by the request's JSON and the response's bytes.

    Attributes:
        options: The client's options as they are sent.
        given: The client's options as the program gave them.
    """

    def __init__(
        self, client: Any, options: Any, endpoint: Chat, operation: operations.Operation
    ) -> None:
        self.client = client
        self.options = self.given = options
        self.endpoint = endpoint
        self.operation = operation
        operation.request = self
        self.context = operation.context
        self._response: Any = None
        self._is_streaming = False
        self._started_s = time.perf_counter()

    @classmethod
    def begin(
        cls, client: Any, options: Any, *, is_stream: bool, resources: str | None = None
    ) -> "ModelRequest | None":
        """Start the span of a request to a model; None for any other request.

        Args:
            client: The client that sends it.
            options: The client's options of it, as it is sent.
            is_stream: Whether the answer is streamed.
            resources: The versions it is made with, as spans say it, where some were substituted.
        """
        endpoint = endpoint_of(options.method, str(options.url))
        if endpoint is None:
            if debugging.is_on:
                debugging.log(f"missed  {options.method} {options.url}: it asks no model")
            return None
        body = options.json_data if isinstance(options.json_data, Mapping) else {}
        if options.extra_json:
            body = {**body, **options.extra_json}
        model = body.get("model")
        attributes: Attributes = {
            c.OPERATION: endpoint.operation,
            c.PROVIDER: _provider_of(type(client)),  # type: ignore[arg-type]  # a class has a hash
            **_server_of(client, str(options.url)),
        }
        if isinstance(model, str):
            attributes[c.REQUEST_MODEL] = model
        if is_stream:
            attributes[c.REQUEST_STREAM] = True
        if resources is not None:
            attributes[c.RESOURCES] = resources
        attributes.update(capture.guard_call(endpoint.request_attributes, body) or {})
        # Read before sending: the program may change its own lists while it waits.
        content = None
        if capture.content_policy().is_kept:
            content = capture.guard_call(endpoint.request_content, body)
        name = f"{endpoint.operation} {model}" if isinstance(model, str) else endpoint.operation
        return cls(client, options, endpoint, operations.start_call(name, attributes, content))

    def observe(self, response: Any) -> None:
        """Note the HTTP response: read after the client has read it, or as it passes by."""
        if self._response is None and not self._is_streaming:
            if response.is_closed:
                self._response = response
            else:
                BodyRecorder(response, self._started_s, self._end_with_body)
                self._is_streaming = True

    def succeed(self, result: Any) -> None:
        """End the span of a call whose answer is there; a stream's span goes on."""
        if self._is_streaming:
            return
        body = self._find_body()
        if body is None and hasattr(result, "model_dump_json"):  # a client that hides its response
            body = capture.guard_call(lambda: result.model_dump_json().encode())
        self._end_with_body(body or b"", is_whole=True)

    def fail(self, exc: BaseException) -> None:
        """End the span with the exception the caller is about to see, and the answer if it came."""
        self._end_with_body(self._find_body() or b"", is_whole=True, exc=exc)

    def _find_body(self) -> bytes | None:
        return (
            None if self._response is None else capture.guard_call(lambda: self._response.content)
        )

    def _end_with_body(
        self,
        body: bytes,
        *,
        is_whole: bool,
        first_chunk_s: float | None = None,
        exc: BaseException | None = None,
    ) -> None:
        """End the span with the answer's body, as far as it was read.

        Args:
            body: A JSON document, or server-sent events.
            is_whole: Whether the body was read to its end.
            first_chunk_s: Seconds from the span's start to the first byte of a stream.
            exc: What ended the call instead.
        """
        operation = self.operation
        if operation.is_over:
            return
        # Apart, both and the answer's body are freed at once.
        operation.request, self.context, self._response = None, Context(), None
        self.options = self.given = None
        read = capture.guard_call(self._read_body, body, first_chunk_s)
        answer, is_complete = read or ({}, False)
        error = answer.get("error")
        if exc is not None:
            operation.fail(exc)
        elif isinstance(error, dict):
            kind = str(error.get("type") or error.get("code") or "error")
            operation.fail_with(kind, str(error.get("message") or ""))
        else:
            if not is_whole and not is_complete:
                operation.attributes[c.ABANDONED] = True
            operation.stop()

    def _read_body(self, body: bytes, first_chunk_s: float | None) -> tuple[Json, bool]:
        """Put an answer on the span; return it, and whether a stream said that it is over."""
        answer: Json | None = None
        is_complete = False
        if _JSON_START.match(body):
            answer = _json_object(body)
        elif events := read_events(body):
            if first_chunk_s is not None:
                self.operation.attributes[c.TIME_TO_FIRST_CHUNK] = first_chunk_s
            is_complete = self.endpoint.is_complete(events)
            answer = self.endpoint.assemble(events)
        if answer is not None:
            capture.guard_call(self._take_answer, answer)
        return answer or {}, is_complete

    def _take_answer(self, answer: Json) -> None:
        self.operation.attributes.update(self.endpoint.response_attributes(answer))
        if capture.content_policy().is_kept:
            self.operation.body.update(self.endpoint.response_content(answer))


def read_events(body: bytes) -> list[Json]:
    """The JSON objects in a body of server-sent events; the closing ``[DONE]`` as ``done``.

    Source: the event stream format of the HTML standard, section 9.2.6; an event of several data
    lines is joined by newlines.
    """
    texts: list[bytes] = []
    data: list[bytes] = []
    is_done = False
    for line in (*body.splitlines(), b""):
        if line.startswith(b"data:"):
            data.append(line[5:])
        elif data and not line:
            text = data[0] if len(data) == 1 else b"\n".join(data)
            data.clear()
            if text.lstrip(b" ").startswith(b"[DONE]"):
                is_done = True
            else:
                texts.append(text)
    try:
        # One call for all: a call for each costs half as much again.
        found: list[Any] = orjson.loads(b"[%s]" % b",".join(texts))
    except ValueError:
        found = [_json_object(text) for text in texts]
    events: list[Json] = [event for event in found if isinstance(event, dict)]
    return [*events, {"done": True}] if is_done else events


def _json_object(data: bytes) -> Json | None:
    try:
        found = orjson.loads(data)
    except ValueError:
        # What orjson refuses and the client accepts, such as an escaped lone surrogate or NaN.
        try:
            found = json.loads(data)
        except ValueError:
            return None
    return found if isinstance(found, dict) else None


@lru_cache(64)
def _provider_of(client: type) -> str:
    # By name, not issubclass: the Azure class is known only to a module we do not import.
    is_azure = any(cls.__name__ == "BaseAzureClient" for cls in client.__mro__)
    return "azure.ai.openai" if is_azure else "openai"


def _server_of(client: Any, sent_to: str) -> Attributes:
    url = client.base_url
    host, port = url.host, url.port
    if "://" in sent_to:  # a whole address, which the client's own does not count for
        parts = urlsplit(sent_to)
        host, port = parts.hostname or host, parts.port
    found: Attributes = {c.SERVER_ADDRESS: host}
    if port is not None:
        found[c.SERVER_PORT] = port
    return found


MAX_KEPT_BYTES: Final = 32 << 20
_END_MARK: Final = b"\ndata: [DONE]"
"""The end of a stream. LiteLLM reads no further, and lets go of the response some time later."""
_REPLACED: Final = ("iter_bytes", "aiter_bytes", "close", "aclose")


class BodyRecorder:
    """Keeps what passes through one response, and tells when that ends."""

    _is_over = True  # until a response is observed

    def __init__(self, response: Any, started_s: float, ended: Callable[..., None]) -> None:
        """Begin to observe a response whose body is still unread.

        Args:
            response: The HTTP response.
            started_s: When the request began, on the clock of ``time.perf_counter``.
            ended: Told once that the reading is over: the body, ``is_whole``, ``first_chunk_s`` and
                the exception that broke it as ``exc``.
        """
        self._ended = ended
        self._chunks: list[bytes] = []
        self._size = 0
        self._started_s = started_s
        self._first_chunk_s: float | None = None
        # While the client's own code reads, it also closes: at the end and when the body breaks.
        self._is_reading = False
        self._response = response
        self._class = type(response)
        self._is_over = False
        for name in _REPLACED:
            setattr(response, name, getattr(self, f"_{name}"))

    def __del__(self) -> None:
        """A response dropped unread and unclosed was abandoned."""
        # At the interpreter's end the module may be gone before the last responses are.
        if not self._is_over and capture is not None:
            capture.guard_call(self._finish)

    def _close(self) -> None:
        try:
            self._class.close(self._response)
        finally:
            capture.guard_call(self._closed)

    async def _aclose(self) -> None:
        try:
            await self._class.aclose(self._response)
        finally:
            capture.guard_call(self._closed)

    def _iter_bytes(self, *args: Any, **kwargs: Any) -> Iterator[bytes]:
        self._is_reading = True
        try:
            for chunk in self._class.iter_bytes(self._response, *args, **kwargs):
                try:  # for each chunk, the fence itself costs as much as the keeping
                    self._keep(chunk)
                except Exception:  # noqa: BLE001  # capture never raises into the traced program
                    capture.note_fault()
                self._is_reading = False
                yield chunk
                self._is_reading = True
        except BaseException as exc:
            capture.guard_call(self._broken, exc)
            raise
        capture.guard_call(self._finish, is_whole=True)

    async def _aiter_bytes(self, *args: Any, **kwargs: Any) -> AsyncIterator[bytes]:
        self._is_reading = True
        try:
            # The inner generator is not closed from here: several that are collected together are
            # all closed by the event loop, and each may be closed only once.
            async for chunk in self._class.aiter_bytes(self._response, *args, **kwargs):
                try:  # for each chunk, the fence itself costs as much as the keeping
                    self._keep(chunk)
                except Exception:  # noqa: BLE001  # capture never raises into the traced program
                    capture.note_fault()
                self._is_reading = False
                yield chunk
                self._is_reading = True
        except BaseException as exc:
            capture.guard_call(self._broken, exc)
            raise
        capture.guard_call(self._finish, is_whole=True)

    def _keep(self, chunk: bytes) -> None:
        if self._first_chunk_s is None:
            self._first_chunk_s = time.perf_counter() - self._started_s
        if self._size < MAX_KEPT_BYTES:
            self._chunks.append(chunk)
            self._size += len(chunk)
        # On a line of its own: within an answer's text a newline is escaped.
        if b"[DONE]" in chunk and (b"\n" + chunk[-20:]).rstrip().endswith(_END_MARK):
            self._finish(is_whole=True)

    def _closed(self) -> None:
        if not self._is_reading:
            self._finish()

    def _broken(self, exc: BaseException) -> None:
        # A generator that is closed was left by its reader; anything else broke the stream.
        self._finish(exc=None if isinstance(exc, GeneratorExit) else exc)

    def _finish(self, *, is_whole: bool = False, exc: BaseException | None = None) -> None:
        if self._is_over:
            return
        self._is_over = True
        # The response gets its own methods back, so that the two no longer hold each other.
        for name in _REPLACED:
            self._response.__dict__.pop(name, None)
        body = b"".join(self._chunks)
        self._chunks.clear()
        self._ended(body, is_whole=is_whole, first_chunk_s=self._first_chunk_s, exc=exc)
