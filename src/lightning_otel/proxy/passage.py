"""One request and its answer on their way: the heads that change, and the record of a copy.

Nothing in here holds a byte back; each part of the record is fenced, and a fault costs it alone.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import h11
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lightning_otel import capture
from lightning_otel.dialects import Dialect, find_dialect, may_ask_model
from lightning_otel.instrumentors import token_ids
from lightning_otel.instrumentors.body import MAX_KEPT_BYTES
from lightning_otel.instrumentors.http import (
    RECORDED,
    HttpExchange,
    Sent,
    begin_request,
    parse_content,
)
from lightning_otel.proxy.codings import Chunks, Decode, find_decoder, readable_codings
from lightning_otel.proxy.routes import Destination, Upstream, server_address
from lightning_otel.types import conventions as c

if TYPE_CHECKING:
    from lightning_otel.proxy import Proxy

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_HEAD_BYTES: Final = 1 << 20
_LONGEST_BYTES: Final = 64 << 20
"""A longer body of a request passes unread."""
_ALL_BYTES: Final = 128 << 20
"""Of all connections together: what would have to be kept beyond it passes unread."""
_OWN: Final = frozenset(
    {
        b"upgrade", b"http2-settings", b"proxy-authorization", b"proxy-connection",
        RECORDED.encode(),
    }
)  # fmt: skip
"""Headers that end here."""
_FRAMING: Final = ("content-length", "transfer-encoding", "expect", "host")
_PARTS: Final = (h11.InformationalResponse, h11.Response, h11.Data, h11.EndOfMessage)
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"[DONE]", b"[DONE]\n", b"[DONE]\r\n")


class _ProxyExchange(HttpExchange):
    @property
    def answer(self) -> str:
        """The messages of the answer, as JSON text; empty if none came."""
        return self._request.operation.body.get(c.OUTPUT_MESSAGES, "")

    def decode(self, body: bytes) -> bytes:
        """Return a body as it is: it was decoded as it passed."""
        return body


class Passage:
    """One request and its answer on their way.

    Attributes:
        dialect: Its reader; None where nothing is recorded.
        is_held: Whether it is sent once it is whole, since something in it may be changed.
        is_unread: Whether the request is too long to be read.
        is_sent: Whether the request is there to its end.
        is_answered: Whether the answer is.
        is_refused: Whether the answer refuses what we asked besides, and is not passed on.
        is_unreadable: Whether the answer is no HTTP, and passes unread until its end.
        sent_bytes: The size of the request's body, as far as it is kept.
        failure: What kept the server from being reached.
    """

    dialect: Dialect | None = None
    is_held = is_unread = is_sent = is_answered = is_refused = is_unreadable = False
    sent_bytes = 0
    reading: "asyncio.Future[Any] | None" = None
    failure: BaseException | None = None
    _has_begun = _has_ended = False
    _context = Context()
    _exchange: _ProxyExchange | None = None
    _chunks: Chunks | None = None
    _decode: Decode | None = None
    _decode_answer: Decode | None = None
    _first_s: float | None = None
    _status = _size = 0
    _marks: tuple[bytes, ...] = ()

    def __init__(
        self,
        proxy: "Proxy",
        request: h11.Request,
        headers: Mapping[str, str],
        destination: Destination,
    ) -> None:
        self.destination = destination
        self._proxy, self._request, self._headers = proxy, request, headers
        self._framing = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        self._sent: list[bytes] = []
        self._pieces: list[bytes] = []
        self._event = bytearray()
        self._start_ns, self._started_s = time.time_ns(), time.perf_counter()
        if request.method == b"POST" and RECORDED not in headers:
            capture.guard_call(self._find_reader)

    def _find_reader(self) -> None:
        dialect = find_dialect("POST", self.destination.url)
        if dialect is None:
            if may_ask_model(self.destination.url):
                self._proxy.note_unread(self.destination)
            return
        self._decode = find_decoder(self._headers.get("content-encoding", ""))
        self.is_held, self.dialect = self._proxy.is_changing, dialect
        self._proxy.passed += 1

    def write_head(self, items: Iterable[tuple[bytes, bytes]] | None = None) -> bytes:
        """Return the head that is sent: with another target and host, without what ends here."""
        host = self.destination.host.encode()
        headers = []
        for name, value in items or self._request.headers.raw_items():
            lower = name.lower()
            if lower == b"accept-encoding" and self.dialect is not None:
                headers.append((name, readable_codings(value.decode("latin-1")).encode()))
            elif lower not in _OWN:
                headers.append((name, host if lower == b"host" else value))
        if "host" not in self._headers:  # of HTTP/1.0
            headers.insert(0, (b"Host", host))
        request = h11.Request(
            method=self._request.method, target=self.destination.target, headers=headers
        )
        head = self._framing.send(request) or b""
        version = self._request.http_version
        return head.replace(b" HTTP/1.1\r\n", b" HTTP/%s\r\n" % version, 1)

    def write(self, event: h11.Data | h11.EndOfMessage) -> bytes:
        """Return the bytes of a part of the body."""
        return self._framing.send(event) or b""

    def write_whole(self, arguments: Any) -> bytes:
        """Return the bytes of a request that was held, as it was or by what it is to be."""
        url, body, headers = arguments or (
            self.destination.url, b"".join(self._sent), self._headers
        )  # fmt: skip
        self._framing = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        self.destination = server_address(Upstream(url))
        pairs = {name: text for name, text in headers.items() if name.lower() not in _FRAMING}
        pairs |= {"host": self.destination.host, "content-length": str(len(body))}
        encoded = [(name.encode("latin-1"), pairs[name].encode("latin-1")) for name in pairs]
        head = self.write_head(encoded)
        return head + self.write(h11.Data(data=body)) + self.write(h11.EndOfMessage())

    def _take_room(self, size: int) -> bool:
        has_room = self._proxy.kept_bytes + size <= _ALL_BYTES
        self._proxy.kept_bytes += size if has_room else 0
        return has_room

    def keep_sent(self, piece: bytes) -> None:
        """Keep a piece of the request's body."""
        if self.dialect is None or self.is_unread or self._has_ended:
            return
        size = len(piece)
        if self.sent_bytes + size <= _LONGEST_BYTES and self._take_room(size):
            self.sent_bytes += size
        else:
            self.is_unread = True
        self._sent.append(bytes(piece))
        if self.is_unread and not self.is_held:
            self.drop_sent()

    def drop_sent(self) -> None:
        """Let go of the request's body."""
        self._proxy.kept_bytes -= self.sent_bytes
        self.sent_bytes = 0
        self._sent.clear()

    def release(self) -> bytes:
        """Return the beginning of a request that is too long to be changed."""
        self.is_held, body = False, b"".join(self._sent)
        self.drop_sent()
        return self.write_head() + self.write(h11.Data(data=body))

    def begin(self) -> Any:
        """Begin the span, once; return address, body and headers to send in place of its own."""
        if self._has_begun or self.dialect is None:
            return None
        self._has_begun = True
        return capture.guard_call(self._begin)

    def _begin(self) -> Any:
        decode = None if self.is_unread else self._decode
        content = parse_content(lambda: decode(b"".join(self._sent)) if decode else None)

        def read_prompt() -> str:
            if self.dialect is None or content is None:
                return ""
            return self.dialect.request_content(content).get(c.INPUT_MESSAGES, "")

        def write(url: str, body: bytes | None, headers: dict[str, str]) -> Any:
            return None if body is None else ((url, body, headers), {})

        url, headers = self.destination.url, self._headers
        context = self._proxy.place(headers, read_prompt)
        self._context = _within_trace(context, headers)
        with capture.attach_context(self._context):
            sent = Sent(url, lambda: content, headers, write, start_ns=self._start_ns)
            self._exchange = exchange = begin_request("proxy", sent, _ProxyExchange)
        return exchange.arguments[0] if exchange is not None and exchange.arguments else None

    def fall_back(self) -> bytes:
        """Return what is sent after a refusal: the request without what was asked besides."""
        assert self._exchange is not None
        self._exchange.note_status(self._status)
        self._status, self.is_refused, self._chunks = 0, False, None
        self.is_answered = self.is_unreadable = False
        return self.write_whole(self._exchange.fall_back()[0])

    def read(self, data: bytes) -> None:
        """Read a copy of the bytes of the answer; none are its end, by the connection's."""
        if not self.is_unreadable:
            self.is_unreadable = not capture.guard_call(self._read, data)

    def _read(self, data: bytes) -> bool:
        """Return whether it can be read on."""
        try:
            if self._chunks is None:
                self._framing.receive_data(data)
                data = self._read_framed()
            if self._chunks is not None:
                capture.guard_call(self._keep, self._chunks.read(data))
                self.is_answered, data = self._chunks.is_over, self._chunks.rest
        except (h11.RemoteProtocolError, ValueError):
            return False
        if self.is_answered and not self.is_refused:
            self.end(is_whole=True)
        # More than it said: nobody knows what comes next.
        return not (self.is_answered and data)

    def _read_framed(self) -> bytes:
        """Read the head and a body that is not in chunks; return what is left."""
        while type(event := self._framing.next_event()) in _PARTS:
            if isinstance(event, h11.Data):
                capture.guard_call(self._keep, bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                self.is_answered = True
            elif isinstance(event, h11.Response) and self._take_head(event):
                self._chunks = Chunks()
                break
        return self._framing.trailing_data[0]

    def _take_head(self, event: h11.Response) -> bool:
        """Return whether the body comes in chunks."""
        self._status, headers = event.status_code, headers_of(event)
        exchange = self._exchange
        can_fall_back = exchange is not None and exchange.fallback is not None
        self.is_refused = can_fall_back and token_ids.is_refusal(self._status)
        self._decode_answer = find_decoder(headers.get("content-encoding", ""))
        if self.dialect and headers.get("content-type", "").startswith("text/event-stream"):
            self._marks = tuple(mark.encode() for mark in self.dialect.end_marks)
        has_body = self._request.method != b"HEAD" and self._status not in (204, 304)
        return has_body and "transfer-encoding" in headers

    def _keep(self, piece: bytes) -> None:
        """Keep a piece of the answer's body; write the record where it ends a stream."""
        if not piece or self.dialect is None or self.is_refused or self._has_ended:
            return
        if self._first_s is None:
            self._first_s = time.perf_counter() - self._started_s
        if self._decode_answer is None or self._size > MAX_KEPT_BYTES:
            return
        text = self._decode_answer(piece)
        if not self._take_room(len(text)):
            self._decode_answer = None
            return
        self._size += len(text)
        self._pieces.append(text)
        if not self._marks:
            return
        self._event += text
        if self._event.endswith(_EVENT_ENDS):
            events, self._event = bytes(self._event), bytearray()
            if any(mark in events for mark in self._marks) and self.dialect.is_ended(events):
                self.end(is_whole=True)

    def end(self, *, is_whole: bool, exc: BaseException | None = None) -> None:
        """Write the record, once; where the request is still being read, after that."""
        if self.reading is not None and not self.reading.done():
            self.reading.add_done_callback(lambda _: self.end(is_whole=is_whole, exc=exc))
        elif self.dialect is not None and not self._has_ended:
            self._has_ended = True
            if is_whole:  # the answer may have come before the request's end
                self.begin()
            capture.guard_call(self._end, is_whole, exc)
            self.drop_sent()
            self._proxy.kept_bytes -= self._size
            self._pieces.clear()

    def _end(self, is_whole: bool, exc: BaseException | None) -> None:  # noqa: FBT001
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if not self._status:
            exchange.fail(exc or ConnectionError("the program went before the answer came"))
        else:
            exchange.note_status(self._status)
            body = b"".join(self._pieces)
            exchange.end_body(body, is_whole=is_whole, first_chunk_s=self._first_s, exc=exc)
        self._proxy.note_answer(self._context, exchange.answer)


def make_parser() -> h11.Connection:
    """Return what reads a request."""
    return h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)


def headers_of(event: Any) -> dict[str, str]:
    """Return the headers of a head, by lower-case name."""
    headers: dict[str, str] = {}
    for name, value in event.headers:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers


def _within_trace(context: Context, headers: Mapping[str, str]) -> Context:
    """Return the context within the program's own span, where that is of the trace of the run."""
    here = trace.get_current_span(context).get_span_context()
    inner = trace.get_current_span(_PROPAGATOR.extract(headers)).get_span_context()
    if not inner.is_valid or inner.trace_id != here.trace_id:
        return context
    around = trace.SpanContext(here.trace_id, inner.span_id, True, here.trace_flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(around), context)
