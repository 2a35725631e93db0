"""A server that answers what it is told to, byte for byte, and keeps what it was sent."""

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tests.listening import Handler, listen


@dataclass(frozen=True)
class Answer:
    """One answer."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    is_cut: bool = False
    pause_s: float = 0.0


class Wire:
    """The server."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        self.draw = random.Random(5)
        self.lock = threading.Lock()
        self.url = ""

    def take(self) -> Answer:
        with self.lock:
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def cut(self, body: bytes) -> Iterator[bytes]:
        """Return a body in pieces of random size."""
        at = 0
        while at < len(body):
            size = self.draw.randint(1, 200)
            yield body[at : at + size]
            at += size


class _Handler(Handler):
    protocol_version = "HTTP/1.1"
    wire: ClassVar[Wire]

    def do_POST(self) -> None:
        body = self.read_body()
        headers = {name.lower(): text for name, text in self.headers.items()}
        self.wire.asked.append((self.path, headers, json.loads(body or b"null")))
        answer = self.wire.take()
        self.send_response(answer.status)
        for name, text in answer.headers.items():
            self.send_header(name, text)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for piece in self.wire.cut(answer.body):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
            time.sleep(answer.pause_s)
        if answer.is_cut:
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")


@contextmanager
def serve() -> Iterator[Wire]:
    wire = Wire()
    with listen(_Handler, wire=wire) as wire.url:
        yield wire


def write_events(events: Iterator[dict[str, Any]], *, is_named: bool = False) -> bytes:
    """Server-sent events, with names where the API gives them."""
    return b"".join(
        (f"event: {event['type']}\n" if is_named else "").encode()
        + b"data: %s\n\n" % json.dumps(event).encode()
        for event in events
    )
