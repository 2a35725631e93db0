"""Model clients that are not ``openai``, or hide it: each request is one call, with its facts."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")
pytest.importorskip("autogen_ext.models.openai")

from autogen_agentchat.teams import RoundRobinGroupChat
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
from autogen_ext.models.replay import ReplayChatCompletionClient
from tests.instrumentors.autogen.programs import agent, calculator
from tests.instrumentors.autogen.stage import INFO, Stage

from lightning_otel import conventions as c
from lightning_otel import provider
from lightning_otel.instrumentors.openai import OpenAIInstrumentor

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
        """The inner client's last answer, else its own."""
        if self._inner is None:
            return result("own words")
        answers = [await self._inner.create(messages, **kwargs) for _ in range(self._tries)]
        return answers[-1]  # type: ignore[no-any-return]  # a client's

    async def create_stream(self, messages: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Two pieces, then the whole."""
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
        """None that is counted."""
        return RequestUsage(0, 0)

    total_usage = actual_usage

    def count_tokens(self, messages: Any, **kwargs: Any) -> int:
        """None that are counted."""
        return 0

    remaining_tokens = count_tokens


def result(content: Any, **more: Any) -> CreateResult:
    """A result of seven tokens in and two out."""
    given: dict[str, Any] = {"finish_reason": "stop", "cached": False} | more
    return CreateResult(content=content, usage=RequestUsage(7, 2), **given)


def messages_of(span: Any, key: str) -> Any:
    """Messages of a span."""
    return json.loads(span.attributes[key])


def test_own_client_is_a_call_with_all_that_autogen_says_of_it(stage: Stage) -> None:
    """Model, messages, tools, answer, usage and reason come from AutoGen's own objects."""
    tools = [FunctionTool(calculator, "Work out."), {"name": "plain", "description": "d"}]

    async def program(client: Any) -> Any:
        more = {"temperature": 0.5, "max_tokens": 9}
        return await Own().create(ASKED, tools=tools, extra_create_args=more)

    answer = stage.trace(program)

    assert answer.content == "own words"
    (call,) = stage.calls()
    assert (call.name, call.kind, call.status) == ("chat own-model", "CLIENT", "UNSET")
    assert call.attributes[c.REQUEST_MODEL] == "own-model"
    assert call.attributes[c.REQUEST_TEMPERATURE] == 0.5
    assert call.attributes[c.REQUEST_MAX_TOKENS] == 9
    assert (call.attributes[c.INPUT_TOKENS], call.attributes[c.OUTPUT_TOKENS]) == (7, 2)
    assert list(call.attributes[c.FINISH_REASONS]) == ["stop"]  # type: ignore[arg-type]  # a list
    assert messages_of(call, c.INPUT_MESSAGES) == [
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
    assert messages_of(call, c.OUTPUT_MESSAGES) == [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "own words"}],
            "finish_reason": "stop",
        }
    ]
    assert [tool["name"] for tool in messages_of(call, c.TOOL_DEFINITIONS)] == [
        "calculator",
        "plain",
    ]


def test_own_stream_is_a_call(stage: Stage) -> None:
    """A streamed answer is the call's, with the time of its first piece."""

    async def program(client: Any) -> Any:
        return [item async for item in Own().create_stream(ASKED)]

    items = stage.trace(program)

    assert items[:2] == ["own ", "words"]
    (call,) = stage.calls()
    assert call.attributes[c.REQUEST_STREAM] is True
    assert call.attributes[c.TIME_TO_FIRST_CHUNK] >= 0  # type: ignore[operator]  # a number
    assert call.attributes[c.OUTPUT_TOKENS] == 2
    assert c.ABANDONED not in call.attributes


def test_replayed_answers_are_the_agents_calls(stage: Stage) -> None:
    """Agents of a client that only replays have their calls, under them."""

    async def program(client: Any) -> Any:
        replay = ReplayChatCompletionClient(["one", "two"])
        team = RoundRobinGroupChat(
            [agent("writer", replay), agent("critic", replay, model_client_stream=True)],
            max_turns=2,
        )
        return await team.run(task="go")

    stage.trace(program)

    stage.check_shape()
    assert [stage.path(call)[-1] for call in stage.calls()] == [
        "invoke_agent writer",
        "invoke_agent critic",
    ]
    said = [messages_of(call, c.OUTPUT_MESSAGES)[0]["parts"][0] for call in stage.calls()]
    assert [part["content"] for part in said] == ["one", "two"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_own_client_over_openai_is_one_call(stage: Stage, is_stream: bool) -> None:
    """The request is the openai client's call: no second span, whoever stands above it."""

    async def program(client: Any) -> Any:
        writer = agent("writer", Own(Own(client)), model_client_stream=is_stream)
        return await writer.run(task="go")

    stage.trace(program)

    assert len(stage.calls()) == 1
    stage.check()


def test_each_try_of_an_own_client_is_a_call(stage: Stage) -> None:
    """Of two requests beneath one call each is a span, side by side."""

    async def program(client: Any) -> Any:
        return await agent("writer", Own(client, tries=2)).run(task="go")

    stage.trace(program)

    assert len(stage.calls()) == 2
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
        provider.instrument("autogen_core")
        OpenAIInstrumentor().uninstrument()
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


def test_generator_of_messages_is_never_read(stage: Stage) -> None:
    """Messages that can be read once are left to the client."""

    class Reading(Own):
        """A client that reads its messages once."""

        async def create(self, messages: Any, **kwargs: Any) -> CreateResult:
            return result(str(len(list(messages))))

    async def program(client: Any) -> Any:
        return await Reading().create(message for message in ASKED)  # type: ignore[arg-type]

    assert stage.trace(program).content == "4"
    (call,) = stage.calls()
    assert c.INPUT_MESSAGES not in call.attributes


def test_unknown_usage_is_missing_and_not_zero(stage: Stage) -> None:
    """Zero of both is how AutoGen writes that nothing is known."""

    class Uncounted(Own):
        """A client that does not count."""

        async def create(self, messages: Any, **kwargs: Any) -> CreateResult:
            return CreateResult(
                finish_reason="unknown", content="x", usage=RequestUsage(0, 0), cached=False
            )

    async def program(client: Any) -> Any:
        return await Uncounted().create(ASKED)

    stage.trace(program)

    (call,) = stage.calls()
    assert not {c.INPUT_TOKENS, c.OUTPUT_TOKENS, c.FINISH_REASONS} & call.attributes.keys()
