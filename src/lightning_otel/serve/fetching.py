"""Selected spans out as Arrow: what ``Store("http://…")`` on another machine reads.

A selection comes as JSON (``store/selections.py`` says which); the answer is one Arrow IPC stream
with the columns asked for, sent as it is read. Memory holds a part of it, whatever its length.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Final

from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from lightning_otel.errors import LightningOtelError, QueryError
from lightning_otel.serve.answers import RefusalError
from lightning_otel.serve.guard import busy
from lightning_otel.store import Store
from lightning_otel.store.ipc import MEDIA_TYPE, parts
from lightning_otel.store.schema import WIDE_COLUMNS
from lightning_otel.store.selections import selection_of
from lightning_otel.store.source import Selection
from lightning_otel.store.table import Query, windows

_MOST_AT_ONCE: Final = 4
"""Answers under way, beyond which readers are asked to come again: each has a DuckDB."""
_PART_SPANS: Final = 10_000
"""Spans with their content that are read at once."""


class Fetching:
    """Answers readers, a few at a time."""

    def __init__(self) -> None:
        self._under_way = 0

    async def answer(self, request: Request) -> Response:
        """The selected spans.

        Raises:
            RefusalError: There is no token, the body is no selection, or too many are answered now.
        """
        state = request.app.state
        if not state.has_token:
            # The files are their owner's alone; a port is open to every user of the machine.
            raise RefusalError(403, "spans are read with a token only: serve --token-file FILE")
        body = await state.bodies.read(request)
        try:
            selection = selection_of(body)
        except QueryError as exc:
            raise RefusalError(400, str(exc)) from exc
        if self._under_way >= _MOST_AT_ONCE:
            raise busy()
        self._under_way += 1
        rest = parts(_tables(state.store, selection))
        try:
            # Before anything is answered: from then on a fault can only break the answer off.
            first = await run_in_threadpool(next, rest)
        except BaseException as exc:
            self._under_way -= 1
            if isinstance(exc, LightningOtelError):
                raise RefusalError(500, f"the store cannot be read: {exc.what}") from exc
            raise
        return StreamingResponse(self._sent(first, rest), media_type=MEDIA_TYPE)

    async def _sent(self, first: bytes, rest: Iterator[bytes]) -> AsyncIterator[bytes]:
        try:
            yield first
            async for part in iterate_in_threadpool(rest):
                yield part
        finally:
            self._under_way -= 1


def _tables(store: Store, selection: Selection) -> Iterator[Query]:
    """The selected spans in parts that memory holds; at least one, if an empty one."""
    source = store.source
    if not set(selection.columns) & set(WIDE_COLUMNS):
        yield source.fetch(selection)
        return
    con = source.connect(("spans",), ("start_ns",))
    starts = source.fetch(replace(selection, columns=("start_ns",), is_ordered=False), con)
    times = windows(starts, _PART_SPANS) or [(0, 0)]
    for since_ns, until_ns in times:
        yield source.fetch(replace(selection, since_ns=since_ns, until_ns=until_ns))
