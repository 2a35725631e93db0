"""The bytes of an answer, as they pass by."""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

from lightning_otel import capture

MAX_KEPT_BYTES: Final = 32 << 20
_END_MARK: Final = b"\ndata: [DONE]"
"""The end of a stream. LiteLLM reads no further, and lets go of the response some time later."""
_REPLACED: Final = ("iter_bytes", "aiter_bytes", "iter_raw", "aiter_raw", "close", "aclose")


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
        self._is_reading = self._is_raw = False
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
        return self._pass_on(self._class.iter_bytes(self._response, *args, **kwargs))

    def _aiter_bytes(self, *args: Any, **kwargs: Any) -> AsyncIterator[bytes]:
        return self._pass_on_async(self._class.aiter_bytes(self._response, *args, **kwargs))

    def _iter_raw(self, *args: Any, **kwargs: Any) -> Iterator[bytes]:
        chunks: Iterator[bytes] = self._class.iter_raw(self._response, *args, **kwargs)
        if self._is_reading:  # what it reads is decoded, and passes by then
            return chunks
        self._is_raw = True
        return self._pass_on(chunks)

    def _aiter_raw(self, *args: Any, **kwargs: Any) -> AsyncIterator[bytes]:
        chunks: AsyncIterator[bytes] = self._class.aiter_raw(self._response, *args, **kwargs)
        if self._is_reading:  # as above
            return chunks
        self._is_raw = True
        return self._pass_on_async(chunks)

    def _pass_on(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        self._is_reading = True
        try:
            for chunk in chunks:
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

    async def _pass_on_async(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self._is_reading = True
        try:
            # The inner generator is not closed from here: several that are collected together are
            # all closed by the event loop, and each may be closed only once.
            async for chunk in chunks:
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
        if self._is_raw:
            body = capture.guard_call(self._decode, body) or b""
        self._ended(body, is_whole=is_whole, first_chunk_s=self._first_chunk_s, exc=exc)

    def _decode(self, body: bytes) -> bytes:
        """Return a body as its encoding says, such as gzip."""
        headers = self._response.headers
        encoding = {key: headers[key] for key in ("content-encoding",) if key in headers}
        return bytes(self._class(200, headers=encoding, content=body).content)
