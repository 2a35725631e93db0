"""A server on loopback that answers as it is told, path by path."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_GZIP = b"\x1f\x8b"
Answer = Callable[[str, str, dict[str, Any]], Any]
"""Gives the answer to a method, a path and a body: an object, or a list of events; bytes as
they are, and None for one that does not exist."""


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """The base URL of such a server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            sent = self.rfile.read(int(self.headers.get("content-length") or 0))
            found = answer(self.command, self.path, json.loads(sent or b"{}"))
            kind, body = "application/json", found
            if isinstance(found, list):
                kind = "text/event-stream"
                body = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in found)
            elif not isinstance(found, bytes):
                body = json.dumps(found or {"error": {"message": "no such thing"}}).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("content-type", kind)
            if body.startswith(_GZIP):
                self.send_header("content-encoding", "gzip")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = _answer  # noqa: N815  # as the base class asks

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
