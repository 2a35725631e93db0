"""Bodies within limits of time and of memory for all of them together."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from starlette.requests import Request
from starlette.types import Message

from lightning_otel.serve import bodies as limits
from lightning_otel.serve.answers import RefusalError
from lightning_otel.serve.bodies import Bodies


def request_of(receive: Callable[[], Awaitable[Message]]) -> Request:
    """A request whose body comes as it comes."""
    return Request({"type": "http", "headers": []}, receive)


def part(body: bytes, *, is_last: bool = False) -> Message:
    """A part of a body, as a server hands it on."""
    return {"type": "http.request", "body": body, "more_body": not is_last}


def test_body_that_drips_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part comes within its time, all of them together do not."""
    monkeypatch.setattr(limits, "BODY_S", 0.3)

    async def receive() -> Message:
        await asyncio.sleep(0.05)
        return part(b"x")

    with pytest.raises(RefusalError) as refusal:
        asyncio.run(Bodies().read(request_of(receive)))

    assert refusal.value.status == 408


def test_bodies_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be too much at once is asked to come again; what was held is given back."""
    monkeypatch.setattr(limits, "_HELD_BYTES", 180)
    bodies = Bodies()

    async def read_at_once() -> list[object]:
        gate = asyncio.Event()
        halves = [iter([part(b"x" * 50), part(b"x" * 50, is_last=True)]) for _ in range(4)]

        def reader(number: int) -> Callable[[], Awaitable[Message]]:
            async def receive() -> Message:
                await gate.wait()
                await asyncio.sleep(0)
                return next(halves[number])

            return receive

        reading = [bodies.read(request_of(reader(number))) for number in range(4)]
        tasks = [asyncio.create_task(each) for each in reading]
        gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(read_at_once())

    refused = [each for each in found if isinstance(each, RefusalError)]
    assert refused
    assert {each.status for each in refused} == {503}
    assert [each for each in found if each == b"x" * 100]
    assert bodies._held_bytes == 0


def test_body_too_long_is_read_to_its_end_but_not_held() -> None:
    """So that its sender comes to read the answer; one without end is not."""
    sent = 0

    async def receive() -> Message:
        nonlocal sent
        sent += 100
        return part(b"x" * 100)

    bodies = Bodies(most_bytes=1000)
    with pytest.raises(RefusalError) as refusal:
        asyncio.run(bodies.read(request_of(receive)))

    assert refusal.value.status == 413
    assert 3000 < sent < 3300
    assert bodies._held_bytes == 0


def test_body_that_is_cut_off_is_none() -> None:
    """A sender that goes away leaves nothing to decode."""

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(RefusalError):
        asyncio.run(Bodies().read(request_of(receive)))
