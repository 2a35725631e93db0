"""A proxy that records: it passes requests of any program on to their servers, byte for byte.

It runs in a thread of its own, beside nothing of the program's.
"""

import asyncio
import hmac
import json
import ssl
import threading
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from lightning_otel import config
from lightning_otel.dialects import Dialect, may_ask_model
from lightning_otel.proxy.connections import Program, Server
from lightning_otel.proxy.recording import Place, Record, Space
from lightning_otel.proxy.routes import Destination, Upstream

__all__ = ["Proxy", "Upstream"]

_BACKLOG: Final = 512

AnswerOwn = Callable[[str, str, Mapping[str, str]], str | None]
"""Answers a request for the proxy itself, by method, path and headers; None for no such path."""


class _Tunnel(asyncio.Protocol):
    """A connection to the user's own proxy, until that has opened the way.

    Attributes:
        head: The head of its answer.
    """

    def __init__(self) -> None:
        self.head = asyncio.get_running_loop().create_future()
        self._data = b""

    def data_received(self, data: bytes) -> None:
        """Take what it answers."""
        self._data += data
        if b"\r\n\r\n" in self._data and not self.head.done():
            self.head.set_result(self._data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Say that it closed the way."""
        if not self.head.done():
            self.head.set_exception(ConnectionError(0, "the proxy on the way to it is gone"))


class Proxy:
    """A proxy in a thread of its own.

    Attributes:
        port: The port it listens on.
        requests: How many requests came.
        passed: How many of them asked models, and are recorded.
        unread: Addresses that seem to ask a model in no known dialect, and how often.
        upgrades: How many WebSockets were refused.
        too_long: How many requests were too long to be read.
    """

    def __init__(
        self, upstreams: Mapping[str, Upstream], place: Place, *, answer: AnswerOwn | None = None
    ) -> None:
        """Make one.

        Args:
            upstreams: By secret first segment of the path, where requests go; with the segment ""
                those that have no other.
            place: Gives the context of a request's span; None where nothing is to be recorded.
            answer: Answers requests for the proxy itself.
        """
        self.upstreams, self._place, self._answer = upstreams, place, answer
        self.port = self.requests = self.passed = self.upgrades = self.too_long = 0
        self.unread: Counter[str] = Counter()
        self.connections: set[Program] = set()
        self._space = Space()
        self._tls: ssl.SSLContext | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen.

        Raises:
            OSError: The address cannot be had.
        """
        self._loop = loop = asyncio.new_event_loop()
        server = loop.run_until_complete(
            loop.create_server(lambda: Program(self), host, port, backlog=_BACKLOG)
        )
        self.port = server.sockets[0].getsockname()[1]
        self._server = server
        self._thread = threading.Thread(target=loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more, and end what is under way."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        self._loop = self._thread = None

    async def _close(self) -> None:
        self._server.close()
        for connection in [*self.connections]:
            connection.transport.abort()
        while self.connections:
            await asyncio.sleep(0.01)

    def find_destination(self, target: str) -> Destination | None:
        """Return where a request goes; None where its path has no segment that is known."""
        path = target if target[:1] == "/" else "/" + target.partition("://")[2].partition("/")[2]
        segment, mark, rest = path[1:].partition("/")
        segment, query_mark, query = segment.partition("?")
        for secret, upstream in self.upstreams.items():
            if not secret:
                return upstream.find_destination(path)
            if hmac.compare_digest(secret.encode(), segment.encode()):
                return upstream.find_destination(mark + rest + query_mark + query)
        return None

    def make_record(self, destination: Destination, headers: Mapping[str, str]) -> Record | None:
        """Begin the record of a request; None where it asks no model, or none is wanted."""
        record = Record(destination.url, headers, self._place, self._space)
        if record.dialect is None:
            if may_ask_model(destination.url):
                self.note_unread(destination, "no known dialect")
            return None
        self.passed += 1
        return record

    def note_unread(self, destination: Destination, reason: str) -> None:
        """Note an address that is not recorded; of its path the end, which holds no secret."""
        path = destination.target.decode("latin-1").partition("?")[0]
        self.unread[f"{destination.host}/…/{path.rpartition('/')[2]} ({reason})"] += 1

    def answer_own(
        self, method: str, target: str, headers: Mapping[str, str]
    ) -> tuple[int, Dialect | None, str] | None:
        """Return the answer to a request for the proxy itself; None for all others."""
        if method == "CONNECT":
            return 501, None, "this proxy is no tunnel; give its address as the server's"
        if target == "/healthz":
            return 200, None, "ok"
        text = self._answer(method, target, headers) if self._answer is not None else None
        return None if text is None else (200, None, text)

    def write_answer(self, status: int, dialect: Dialect | None, message: str) -> bytes:
        """Return the bytes of an answer of the proxy's own, as an error of the dialect."""
        if status == 200:
            value: Any = {"status": message}
        else:
            value = (dialect or Dialect()).write_error(status, message)
        body = json.dumps(value).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body

    async def connect(self, origin: tuple[str, str, int], server: Server) -> None:
        """Connect to a server, through the user's own proxy where one is set.

        Raises:
            OSError: It cannot be reached; in TLS too, where its certificate is not trusted.
        """
        scheme, host, port = origin
        loop = asyncio.get_running_loop()
        tls = self._find_tls() if scheme == "https" else None
        through = None
        if not proxy_bypass(f"{host}:{port}"):
            through = getproxies_environment().get(scheme)
        if through is None:
            await loop.create_connection(
                lambda: server, host, port, ssl=tls, server_hostname=host if tls else None
            )
            return
        parts = urlsplit(through if "://" in through else f"http://{through}")
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise OSError(0, f"a proxy of kind {parts.scheme} is not known")
        outer = self._find_tls() if parts.scheme == "https" else None
        name = f"[{host}]" if ":" in host else host
        request = f"CONNECT {name}:{port} HTTP/1.1\r\nHost: {name}:{port}\r\n"
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            request += f"Proxy-Authorization: Basic {b64encode(user.encode()).decode()}\r\n"
        transport, tunnel = await loop.create_connection(
            _Tunnel, parts.hostname, parts.port or (443 if outer else 80), ssl=outer
        )
        transport.write(f"{request}\r\n".encode())
        if b" 200" not in (await tunnel.head).partition(b"\r\n")[0]:
            transport.abort()
            raise OSError(0, "the proxy on the way to it refuses the connection")
        if tls is not None:
            inner = await loop.start_tls(transport, server, tls, server_hostname=host)
        else:
            inner = transport
            transport.set_protocol(server)
        server.connection_made(inner)

    def _find_tls(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            for file in config.trusted_certificates():
                self._tls.load_verify_locations(file)
        return self._tls
