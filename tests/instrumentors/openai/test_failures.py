"""Requests that fail: the program gets its own exception, and the span says how it ended."""

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from lightning_otel import Store, auto_trace
from lightning_otel.demo.server import DemoServer

ASKED: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]

Ask = Callable[[Any], object]
"""What a program does with a client; untyped, as programs get it wrong."""


class Sum(BaseModel):
    """What the parse surfaces ask for."""

    value: int


def failure_of(ask: Callable[[], object]) -> dict[str, Any]:
    """All a program can see of the exception a call ends in."""
    with pytest.raises((Exception, asyncio.CancelledError)) as caught:
        ask()
    exc = caught.value
    causes = [exc.__cause__, exc.__context__]
    return {
        "type": type(exc),
        "text": str(exc),
        "body": getattr(exc, "body", None),
        "status": getattr(exc, "status_code", None),
        "causes": [(type(cause), str(cause)) for cause in causes],
        "suppressed": exc.__suppress_context__,
    }


def asking(model: Any, messages: Any = ASKED, **fields: Any) -> Ask:
    return lambda c: c.chat.completions.create(model=model, messages=messages, **fields)


FAILING: dict[str, Ask] = {
    **{model: asking(model) for model in ("fail-400", "fail-401", "fail-429", "fail-500", "cut")},
    "fail-400 stream": asking("fail-400", stream=True),
    "fail-400 raw": lambda c: c.chat.completions.with_raw_response.create(
        model="fail-400", messages=ASKED
    ),
    "fail-400 streaming response": lambda c: c.chat.completions.with_streaming_response.create(
        model="fail-400", messages=ASKED
    ).__enter__(),
    "fail-400 responses": lambda c: c.responses.create(model="fail-400", input="hello"),
    "fail-400 embeddings": lambda c: c.embeddings.create(model="fail-400", input="hello"),
    "timeout": asking("slow", timeout=0.05),
    "parse of text that is no JSON": lambda c: c.chat.completions.parse(
        model="big", messages=ASKED, response_format=Sum, max_tokens=1
    ),
    "messages of a number": asking("fail-400", 7),
    "messages of nonsense": asking("fail-400", [1, None, "x"]),
    "tools of nonsense": asking(
        "fail-400", tools=[7, {"function": 3}], stop=7, n="two", temperature="hot"
    ),
    "tools of objects": asking("toy", tools=[object()]),
    "tool calls of nonsense": asking(
        "fail-400", [{"role": "assistant", "tool_calls": 7, "content": 8}]
    ),
    "model of a number": asking(7, {"a": 1}),
    "text of half a character": asking(
        "toy", [{"role": "user", "content": "\ud800"}], stop="\ud800"
    ),
    "input of a generator": lambda c: c.responses.create(
        model="toy", input=(item for item in ASKED)
    ),
    "prompt of nonsense": lambda c: c.completions.create(model="fail-400", prompt=[1, "two"]),
    "input of a number": lambda c: c.embeddings.create(model="fail-400", input=7),
    "body of a list": lambda c: c.post("/chat/completions", body=[1], cast_to=object),
    "body of bytes": lambda c: c.post("/chat/completions", content=b"{}", cast_to=object),
    "nobody there": lambda c: asking("toy")(c.with_options(base_url="http://127.0.0.1:9/v1")),
    "no arguments": lambda c: c.chat.completions.create(),
    "no arguments at all": lambda c: c.request(),
}
NO_SPAN = ("no arguments", "no arguments at all")


@pytest.mark.parametrize("name", FAILING)
def test_request_that_fails_gives_the_program_its_own_exception(
    name: str, store: Store, server: DemoServer, client: openai.OpenAI, facts: Any
) -> None:
    """Type, message, body and cause are those of an uninstrumented client; the span has failed."""
    expected = failure_of(lambda: FAILING[name](client))
    count = len(server.log)

    with auto_trace(store=store) as recording:
        found = failure_of(lambda: FAILING[name](client))

    assert found == expected
    before, after = server.log[:count], server.log[count:]
    assert [held.request for held in before] == [held.request for held in after]
    spans = facts.calls(recording)
    assert len(spans) == (0 if name in NO_SPAN else 1)
    for span in spans:
        assert span.status == "ERROR"
        assert span.attributes["error.type"] == qualified(found["type"])
        assert span.status_message == found["text"].encode("utf-8", "replace").decode()
        if name.startswith("parse"):  # which failed after the model had answered
            assert span.attributes["gen_ai.response.id"] == after[0].response_id
            assert span.attributes["gen_ai.output.messages"]


def qualified(cls: type) -> str:
    """A class's name as ``error.type`` has it."""
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"


class SilentError(Exception):
    """Has no words: asked for them it fails."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SilentError])
def test_request_interrupted_fails_its_span(
    kind: type[BaseException],
    store: Store,
    client: openai.OpenAI,
    facts: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The very exception goes through; patched in, as a test can press no key."""
    error = kind()

    def interrupt(request: object) -> None:
        raise error

    monkeypatch.setattr(client, "_prepare_request", interrupt)

    with auto_trace(store=store) as recording, pytest.raises(kind) as caught:
        client.chat.completions.create(model="toy", messages=ASKED)

    assert caught.value is error
    (span,) = facts.calls(recording)
    assert span.status == "ERROR"
    assert span.attributes["error.type"].endswith(kind.__name__)
