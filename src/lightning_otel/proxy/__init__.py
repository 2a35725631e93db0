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
from typing import Any, Final, TypeAlias
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from opentelemetry.context import Context

from lightning_otel import config
from lightning_otel.dialects import Dialect
from lightning_otel.errors import NotInstalledError, install_command

try:
    from lightning_otel.proxy.connections import Program, ServerConnection
except ModuleNotFoundError as exc:
    text = f"the proxy needs {exc.name}; run: {install_command('proxy')}"
    raise NotInstalledError(text) from exc
from lightning_otel.proxy.routes import Destination, Upstream, server_address

__all__ = ["Proxy", "Upstream"]

_BACKLOG: Final = 512

Place: TypeAlias = Callable[[Mapping[str, str], Callable[[], str]], Context]
Note: TypeAlias = Callable[[Context, str], None]
AnswerOwn: TypeAlias = Callable[[str, str, Mapping[str, str]], str | None]


class Proxy:
    """A proxy in a thread of its own.

    Attributes:
        upstreams: By secret first segment of the path, where requests go; with the segment ""
            those that have no other.
        place: Gives the context of a request's span, by its headers and, where it asks for them,
            its messages as JSON text.
        answer: Answers by method, path and headers what asks the proxy itself.
        note_answer: Takes that context and the messages of the answer; none where it failed.
        is_changing: Whether requests may be sent otherwise than they came.
        passed: How many of them asked models, and are recorded.
        unread: Addresses that seem to ask a model in no known dialect, and how often.
        too_long: How many requests were too long to be read.
        kept_bytes: The size of the bodies that all connections keep.
    """

    def __init__(
        self,
        upstreams: Mapping[str, Upstream],
        place: Place,
        note_answer: Note = lambda *_: None,
        answer: AnswerOwn = lambda *_: None,
        *,
        is_changing: bool,
    ) -> None:
        self.upstreams, self.is_changing = upstreams, is_changing
        self.place, self.note_answer, self.answer = place, note_answer, answer
        self.port = self.requests = self.passed = self.upgrades = self.too_long = 0
        self.kept_bytes = 0
        self.unread: Counter[str] = Counter()
        self.connections: set[Program] = set()
        self._tls: ssl.SSLContext | None = None

    def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen.

        Raises:
            OSError: The address cannot be had.
        """
        self._loop = loop = asyncio.new_event_loop()
        self._server = loop.run_until_complete(
            loop.create_server(lambda: Program(self), host, port, backlog=_BACKLOG)
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more, and end what is under way."""
        loop = self._loop
        asyncio.run_coroutine_threadsafe(self._close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    async def _close(self) -> None:
        self._server.close()
        for connection in [*self.connections]:
            connection.transport.abort()
        while self.connections:
            await asyncio.sleep(0.01)

    def find_destination(self, target: str) -> Destination | None:
        """Return where a request goes; None where its path has no segment that is known."""
        path = target if target[:1] == "/" else "/" + target.partition("://")[2].partition("/")[2]
        if path == "/" != target:  # of CONNECT
            return None
        segment = path[1:].partition("/")[0].partition("?")[0]
        for secret, upstream in self.upstreams.items():
            if not secret:
                return server_address(upstream, path)
            if hmac.compare_digest(secret.encode(), segment.encode()):
                return server_address(upstream, path[1 + len(segment) :])
        return None

    def note_unread(self, destination: Destination) -> None:
        """Note an address that is not recorded; of its path the end, which holds no secret."""
        path = destination.target.decode("latin-1").partition("?")[0]
        name = f"{destination.host}/…/{path.rpartition('/')[2]} (no known dialect)"
        self.unread[name] += 1

    def write_answer(self, status: int, dialect: Dialect | None, message: str) -> bytes:
        """Return the bytes of an answer of the proxy's own, as an error of the dialect."""
        value: Any = {"status": message}
        if status != 200:
            value = (dialect or Dialect()).write_error(status, message)
        body = json.dumps(value).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body

    async def connect(self, origin: tuple[str, str, int], server: ServerConnection) -> None:
        """Connect to a server, through the user's own proxy where one is set.

        Raises:
            OSError: It cannot be reached; in TLS too, where its certificate is not trusted.
        """
        scheme, host, port = origin
        loop = asyncio.get_running_loop()
        tls = self._find_tls(scheme)
        name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        through = getproxies_environment().get(scheme)
        if through is None or proxy_bypass(name):
            await loop.create_connection(lambda: server, host, port, ssl=tls)
            return
        parts = urlsplit(through if "://" in through else f"http://{through}")
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise OSError(0, f"a proxy of kind {parts.scheme} is not known")
        request = f"CONNECT {name} HTTP/1.1\r\nHost: {name}\r\n"
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            request += f"Proxy-Authorization: Basic {b64encode(user.encode()).decode()}\r\n"
        outer, reader = self._find_tls(parts.scheme), asyncio.StreamReader()
        transport, _ = await loop.create_connection(
            lambda: asyncio.StreamReaderProtocol(reader),
            parts.hostname, parts.port or (443 if outer else 80), ssl=outer,
        )  # fmt: skip
        try:
            transport.write(f"{request}\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = b""
        if b" 200" not in head.partition(b"\r\n")[0]:
            transport.abort()
            raise OSError(0, "the proxy on the way to it refuses the connection")
        inner: Any = transport
        if tls is not None:
            inner = await loop.start_tls(transport, server, tls, server_hostname=host)
        else:
            transport.set_protocol(server)
        server.connection_made(inner)

    def _find_tls(self, scheme: str) -> ssl.SSLContext | None:
        if self._tls is None and scheme == "https":
            self._tls = ssl.create_default_context()
            files = config.read_environment("NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE")
            for file in filter(None, files.values()):
                self._tls.load_verify_locations(file)
        return self._tls if scheme == "https" else None
