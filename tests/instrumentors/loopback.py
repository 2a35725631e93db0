"""A server on loopback that answers as it is told, path by path."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.listening import Handler, listen

_GZIP = b"\x1f\x8b"
Answer = Callable[[str, str, dict[str, Any]], Any]
"""Gives the answer to a method, a path and a body: an object, or a list of events; bytes as
they are, and None for one that does not exist."""


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """The base URL of such a server."""

    class Told(Handler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            found = answer(self.command, self.path, json.loads(self.read_body() or b"{}"))
            kind, body = "application/json", found
            if isinstance(found, list):
                kind = "text/event-stream"
                body = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in found)
            elif not isinstance(found, bytes):
                body = json.dumps(found or {"error": {"message": "no such thing"}}).encode()
            headers = [("content-encoding", "gzip")] if body.startswith(_GZIP) else []
            self.send(body, kind, 404 if found is None else 200, headers)

        do_GET = do_POST = do_DELETE = _answer  # as the base class asks

    with listen(Told) as url:
        yield f"{url}/v1"
