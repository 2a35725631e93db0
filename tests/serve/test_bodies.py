"""Bodies within limits of time and memory for all together; senders that stall are let go."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.types import Message
from tests.serve.api.conftest import Client
from tests.serve.api.test_events import listening
from tests.serve.serving import JSON, PROTOBUF, Serving, body_of

from lightning_otel.serve import bodies as limits
from lightning_otel.serve.bodies import Bodies
from lightning_otel.serve.responses import RefusalError


async def read(bodies: Bodies, receive: Callable[[], Awaitable[Message]]) -> bytes | int:
    """The body of a request whose parts come so, or the status with which it is refused."""
    try:
        return await bodies.read(Request({"type": "http", "headers": []}, receive))
    except RefusalError as refusal:
        return refusal.status


def part(body: bytes, *, is_last: bool = False) -> Message:
    """A part of a body, as a server hands it on."""
    return {"type": "http.request", "body": body, "more_body": not is_last}


def test_body_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that drips, in time; one too long is read on, so that its sender sees the answer."""
    monkeypatch.setattr(limits, "BODY_S", 0.3)
    bodies, sent = Bodies(most_bytes=1000), 0

    async def drip() -> Message:
        await asyncio.sleep(0.05)
        return part(b"x")

    async def flood() -> Message:
        nonlocal sent
        sent += 100
        return part(b"x" * 100)

    async def leave() -> Message:
        return {"type": "http.disconnect"}

    found = [asyncio.run(read(bodies, receive)) for receive in (drip, flood, leave)]

    assert found == [408, 413, 400]
    assert 3000 < sent < 3300
    assert bodies._held_bytes == 0


def test_bodies_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be too much at once is asked to come again; what was held is given back."""
    monkeypatch.setattr(limits, "_HELD_BYTES", 180)
    bodies = Bodies()

    async def read_at_once() -> list[bytes | int]:
        gate = asyncio.Event()

        def reader() -> Callable[[], Awaitable[Message]]:
            halves = iter([part(b"x" * 50), part(b"x" * 50, is_last=True)])

            async def receive() -> Message:
                await gate.wait()
                await asyncio.sleep(0)
                return next(halves)

            return receive

        tasks = [asyncio.create_task(read(bodies, reader())) for _ in range(4)]
        gate.set()
        return await asyncio.gather(*tasks)

    assert set(asyncio.run(read_at_once())) == {503, b"x" * 100}
    assert bodies._held_bytes == 0


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
        quiet = held.enter_context(listening(Client(running)))
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
            heard += quiet.answer.readline()
        running.post(body_of(1))
        quiet.next("trace")

    assert sorted(found) == [b"", b"", b"HTTP/1.1 408", b"HTTP/1.1 408"]
    assert b"event: ready" in heard
