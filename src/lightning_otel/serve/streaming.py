"""Long answers, sent as they are made: a few at a time, and none begun that cannot be."""

import tempfile
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from pathlib import Path
from typing import Final

from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from lightning_otel.serve.responses import busy

PARQUET: Final = "application/vnd.apache.parquet"
PART_BYTES: Final = 1 << 16


def parquet_parts(write: Callable[[Path], object]) -> Iterator[bytes]:
    """Yield a Parquet file in parts; ``write`` makes it whole before the first one."""
    with tempfile.TemporaryDirectory(prefix="lightning-otel-") as folder:
        path = Path(folder, "rows.parquet")
        write(path)
        with path.open("rb") as file:
            while part := file.read(PART_BYTES):
                yield part


def join_lines(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines in parts of some size."""
    buffer = bytearray()
    for line in lines:
        buffer += line
        if len(buffer) >= PART_BYTES:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)


class Streams:
    """Answers under way; beyond a number of them readers are asked to come again."""

    def __init__(self, most_at_once: int) -> None:
        self._most_at_once = most_at_once
        self._under_way = 0

    async def answer(
        self,
        parts: Iterator[bytes],
        media_type: str,
        headers: Mapping[str, str] | None = None,
        run: Callable[[Callable[[], bytes]], Awaitable[bytes]] = run_in_threadpool,
    ) -> Response:
        """An answer in parts, the first of which ``run`` makes before anything is said."""
        if self._under_way >= self._most_at_once:
            raise busy()
        self._under_way += 1
        try:
            # From then on a fault can only break the answer off.
            first = await run(lambda: next(parts, b""))
        except BaseException:
            self._under_way -= 1
            raise
        return StreamedResponse(
            _send_parts(first, parts), lambda: self._leave_stream(parts), media_type, headers
        )

    def _leave_stream(self, parts: Iterator[bytes]) -> None:
        self._under_way -= 1
        if isinstance(parts, Generator):
            parts.close()  # takes away the file that it reads


class StreamedResponse(StreamingResponse):
    """An answer that holds a place until it ends; its stream may never run."""

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        release: Callable[[], None],
        media_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(parts, headers=headers, media_type=media_type)
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._release()


async def _send_parts(first: bytes, parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for part in iterate_in_threadpool(parts):
        yield part
