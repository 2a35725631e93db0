"""A model that answers what a test says, behind a real OpenAI-compatible server on loopback."""

import json
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from lightning_otel.demo.policy import Reply, ToolCall
from lightning_otel.demo.server import DemoServer
from lightning_otel.demo.wire import Json, WireAnswer
from lightning_otel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that is refused, with an HTTP status and an error's message."""

    status: int
    message: str


Said: TypeAlias = "str | ToolCall | list[ToolCall] | Reply | Failure"
"""What is answered: text, a tool call or several, both as a ``Reply``, or a failure."""

Line: TypeAlias = "Said | Callable[[Mapping[str, Any]], Said]"
"""An entry of a script: an answer, or a function of the request's body that gives one."""


class _RefusedError(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ScriptedServer(DemoServer):
    """Answers one request after the other as a script says, streamed or not.

    Embeddings are made up. ``requests`` has the bodies; ``log`` has every exchange whole.
    """

    def __init__(self, script: Iterable[Line] | Callable[[Mapping[str, Any]], Said]) -> None:
        """Take the answers in order, or a function of a request's body that answers all."""
        super().__init__()
        self.fault = "none"  # a model of any name is answered
        # Guards: each entry is given to one request.
        self._lock = threading.Lock()
        self._always = script if callable(script) else None
        self._script: list[Line] = [] if callable(script) else list(script)
        self._count = len(self._script)

    @property
    def requests(self) -> list[Mapping[str, Any]]:
        """The bodies of the requests so far, in order."""
        return [exchange.request for exchange in self.log if exchange.request is not None]

    @property
    def unused(self) -> int:
        """The number of script entries not asked for yet."""
        return len(self._script)

    def answer(self, name: str, body: Json, fault: str) -> WireAnswer:
        """The answer of one endpoint to a body."""
        try:
            return super().answer(name, body, fault)
        except _RefusedError as exc:
            error = {"message": str(exc), "type": "scripted", "param": None, "code": None}
            return WireAnswer({"error": error}, status=exc.failure.status)

    def _sample_replies(self, body: Json, count: int, fault: str) -> list[Reply]:
        return [_make_reply(self._next_line(body), body) for _ in range(count)]

    def _next_line(self, body: Json) -> Line:
        if self._always is not None:
            return self._always
        with self._lock:
            if self._script:
                return self._script.pop(0)
        # 400, which clients do not try again.
        raise _RefusedError(
            Failure(400, f"the script has {self._count} answers, and this request is one more")
        )


def scripted_server(
    script: Iterable[Line] | Callable[[Mapping[str, Any]], Said],
) -> ScriptedServer:
    """Make a server for a ``with`` block that answers what a script says, at its ``base_url``.

    Args:
        script: Texts, tool calls (``tool_call("search", query="x")``; a list for several at once),
            failures (``failure(429)``), or functions of the request's body that return one of
            these, in the order of the requests; or one function that answers all of them. A
            request beyond its end fails with status 400.
    """
    return ScriptedServer(script)


def tool_call(name: str, /, **arguments: Any) -> ToolCall:
    """Make a tool call of a model, with arguments of any JSON."""
    return ToolCall(f"call_{secrets.token_hex(12)}", name, json.dumps(arguments))


def failure(status: int = 500, message: str = "the script says so") -> Failure:
    """Make a request's refusal.

    Args:
        status: The HTTP status, 400 to 599; clients retry 408, 409, 429 and 500 up, and each
            retry takes an entry of the script.
        message: The error's message.

    Raises:
        ConfigError: The status is no failure.
    """
    if not 400 <= status <= 599:
        raise ConfigError(f"status {status} is no failure; give one from 400 to 599")
    return Failure(status, message)


def _make_reply(line: Line, body: Mapping[str, Any]) -> Reply:
    reply = line(body) if callable(line) else line
    if isinstance(reply, Failure):
        raise _RefusedError(reply)
    if isinstance(reply, Reply):
        return reply
    if isinstance(reply, str):
        return Reply(text=reply)
    calls = (reply,) if isinstance(reply, ToolCall) else tuple(reply)
    return Reply(text="", tool_calls=calls, finish_reason="tool_calls")
