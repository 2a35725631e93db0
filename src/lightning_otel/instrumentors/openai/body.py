"""A response's bytes as the program reads them: nothing is read for it, delayed or changed.

The two methods through which a body is decoded, and the two that close it, are replaced on the one
response object; so the program keeps the client's own stream object, of its own type.
"""

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

from lightning_otel import capture

MAX_KEPT_BYTES = 32 << 20
_REPLACED = ("iter_bytes", "aiter_bytes", "close", "aclose")


class Answered(Protocol):
    """Receives the body once, when it was read to its end or given up."""

    def __call__(self, body: bytes, *, is_whole: bool, first_chunk_s: float | None) -> None:
        """Take the body."""


class Failed(Protocol):
    """Receives the exception that broke the reading."""

    def __call__(self, exc: BaseException) -> None:
        """Take the exception."""


class BodyRecorder:
    """Keeps what passes through one response, and tells when that ends."""

    def __init__(self, response: Any, started_s: float, answered: Answered, failed: Failed) -> None:
        """Begin to observe a response whose body is still unread.

        Args:
            response: The HTTP response.
            started_s: When the request began, on the clock of ``time.perf_counter``.
            answered: Told the body.
            failed: Told the exception.
        """
        self._answered = answered
        self._failed = failed
        self._chunks: list[bytes] = []
        self._size = 0
        self._started_s = started_s
        self._first_chunk_s: float | None = None
        self._is_over = False
        self._response = response
        self._class = type(response)
        for name in _REPLACED:
            setattr(response, name, getattr(self, f"_{name}"))

    def __del__(self) -> None:
        """A response dropped unread and unclosed was abandoned."""
        self._finish(is_whole=False)

    def _close(self) -> None:
        try:
            self._class.close(self._response)
        finally:
            self._finish(is_whole=False)

    async def _aclose(self) -> None:
        try:
            await self._class.aclose(self._response)
        finally:
            self._finish(is_whole=False)

    def _iter_bytes(self, *args: Any, **kwargs: Any) -> Iterator[bytes]:
        response = self._response
        try:
            for chunk in self._class.iter_bytes(response, *args, **kwargs):
                self._keep(chunk)
                yield chunk
        except BaseException as exc:
            self._broken(exc)
            raise
        self._finish(is_whole=True)

    async def _aiter_bytes(self, *args: Any, **kwargs: Any) -> AsyncIterator[bytes]:
        response = self._response
        try:
            async for chunk in self._class.aiter_bytes(response, *args, **kwargs):
                self._keep(chunk)
                yield chunk
        except BaseException as exc:
            self._broken(exc)
            raise
        self._finish(is_whole=True)

    def _keep(self, chunk: bytes) -> None:
        if self._first_chunk_s is None:
            self._first_chunk_s = time.perf_counter() - self._started_s
        if self._size < MAX_KEPT_BYTES:
            self._chunks.append(chunk)
            self._size += len(chunk)

    def _broken(self, exc: BaseException) -> None:
        # A generator that is closed was left by its reader; anything else broke the stream.
        if isinstance(exc, GeneratorExit):
            self._finish(is_whole=False)
        elif not self._is_over:
            self._leave()
            capture.guarded(self._failed, exc)

    def _finish(self, *, is_whole: bool) -> None:
        if not self._is_over:
            self._leave()
            capture.guarded(
                self._answered,
                b"".join(self._chunks),
                is_whole=is_whole,
                first_chunk_s=self._first_chunk_s,
            )
            self._chunks.clear()

    def _leave(self) -> None:
        """Give the response its own methods back, so that the two no longer hold each other."""
        self._is_over = True
        for name in _REPLACED:
            self._response.__dict__.pop(name, None)
