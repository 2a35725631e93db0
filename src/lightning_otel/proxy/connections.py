"""A program's connection and the one to the server that it stands for: bytes go on as they came.

Each connection of the program has one of its own to the server, so that keep-alive, closing, early
answers, half-closed connections and slow readers are what they would be without us. Of an answer no
byte is changed; a copy is read, and the record is written before the last byte goes on.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

import h11

from lightning_otel.dialects import Dialect
from lightning_otel.proxy.passage import Passage, headers_of, make_parser

if TYPE_CHECKING:
    from lightning_otel.proxy import Proxy

_QUICK_BYTES: Final = 256 << 10
"""A longer request is read in a thread."""
_LINGER_S: Final = 2.0
"""How long an answer of our own waits for the program to take it."""
_RESET: Final = struct.pack("ii", 1, 0)
_NO_ADDRESS: Final = (
    "this address is none of lightning-otel's proxy, which is no tunnel; give the one that it "
    "printed, with its key, as the server's"
)
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class ServerConnection(asyncio.Protocol):
    """The connection to a server."""

    def __init__(self, program: "Program", origin: tuple[str, str, int]) -> None:
        self.program, self.origin = program, origin
        self.transport: Any = None

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
    """A connection of the program."""

    def __init__(self, proxy: "Proxy") -> None:
        self._proxy = proxy
        self.transport: Any = None
        self._parser = make_parser()
        self._passage: Passage | None = None
        self._server: ServerConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_over = self._is_full = False

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
        headers, proxy = headers_of(request), self._proxy
        target, method = request.target.decode("latin-1"), request.method.decode("latin-1")
        text = "ok" if target == "/healthz" else proxy.answer(method, target, headers)
        destination = proxy.find_destination(target)
        if text is not None:
            self._answer(200, None, text)
            return
        if destination is None:
            self._answer(404, None, _NO_ADDRESS)
            return
        proxy.requests += 1
        passage = Passage(proxy, request, headers, destination)
        if headers.get("upgrade", "h2c").lower() != "h2c":
            proxy.upgrades += 1
            self._answer(
                426, passage.dialect, "lightning-otel's proxy takes no WebSocket; use HTTP"
            )
            return
        self._passage = passage
        if not passage.is_held:
            self._start(self._open(passage, passage.write_head))
        elif self._parser.they_are_waiting_for_100_continue:
            self.transport.write(_CONTINUE)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what takes time; nothing more is taken from the program meanwhile."""
        self._task = task = asyncio.ensure_future(work)
        task.add_done_callback(self._check)

    def _check(self, task: "asyncio.Task[None]") -> None:
        """Fail where the server could not be reached; what was asked belongs on record first."""
        passage = self._passage
        if task.cancelled() or (failure := task.exception()) is None or passage is None:
            return
        passage.failure, self._task, self._server = failure, None, None
        if passage.is_sent or self._parser.they_are_waiting_for_100_continue:
            self._fail(passage)
        else:
            self.read_on()

    async def _open(self, passage: Passage, write: Callable[[], bytes]) -> None:
        """Have a connection to the passage's server, and send what is to be sent first."""
        data, origin = write(), passage.destination.origin
        if self._server is None or self._server.origin != origin:
            self._leave_server()
            self._server = ServerConnection(self, origin)
            await self._proxy.connect(origin, self._server)
        self._task = None
        self._server.transport.write(data)
        self.read_on()

    def _leave_server(self) -> None:
        server, self._server = self._server, None
        if server is not None and server.transport is not None:
            server.transport.abort()

    def _fail(self, passage: Passage) -> None:
        passage.begin()
        exc = passage.failure
        passage.end(is_whole=False, exc=exc)
        reason = exc.strerror if isinstance(exc, OSError) else None
        message = f"cannot reach {passage.destination.host}: {reason or type(exc).__name__}"
        self._passage = None
        self._answer(502, passage.dialect, message)

    def _send(self, event: h11.Data | h11.EndOfMessage) -> None:
        """Send a part of the request on, or keep it until all is there."""
        passage = self._passage
        if passage is None:
            return
        if not passage.is_held and self._server is not None:
            self._server.transport.write(passage.write(event))
        if isinstance(event, h11.Data):
            passage.keep_sent(event.data)
            if passage.is_held and passage.is_unread:  # too long to be changed
                self._start(self._open(passage, passage.release))
            return
        passage.is_sent = True
        self._proxy.too_long += passage.is_unread
        if passage.failure is not None:
            self._fail(passage)
        elif passage.is_held or passage.sent_bytes > _QUICK_BYTES:
            self._start(self._read_sent(passage))
        else:
            passage.begin()
            passage.drop_sent()
            self._end_cycle()

    async def _read_sent(self, passage: Passage) -> None:
        """Read a request in a thread, since it is long, or is changed before it is sent."""
        self._balance()
        loop = asyncio.get_running_loop()
        passage.reading = loop.run_in_executor(None, passage.begin)
        arguments = await asyncio.shield(passage.reading)
        if passage.is_held:
            await self._open(passage, lambda: passage.write_whole(arguments))
        passage.drop_sent()
        self._task = None
        self._balance()
        self.read_on()
        self._end_cycle()

    def pass_on(self, server: ServerConnection, data: bytes) -> None:
        """Pass bytes of the server on: after the record, if they are the last."""
        passage = self._passage
        if server is not self._server:
            return
        if passage is not None:
            passage.read(data)
            if passage.is_refused:
                if passage.is_answered or passage.is_unreadable:
                    self._send_again(passage)
                return
        self.transport.write(data)
        self._end_cycle()

    def _send_again(self, passage: Passage) -> None:
        self._leave_server()
        self._start(self._open(passage, passage.fall_back))

    def _end_cycle(self) -> None:
        passage = self._passage
        if passage is None or not (passage.is_sent and passage.is_answered) or self._task:
            return
        if not passage.is_unreadable:
            self._begin_cycle()
            self.read_on()

    def _begin_cycle(self) -> None:
        """Be ready for the next request, of which something may have come."""
        rest, self._passage, self._parser = self._parser.trailing_data[0], None, make_parser()
        if rest:
            self._parser.receive_data(rest)

    def _answer(self, status: int, dialect: Dialect | None, message: str) -> None:
        """Answer a request here, in its dialect, and end the connection."""
        self._is_over, self._task = True, None
        self.transport.write(self._proxy.write_answer(status, dialect, message))
        with contextlib.suppress(OSError):  # the program may have gone
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
        passage, self._passage = self._passage, None
        if passage is not None:
            passage.end(is_whole=False)
        self._leave_server()

    def lose_server(self, server: ServerConnection, exc: Exception | None) -> None:
        """End the connection as the server ended its own."""
        if server is not self._server:
            return
        self._server, passage = None, self._passage
        if passage is not None:
            if exc is None:
                passage.read(b"")
            if passage.is_refused:
                self._send_again(passage)
                return
            error = exc or ConnectionError("the server closed the connection before the end")
            passage.end(is_whole=passage.is_answered, exc=error)
        if exc is not None and (sock := self.transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.close()

    def pause_writing(self) -> None:
        """Let the server wait: the program reads slowly."""
        self._is_full = True
        self._balance()

    def resume_writing(self) -> None:
        """Read on from the server."""
        self._is_full = False
        self._balance()

    def _balance(self) -> None:
        """Let the server wait while the program reads slowly, or its request is being read."""
        if self._server is not None and self._server.transport is not None:
            transport, waits = self._server.transport, self._is_full or self._task is not None
            transport.pause_reading() if waits else transport.resume_reading()
