"""A server that keeps every byte it is sent and answers as a test scripts it; and a raw client."""

import contextlib
import gzip
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import zstandard

CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "identity": bytes,
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}


JSON = "content-type: application/json"
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
HEAD = {"id": "chatcmpl-1", "model": "m", "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
WHOLE = json.dumps({**HEAD, "choices": [CHOICE]}).encode()
BODY = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "hi"}]}'
CHAT = "/v1/chat/completions"


class Peer:
    """One connection to the server."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.file = sock.makefile("rb")
        self.sent = b""

    def read_head(self) -> bytes:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = self.file.readline()
            if not line:
                return b""
            head += line
        return head

    def read_body(self, head: bytes) -> bytes:
        if size := re.search(rb"content-length: (\d+)", head.lower()):
            return self.file.read(int(size[1]))
        body = b""
        while b"transfer-encoding: chunked" in head.lower():
            length = int(self.file.readline().partition(b";")[0], 16)
            body += self.file.read(length)
            self.file.readline()
            if not length:
                break
        return body

    def write(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.sock.sendall(piece)


Script = Callable[["Origin", Peer], bool]
"""Serves one request; returns whether the connection goes on."""


def play(*pieces: bytes, closes: bool = False) -> Script:

    def script(origin: "Origin", peer: Peer) -> bool:
        head = peer.read_head()
        if head:
            origin.asked.append((head, peer.read_body(head)))
            peer.write(*pieces)
        return bool(head) and not closes

    return script


class Origin:
    """The server: its script serves each request; head and body of each go to ``asked``."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.script = play()
        self._tls = tls
        self.asked: list[tuple[bytes, bytes]] = []
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock = self._listener.accept()[0]
                self.connections += 1
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
            stack.enter_context(sock)
            peer = Peer(sock)
            while peer.file.peek(1) and self.script(self, peer):
                pass
            peer.file.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextlib.contextmanager
def proxying(folder: Path, upstream: str, *options: str, **env: str) -> Iterator[tuple[str, int]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_otel", "proxy", "--listen", "127.0.0.1:0",
         "--upstream", upstream, "--store", str(folder / "t.duckdb"), *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        env={**os.environ, **env},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://"), process.communicate(timeout=20)
        yield address, process.pid
    finally:
        process.terminate()
        notes = process.communicate(timeout=30)[1]
        (folder / "notes.txt").write_text(notes)
    assert "Fatal error" not in notes, notes
    assert "exception was never retrieved" not in notes, notes


def connect(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").partition("/")[0].split(":")
    sock = socket.create_connection((host, int(port)), timeout=30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def post(body: bytes, path: str = CHAT, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: example.invalid", *headers]
    if not any(line.lower().startswith("transfer-encoding") for line in headers):
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, f"content-length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def whole(*headers: str) -> bytes:
    """The bytes of a whole answer of a chat completion."""
    return answer(WHOLE, JSON, *headers)


def chunks(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece)


def chunked(*pieces: bytes, headers: Sequence[str] = ("content-type: text/event-stream",)) -> bytes:
    head = "\r\n".join(["HTTP/1.1 200 OK", *headers, "transfer-encoding: chunked"]).encode()
    return head + b"\r\n\r\n" + chunks(*pieces) + b"0\r\n\r\n"


def ask(sock: socket.socket, sent: bytes, size: int) -> bytes:
    sock.sendall(sent)
    return read(sock, size)


def talk(address: str, sent: bytes, size: int = 1 << 30) -> bytes:
    """Send bytes on a connection of its own; return what comes back."""
    with connect(address) as sock:
        return ask(sock, sent, size)


def read(sock: socket.socket, size: int = 1 << 30) -> bytes:
    data = bytearray()
    while len(data) < size and (piece := sock.recv(min(1 << 20, size - len(data)))):
        data += piece
    return bytes(data)
