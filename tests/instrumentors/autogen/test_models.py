"""Model clients that are not ``openai``, or hide it: each request is one call, with its facts."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")
pytest.importorskip("autogen_ext.models.openai")

from autogen_core import FunctionCall
from autogen_core.models import (
    AssistantMessage,
    ChatCompletionClient,
    CreateResult,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    RequestUsage,
    SystemMessage,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_ext.models.cache import ChatCompletionCache
from tests.instrumentors.autogen.programs import agent, calculator
from tests.instrumentors.autogen.stage import INFO, Stage
from tests.instrumentors.conftest import instrumentor

from lightning_otel import instrument
from lightning_otel.types import conventions as c

ASKED: list[LLMMessage] = [
    SystemMessage(content="be brief"),
    UserMessage(content="go", source="user"),
    AssistantMessage(
        content=[FunctionCall(id="1", name="calculator", arguments='{"expression":"6*7"}')],
        thought="hm",
        source="calc",
    ),
    FunctionExecutionResultMessage(
        content=[
            FunctionExecutionResult(content="42", name="calculator", call_id="1", is_error=False)
        ]
    ),
]


class Own(ChatCompletionClient):
    """A client as a program may write it: over another one, or by itself."""

    component_type = "model"
    component_config_schema = RequestUsage
    model_info = INFO
    capabilities = INFO

    def __init__(self, inner: Any = None, tries: int = 1) -> None:
        self.model_name = "own-model"
        self._inner = inner
        self._tries = tries

    async def create(self, messages: Any, **kwargs: Any) -> CreateResult:
        if self._inner is None:
            return result("own words")
        answers = [await self._inner.create(messages, **kwargs) for _ in range(self._tries)]
        return answers[-1]  # type: ignore[no-any-return]  # a client's

    async def create_stream(self, messages: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        if self._inner is not None:
            async for item in self._inner.create_stream(messages, **kwargs):
                yield item
            return
        yield "own "
        yield "words"
        yield result("own words")

    async def close(self) -> None:
        """Nothing is open."""

    def actual_usage(self) -> RequestUsage:
        return RequestUsage(0, 0)

    total_usage = actual_usage

    def count_tokens(self, messages: Any, **kwargs: Any) -> int:
        return 0

    remaining_tokens = count_tokens


def result(content: Any, **more: Any) -> CreateResult:
    """A result of seven tokens in and two out."""
    given: dict[str, Any] = {"finish_reason": "stop", "cached": False} | more
    return CreateResult(content=content, usage=RequestUsage(7, 2), **given)


def messages_of(span: Any, key: str) -> Any:
    return json.loads(span.attributes[key])


GIVEN = [
    {"role": "system", "parts": [{"type": "text", "content": "be brief"}]},
    {"role": "user", "parts": [{"type": "text", "content": "go"}]},
    {
        "role": "assistant",
        "parts": [
            {"type": "reasoning", "content": "hm"},
            {
                "type": "tool_call",
                "id": "1",
                "name": "calculator",
                "arguments": {"expression": "6*7"},
            },
        ],
    },
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "1", "response": "42"}]},
]
SAID = {"role": "assistant", "parts": [{"type": "text", "content": "own words"}]}


@pytest.mark.parametrize("is_stream", [False, True])
def test_own_client_is_a_call_with_all_that_autogen_says_of_it(
    stage: Stage, is_stream: bool
) -> None:
    """Model, messages, tools, answer, usage and reason come from AutoGen's own objects."""
    tools: Any = [FunctionTool(calculator, "Work out."), {"name": "plain", "description": "d"}]
    more: Any = {"tools": tools, "extra_create_args": {"temperature": 0.5, "max_tokens": 9}}

    async def program(client: Any) -> Any:
        if is_stream:
            return [item async for item in Own().create_stream(ASKED, **more)]
        return [await Own().create(ASKED, **more)]

    *pieces, answer = stage.trace(program)

    assert (pieces, answer.content) == (["own ", "words"] if is_stream else [], "own words")
    (call,) = stage.calls()
    assert (call.name, call.kind, call.status) == ("chat own-model", "CLIENT", "UNSET")
    found = dict(call.attributes)
    assert (found.pop(c.TIME_TO_FIRST_CHUNK, None) is not None) is is_stream
    assert (found.pop(c.REQUEST_STREAM, False), c.ABANDONED in found) == (is_stream, False)
    assert messages_of(call, c.INPUT_MESSAGES) == GIVEN
    assert messages_of(call, c.OUTPUT_MESSAGES) == [{**SAID, "finish_reason": "stop"}]
    definitions = messages_of(call, c.TOOL_DEFINITIONS)
    assert [tool["name"] for tool in definitions] == ["calculator", "plain"]
    numbers = {
        c.REQUEST_MODEL: "own-model",
        c.REQUEST_TEMPERATURE: 0.5,
        c.REQUEST_MAX_TOKENS: 9,
        c.INPUT_TOKENS: 7,
        c.OUTPUT_TOKENS: 2,
        c.FINISH_REASONS: ["stop"],
    }
    assert found.items() >= numbers.items()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("tries", [1, 2])
def test_own_client_over_openai_is_a_call_for_each_request(
    stage: Stage, is_stream: bool, tries: int
) -> None:
    """The requests are the openai client's calls, side by side: none of those who stand above."""

    async def program(client: Any) -> Any:
        writer = agent("writer", Own(Own(client), tries), model_client_stream=is_stream)
        return await writer.run(task="go")

    stage.trace(program)

    assert len(stage.calls()) == (1 if is_stream else tries)
    assert len({call.parent_span_id for call in stage.calls()}) == 1
    stage.check()


def test_cached_answer_is_no_call(stage: Stage) -> None:
    """What a cache answers was not asked again; what it does not know is one call."""

    class Store:
        """A cache in a dict."""

        def __init__(self) -> None:
            self._held: dict[str, Any] = {}

        def get(self, key: str, default: Any = None) -> Any:
            return self._held.get(key, default)

        def set(self, key: str, value: Any) -> None:
            self._held[key] = value

    async def program(client: Any) -> Any:
        cached = ChatCompletionCache(client, Store())  # type: ignore[arg-type]  # by protocol
        asked: list[LLMMessage] = [UserMessage(content="You are writer.", source="user")]
        return [await cached.create(asked), await cached.create(asked)]

    first, second = stage.trace(program)

    assert first.content == second.content
    assert second.cached
    assert len(stage.calls()) == len(stage.server.log) == 1


def test_call_of_the_openai_client_is_recorded_without_its_instrumentor(stage: Stage) -> None:
    """Where the instrumentor of ``openai`` is off, AutoGen's own facts make the call."""

    async def program(client: Any) -> Any:
        instrument("autogen_core")
        instrumentor("openai").uninstrument()
        return await agent("writer", client).run(task="go")

    stage.trace(program)

    (call,) = stage.calls()
    exchange = stage.server.log[-1]
    assert exchange.response is not None
    assert call.name == "chat toy"
    assert call.attributes[c.PROVIDER] == "openai"
    assert call.attributes[c.INPUT_TOKENS] == exchange.response["usage"]["prompt_tokens"]
    assert stage.path(call) == ["invoke_agent writer"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_failed_own_call_is_a_failed_call(stage: Stage, is_stream: bool) -> None:
    """The exception passes as it is, and the span says it."""

    class Failing(Own):
        """A client whose model cannot be had."""

        async def create(self, messages: Any, **kwargs: Any) -> CreateResult:
            raise error

        async def create_stream(self, messages: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            raise error
            yield

    error = ConnectionError("gone")

    async def program(client: Any) -> None:
        with pytest.raises(ConnectionError) as caught:
            await agent("writer", Failing(), model_client_stream=is_stream).run(task="go")
        assert caught.value is error

    stage.trace(program)

    (call,) = stage.calls()
    assert (call.status, call.attributes[c.ERROR_TYPE]) == ("ERROR", "ConnectionError")
    (turn,) = stage.named("invoke_agent writer")
    assert turn.status == "ERROR"


def test_what_is_not_known_is_missing(stage: Stage) -> None:
    """Messages that can be read once are the client's; zero of both counts is how AutoGen says
    that nothing is known.
    """

    class Odd(Own):
        """A client that reads its messages once and does not count."""

        async def create(self, messages: Any, **kwargs: Any) -> CreateResult:
            unknown: Any = {"finish_reason": "unknown", "usage": RequestUsage(0, 0)}
            return CreateResult(content=str(len(list(messages))), cached=False, **unknown)

    async def program(client: Any) -> Any:
        return await Odd().create(message for message in ASKED)  # type: ignore[arg-type]  # as it is

    assert stage.trace(program).content == "4"
    (call,) = stage.calls()
    unknown = {c.INPUT_MESSAGES, c.INPUT_TOKENS, c.OUTPUT_TOKENS, c.FINISH_REASONS}
    assert not unknown & call.attributes.keys()
