"""The record of one request that passes: what is sent and answered, handed to the recorder.

Nothing in here holds a byte back; each part is fenced, and a fault costs the record alone.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from opentelemetry import trace
from opentelemetry.context import Context

from lightning_otel import capture
from lightning_otel.dialects import Dialect, find_dialect
from lightning_otel.instrumentors.body import MAX_KEPT_BYTES
from lightning_otel.instrumentors.http import Exchange, Sent, begin_request
from lightning_otel.proxy.codings import Decode, find_decoder

LONGEST_BYTES: Final = 64 << 20
"""A longer body of a request passes unread."""
_ALL_BYTES: Final = 128 << 20
"""Of all connections together: what begins when so much is kept passes unread."""
Place: TypeAlias = Callable[[Mapping[str, str]], Context]
"""Gives the context of a request's span, by its headers."""
_EVENTS: Final = "text/event-stream"
_DONE: Final = b"[DONE]"


class Space:
    """The bytes that all connections keep together.

    Attributes:
        taken: How many there are.
    """

    def __init__(self) -> None:
        self.taken = 0

    def take(self, size: int) -> bool:
        """Take room for so many bytes, if there is some."""
        if self.taken + size > _ALL_BYTES:
            return False
        self.taken += size
        return True


class _Exchange(Exchange):
    """One request that passes; its answer is decoded as it does."""

    def decode(self, body: bytes) -> bytes:
        """Return it as it is."""
        return body


class Record:
    """One request to a model and its answer.

    Attributes:
        dialect: Its reader; None of a request that asks no model.
        is_whole: Whether the record of the answer is written.
        is_unread: Whether the request is too long to be read.
        is_held: Whether it is sent once it is whole, since something in it may be changed.
    """

    def __init__(self, url: str, headers: Mapping[str, str], place: Place, space: Space) -> None:
        """Begin with the head of a request.

        Args:
            url: The address that it goes on to.
            headers: Its headers, by lower-case name.
            place: Gives the context that its span stands in.
            space: The room for its bytes.
        """
        self.url, self.headers = url, headers
        self.dialect: Dialect | None = find_dialect("POST", url)
        self.is_whole = self.is_unread = self.is_held = False
        self._context = Context()
        if self.dialect is not None:
            self._context = _within_trace(place(headers), headers.get("traceparent", ""))
            frame = capture.current_frame(self._context)
            has_assigner = frame is not None and frame.assigner is not None
            self.is_held = has_assigner or capture.asks_for_ids(frame)
        self._space, self._taken = space, 0
        self._start_ns, self._started_s = time.time_ns(), time.perf_counter()
        self._pieces: list[bytes] = []
        self._sent = b""
        self._exchange: Exchange | None = None
        self._decode: Decode | None = find_decoder(headers.get("content-encoding", ""))
        self._status, self._size = 0, 0
        self._first_s: float | None = None
        self._marks: tuple[bytes, ...] = ()
        self._open = bytearray()

    @property
    def sent_bytes(self) -> int:
        """The size of the request, as far as it is kept."""
        return self._taken

    @property
    def refused(self) -> bool:
        """Return whether the answer that begins refuses what was asked besides."""
        exchange = self._exchange
        return exchange is not None and exchange.fallback is not None and self._status in (400, 422)

    def _keep(self, piece: bytes) -> bool:
        if not self._space.take(len(piece)):
            return False
        self._taken += len(piece)
        self._pieces.append(bytes(piece))
        return True

    def _take_pieces(self) -> bytes:
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._space.taken -= self._taken
        self._taken = 0
        return data

    def keep_sent(self, piece: bytes) -> None:
        """Keep a piece of the request's body."""
        if self.is_unread:
            return
        self.is_unread = self._taken + len(piece) > LONGEST_BYTES or not self._keep(piece)
        if self.is_unread and self.is_held:
            self._pieces.append(bytes(piece))  # until it is sent
        elif self.is_unread:
            self._take_pieces()

    def release(self) -> bytes:
        """Return what was kept of a request that is too long to be changed."""
        self.is_held = False
        return self._take_pieces()

    def sent_body(self) -> bytes:
        """Return the request's body."""
        return b"".join(self._pieces)

    def begin(self) -> tuple[str, bytes, dict[str, str]] | None:
        """Begin the span, now that the request is there; return what is sent in its place, if any.

        An address, a body and headers.
        """
        self._sent = self._take_pieces()
        with capture.attach_context(self._context):
            sent = Sent(
                self.url, self._read_sent, self.headers, _arguments, start_ns=self._start_ns
            )
            self._exchange = begin_request("proxy", sent, _Exchange)
        self._sent = b""
        exchange = self._exchange
        return exchange.arguments[0] if exchange is not None and exchange.arguments else None

    def _read_sent(self) -> Any:
        return None if self.is_unread or self._decode is None else self._decode(self._sent)

    def fall_back(self) -> tuple[str, bytes, dict[str, str]]:
        """Return what is sent after a refusal: the request without what was asked besides."""
        assert self._exchange is not None
        self._exchange.note_status(self._status)
        arguments = self._exchange.fall_back()
        self._status = 0
        return arguments[0]  # type: ignore[no-any-return]  # as begin makes them

    def answer(self, status: int, headers: Mapping[str, str]) -> None:
        """Note the head of the answer."""
        self._status = status
        self._decode = find_decoder(headers.get("content-encoding", ""))
        if self.dialect is not None and headers.get("content-type", "").startswith(_EVENTS):
            self._marks = tuple(mark.encode() for mark in self.dialect.end_marks)

    def keep(self, piece: bytes) -> bool:
        """Keep a piece of the answer's body; return whether it ends a stream."""
        if self._first_s is None:
            self._first_s = time.perf_counter() - self._started_s
        if self._decode is None or self._size > MAX_KEPT_BYTES:
            return False
        text = self._decode(piece)
        self._size += len(text)
        if not self._keep(text):
            self._size = MAX_KEPT_BYTES + 1
            return False
        return bool(self._marks) and self._is_ended(text)

    def _is_ended(self, text: bytes) -> bool:
        """Return whether the event that ends the stream has come, and come whole."""
        self._open += text
        if not self._open.endswith((b"\n\n", b"\r\n\r\n")) and not text.rstrip().endswith(_DONE):
            return False
        events, self._open = bytes(self._open), bytearray()
        if self.dialect is None or not any(mark in events for mark in self._marks):
            return False
        return self.dialect.is_ended(events)

    def end(self, *, is_whole: bool, exc: BaseException | None = None) -> None:
        """Write the record, once: with the whole answer, or as far as it came."""
        if self.is_whole:
            return
        self.is_whole = True
        body = self._take_pieces()
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if not self._status:
            exchange.fail(exc or ConnectionError("the program went before the answer came"))
            return
        exchange.note_status(self._status)
        exchange.end_body(body, is_whole=is_whole, first_chunk_s=self._first_s, exc=exc)


def _arguments(url: str, body: bytes | None, headers: dict[str, str]) -> Any:
    """Return what is sent otherwise, as the recorder's clients take it; None for nothing."""
    return None if body is None else ((url, body, headers), {})


def _within_trace(context: Context, traceparent: str) -> Context:
    """Return the context within the program's own span, where that is of the trace of the run."""
    here = trace.get_current_span(context).get_span_context()
    parts = traceparent.split("-")
    if len(parts) != 4 or parts[1] != format(here.trace_id, "032x"):
        return context
    try:
        span_id = int(parts[2], 16)
    except ValueError:
        return context
    around = trace.SpanContext(here.trace_id, span_id, is_remote=True, trace_flags=here.trace_flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(around), context)
