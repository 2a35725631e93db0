"""Calls over a websocket, each from its request to the last event of its answer.

Source: ``responses.connect()`` of the ``openai`` client, which sends ``response.create`` events; a
server answers those of a connection one after the other, with the events of a stream.
"""

import time
from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Final

from opentelemetry import context as otel_context

from lightning_otel import capture
from lightning_otel.dialects.dialect import parse_object
from lightning_otel.dialects.responses import Responses
from lightning_otel.instrumentors.base import LibraryInstrumentor
from lightning_otel.instrumentors.openai import ClientRequest
from lightning_otel.instrumentors.wrappers import WrappedRun, wrap_call

_CALLS: Final = "_lightning_otel_calls"
_DIALECT: Final = Responses()


def patch_connections(instrumentor: LibraryInstrumentor, *connections: type) -> None:
    """Record what goes over connections of these classes."""
    for connection in connections:
        instrumentor.wrap_calls(connection, _begin_call, "send")
        for name in ("recv_bytes", "close"):
            # Where it is defined, as else it could not be pickled: releases differ.
            owner = next(base for base in connection.__mro__ if name in vars(base))
            instrumentor.wrap(owner, name, wrap_call(_follow_calls))


class _SocketCall(ClientRequest):
    def __init__(self, connection: Any, body: Mapping[str, Any]) -> None:
        uri = capture.read_attribute(connection._connection.protocol, "uri")
        host = getattr(uri, "host", "")
        server = f"//[{host}]:{uri.port}" if ":" in host else f"//{host}:{uri.port}" if host else ""
        client = SimpleNamespace(base_url=server)
        options = SimpleNamespace(json_data=body, extra_json=None, url="/responses")
        super().__init__(client, options, _DIALECT, otel_context.get_current(), is_stream=True)
        self._events: list[bytes] = []
        self._first_s: float | None = None
        self._is_streaming = True  # what was sent is not yet answered
        self._calls = vars(connection).setdefault(_CALLS, deque())
        self._calls.append(self)

    def fail(self, exc: BaseException) -> None:
        self._calls.remove(self)
        super().fail(exc)

    def take(self, data: bytes) -> bool:
        if self._first_s is None:
            self._first_s = time.perf_counter() - self.started_s
        self._events.append(data)
        event = parse_object(data) or {}
        return event.get("type") in (*self._endpoint.end_marks, "error")

    def finish(self, exc: BaseException | None = None, *, is_whole: bool) -> None:
        body = b"".join(b"data: %s\n\n" % event for event in self._events)
        self.end(body, is_whole=is_whole, first_chunk_s=self._first_s, exc=exc)


class _Following(WrappedRun):
    def __init__(self, calls: deque[_SocketCall]) -> None:
        self._calls = calls

    def succeed(self, result: Any) -> None:
        if result is None:
            self._leave(None)
        elif self._calls and self._calls[0].take(bytes(result)):
            self._calls.popleft().finish(is_whole=True)

    def fail(self, exc: BaseException) -> None:
        if isinstance(exc, Exception) and not isinstance(exc, TimeoutError):
            self._leave(exc)

    def _leave(self, exc: BaseException | None) -> None:
        while self._calls:
            self._calls.popleft().finish(exc, is_whole=False)


def _begin_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _SocketCall | None:
    event: Any = args[1] if len(args) > 1 else kwargs.get("event")
    if hasattr(event, "model_dump"):
        event = event.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if not isinstance(event, Mapping) or event.get("type") != "response.create":
        return None
    return _SocketCall(args[0], {key: value for key, value in event.items() if key != "type"})


def _follow_calls(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Following | None:
    calls = vars(args[0]).get(_CALLS)
    return _Following(calls) if calls else None
