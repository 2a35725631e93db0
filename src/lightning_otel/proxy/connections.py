"""A program's connection and the one to the server that it stands for: bytes go on as they came.

Each connection of the program has one of its own to the server, so that keep-alive, closing, early
answers, half-closed connections and slow readers are what they would be without us. Of an answer no
byte is changed; a copy is read, and the record is written before the last byte goes on.
"""

import asyncio
import socket
import struct
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import h11

from lightning_otel import capture
from lightning_otel.dialects import Dialect
from lightning_otel.instrumentors.http import RECORDED
from lightning_otel.proxy.codings import readable_codings
from lightning_otel.proxy.recording import Record
from lightning_otel.proxy.routes import Destination, server_address

if TYPE_CHECKING:
    from lightning_otel.proxy import Proxy

_HEAD_BYTES: Final = 1 << 20
_QUICK_BYTES: Final = 256 << 10
"""A longer request is read in a thread."""
_LINGER_S: Final = 2.0
"""How long an answer of our own waits for the program to take it."""
_RESET: Final = struct.pack("ii", 1, 0)
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_OWN: Final = frozenset(
    {
        b"upgrade", b"http2-settings", b"proxy-authorization", b"proxy-connection",
        RECORDED.encode(),
    }
)  # fmt: skip
"""Headers that end here."""

_PARTS: Final = (h11.InformationalResponse, h11.Response, h11.Data, h11.EndOfMessage)
_FRAMING: Final = ("content-length", "transfer-encoding", "expect", "host")


class _Passage:
    """One request and its answer on their way.

    Attributes:
        request: The head of the request.
        headers: Its headers, by lower-case name.
        destination: Where it goes.
        record: Its record; None where nothing is recorded.
        is_sent: Whether the request is there to its end.
        is_answered: Whether the answer is.
        is_refused: Whether the answer refuses what we asked besides, and is not passed on.
        is_unreadable: Whether the answer is no HTTP, and passes unread until its end.
        reading: The reading of a long request in a thread.
        ends_record: Whether the record ends with that.
    """

    def __init__(
        self,
        request: h11.Request,
        headers: Mapping[str, str],
        destination: Destination,
        record: Record | None,
    ) -> None:
        self.request, self.headers = request, headers
        self.destination, self.record = destination, record
        self.is_sent = self.is_answered = self.is_refused = self.is_unreadable = False
        self.has_begun = self.ends_record = False
        self.reading: asyncio.Future[Any] | None = None
        self._framing = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)

    def head(self) -> bytes:
        """Return the head that is sent: with another target and host, without what ends here."""
        return self._write_head(self.request.headers.raw_items())

    def _write_head(self, items: Iterable[tuple[bytes, bytes]]) -> bytes:
        host = self.destination.host.encode()
        headers = []
        for name, value in items:
            lower = name.lower()
            if lower == b"accept-encoding" and self.record is not None:
                headers.append((name, readable_codings(value.decode("latin-1")).encode()))
            elif lower not in _OWN:
                headers.append((name, host if lower == b"host" else value))
        if "host" not in self.headers:  # of HTTP/1.0
            headers.insert(0, (b"Host", host))
        request = h11.Request(
            method=self.request.method, target=self.destination.target, headers=headers
        )
        head = self._framing.send(request) or b""
        version = self.request.http_version
        return head.replace(b" HTTP/1.1\r\n", b" HTTP/%s\r\n" % version, 1)

    def write(self, event: h11.Data | h11.EndOfMessage) -> bytes:
        """Return the bytes of a part of the body."""
        return self._framing.send(event) or b""

    def write_whole(self, url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """Return the bytes of a request that is sent in place of the program's."""
        self._framing = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        self.destination = server_address(url)
        pairs = {name: text for name, text in headers.items() if name.lower() not in _FRAMING}
        pairs |= {"host": self.destination.host, "content-length": str(len(body))}
        encoded = [(name.encode("latin-1"), pairs[name].encode("latin-1")) for name in pairs]
        head = self._write_head(encoded)
        return head + self.write(h11.Data(data=body)) + self.write(h11.EndOfMessage())

    def read(self, data: bytes) -> None:
        """Read a copy of the bytes of the answer; no bytes are its end by the connection's."""
        if self.is_unreadable:
            return
        try:
            self._framing.receive_data(data)
            pieces: list[bytes] = []
            while type(event := self._framing.next_event()) in _PARTS:
                if type(event) is h11.Data:
                    pieces.append(event.data)
                else:
                    self._keep(pieces)
                    self._take(event)
            self._keep(pieces)
            if self.is_answered and self._framing.trailing_data[0]:
                self.is_unreadable = True  # more than it said: nobody knows what comes next
        except h11.RemoteProtocolError:
            self.is_unreadable = True

    def _keep(self, pieces: list[bytes]) -> None:
        """Keep what has come of the body in one: to look at each chunk costs more than all else."""
        if pieces and self.record is not None and not self.is_refused:
            is_end = capture.guard_call(self.record.keep, b"".join(pieces))
            pieces.clear()
            if is_end:
                self.end_record()

    def _take(self, event: Any) -> None:
        record = self.record
        if isinstance(event, h11.Response) and record is not None:
            headers = _headers_of(event)
            capture.guard_call(record.answer, event.status_code, headers)
            self.is_refused = record.refused
        elif isinstance(event, h11.EndOfMessage):
            self.is_answered = True
            if not self.is_refused:
                self.end_record()

    def end_record(self, *, is_whole: bool = True, exc: BaseException | None = None) -> None:
        """Write the record, or have it written once the request is read."""
        if self.record is None:
            return
        if self.reading is not None and not self.reading.done():
            self.ends_record = True
            self.reading.add_done_callback(lambda _: self._end(is_whole, exc))
            return
        self._end(is_whole, exc)

    def _end(self, is_whole: bool, exc: BaseException | None) -> None:  # noqa: FBT001
        self.ends_record = False
        record = self.record
        if record is not None:
            if not self.has_begun and is_whole:  # the answer came before the request's end
                self.has_begun = True
                capture.guard_call(record.begin)
            capture.guard_call(record.end, is_whole=is_whole, exc=exc)


class Server(asyncio.Protocol):
    """The connection to a server."""

    def __init__(self, program: "Program") -> None:
        self.program = program
        self.transport: Any = None
        self.origin: tuple[str, str, int] | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Pass bytes on."""
        self.program.pass_on(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the program's connection, too."""
        self.program.lose_server(self, exc)

    def pause_writing(self) -> None:
        """Let the program wait."""
        self.program.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read on."""
        self.program.read_on()


class Program(asyncio.Protocol):
    """A connection of the program.

    Attributes:
        transport: Its transport.
    """

    def __init__(self, proxy: "Proxy") -> None:
        """Take a connection for a proxy."""
        self._proxy = proxy
        self.transport: Any = None
        self._parser = _make_parser()
        self._passage: _Passage | None = None
        self._server: Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._tail: list[bytes] = []
        self._is_held = self._is_over = self._has_ended = False

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        self.transport = transport
        self._proxy.connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Take what the program sends."""
        if not self._is_over:
            self._parser.receive_data(data)
            self.read_on()

    def read_on(self) -> None:
        """Take what has come from the program, unless it has to wait for the server."""
        if self._is_over:
            return
        try:
            while self._task is None:
                event = self._parser.next_event()
                if event is h11.NEED_DATA:
                    self.transport.resume_reading()
                    return
                if event is h11.PAUSED:  # the next request, before this one is answered
                    if self._passage is not None and not self._passage.is_unreadable:
                        break
                    self._begin_cycle()
                elif isinstance(event, h11.Request):
                    self._begin(event)
                elif isinstance(event, h11.ConnectionClosed):
                    return
                elif isinstance(event, h11.Data | h11.EndOfMessage):
                    self._send(event)
        except h11.ProtocolError as exc:
            if self._passage is not None:
                self.transport.abort()
                return
            self._answer(exc.error_status_hint, None, "the request is no HTTP that can be read")
            return
        self.transport.pause_reading()

    def _begin(self, request: h11.Request) -> None:
        """Begin to pass a request on, or answer it here."""
        headers, proxy = _headers_of(request), self._proxy
        target, method = request.target.decode("latin-1"), request.method.decode("latin-1")
        if (own := proxy.answer_own(method, target, headers)) is not None:
            self._answer(*own)
            return
        destination = proxy.find_destination(target)
        if destination is None:
            self._answer(404, None, "this address is none of lightning-otel's proxy")
            return
        record = None
        proxy.requests += 1
        if method == "POST" and RECORDED not in headers:
            record = capture.guard_call(proxy.make_record, destination, headers)
        dialect = record.dialect if record is not None else None
        if headers.get("upgrade", "h2c").lower() != "h2c":
            proxy.upgrades += 1
            self._answer(426, dialect, "lightning-otel's proxy takes no WebSocket; use HTTP")
            return
        self._passage = _Passage(request, headers, destination, record)
        if record is not None and record.is_held:
            if self._parser.they_are_waiting_for_100_continue:
                self.transport.write(_CONTINUE)
            return
        self._task = asyncio.ensure_future(self._open(self._passage))

    async def _open(self, passage: _Passage, data: bytes = b"") -> None:
        """Have a connection to the passage's server, and send what is to be sent first."""
        origin = passage.destination.origin
        if self._server is None or self._server.origin != origin:
            former, self._server = self._server, None
            if former is not None:
                former.transport.close()
            try:
                server = Server(self)
                await self._proxy.connect(origin, server)
            except (OSError, EOFError, ValueError) as exc:
                self._fail(passage, exc)
                return
            server.origin, self._server = origin, server
        self._task = None
        self._server.transport.write(data or passage.head())
        self.read_on()

    def _fail(self, passage: _Passage, exc: Exception) -> None:
        """Say that the server cannot be reached, with what has come of the request on record."""
        record = passage.record
        if record is not None and not passage.has_begun:
            while isinstance(event := self._parser.next_event(), h11.Data):
                record.keep_sent(event.data)
            passage.has_begun = True
            capture.guard_call(record.begin)
        passage.end_record(is_whole=False, exc=exc)
        reason = exc.strerror if isinstance(exc, OSError) else None
        message = f"cannot reach {passage.destination.host}: {reason or type(exc).__name__}"
        self._passage = None
        self._answer(502, record.dialect if record is not None else None, message)

    def _send(self, event: h11.Data | h11.EndOfMessage) -> None:
        """Send a part of the request on, or keep it until all is there."""
        passage = self._passage
        if passage is None:
            return
        record = passage.record
        is_held = record is not None and record.is_held
        if not is_held and self._server is not None:
            self._server.transport.write(passage.write(event))
        if isinstance(event, h11.Data):
            if record is not None:
                record.keep_sent(event.data)
                if is_held and record.is_unread:  # too long to be changed
                    data = passage.head() + passage.write(h11.Data(data=record.release()))
                    self._task = asyncio.ensure_future(self._open(passage, data))
            return
        passage.is_sent = True
        self._proxy.too_long += record is not None and record.is_unread
        if is_held:
            self._task = asyncio.ensure_future(self._send_changed(passage))
            return
        if record is not None and not passage.has_begun:
            passage.has_begun = True
            if record.sent_bytes > _QUICK_BYTES:
                loop = asyncio.get_running_loop()
                passage.reading = loop.run_in_executor(None, capture.guard_call, record.begin)
            else:
                capture.guard_call(record.begin)
        self._end_cycle()

    async def _send_changed(self, passage: _Passage) -> None:
        """Send a request as it is to be sent, now that it is whole."""
        record = passage.record
        assert record is not None
        body = record.sent_body()
        loop, passage.has_begun = asyncio.get_running_loop(), True
        if len(body) > _QUICK_BYTES:
            changed = await loop.run_in_executor(None, capture.guard_call, record.begin)
        else:
            changed = capture.guard_call(record.begin)
        url, body, headers = changed or (record.url, body, passage.headers)
        await self._open(passage, passage.write_whole(url, body, headers))

    async def _send_again(self, passage: _Passage) -> None:
        """Send a request without what the server refused."""
        assert passage.record is not None
        url, body, headers = passage.record.fall_back()
        passage.is_refused = passage.is_answered = False
        if self._server is not None:
            self._server.transport.close()
            self._server = None
        await self._open(passage, passage.write_whole(url, body, headers))

    def pass_on(self, server: Server, data: bytes) -> None:
        """Pass bytes of the server on: after the record, if they are the last."""
        if server is not self._server:
            return
        passage = self._passage
        if passage is None or self._is_held:
            self._write(data)
            return
        passage.read(data)
        if passage.is_refused:
            if passage.is_answered:
                self._task = asyncio.ensure_future(self._send_again(passage))
            return
        if passage.ends_record and passage.reading is not None:
            self._is_held = True
            server.transport.pause_reading()
            passage.reading.add_done_callback(lambda _: self._release(passage))
        self._write(data)
        self._end_cycle()

    def _write(self, data: bytes) -> None:
        if self._is_held:
            self._tail.append(data)
        else:
            self.transport.write(data)

    def _release(self, passage: _Passage) -> None:
        """Pass on what waited for the record of a long request."""
        self._is_held = False
        tail, self._tail = b"".join(self._tail), []
        self.transport.write(tail)
        if self._has_ended:
            self.transport.close()
        elif self._server is not None:
            self._server.transport.resume_reading()
        self._end_cycle()

    def _end_cycle(self) -> None:
        passage = self._passage
        if passage is None or not (passage.is_sent and passage.is_answered) or self._is_held:
            return
        if not passage.is_unreadable:
            self._begin_cycle()
            self.read_on()

    def _begin_cycle(self) -> None:
        """Be ready for the next request, of which something may have come."""
        rest, self._passage, self._parser = self._parser.trailing_data[0], None, _make_parser()
        if rest:
            self._parser.receive_data(rest)

    def _answer(self, status: int, dialect: Dialect | None, message: str) -> None:
        """Answer a request here, in its dialect, and end the connection."""
        self._is_over, self._task = True, None
        self.transport.write(self._proxy.write_answer(status, dialect, message))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()  # what else is sent must be taken, or the answer is lost
        asyncio.get_running_loop().call_later(_LINGER_S, self.transport.close)

    def eof_received(self) -> bool:
        """Take the end of what the program sends: it may still wait for an answer."""
        passage, server = self._passage, self._server
        if self._is_over or passage is None or not passage.is_sent:
            return False
        if server is not None and not passage.is_answered:
            if not server.transport.can_write_eof():  # in TLS nobody closes one half
                return False
            server.transport.write_eof()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the server, too: the program is gone."""
        self._is_over = True
        self._proxy.connections.discard(self)
        if self._task is not None:
            self._task.cancel()
        passage, server = self._passage, self._server
        self._passage = self._server = None
        if passage is not None:
            passage.end_record(is_whole=False)
        if server is not None:
            server.transport.abort()

    def lose_server(self, server: Server, exc: Exception | None) -> None:
        """End the connection as the server ended its own."""
        if server is not self._server:
            return
        self._server, passage = None, self._passage
        if passage is not None and passage.is_refused:
            if not passage.is_answered:
                self.transport.close()
            return
        if passage is not None:
            if exc is None:
                passage.read(b"")
            error = exc or ConnectionError("the server closed the connection before the end")
            passage.end_record(is_whole=passage.is_answered, exc=error)
        if exc is not None and (sock := self.transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._has_ended = True
        if not self._is_held:
            self.transport.close()

    def pause_writing(self) -> None:
        """Let the server wait: the program reads slowly."""
        if self._server is not None:
            self._server.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read on from the server."""
        if self._server is not None and not self._is_held:
            self._server.transport.resume_reading()


def _make_parser() -> h11.Connection:
    return h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)


def _headers_of(event: Any) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in event.headers:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers
