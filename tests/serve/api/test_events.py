"""Events as they happen: heard at once, resumed where they broke off, bounded, and ended."""

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.serve.api.conftest import Client
from tests.serve.serving import Serving

from lightning_otel import Store
from lightning_otel.serve.api import events as module
from lightning_otel.serve.api.events import EventBroker
from lightning_otel.serve.api.repositories import Repositories


class Heard(NamedTuple):
    """One event."""

    event_id: str
    kind: str
    data: Any


class Listening:
    """One who listens."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.answer = answer

    def next(self, kind: str = "") -> Heard:
        found: dict[str, str] = {}
        while line := self.answer.readline().decode():
            if line != "\n":
                name, _, value = line.rstrip("\n").partition(": ")
                found[name] = value
            elif found.get("event") and kind in ("", found["event"]):
                return Heard(found["id"], found["event"], json.loads(found["data"]))
        raise EOFError


@contextmanager
def listening(client: Client, **headers: str) -> Iterator[Listening]:
    connection = http.client.HTTPConnection("127.0.0.1", client.running.port, timeout=20)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    named["Authorization"] = f"Bearer {client.running.key}"
    connection.request("GET", "/v1/events", headers=named)
    answer = connection.getresponse()
    assert answer.status == 200
    try:
        yield Listening(answer)
    finally:
        answer.close()
        connection.close()


def test_events_tell_of_what_happens(client: Client) -> None:
    """A trace, its rollout, its reward; a training run; each with an id."""
    from lightning_otel.state import State
    from lightning_otel.state.runs import Runs

    client.act("before", 1.0)
    with listening(client) as heard:
        ready = heard.next()
        client.act("heard", 0.5)
        found: dict[str, Heard] = {}
        spans = 0
        while spans < 3 or len(found) < 3:  # a look may come between two spans
            each = heard.next()
            found[each.kind] = each
            spans += each.data.get("spans", 0)
        run = Runs(State(client.store.name)).start("baseline")
        begun = heard.next("run")

    assert ready.kind == "ready"
    assert found["reward"].data["value"] == 0.5
    assert found["rollout"].data["rollout_id"] == "heard"
    assert found["rollout"].data["status"] == "succeeded"
    assert spans == 3
    assert found["trace"].data["has_ended"]
    assert begun.data["run_id"] == run.run_id
    assert len({ready.event_id, begun.event_id, *(each.event_id for each in found.values())}) == 5


def test_who_comes_back_hears_what_it_missed(client: Client) -> None:
    """By the id of the last event it heard; by one of an earlier server, that it missed some."""
    with listening(client) as heard:
        last = heard.next().event_id
    client.act("missed", 0.25)

    with listening(client, Last_Event_ID=last) as heard:
        greeting, missed = heard.next(), heard.next("rollout")
    with listening(client, Last_Event_ID="00000000-5") as heard:
        stranger = heard.next()

    assert greeting.kind == "ready"
    assert missed.data["rollout_id"] == "missed"
    assert stranger.kind == "reset"


def test_listeners_are_bounded_and_do_not_hold_the_server(tmp_path: Path) -> None:
    """One too many is asked to come again; told to end, the server ends at once."""
    with Serving(tmp_path / "s.duckdb", "--port", "0") as running:
        client = Client(running)
        held = contextlib.ExitStack()
        for _ in range(module.MOST_LISTENERS):
            held.enter_context(listening(client))
        refused = client.ask("GET", "/v1/events")
        healthy = client.ask("GET", "/healthz")
        began = time.monotonic()
        code, _ = running.end()
        took_s = time.monotonic() - began
        held.close()

    assert (refused.status, healthy.status, code) == (503, 200, 0)
    assert took_s < 5


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_slow_listener_is_told_that_it_missed_some(store: Store, is_slow: bool) -> None:
    """Memory holds one ring for all; who falls out of it reads anew."""
    import asyncio

    store.writer()

    async def hear() -> tuple[int, int]:
        broker = EventBroker(store, Repositories(store))
        heard = (await broker.answer()).body_iterator
        await anext(heard)
        broker._put_events([("trace", {}) for _ in range(module._HELD + is_slow)])
        part = bytes(await anext(heard))
        broker.close()
        return part.count(b"event: trace"), part.count(b"event: reset")

    assert asyncio.run(hear()) == ((0, 1) if is_slow else (module._HELD, 0))
