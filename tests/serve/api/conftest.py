"""A server with a store that agents have written, asked as a client asks it."""

import json
from typing import Any

import pytest
from tests.acting import act
from tests.serve.serving import JSON, Serving
from tests.viewer.client import Answer

from lightning_otel import Store


class Client:
    """Asks a server with its key."""

    def __init__(self, running: Serving) -> None:
        self.running = running
        self.store = Store(running.store)

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        """The answer to a request, whose body is sent as JSON."""
        named = {"authorization": f"Bearer {self.running.key}", **headers}
        if body is None:
            return self.running.ask(method, path, **named)
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.running.ask(method, path, text, **{"content_type": JSON, **named})

    def get(self, path: str, **headers: str) -> Any:
        answer = self.ask("GET", path, **headers)
        assert answer.status == 200, answer.body
        return json.loads(answer.body)

    def post(self, path: str, body: object, status: int = 200, **headers: str) -> Any:
        """What a POST tells, which is to end so."""
        answer = self.ask("POST", path, body, **headers)
        assert answer.status == status, answer.body
        return json.loads(answer.body)

    def act(self, name: str, reward: float | None = None, **task: Any) -> None:
        """Have an agent take one step."""
        act(self.store, name, reward, task=task or None)


@pytest.fixture(scope="module")
def client(shared: Serving) -> Client:
    """A client of a server that the tests of a module share."""
    return Client(shared)
