"""A server that sends what the demo server never does, and what the span of a call then says."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import openai

from lightning_otel import Store, auto_trace

if int(openai.__version__.partition(".")[0]) >= 3:  # the HTTP library that it sends by
    import httpx2 as http
else:
    import httpx as http

__all__ = ["answering", "http", "read"]


_answer: dict[str, Any] = {}


@cache
def _client() -> openai.OpenAI:
    transport = http.MockTransport(lambda _: http.Response(200, **_answer))
    return openai.OpenAI(
        base_url="http://127.0.0.1/v1", api_key="k", http_client=http.Client(transport=transport)
    )


def answering(body: bytes, **headers: str) -> openai.OpenAI:
    """The one client, which is answered with this body from now on."""
    _answer.update(content=body, headers={"content-type": "application/json", **headers})
    return _client()


def read(path: str, request: Any = None, answer: Any = None) -> dict[str, Any]:
    """The attributes of a call's span, its content read and the rollout's stamps left out."""
    is_stream = isinstance(answer, list)
    body, kind = json.dumps(answer or {}), "application/json"
    if is_stream:
        events = ("[DONE]" if event.get("done") else json.dumps(event) for event in answer)
        body, kind = "".join(f"data: {event}\n\n" for event in events), "text/event-stream"
    options: dict[str, Any] = {"stream": True, "stream_cls": openai.Stream[object]}
    send: Callable[..., Any] = answering(body.encode(), **{"content-type": kind}).post
    with auto_trace(store=Store(":memory:")) as recording, suppress(Exception):
        found = send(path, body=request or {}, cast_to=object, **(options if is_stream else {}))
        if is_stream:
            list(found)
    _, span = recording.spans()
    return {
        key: json.loads(value) if str(value)[:1] == "[" and isinstance(value, str) else value
        for key, value in span.attributes.items()
        if not key.startswith("agentlightning.")
    }
