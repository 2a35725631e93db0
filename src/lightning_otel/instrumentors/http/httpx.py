"""Requests of ``httpx`` and ``httpx2`` to models, recorded where they leave the process.

Wrapped transports miss what a program answers itself, as ``MockTransport`` and caches do.
"""

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

from lightning_otel import capture
from lightning_otel.instrumentors.base import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.body import BodyRecorder
from lightning_otel.instrumentors.http import HttpExchange, Sent, begin_request
from lightning_otel.instrumentors.wrappers import wrap_call


class _TransportInstrumentor(LibraryInstrumentor):
    """Common part of both libraries; OpenTelemetry keeps one instance a class, inherited."""

    def _patch_transports(self, module: ModuleType) -> None:
        send = wrap_call(self.if_active(_begin_request))
        self.wrap(module.HTTPTransport, "handle_request", send)
        self.wrap(module.AsyncHTTPTransport, "handle_async_request", send)


class HTTPXInstrumentor(_TransportInstrumentor):
    """Switches the capture of requests by ``httpx`` on and off."""

    requires = ("httpx >= 0.27",)

    def patches(self) -> Mapping[str, Patch]:
        """The module of the transports."""
        return {"httpx": self._patch_transports}


class HTTPX2Instrumentor(_TransportInstrumentor):
    """Switches the capture of requests by ``httpx2`` on and off."""

    requires = ("httpx2 >= 2",)

    def patches(self) -> Mapping[str, Patch]:
        """The module of the transports."""
        return {"httpx2": self._patch_transports}


class _HttpxExchange(HttpExchange):
    _response_class: Any = None
    _coding = ""

    def succeed(self, result: Any) -> None:
        self.note_status(result.status_code)
        recorder = self.record_body()
        if recorder is not None:
            self._response_class = type(result)
            self._coding = result.headers.get("content-encoding", "")
            stream = result.stream
            result.stream = _recorded_class(_stream_base(stream))(stream, recorder)

    def drop(self, result: Any) -> Any:
        is_sync = _stream_base(result.stream).__name__ == "SyncByteStream"
        return result.close if is_sync else result.aclose

    def decode(self, body: bytes) -> bytes:
        if not self._coding or not body:
            return body
        headers = {"content-encoding": self._coding}
        return bytes(self._response_class(200, headers=headers, content=body).content)


def _begin_request(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> HttpExchange | None:
    request = args[1] if len(args) > 1 else kwargs["request"]
    if request.method != "POST":
        return None
    library = type(request).__module__.partition(".")[0]

    def write(url: str, content: bytes | None, headers: dict[str, str]) -> tuple[Any, Any]:
        if content is None:
            request.headers.update(headers)
            return args, kwargs
        copy = type(request)(
            "POST", url, headers=headers, content=content, extensions=request.extensions
        )
        return (args[0], copy), {}

    sent = Sent(str(request.url), lambda: _content_of(request), request.headers, write)
    exchange = begin_request(library, sent, _HttpxExchange)
    if exchange is not None and _content_of(request) is None:
        capture.guard_call(_read_as_it_goes, request, exchange)
    return exchange


def _read_as_it_goes(request: Any, exchange: HttpExchange) -> None:
    def ended(body: bytes, **how: Any) -> None:
        exchange.take_sent(body, str(request.url))

    recorder = BodyRecorder(time.perf_counter(), ended)
    request.stream = _recorded_class(_stream_base(request.stream))(request.stream, recorder)


def _content_of(request: Any) -> bytes | None:
    """Return a request's body; None where a generator makes it, which may run once only."""
    content: bytes | None = request.content if hasattr(request, "_content") else None
    return content


def _stream_base(stream: Any) -> type:
    """Return the library's own class of a stream, which its clients ask for."""
    names = ("SyncByteStream", "AsyncByteStream")
    return next(cls for cls in type(stream).__mro__ if cls.__name__ in names)


class _RecordedStream:
    def __init__(self, stream: Any, recorder: BodyRecorder) -> None:
        self._stream = stream
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[bytes]:
        return self._recorder.read(self._stream)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._recorder.read_async(self._stream)

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            capture.guard_call(self._recorder.note_close)

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            capture.guard_call(self._recorder.note_close)


@lru_cache(8)
def _recorded_class(base: Any) -> Any:
    return type("RecordedByteStream", (_RecordedStream, base), {})
