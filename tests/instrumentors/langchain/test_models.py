"""Models of LangChain over the openai client: each request one span, and nothing else changed."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from pydantic import BaseModel, field_validator
from tests.facts import sent
from tests.instrumentors.langchain.conftest import Chat, all_of
from tests.instrumentors.outline import all_named, assert_each_call_once, outline

from lightning_otel import Store, auto_trace
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import conventions as c

# langchain-openai adds up the usage of several answers, and does not know all the server's details.
pytestmark = pytest.mark.filterwarnings("ignore:Unexpected type for token usage:UserWarning")

ASKED: Any = [("system", "Be brief."), ("user", "héllo")]
QUESTION: Any = [HumanMessage("one")]


class Sum(BaseModel):
    """What structured outputs ask for."""

    value: int
    words: str


def many(chat: Chat) -> list[Any]:
    return chat().batch(["one", "two", "three"], {"max_concurrency": 2})


SYNC: dict[str, Callable[[Chat], Any]] = {
    "invoke": lambda chat: chat(temperature=0.25, seed=7).invoke(ASKED),
    "invoke, Responses": lambda chat: chat(use_responses_api=True).invoke(ASKED),
    "stream": lambda chat: list(chat().stream(ASKED)),
    "stream with usage": lambda chat: list(chat(stream_usage=True).stream(ASKED)),
    "stream, Responses": lambda chat: list(chat(use_responses_api=True).stream(ASKED)),
    "streaming=True": lambda chat: chat(streaming=True).invoke(ASKED),
    "batch": many,
    "generate": lambda chat: chat().generate([QUESTION, QUESTION]).generations,
    "choices": lambda chat: chat(n=2).generate([QUESTION]).generations,
    "tools": lambda chat: chat().bind_tools([Sum]).invoke("What is 17*23?"),
    "logprobs": lambda chat: chat(logprobs=True).invoke(ASKED),
    "token ids": lambda chat: chat(extra_body={"return_token_ids": True}).invoke(ASKED),
    "with_retry": lambda chat: chat().with_retry().invoke(ASKED),
    "chain": lambda chat: (
        ChatPromptTemplate.from_messages([("user", "say {word}")]) | chat() | StrOutputParser()
    ).invoke({"word": "hé"}),
    "stream of a chain": lambda chat: list(
        (
            ChatPromptTemplate.from_messages([("user", "say {word}")]) | chat() | StrOutputParser()
        ).stream({"word": "hé"})
    ),
}
ASYNC: dict[str, Callable[[Chat], Any]] = {
    "ainvoke": lambda chat: chat(temperature=0.25).ainvoke(ASKED),
    "ainvoke, Responses": lambda chat: chat(use_responses_api=True).ainvoke(ASKED),
    "astream": lambda chat: all_of(chat().astream(ASKED)),
    "astream with usage": lambda chat: all_of(chat(stream_usage=True).astream(ASKED)),
    "astream, Responses": lambda chat: all_of(chat(use_responses_api=True).astream(ASKED)),
    "abatch": lambda chat: chat().abatch(["one", "two", "three"]),
    "agenerate": lambda chat: chat().agenerate([QUESTION, QUESTION]),
    "tools": lambda chat: chat().bind_tools([Sum]).ainvoke("What is 17*23?"),
    "astream_events": lambda chat: all_of(chat().astream_events(ASKED, version="v2")),
}


def plain(value: Any) -> Any:
    """A result without what differs from one run to the next."""
    if isinstance(value, BaseModel):
        return [type(value).__qualname__, plain(value.model_dump(warnings=False))]
    if isinstance(value, dict):
        skipped = ("id", "run_id", "created_at", "call_id", "item_id", "run", "parent_ids")
        return {key: plain(item) for key, item in value.items() if key not in skipped}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


@pytest.mark.parametrize("name", [*SYNC, *ASYNC])
def test_model_call_is_one_span(
    name: str, server: DemoServer, facts: Any, chat: Chat, store: Store
) -> None:
    """Each request is one span with all the log says, and the program sees what it saw before."""

    async def run_async(chat: Chat) -> Any:
        return await ASYNC[name](chat)

    def run(chat: Chat) -> Any:
        return SYNC[name](chat) if name in SYNC else asyncio.run(run_async(chat))

    with DemoServer(seed=0) as fixed:
        before = run(lambda **options: chat(base_url=fixed.base_url, **options))
    with auto_trace(store=store) as recording:
        after = run(chat)

    assert plain(after) == plain(before)
    assert sorted(map(sent, server.log)) == sorted(map(sent, fixed.log))
    assert_each_call_once(recording, server, facts)
    lines = outline(recording).splitlines()
    if name == "chain":
        assert lines == ["RunnableSequence", "  chat toy"]


class Picky(BaseModel):
    """What no answer of the demo server is, though it fits the schema."""

    value: int

    @field_validator("value")
    @classmethod
    def _refuse(cls, value: int) -> int:
        raise ValueError("not good enough")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("is_async", [False, True])
def test_structured_output_that_is_refused_is_still_recorded(
    method: Any, is_async: bool, server: DemoServer, chat: Chat, store: Store
) -> None:
    """What the model said is there to train on, though the client or LangChain raises for it."""
    wanted = chat().with_structured_output(Picky, method=method)

    with (
        auto_trace(store=store) as recording,
        pytest.raises(ValueError, match="not good enough"),
    ):
        asyncio.run(wanted.ainvoke("Take 7.")) if is_async else wanted.invoke("Take 7.")

    (span,) = all_named(recording, "chat toy")
    assert span.attributes[c.RESPONSE_ID] == server.log[0].response_id
    assert "value" in span.attributes[c.OUTPUT_MESSAGES]
    (trajectory,) = recording.trajectories()
    (step,) = trajectory.transitions
    assert "value" in str(step.action)


def test_each_request_of_a_fallback_and_its_retries_is_a_span(
    server: DemoServer, chat: Chat, store: Store
) -> None:
    """Every attempt that LangChain makes stands beside the others."""
    failing = chat(model="fail-500").with_retry(stop_after_attempt=2, wait_exponential_jitter=False)

    with auto_trace(store=store) as recording:
        answer = failing.with_fallbacks([chat()]).invoke("hello")

    assert isinstance(answer, BaseMessage)
    calls = [span for span in recording.spans() if span.name.startswith("chat ")]
    assert [(span.name, span.status) for span in calls] == [
        ("chat fail-500", "ERROR"), ("chat fail-500", "ERROR"), ("chat toy", "UNSET"),
    ]  # fmt: skip
    assert outline(recording).startswith("RunnableWithFallbacks\n  ")
    assert len(server.log) == 3


def test_answer_without_cost_is_a_call(store: Store) -> None:
    """Only LangChain's cache makes an answer a hit, and no server that asks for nothing."""
    usage: Any = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3, "total_cost": 0}
    answer = AIMessage(content="free", usage_metadata=usage)
    with auto_trace(store=store):
        GenericFakeChatModel(messages=iter([answer])).invoke("hello")
    (step,) = store.transitions()
    assert step.output_tokens == 2


def test_hit_of_the_cache_is_no_call(chat: Chat, server: DemoServer, store: Store) -> None:
    """The span stays, under a name of its own, without the usage and the id of the first answer."""
    model = chat(cache=InMemoryCache())
    with auto_trace(store=store) as recording:
        answers = [model.invoke(ASKED).content for _ in range(2)]
        asyncio.run(model.ainvoke(ASKED))

    assert answers[0] == answers[1]
    first, *hits = [span for span in recording.spans() if span.name != c.SPAN_ROLLOUT]
    assert first.attributes[c.OPERATION] == "chat"
    assert [span.name for span in hits] == ["cache_hit toy"] * 2
    assert not any({c.INPUT_TOKENS, c.RESPONSE_ID} & span.attributes.keys() for span in hits)
    assert len(store.transitions().rows()) == len(server.log) == 1
