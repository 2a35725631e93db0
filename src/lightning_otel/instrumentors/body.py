"""The bytes of an answer, as they pass by."""

import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Final

from lightning_otel import capture

MAX_KEPT_BYTES: Final = 32 << 20
_END_MARK: Final = b"\ndata: [DONE]"
"""The end of a stream. LiteLLM reads no further, and lets go of the response some time later."""
_REPLACED: Final = ("iter_bytes", "aiter_bytes", "iter_raw", "aiter_raw", "close", "aclose")


class BodyRecorder:
    """Keeps the bytes of one answer, and reports when their reading ends."""

    is_over = True  # until it begins

    def __init__(self, started_s: float, ended: Callable[..., None]) -> None:
        """Args:
        started_s: When the request began, on the clock of ``time.perf_counter``.
        ended: Called once when the reading is over: the body, ``is_whole``, ``first_chunk_s``
            and the exception that broke it as ``exc``.
        """
        self._ended = ended
        self._chunks: list[bytes] = []
        self._size = 0
        self._started_s = started_s
        self._first_chunk_s: float | None = None
        # While the client's own code reads, it also closes: at the end and when the body breaks.
        self._is_reading = False
        self.is_over = False

    def __del__(self) -> None:
        """A body dropped unread and unclosed was abandoned."""
        # At the interpreter's end the module may be gone before the last responses are.
        if not self.is_over and capture is not None:
            capture.guard_call(self.finish)

    def read(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Hand on the chunks of a body as they come."""
        self._is_reading = True
        try:
            for chunk in chunks:
                try:  # for each chunk, the fence itself costs as much as the keeping
                    self.keep(chunk)
                except Exception:  # noqa: BLE001  # capture never raises into the traced program
                    capture.note_fault()
                self._is_reading = False
                yield chunk
                self._is_reading = True
        except BaseException as exc:
            capture.guard_call(self.note_break, exc)
            raise
        capture.guard_call(self.finish, is_whole=True)

    async def read_async(self, chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """Hand on the chunks of a body as they come."""
        self._is_reading = True
        try:
            # The inner generator is not closed from here: several that are collected together are
            # all closed by the event loop, and each may be closed only once.
            async for chunk in chunks:
                try:  # for each chunk, the fence itself costs as much as the keeping
                    self.keep(chunk)
                except Exception:  # noqa: BLE001  # capture never raises into the traced program
                    capture.note_fault()
                self._is_reading = False
                yield chunk
                self._is_reading = True
        except BaseException as exc:
            capture.guard_call(self.note_break, exc)
            raise
        capture.guard_call(self.finish, is_whole=True)

    def keep(self, chunk: bytes) -> None:
        """Keep a chunk."""
        if self._first_chunk_s is None:
            self._first_chunk_s = time.perf_counter() - self._started_s
        if self._size < MAX_KEPT_BYTES:
            self._chunks.append(chunk)
            self._size += len(chunk)
        # On a line of its own: within an answer's text a newline is escaped.
        if b"[DONE]" in chunk and (b"\n" + chunk[-20:]).rstrip().endswith(_END_MARK):
            self.finish(is_whole=True)

    def decode(self, body: bytes) -> bytes:
        """Return a body without the coding it passed by in."""
        return body

    def note_close(self) -> None:
        """Note that the program closed the response."""
        if not self._is_reading:
            self.finish()

    def note_break(self, exc: BaseException) -> None:
        """Note what ended the reading."""
        # A generator that is closed was left by its reader; anything else broke the stream.
        self.finish(exc=None if isinstance(exc, GeneratorExit) else exc)

    def finish(self, *, is_whole: bool = False, exc: BaseException | None = None) -> None:
        """End it, once."""
        if self.is_over:
            return
        self.is_over = True
        body = b"".join(self._chunks)
        self._chunks.clear()
        body = capture.guard_call(self.decode, body) or b""
        self._ended(body, is_whole=is_whole, first_chunk_s=self._first_chunk_s, exc=exc)


class ResponseRecorder(BodyRecorder):
    """Keeps what passes through one response of an ``httpx`` client, decoded."""

    def __init__(self, response: Any, started_s: float, ended: Callable[..., None]) -> None:
        super().__init__(started_s, ended)
        self._is_raw = False
        self._response = response
        self._class = type(response)
        for name in _REPLACED:
            setattr(response, name, getattr(self, f"_{name}"))

    def _close(self) -> None:
        try:
            self._class.close(self._response)
        finally:
            capture.guard_call(self.note_close)

    async def _aclose(self) -> None:
        try:
            await self._class.aclose(self._response)
        finally:
            capture.guard_call(self.note_close)

    def _iter_bytes(self, *args: Any, **kwargs: Any) -> Iterator[bytes]:
        return self.read(self._class.iter_bytes(self._response, *args, **kwargs))

    def _aiter_bytes(self, *args: Any, **kwargs: Any) -> AsyncIterator[bytes]:
        return self.read_async(self._class.aiter_bytes(self._response, *args, **kwargs))

    def _iter_raw(self, *args: Any, **kwargs: Any) -> Iterator[bytes]:
        chunks: Iterator[bytes] = self._class.iter_raw(self._response, *args, **kwargs)
        if self._is_reading:  # what it reads is decoded, and passes by then
            return chunks
        self._is_raw = True
        return self.read(chunks)

    def _aiter_raw(self, *args: Any, **kwargs: Any) -> AsyncIterator[bytes]:
        chunks: AsyncIterator[bytes] = self._class.aiter_raw(self._response, *args, **kwargs)
        if self._is_reading:  # as above
            return chunks
        self._is_raw = True
        return self.read_async(chunks)

    def decode(self, body: bytes) -> bytes:
        """Return a body as its encoding says, such as gzip, if the program reads it raw."""
        if not self._is_raw:
            return body
        headers = self._response.headers
        encoding = {key: headers[key] for key in ("content-encoding",) if key in headers}
        return bytes(self._class(200, headers=encoding, content=body).content)

    def finish(self, *, is_whole: bool = False, exc: BaseException | None = None) -> None:
        """End it; the response gets its own methods back, so that the two let each other go."""
        if not self.is_over:
            for name in _REPLACED:
                self._response.__dict__.pop(name, None)
        super().finish(is_whole=is_whole, exc=exc)
