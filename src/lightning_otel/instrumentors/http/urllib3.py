"""Requests of ``urllib3`` to models, and so of ``requests`` and all else that stands on it.

Its own retries and redirects lie within one request; the history of the response has them.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

from opentelemetry import context as otel_context

from lightning_otel import capture
from lightning_otel.capture import operations
from lightning_otel.instrumentors.base import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.body import BodyRecorder
from lightning_otel.instrumentors.http import HttpExchange, Sent, begin_request, take_name
from lightning_otel.instrumentors.model_requests import open_request
from lightning_otel.instrumentors.wrappers import bind_names, wrap_call

_NAMES: Final = ("method", "url", "body", "headers")


class Urllib3Instrumentor(LibraryInstrumentor):
    """Switches the capture of requests by ``urllib3`` and ``requests`` on and off."""

    requires = ("urllib3 >= 1.26",)

    def patches(self) -> Mapping[str, Patch]:
        """The module of the pools."""
        return {"urllib3.connectionpool": self._patch_pool}

    def _patch_pool(self, module: ModuleType) -> None:
        self.wrap(module.HTTPConnectionPool, "urlopen", wrap_call(self.if_active(_begin_request)))


class _Urllib3Exchange(HttpExchange):
    is_preloaded = True

    def succeed(self, result: Any) -> None:
        history = getattr(getattr(result, "retries", None), "history", ())
        for attempt in history:
            self.note_earlier(attempt.status or operations.type_name(attempt.error))
        self.note_status(result.status)
        recorder = self.record_body()
        if recorder is None:
            return
        if self.is_preloaded:
            recorder.keep(result.data)
            recorder.finish(is_whole=True)
        else:
            result._lightning_otel = _ResponseReading(recorder)
            result.__class__ = _recorded_class(type(result))  # type: ignore[arg-type]  # a class has a hash


def _begin_request(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> HttpExchange | None:
    values = bind_names(_NAMES, args, kwargs)
    if values["method"].upper() != "POST":
        return None
    pool, url = args[0], values["url"]
    if "://" not in url:
        host = f"[{pool.host}]" if ":" in pool.host else pool.host
        url = f"{pool.scheme}://{host}:{pool.port}{url}"
    if open_request(otel_context.get_current()) is not None:
        return None

    def write(url: str, content: bytes | None, headers: dict[str, str]) -> tuple[Any, Any]:
        options = {name: kwargs[name] for name in kwargs if name not in _NAMES}
        if content is None:
            content, headers = values.get("body"), {**fields, **headers}
        return (pool, values["method"], values["url"], content, headers, *args[5:]), options

    fields = values.get("headers") or pool.headers or {}
    sent = Sent(url, lambda: values.get("body"), fields, write, can_move=False)
    exchange = begin_request("urllib3", sent, _Urllib3Exchange)
    if isinstance(exchange, _Urllib3Exchange):
        exchange.is_preloaded = values.get("preload_content", True)
    return exchange


class _ResponseReading:
    """Reads one response; the outermost of its nested methods has the program's bytes."""

    def __init__(self, recorder: BodyRecorder) -> None:
        self.recorder = recorder
        self.depth = 0

    def read(self, read: Callable[..., bytes], *args: Any, **kwargs: Any) -> bytes:
        self.depth += 1
        try:
            data = read(*args, **kwargs)
        except BaseException as exc:
            capture.guard_call(self.recorder.note_break, exc)
            raise
        finally:
            self.depth -= 1
        if not self.depth:
            amount = args[0] if args else kwargs.get("amt")
            capture.guard_call(self._keep, data, is_end=amount is None or not (data or amount == 0))
        return data

    def _keep(self, data: bytes, *, is_end: bool) -> None:
        self.recorder.keep(data)
        if is_end:
            self.recorder.finish(is_whole=True)

    def walk(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        return chunks if self.depth else self.recorder.read(self._walk_inside(chunks))

    def _walk_inside(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        while True:
            self.depth += 1
            try:
                chunk = next(chunks, None)
            finally:
                self.depth -= 1
            if chunk is None:
                return
            yield chunk

    def end(self) -> None:
        if not self.depth:
            capture.guard_call(self.recorder.note_close)


@lru_cache(8)
def _recorded_class(cls: Any) -> Any:
    class Recorded(cls):  # type: ignore[misc]  # the library's own
        def read(self, *args: Any, **kwargs: Any) -> bytes:
            data: bytes = self._lightning_otel.read(super().read, *args, **kwargs)
            return data

        def read1(self, *args: Any, **kwargs: Any) -> bytes:
            data: bytes = self._lightning_otel.read(super().read1, *args, **kwargs)
            return data

        def stream(self, *args: Any, **kwargs: Any) -> Any:
            return self._lightning_otel.walk(super().stream(*args, **kwargs))

        def read_chunked(self, *args: Any, **kwargs: Any) -> Any:
            return self._lightning_otel.walk(super().read_chunked(*args, **kwargs))

        def close(self) -> None:
            try:
                super().close()
            finally:
                self._lightning_otel.end()

        def release_conn(self) -> None:
            try:
                super().release_conn()
            finally:
                self._lightning_otel.end()

    return take_name(Recorded, cls)
