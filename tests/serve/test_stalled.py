"""Senders that stall, in any way: they do not shut others out, and are let go in time."""

import contextlib
import http.client
import json
import socket
import threading
import time
from pathlib import Path

from tests.serve.serving import JSON, PROTOBUF, Serving, body_of

STALLED = 800
HEAD = "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
WAYS = (
    "",
    "GET /v1/sta",
    HEAD.format(path="/v1/traces", kind=PROTOBUF),
    HEAD.format(path="/v1/traces", kind=PROTOBUF) + "Content-Length: 1000\r\n\r\nabc",
    HEAD.format(path="/v1/feedback", kind=JSON) + "Content-Length: 1000\r\n\r\n{",
    HEAD.format(path="/feedback", kind=JSON) + "Transfer-Encoding: chunked\r\n\r\n5\r\n",
)


def test_stalled_sockets_shut_nobody_out(tmp_path: Path) -> None:
    """800 of them, before, in and after their headers: spans, feedback and reads go on."""
    with Serving(tmp_path / "s.duckdb", "--port", "0") as running, contextlib.ExitStack() as held:
        for number in range(STALLED):
            stalled = held.enter_context(
                socket.create_connection(("127.0.0.1", running.port), timeout=20)
            )
            stalled.sendall(WAYS[number % len(WAYS)].encode())
        began = time.monotonic()
        spans = [running.post(body_of(1)).status for _ in range(5)]
        body = json.dumps({"rollout_id": "r", "reward": 1, "feedback_id": "f"}).encode()
        feedback = running.ask("POST", "/v1/feedback", body, content_type=JSON).status
        status = running.ask("GET", "/v1/status", authorization=f"Bearer {running.key}").status
        took_s = time.monotonic() - began
        memory_mb = running.memory_mb()

    assert spans == [200] * 5
    assert (feedback, status) == (202, 200)
    assert took_s < 10
    assert memory_mb < 400


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

        threads = [threading.Thread(target=stall, args=(way,)) for way in WAYS[1:5]]
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
