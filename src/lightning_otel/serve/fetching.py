"""Selected spans out as Arrow: what ``Store("http://…")`` on another machine reads.

A selection comes as JSON (``store/selections.py`` says which); the answer is one Arrow IPC stream
with the columns asked for, sent as it is read. Memory holds a part of it, whatever its length.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from lightning_otel.dataset import Store
from lightning_otel.errors import QueryError
from lightning_otel.serve.answers import RefusalError
from lightning_otel.serve.streaming import Streams
from lightning_otel.store.engines.ipc import MEDIA_TYPE, parts
from lightning_otel.store.engines.selections import selection_of
from lightning_otel.store.schema import WIDE_COLUMNS
from lightning_otel.store.source import Selection
from lightning_otel.store.table import Query, windows

_MOST_AT_ONCE: Final = 4
"""Answers under way, beyond which readers are asked to come again: each has a DuckDB."""
_PART_SPANS: Final = 10_000
"""Spans with their content that are read at once."""


class Fetching:
    """Answers readers, a few at a time."""

    def __init__(self) -> None:
        self._streams = Streams(_MOST_AT_ONCE)

    async def answer(self, request: Request) -> Response:
        """The selected spans.

        Raises:
            RefusalError: The body is no selection, or too many are answered now.
        """
        state = request.app.state
        body = await state.bodies.read(request)
        try:
            selection = selection_of(body)
        except QueryError as exc:
            raise RefusalError(400, str(exc)) from exc
        return await self._streams.answer(parts(_tables(state.store, selection)), MEDIA_TYPE)


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
