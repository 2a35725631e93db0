"""Senders that stall, in any way: they do not shut others out, and are let go in time."""

import contextlib
import http.client
import socket
import threading
from pathlib import Path

from tests.serve.serving import JSON, PROTOBUF, Serving, body_of

HEAD = "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
WAYS = (
    "GET /v1/sta",
    HEAD.format(path="/v1/traces", kind=PROTOBUF),
    HEAD.format(path="/v1/traces", kind=PROTOBUF) + "Content-Length: 1000\r\n\r\nabc",
    HEAD.format(path="/v1/feedback", kind=JSON) + "Content-Length: 1000\r\n\r\n{",
)


def test_stalled_senders_are_let_go_and_quiet_readers_are_not(tmp_path: Path) -> None:
    """A body that does not come is refused, a header without end closed; a listener is kept."""
    with Serving(tmp_path / "s.duckdb", "--port", "0") as running, contextlib.ExitStack() as held:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
        headers = {"Authorization": f"Bearer {running.key}"}
        connection.request("GET", "/v1/events", headers=headers)
        answer = connection.getresponse()
        found: list[bytes] = []

        def stall(way: str) -> None:
            stalled = held.enter_context(
                socket.create_connection(("127.0.0.1", running.port), timeout=25)
            )
            stalled.sendall(way.encode())
            found.append(stalled.recv(4096)[:12])

        threads = [threading.Thread(target=stall, args=(way,)) for way in WAYS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        heard = b""
        while b": still here" not in heard:
            heard += answer.readline()
        running.post(body_of(1))
        while b"event: trace" not in heard:
            heard += answer.readline()
        answer.close()
        connection.close()

    assert sorted(found) == [b"", b"", b"HTTP/1.1 408", b"HTTP/1.1 408"]
    assert b"event: ready" in heard
