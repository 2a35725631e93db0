"""Every surface of the client: to the program as without us, every fact on the span."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from lightning_otel import Store, auto_trace
from lightning_otel.demo.server import DemoServer, Exchange

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Works out an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
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
    """A result's type, beside what it says."""
    return [type(value).__qualname__, plain(value)]


def drained(stream: Any) -> list[object]:
    """A stream's type and all it gives."""
    return [type(stream), *(plain(item) for item in stream)]


def lines_of(opened: Any) -> list[object]:
    """The data lines of a response still unread, without ids and times."""
    with opened as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines()]
    return [type(response), [plain(json.loads(line)) for line in lines if line.startswith("{")]]


def parsed_of(opened: Any) -> list[object]:
    """A response opened unread, then parsed."""
    with opened as response:
        return [type(response), *seen(response.parse())]


def stream_parsed_of(opened: Any) -> list[object]:
    """A response opened unread, then parsed into a stream."""
    with opened as response:
        return [type(response), *drained(response.parse())]


def events_of(manager: Any, final: str) -> list[object]:
    """The helper's events and its final object."""
    with manager as stream:
        return [type(stream), [plain(event) for event in stream], plain(getattr(stream, final)())]


Surface = Callable[[openai.OpenAI], object]
SURFACES: dict[str, Surface] = {
    "chat": lambda c: seen(c.chat.completions.create(model="toy", messages=ASKED)),
    "chat sampling": lambda c: seen(
        c.chat.completions.create(
            model="toy", messages=ASKED, n=2, stop=["END", "\n"], logprobs=True, **SAMPLING
        )
    ),
    "chat tools": lambda c: seen(
        c.chat.completions.create(model="toy", messages=QUESTION, tools=[TOOL], extra_body=IDS)
    ),
    "chat history": lambda c: seen(
        c.chat.completions.create(
            model="toy", messages=HISTORY, tools=[TOOL], logprobs=True, extra_body=IDS, stop="END"
        )
    ),
    "chat generator": lambda c: seen(
        c.chat.completions.create(model="toy", messages=(item for item in ASKED))
    ),
    "chat raw": lambda c: seen(
        c.chat.completions.with_raw_response.create(model="toy", messages=ASKED).parse()
    ),
    "chat raw unparsed": lambda c: plain(
        json.loads(c.chat.completions.with_raw_response.create(model="toy", messages=ASKED).text)
    ),
    "chat streaming response": lambda c: parsed_of(
        c.chat.completions.with_streaming_response.create(model="toy", messages=ASKED)
    ),
    "chat streaming response lines": lambda c: lines_of(
        c.chat.completions.with_streaming_response.create(model="toy", messages=ASKED)
    ),
    "chat stream": lambda c: drained(
        c.chat.completions.create(
            model="toy",
            messages=HISTORY,
            stream=True,
            logprobs=True,
            stream_options=USAGE,
            extra_body=IDS,
        )
    ),
    "chat stream without usage": lambda c: drained(
        c.chat.completions.create(model="toy", messages=ASKED, stream=True)
    ),
    "chat stream n": lambda c: drained(
        c.chat.completions.create(
            model="toy", messages=ASKED, stream=True, n=2, logprobs=True, extra_body=IDS
        )
    ),
    "chat stream tools": lambda c: drained(
        c.chat.completions.create(
            model="toy", messages=QUESTION, stream=True, tools=[TOOL], extra_body=IDS
        )
    ),
    "chat stream null choices": lambda c: drained(
        c.chat.completions.create(model="null-choices", messages=ASKED, stream=True)
    ),
    "chat stream null index": lambda c: drained(
        c.chat.completions.create(model="null-index", messages=QUESTION, stream=True, tools=[TOOL])
    ),
    "chat stream raw": lambda c: drained(
        c.chat.completions.with_raw_response.create(
            model="toy", messages=ASKED, stream=True, stream_options=USAGE
        ).parse()
    ),
    "chat stream streaming response": lambda c: stream_parsed_of(
        c.chat.completions.with_streaming_response.create(model="toy", messages=ASKED, stream=True)
    ),
    "chat stream streaming response lines": lambda c: lines_of(
        c.chat.completions.with_streaming_response.create(model="toy", messages=ASKED, stream=True)
    ),
    "chat stream helper": lambda c: events_of(
        c.chat.completions.stream(model="toy", messages=ASKED), "get_final_completion"
    ),
    "responses": lambda c: seen(c.responses.create(model="toy", input="hello")),
    "responses tools": lambda c: seen(
        c.responses.create(
            model="toy", input=QUESTION, tools=[FLAT_TOOL], instructions="Be brief.", top_p=0.5
        )
    ),
    "responses items": lambda c: seen(
        c.responses.create(
            model="toy",
            input=ITEMS,
            tools=[FLAT_TOOL],
            include=LOGPROBS,
            max_output_tokens=2,
            previous_response_id="resp_0",
        )
    ),
    "responses raw": lambda c: seen(
        c.responses.with_raw_response.create(model="toy", input="hello").parse()
    ),
    "responses stream": lambda c: drained(
        c.responses.create(model="toy", input="hello", stream=True, include=LOGPROBS)
    ),
    "responses stream tools": lambda c: drained(
        c.responses.create(model="toy", input=QUESTION, stream=True, tools=[FLAT_TOOL])
    ),
    "responses stream helper": lambda c: events_of(
        c.responses.stream(model="toy", input="hello"), "get_final_response"
    ),
    "beta responses": lambda c: seen(c.beta.responses.create(model="toy", input="hello")),
    "embeddings": lambda c: seen(c.embeddings.create(model="toy", input="hello")),
    "embeddings many": lambda c: seen(
        c.embeddings.create(model="toy", input=["a", "b"], encoding_format="float", dimensions=4)
    ),
    "completions": lambda c: seen(c.completions.create(model="toy", prompt="hello")),
    "completions many": lambda c: seen(
        c.completions.create(
            model="toy", prompt=["one", "two"], n=2, logprobs=1, max_tokens=3, extra_body=IDS
        )
    ),
    "completions stream": lambda c: drained(
        c.completions.create(
            model="toy",
            prompt="hello",
            stream=True,
            logprobs=1,
            stream_options=USAGE,
            extra_body=IDS,
        )
    ),
    "by hand": lambda c: seen(
        c.post("chat/completions", body={"model": "toy", "messages": ASKED}, cast_to=ChatCompletion)
    ),
}
JSON_SURFACES: dict[str, Surface] = {
    "chat parse": lambda c: seen(
        c.chat.completions.parse(model="toy", messages=ASKED, response_format=Sum)
    ),
    "chat stream helper parsed": lambda c: events_of(
        c.chat.completions.stream(model="toy", messages=ASKED, response_format=Sum),
        "get_final_completion",
    ),
    "responses parse": lambda c: seen(
        c.responses.parse(model="toy", input="hello", text_format=Sum)
    ),
    "responses parse tools": lambda c: seen(
        c.responses.parse(model="toy", input=QUESTION, text_format=Sum, tools=[FLAT_TOOL])
    ),
}
AsyncSurface = Callable[[openai.AsyncOpenAI], Awaitable[object]]


async def async_drained(stream: Any) -> list[object]:
    """A stream's type and all it gives."""
    return [type(stream), *[plain(item) async for item in stream]]


async def async_chat(c: openai.AsyncOpenAI) -> object:
    """One call, whole."""
    return seen(await c.chat.completions.create(model="toy", messages=ASKED, **SAMPLING))


async def async_tools(c: openai.AsyncOpenAI) -> object:
    """Tools and ids."""
    return seen(
        await c.chat.completions.create(
            model="toy", messages=QUESTION, tools=[TOOL], logprobs=True, extra_body=IDS
        )
    )


async def async_raw(c: openai.AsyncOpenAI) -> object:
    """A raw response, parsed."""
    raw = await c.chat.completions.with_raw_response.create(model="toy", messages=ASKED)
    return [type(raw), *seen(raw.parse())]


async def async_streaming_response(c: openai.AsyncOpenAI) -> object:
    """A response opened unread, then parsed."""
    opened = c.chat.completions.with_streaming_response.create(model="toy", messages=ASKED)
    async with opened as response:
        return [type(response), *seen(await response.parse())]


async def async_streaming_lines(c: openai.AsyncOpenAI) -> object:
    """A response opened unread, then read line by line."""
    opened = c.chat.completions.with_streaming_response.create(
        model="toy", messages=ASKED, stream=True
    )
    async with opened as response:
        lines = [line.removeprefix("data: ") async for line in response.iter_lines()]
    return [plain(json.loads(line)) for line in lines if line.startswith("{")]


async def async_stream(c: openai.AsyncOpenAI) -> object:
    """A stream to its end."""
    return await async_drained(
        await c.chat.completions.create(
            model="toy",
            messages=HISTORY,
            stream=True,
            logprobs=True,
            stream_options=USAGE,
            extra_body=IDS,
        )
    )


async def async_raw_stream(c: openai.AsyncOpenAI) -> object:
    """A raw response, parsed into a stream."""
    raw = await c.chat.completions.with_raw_response.create(
        model="toy", messages=ASKED, stream=True
    )
    return await async_drained(raw.parse())


async def async_helper(c: openai.AsyncOpenAI) -> object:
    """The streaming helper."""
    async with c.chat.completions.stream(model="toy", messages=ASKED) as stream:
        events = [plain(event) async for event in stream]
        return [type(stream), events, plain(await stream.get_final_completion())]


async def async_responses(c: openai.AsyncOpenAI) -> object:
    """The Responses API, whole."""
    return seen(await c.responses.create(model="toy", input=ITEMS, tools=[FLAT_TOOL]))


async def async_responses_stream(c: openai.AsyncOpenAI) -> object:
    """The Responses API, streamed."""
    return await async_drained(await c.responses.create(model="toy", input="hello", stream=True))


async def async_responses_helper(c: openai.AsyncOpenAI) -> object:
    """The Responses API's streaming helper."""
    async with c.responses.stream(model="toy", input="hello") as stream:
        events = [plain(event) async for event in stream]
        return [type(stream), events, plain(await stream.get_final_response())]


async def async_embeddings(c: openai.AsyncOpenAI) -> object:
    """Embeddings."""
    return seen(await c.embeddings.create(model="toy", input="hello"))


async def async_completions(c: openai.AsyncOpenAI) -> object:
    """A legacy completion, streamed."""
    return await async_drained(
        await c.completions.create(model="toy", prompt="hello", stream=True, extra_body=IDS)
    )


ASYNC_SURFACES: list[AsyncSurface] = [
    async_chat,
    async_tools,
    async_raw,
    async_streaming_response,
    async_streaming_lines,
    async_stream,
    async_raw_stream,
    async_helper,
    async_responses,
    async_responses_stream,
    async_responses_helper,
    async_embeddings,
    async_completions,
]


def sent(exchange: Exchange) -> dict[str, Any]:
    """What a server was sent, without its own address."""
    headers = {name: value for name, value in exchange.headers.items() if name != "host"}
    return {"path": exchange.path, "body": exchange.request, "headers": headers}


def asked_of(surface: Surface, server: DemoServer) -> object:
    """What a surface gives a program."""
    with openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client:
        return surface(client)


@pytest.mark.parametrize("name", [*SURFACES, *JSON_SURFACES])
@pytest.mark.pain(17)
def test_surface_is_the_same_to_program_and_server(
    name: str, store: Store, server: DemoServer, facts: Any
) -> None:
    """Results, types and bytes sent are those of an uninstrumented client, in one span."""
    if name == "beta responses" and "responses" not in dir(openai.resources.beta.Beta):
        pytest.skip(f"openai {openai.__version__} has no such surface")
    surface = (SURFACES | JSON_SURFACES)[name]
    with DemoServer() as untouched:
        expected = asked_of(surface, untouched)
        wanted = untouched.log

    with auto_trace(store=store) as recording:
        found = asked_of(surface, server)

    assert found == expected
    assert [sent(exchange) for exchange in server.log] == [sent(exchange) for exchange in wanted]
    (span,) = facts.calls(recording)
    (exchange,) = server.log
    more = {"output_type": "json"} if name in JSON_SURFACES else {}
    facts.agree(span, exchange, **more)


@pytest.mark.parametrize("surface", ASYNC_SURFACES)
def test_async_surface_is_the_same_to_program_and_server(
    surface: AsyncSurface, store: Store, server: DemoServer, facts: Any
) -> None:
    """Results, types and bytes sent are those of an uninstrumented client, in one span."""

    async def asked(base_url: str) -> object:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
            return await surface(client)

    with DemoServer() as untouched:
        expected = asyncio.run(asked(untouched.base_url))
        wanted = untouched.log

    with auto_trace(store=store) as recording:
        found = asyncio.run(asked(server.base_url))

    assert found == expected
    assert [sent(exchange) for exchange in server.log] == [sent(exchange) for exchange in wanted]
    (span,) = facts.calls(recording)
    (exchange,) = server.log
    facts.agree(span, exchange)
