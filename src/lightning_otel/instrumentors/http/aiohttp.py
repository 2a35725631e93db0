"""Requests of ``aiohttp`` to models: its sessions are wrapped where every verb passes once."""

import asyncio
from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

import wrapt

from lightning_otel import capture
from lightning_otel.instrumentors.base import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.body import BodyRecorder
from lightning_otel.instrumentors.http import HttpExchange, Sent, begin_request, take_name
from lightning_otel.instrumentors.wrappers import bind_names, wrap_call

_READS: Final = ("read", "readany", "readline", "readuntil", "readexactly", "readchunk")
_WALKS: Final = ("__aiter__", "iter_any", "iter_chunked", "iter_chunks")


class AiohttpInstrumentor(LibraryInstrumentor):
    """Switches the capture of requests by ``aiohttp`` on and off."""

    requires = ("aiohttp >= 3.9",)

    def patches(self) -> Mapping[str, Patch]:
        """The module of the session."""
        return {"aiohttp": self._patch_session}

    def _patch_session(self, module: ModuleType) -> None:
        self.wrap(module.ClientSession, "_request", wrap_call(self.if_active(_begin_request)))


class _AiohttpExchange(HttpExchange):
    def succeed(self, result: Any) -> None:
        self.note_status(result.status)
        recorder = self.record_body()
        if recorder is None:
            return
        if result.content.at_eof():
            recorder.finish(is_whole=True)
            return
        result.content = _BodyReader(result.content, recorder)
        result.__class__ = _recorded_class(type(result))  # type: ignore[arg-type]  # a class has a hash


def _begin_request(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> HttpExchange | None:
    values = bind_names(("method", "url"), args[:3], kwargs)
    method = values["method"]
    if method.upper() != "POST":
        return None
    url = str(values["url"] if "url" in values else values["str_or_url"])
    content = values.get("json") if values.get("json") is not None else values.get("data")

    def write(url: str, content: bytes | None, headers: dict[str, str]) -> tuple[Any, Any]:
        if content is None:
            own = values.get("headers") or {}
            items = own.items() if isinstance(own, Mapping) else own
            return args, {**kwargs, "headers": [*items, *headers.items()]}
        names = ("method", "url", "str_or_url", "json", "data", "headers")
        options = {name: kwargs[name] for name in kwargs if name not in names}
        headers = {"Content-Type": "application/json", **headers}
        return (args[0], method, url), {**options, "data": content, "headers": headers}

    sent = Sent(url, lambda: content, values.get("headers") or {}, write)
    return begin_request("aiohttp", sent, _AiohttpExchange)


@lru_cache(8)
def _recorded_class(cls: Any) -> Any:
    class RecordedResponse(cls):  # type: ignore[misc]  # the library's own
        __slots__ = ()

        def close(self) -> None:
            try:
                super().close()
            finally:
                capture.guard_call(self.content.note_close)

        def release(self) -> Any:
            try:
                return super().release()
            finally:
                capture.guard_call(self.content.note_close)

    return take_name(RecordedResponse, cls)


class _BodyReader(wrapt.ObjectProxy[Any]):
    def __init__(self, reader: Any, recorder: BodyRecorder) -> None:
        super().__init__(reader)
        self._self_recorder = recorder
        self._self_cancelled: type[BaseException] | None = None

    def note_close(self) -> None:
        exc = self._self_cancelled() if self._self_cancelled is not None else None
        self._self_recorder.finish(exc=exc)

    def read_nowait(self, n: int = -1) -> bytes:
        data: bytes = self.__wrapped__.read_nowait(n)
        capture.guard_call(self.keep, data)
        return data

    def keep(self, data: Any) -> None:
        self._self_cancelled = None
        self._self_recorder.keep(data[0] if isinstance(data, tuple) else data)
        if self.__wrapped__.at_eof():
            self._self_recorder.finish(is_whole=True)

    def note_break(self, exc: BaseException) -> None:
        if isinstance(exc, asyncio.CancelledError):
            self._self_cancelled = type(exc)
        else:
            self._self_recorder.note_break(exc)


def _make_read(name: str) -> Any:
    async def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            data = await getattr(self.__wrapped__, name)(*args, **kwargs)
        except BaseException as exc:
            capture.guard_call(self.note_break, exc)
            raise
        capture.guard_call(self.keep, data)
        return data

    return read


def _make_walk(name: str) -> Any:
    def walk(self: Any, *args: Any, **kwargs: Any) -> Any:
        # With the proxy in the reader's place: what it iterates by are the methods above.
        return getattr(type(self.__wrapped__), name)(self, *args, **kwargs)

    return walk


for _name in _READS:
    setattr(_BodyReader, _name, _make_read(_name))
for _name in _WALKS:
    setattr(_BodyReader, _name, _make_walk(_name))
