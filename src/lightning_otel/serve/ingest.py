"""Spans from a request's body into the store, one body at a time, and what became of them."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

from lightning_otel.dataset import Store
from lightning_otel.errors import StoreError
from lightning_otel.receivers import (
    DEFAULT_LIMITS,
    Rejected,
    RequestLimits,
    inflated,
    logs,
    otlp,
    protobuf,
)
from lightning_otel.serve.responses import JSON, RefusalError, busy
from lightning_otel.store.counts import UNFIT
from lightning_otel.types import Span

_MOST_WAITING: Final = 64
"""Bodies that wait for their turn, beyond which senders are asked to come again."""
_LONGEST_WAIT_S: Final = 30.0
"""For its turn and its end: senders wait 10 s by default."""
_DISK_RETRY_S: Final = "5"
_Decode: TypeAlias = Callable[[bytes, str, RequestLimits], Iterator[Span | Rejected]]
_DECODERS: Final[Mapping[tuple[bool, bool], _Decode]] = {
    (False, False): protobuf.decode_spans,
    (False, True): otlp.decode_spans,
    (True, False): protobuf.decode_logs,
    (True, True): logs.decode_logs,
}
"""By whether a body is logs, and whether it is JSON."""


@dataclass(slots=True)
class Counts:
    """Counters of everything that was received."""

    stored: int = 0
    """Spans in a segment, those sent twice counted twice."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Spans that were not kept, by reason."""
    refused: Counter[int] = field(default_factory=Counter)
    """Requests not served, by status."""


class Ingester:
    """Takes bodies in turn: they share one interpreter and one segment, and memory for one."""

    def __init__(self, store: Store) -> None:
        self._writer = store.writer()
        self._turn = ThreadPoolExecutor(1, thread_name_prefix="intake")
        self._waiting = 0
        self._is_dirty = False
        self._last_s = time.monotonic()
        self.counts = Counts()

    async def take(
        self,
        body: bytes,
        content_type: str,
        *,
        is_compressed: bool,
        came: str,
        is_logs: bool = False,
    ) -> Mapping[str, int]:
        """Have the spans of a body in a segment; return how many were rejected, by reason."""
        if self._waiting >= _MOST_WAITING:
            raise busy()
        self._waiting += 1
        decode = _DECODERS[is_logs, content_type == JSON]
        take = partial(self._take_body, body, decode, came, is_compressed=is_compressed)
        try:
            async with asyncio.timeout(_LONGEST_WAIT_S):
                return await asyncio.get_running_loop().run_in_executor(self._turn, take)
        except TimeoutError as exc:
            raise busy() from exc  # if it is taken yet and comes again, it is kept once
        except OSError as exc:
            message = "the store does not take spans now; come again"
            raise RefusalError(503, message, {"Retry-After": _DISK_RETRY_S}) from exc
        finally:
            self._waiting -= 1

    def keep(self, spans: Sequence[Span]) -> None:
        """Have spans made here in the segment; from any thread but the loop's.

        Raises:
            StoreError: The disk refuses them.
        """
        try:
            self._turn.submit(self._keep_spans, spans).result()
        except OSError as exc:
            why = exc.strerror or exc
            raise StoreError(f"the store does not take it now: {why}; come again") from exc

    def seal_if_idle(self, idle_s: float) -> None:
        """Close the segment if nothing came for so long, so that it can be settled."""
        if self._is_dirty and time.monotonic() - self._last_s >= idle_s:
            self._turn.submit(self._seal_segment).result()

    def close(self) -> None:
        """Take no more, and close the segment."""
        self._turn.shutdown(cancel_futures=True)
        self._seal_segment()

    def _take_body(
        self, body: bytes, decode: _Decode, came: str, *, is_compressed: bool
    ) -> Mapping[str, int]:
        if is_compressed:
            body = inflated(body, DEFAULT_LIMITS)
        spans_read = decode(body, came, DEFAULT_LIMITS)  # what is no request is refused here
        rejected: Counter[str] = Counter()
        count = 0

        def fit_spans() -> Iterator[Span]:
            nonlocal count
            for span in spans_read:
                if isinstance(span, Rejected):
                    rejected[span.reason] += 1
                else:
                    count += 1
                    yield span

        self._keep_spans(fit_spans())
        if rejected:  # not before: where the disk refused the others, all of them come again
            self._writer.count_unstored(UNFIT, rejected.total())
        self.counts.stored += count
        self.counts.rejected.update(rejected)
        return rejected

    def _keep_spans(self, spans: Iterable[Span]) -> None:
        self._is_dirty = True
        self._writer.add_all(spans)
        self._last_s = time.monotonic()

    def _seal_segment(self) -> None:
        self._is_dirty = False
        self._writer.seal()
