"""Every surface of the client: to the program as without us, every fact on the span."""

import asyncio
import inspect
import json
from contextlib import AsyncExitStack
from operator import attrgetter
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from tests.facts import CALCULATOR as TOOL

from lightning_otel import Store, auto_trace
from lightning_otel.demo.server import DemoServer, LogEntry

FLAT_TOOL: Any = {"type": "function", **TOOL["function"]}
SUM = "What is 17*23?"
ASKED: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "héllo"}]
QUESTION: Any = [{"role": "user", "content": SUM}]
HISTORY: Any = [
    *QUESTION,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "calculator", "arguments": '{"expression": "17*23"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "391"},
]
ITEMS: Any = [
    {"role": "user", "content": SUM},
    {"type": "function_call", "call_id": "call_1", "name": "calculator", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "391"},
]
IDS: Any = {"return_token_ids": True}
SAMPLING: Any = {
    "temperature": 0.25,
    "top_p": 0.5,
    "max_completion_tokens": 3,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.75,
    "seed": 7,
    "reasoning_effort": "low",
    "service_tier": "default",
}
USAGE: Any = {"include_usage": True}
LOGPROBS: Any = ["message.output_text.logprobs"]


class Sum(BaseModel):
    """What the parse surfaces ask for."""

    value: int
    words: str


def plain(value: object) -> object:
    """A result without what differs from one request to the next: ids and times."""
    if isinstance(value, BaseModel):
        value = value.model_dump(warnings=False)
    if isinstance(value, dict):
        return {
            name: plain(item)
            for name, item in value.items()
            if name not in ("id", "created", "created_at", "completed_at", "item_id", "call_id")
        }
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def seen(value: Any) -> list[object]:
    return [type(value).__qualname__, plain(value)]


async def waited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def items(stream: Any) -> list[Any]:
    return [item async for item in stream] if hasattr(stream, "__aiter__") else list(stream)


async def opened(stack: AsyncExitStack, manager: Any) -> Any:
    is_async = hasattr(manager, "__aenter__")
    return await stack.enter_async_context(manager) if is_async else stack.enter_context(manager)


CREATE = "chat.completions.create"
RAW = "chat.completions.with_raw_response.create"
OPENED = "chat.completions.with_streaming_response.create"
HELLO: Any = {"messages": ASKED}
INPUT: Any = {"input": "hello"}
STREAM: Any = {"stream": True}
SURFACES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat": (CREATE, "", HELLO),
    "chat sampling": (
        CREATE, "", {**HELLO, "n": 2, "stop": ["END", "\n"], "logprobs": True, **SAMPLING}
    ),
    "chat tools": (CREATE, "", {"messages": QUESTION, "tools": [TOOL], "extra_body": IDS}),
    "chat history": (
        CREATE,
        "",
        {"messages": HISTORY, "tools": [TOOL], "logprobs": True, "extra_body": IDS, "stop": "END"},
    ),
    "chat generator": (CREATE, "", {"messages": iter}),
    "chat raw": (RAW, "parsed", HELLO),
    "chat raw unparsed": (RAW, "text", HELLO),
    "chat streaming response": (OPENED, "opened", HELLO),
    "chat streaming response lines": (OPENED, "lines", HELLO),
    "chat stream": (
        CREATE,
        "stream",
        {"messages": HISTORY, "logprobs": True, "stream_options": USAGE, "extra_body": IDS},
    ),
    "chat stream without usage": (CREATE, "stream", HELLO),
    "chat stream n": (CREATE, "stream", {**HELLO, "n": 2, "logprobs": True, "extra_body": IDS}),
    "chat stream tools": (
        CREATE, "stream", {"messages": QUESTION, "tools": [TOOL], "extra_body": IDS}
    ),
    "chat stream null choices": (CREATE, "stream", {**HELLO, "model": "null-choices"}),
    "chat stream null index": (
        CREATE, "stream", {"model": "null-index", "messages": QUESTION, "tools": [TOOL]}
    ),
    "chat stream raw": (RAW, "stream parsed", {**HELLO, "stream_options": USAGE}),
    "chat stream streaming response": (OPENED, "stream opened", HELLO),
    "chat stream streaming response lines": (OPENED, "stream lines", HELLO),
    "chat stream helper": ("chat.completions.stream", "get_final_completion", HELLO),
    "chat parse": ("chat.completions.parse", "", {**HELLO, "response_format": Sum}),
    "chat stream helper parsed": (
        "chat.completions.stream", "get_final_completion", {**HELLO, "response_format": Sum}
    ),
    "responses": ("responses.create", "", INPUT),
    "responses tools": (
        "responses.create",
        "",
        {"input": QUESTION, "tools": [FLAT_TOOL], "instructions": "Be brief.", "top_p": 0.5},
    ),
    "responses items": (
        "responses.create",
        "",
        {
            "input": ITEMS, "tools": [FLAT_TOOL], "include": LOGPROBS, "max_output_tokens": 2,
            "previous_response_id": "resp_0",
        },
    ),
    "responses raw": ("responses.with_raw_response.create", "parsed", INPUT),
    "responses stream": ("responses.create", "stream", {**INPUT, "include": LOGPROBS}),
    "responses stream tools": (
        "responses.create", "stream", {"input": QUESTION, "tools": [FLAT_TOOL]}
    ),
    "responses stream helper": ("responses.stream", "get_final_response", INPUT),
    "responses parse": ("responses.parse", "", {**INPUT, "text_format": Sum}),
    "responses parse tools": (
        "responses.parse", "", {"input": QUESTION, "text_format": Sum, "tools": [FLAT_TOOL]}
    ),
    "beta responses": ("beta.responses.create", "", INPUT),
    "embeddings": ("embeddings.create", "", INPUT),
    "embeddings many": (
        "embeddings.create",
        "",
        {"input": ["a", "b"], "encoding_format": "float", "dimensions": 4},
    ),
    "completions": ("completions.create", "", {"prompt": "hello"}),
    "completions many": (
        "completions.create",
        "",
        {"prompt": ["one", "two"], "n": 2, "logprobs": 1, "max_tokens": 3, "extra_body": IDS},
    ),
    "completions stream": (
        "completions.create",
        "stream",
        {"prompt": "hello", "logprobs": 1, "stream_options": USAGE, "extra_body": IDS},
    ),
    "by hand": ("post", "", {}),
}  # fmt: skip
"""By name: the method, how its result is read, and its arguments."""
JSON_SURFACES = [
    name
    for name, (*_, given) in SURFACES.items()
    if {"response_format", "text_format"} & given.keys()
]


async def result_of(client: Any, name: str) -> list[object]:
    path, way, given = SURFACES[name]
    method = attrgetter(path)(client)
    options = {"model": "toy", **given}
    if options.get("messages") is iter:
        options["messages"] = iter(ASKED)
    if path == "post":
        body = {"model": "toy", "messages": ASKED}
        return seen(await waited(method("chat/completions", body=body, cast_to=ChatCompletion)))
    if way.startswith("stream"):
        options |= STREAM
    async with AsyncExitStack() as stack:
        result = await waited(method(**options)) if way[:3] != "get" else method(**options)
        found: list[object] = [type(result).__qualname__]
        if way.startswith("get"):
            stream = await opened(stack, result)
            events = plain(await items(stream))
            return [*found, events, plain(await waited(getattr(stream, way)()))]
        if "opened" in way or "lines" in way:
            result = await opened(stack, result)
        if "lines" in way:
            lines = [line.removeprefix("data: ") for line in await items(result.iter_lines())]
            return [*found, [plain(json.loads(line)) for line in lines if line.startswith("{")]]
        if way == "text":
            return [*found, plain(json.loads(result.text))]
        if "opened" in way or "parsed" in way:
            result = await waited(result.parse())
        held = await items(result) if way.startswith("stream") else result
        return [*found, type(result).__qualname__, plain(held)]


def sent(exchange: LogEntry) -> dict[str, Any]:
    """What a server was sent, without its own address."""
    headers = {name: value for name, value in exchange.headers.items() if name != "host"}
    return {"path": exchange.path, "body": exchange.request, "headers": headers}


def asked_of(name: str, server: DemoServer, *, is_async: bool = False) -> object:
    async def ask() -> object:
        kind: Any = openai.AsyncOpenAI if is_async else openai.OpenAI
        async with AsyncExitStack() as stack:
            client = kind(base_url=server.base_url, api_key="k", max_retries=0)
            return await result_of(await opened(stack, client), name)

    return asyncio.run(ask())


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.pain(17)
def test_surface_is_the_same_to_program_and_server(
    name: str, is_async: bool, store: Store, server: DemoServer, facts: Any
) -> None:
    """Results, types and bytes sent are those of an uninstrumented client, in one span."""
    if name == "beta responses" and "responses" not in dir(openai.resources.beta.Beta):
        pytest.skip(f"openai {openai.__version__} has no such surface")
    if name == "chat generator" and is_async:
        pytest.skip("the asynchronous client takes no iterator")
    with DemoServer() as untouched:
        expected = asked_of(name, untouched, is_async=is_async)
        wanted = untouched.log

    with auto_trace(store=store) as recording:
        found = asked_of(name, server, is_async=is_async)

    assert found == expected
    assert [sent(exchange) for exchange in server.log] == [sent(exchange) for exchange in wanted]
    (span,) = facts.calls(recording)
    more = {"output_type": "json"} if name in JSON_SURFACES else {}
    facts.agree(span, server.log[0], **more)
