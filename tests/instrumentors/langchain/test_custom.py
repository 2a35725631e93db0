"""Models, retrievers and handlers that no client stands behind: LangChain's own words are kept."""

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.llms import LLM
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, GenerationChunk
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_openai import OpenAIEmbeddings
from opentelemetry import trace
from tests.instrumentors.langchain.conftest import Chat
from tests.instrumentors.outline import all_named, outline

from lightning_otel import Store, auto_trace
from lightning_otel import conventions as c
from lightning_otel.demo.server import DemoServer
from lightning_otel.instrumentors.langchain import runs

mine = trace.get_tracer("the program's own")
CALL: Any = {"name": "add", "args": {"a": 1}, "id": "c1", "type": "tool_call"}
USAGE: Any = {
    "input_tokens": 11,
    "output_tokens": 5,
    "total_tokens": 16,
    "input_token_details": {"cache_read": 3},
    "output_token_details": {"reasoning": 2},
}
HISTORY: Any = [
    SystemMessage("Be brief."),
    HumanMessage([{"type": "text", "text": "héllo"}]),
    AIMessage("", tool_calls=[CALL]),
    ToolMessage("1", tool_call_id="c1"),
]
GIVEN = [
    {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
    {"role": "user", "parts": [{"type": "text", "content": "héllo"}]},
    {
        "role": "assistant",
        "parts": [{"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 1}}],
    },
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "1"}]},
]


class House(BaseChatModel):
    """A model of the program's own, which says nothing of a provider."""

    fails: bool = False
    answer: Any = None

    @property
    def _llm_type(self) -> str:
        return "house"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any):  # type: ignore[no-untyped-def]  # as LangChain's
        with mine.start_as_current_span("mine"):
            if self.fails:
                raise RuntimeError("no house")
        answer = AIMessage(
            "well",
            tool_calls=[CALL],
            usage_metadata=USAGE,
            id="house-1",
            response_metadata={"finish_reason": "tool_calls", "model_name": "house-2"},
        )
        return ChatResult(generations=[ChatGeneration(message=self.answer or answer)])


class Streaming(House):
    """The same in pieces."""

    def _stream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        with mine.start_as_current_span("mine"):
            yield ChatGenerationChunk(message=AIMessageChunk("we", id="house-1"))
        if self.fails:
            raise RuntimeError("no house")
        last = AIMessageChunk(
            "ll", usage_metadata=USAGE, response_metadata={"finish_reason": "stop"}
        )
        yield ChatGenerationChunk(message=last)


class AsyncStreaming(House):
    """And by the event loop."""

    async def _astream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        for piece in ("we", "ll"):
            await asyncio.sleep(0)
            yield ChatGenerationChunk(message=AIMessageChunk(piece, id="house-1"))


class Teller(LLM):
    """A completion model of the program's own."""

    @property
    def _llm_type(self) -> str:
        return "teller"

    def _call(self, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        return prompt[::-1]

    def _stream(
        self, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[GenerationChunk]:
        for letter in prompt[::-1]:
            yield GenerationChunk(text=letter)


class Shelf(BaseRetriever):
    """A retriever, with an embedding of its own if it is given a maker of them."""

    embeddings: Any = None

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        with mine.start_as_current_span("mine"):
            if self.embeddings is not None:
                self.embeddings.embed_query(query)
            return [Document("on " + query, id="d1")]


def whole(span: Any) -> dict[str, Any]:
    """A span's attributes, with its content read and without the rollout's stamps."""
    found = {
        key: json.loads(value) if key in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES) else value
        for key, value in span.attributes.items()
    }
    return {key: value for key, value in found.items() if not key.startswith("agentlightning")}


WHOLE = {
    c.OPERATION: "chat",
    c.PROVIDER: "house",
    c.INPUT_MESSAGES: GIVEN,
    c.OUTPUT_MESSAGES: [
        {
            "role": "assistant",
            "parts": [
                {"type": "text", "content": "well"},
                {"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 1}},
            ],
            "finish_reason": "tool_calls",
        }
    ],
    c.FINISH_REASONS: ["tool_calls"],
    c.RESPONSE_ID: "house-1",
    c.RESPONSE_MODEL: "house-2",
    c.INPUT_TOKENS: 11,
    c.OUTPUT_TOKENS: 5,
    c.CACHED_TOKENS: 3,
    c.REASONING_TOKENS: 2,
}


async def _drain(stream: Any) -> None:
    async for _ in stream:
        pass


RUNS: dict[str, Any] = {
    "invoke": lambda model: model.invoke(HISTORY),
    "ainvoke": lambda model: asyncio.run(model.ainvoke(HISTORY)),
    # LangChain answers a stream of a model without one by asking it once.
    "stream": lambda model: list(model.stream(HISTORY)),
    "astream": lambda model: asyncio.run(_drain(model.astream(HISTORY))),
}


@pytest.mark.parametrize("name", RUNS)
def test_custom_model_is_recorded_whole(name: str, store: Store) -> None:
    """Messages, calls, usage, finish reason and ids come from LangChain's objects."""
    with auto_trace(store=store) as recording:
        RUNS[name](House())

    assert outline(recording).splitlines() == ["chat House", "  mine"]
    (span,) = all_named(recording, "chat House")
    assert (span.kind, whole(span)) == ("CLIENT", WHOLE)
    (trajectory,) = recording.trajectories()
    assert len(trajectory.transitions) == 1


def test_tools_of_a_custom_model_are_kept(store: Store) -> None:
    """Tools that were bound to a model stand on its call, if only by name and purpose."""

    @tool
    def add(a: int) -> int:
        """Adds."""
        return a

    with auto_trace(store=store) as recording:
        House().bind(tools=[add]).invoke("hello")
        House().bind(
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]
        ).invoke("hello")

    found = [
        json.loads(span.attributes[c.TOOL_DEFINITIONS])
        for span in all_named(recording, "chat House")
    ]
    assert found == [
        [{"type": "function", "name": "add", "description": "Adds."}],
        [{"type": "function", "name": "f", "parameters": {}}],
    ]


@pytest.mark.parametrize(
    ("kind", "is_async"), [(Streaming, False), (Streaming, True), (AsyncStreaming, True)]
)
def test_custom_stream_is_recorded_whole(kind: Any, is_async: bool, store: Store) -> None:
    """A stream's pieces are one answer, and its own spans stand in its call."""
    model = kind()

    async def main() -> list[Any]:
        return [piece async for piece in model.astream(HISTORY)]

    with auto_trace(store=store) as recording:
        pieces = asyncio.run(main()) if is_async else list(model.stream(HISTORY))

    assert [piece.content for piece in pieces] == ["we", "ll", ""]
    outline(recording)
    (span,) = all_named(recording, f"chat {kind.__name__}")
    found = whole(span)
    assert found[c.INPUT_MESSAGES] == GIVEN
    assert found[c.OUTPUT_MESSAGES][0]["parts"] == [{"type": "text", "content": "well"}]
    assert found[c.RESPONSE_ID] == "house-1"
    assert found[c.REQUEST_STREAM] is True
    assert c.ABANDONED not in found
    if kind is Streaming:
        assert found[c.INPUT_TOKENS] == 11
        assert found[c.FINISH_REASONS] == ["stop"]
        assert all_named(recording, "mine")[0].parent_span_id == span.span_id


def test_custom_stream_that_is_left_keeps_what_was_said(store: Store) -> None:
    """Of a stream that the program leaves there is what it read, marked as abandoned."""

    async def main() -> None:
        stream = AsyncStreaming().astream(HISTORY)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]  # it is a generator

    with auto_trace(store=store) as recording:
        for _ in Streaming().stream(HISTORY):
            break
        asyncio.run(main())

    outline(recording)
    for span in recording.spans()[1:]:
        if span.name != "mine":
            assert span.attributes[c.ABANDONED] is True
            assert span.status == "UNSET"
            assert "we" in span.attributes[c.OUTPUT_MESSAGES]


@pytest.mark.parametrize("kind", [House, Streaming])
def test_failing_custom_model_keeps_its_prompt(kind: Any, store: Store) -> None:
    """A call that raises ends with the exception, which is the program's."""
    model = kind(fails=True)

    with auto_trace(store=store) as recording:
        with pytest.raises(RuntimeError, match="no house"):
            list(model.stream(HISTORY))
        with pytest.raises(RuntimeError, match="no house"):
            model.invoke(HISTORY)

    spans = all_named(recording, f"chat {kind.__name__}")
    assert [span.attributes[c.ERROR_TYPE] for span in spans] == ["RuntimeError"] * 2
    assert all(whole(span)[c.INPUT_MESSAGES] == GIVEN for span in spans)


def test_batch_of_which_one_fails_leaves_nothing_open(store: Store) -> None:
    """LangChain never tells the end of the questions after the one that failed."""
    model = House(fails=True)

    with auto_trace(store=store) as recording, pytest.raises(RuntimeError):
        model.generate([HISTORY, HISTORY, HISTORY])

    assert len(all_named(recording, "chat House")) == 1


def test_completion_model_is_one_call_for_a_request(store: Store) -> None:
    """Texts go in and out; several at once are one request."""
    with auto_trace(store=store) as recording:
        Teller().invoke("abc")
        Teller().generate(["one", "two"])
        assert "".join(Teller().stream("xy")) == "yx"
        asyncio.run(Teller().ainvoke("async"))

    def texts(span: Any, key: str) -> list[str]:
        return [part["content"] for item in whole(span)[key] for part in item["parts"]]

    spans = all_named(recording, "text_completion Teller")
    assert [(texts(span, c.INPUT_MESSAGES), texts(span, c.OUTPUT_MESSAGES)) for span in spans] == [
        (["abc"], ["cba"]), (["one", "two"], ["eno", "owt"]), (["xy"], ["yx"]),
        (["async"], ["cnysa"]),
    ]  # fmt: skip


@pytest.mark.skipif(
    not hasattr(BaseChatModel, "stream_events"), reason="this LangChain has no events of a model"
)
def test_events_of_a_model_are_one_call(chat: Chat, store: Store) -> None:
    """The newest way to read a model, by its events, is one span as all others."""
    with auto_trace(store=store) as recording, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model in (Streaming(), chat()):
            stream = model.stream_events(HISTORY[:2], version="v3")
            assert str(stream.text)

    outline(recording)
    assert [line.strip() for line in outline(recording).splitlines()] == [
        "chat Streaming",
        "mine",
        "chat toy",
    ]
    assert whole(all_named(recording, "chat Streaming")[0])[c.OUTPUT_MESSAGES][0]["parts"] == [
        {"type": "text", "content": "well"}
    ]


@pytest.mark.usefixtures("own_client")
@pytest.mark.parametrize("is_async", [False, True])
def test_retriever_holds_its_embedding(is_async: bool, server: DemoServer, store: Store) -> None:
    """What a retriever does stands in its span, beside what it was asked and found."""
    embeddings: Any = OpenAIEmbeddings(
        model="toy", base_url=server.base_url, api_key="k", check_embedding_ctx_length=False
    )
    shelf = Shelf(embeddings=embeddings)

    with auto_trace(store=store) as recording:
        asyncio.run(shelf.ainvoke("trees")) if is_async else shelf.invoke("trees")

    assert outline(recording).splitlines() == ["retrieval Shelf", "  mine", "    embeddings toy"]
    found = whole(all_named(recording, "retrieval Shelf")[0])
    assert found == {
        c.OPERATION: "retrieval",
        c.RETRIEVAL_QUERY: "trees",
        c.RETRIEVAL_DOCUMENTS: '[{"content":"on trees","id":"d1"}]',
    }


def test_failing_tool_ends_with_its_exception(store: Store) -> None:
    """A tool that raises, and one that tells the model of its failure, are both failed."""

    @tool
    def breaks(a: int) -> int:
        """Breaks."""
        raise ZeroDivisionError("mine")

    with auto_trace(store=store) as recording:
        with pytest.raises(ZeroDivisionError, match="mine"):
            breaks.invoke({"a": 1})
        handled = breaks.model_copy(update={"handle_validation_error": True})
        handled.invoke({"type": "tool_call", "name": "breaks", "args": {"a": "x"}, "id": "c1"})

    spans = all_named(recording, "execute_tool breaks")
    assert [(span.status, span.attributes[c.ERROR_TYPE]) for span in spans] == [
        ("ERROR", "ZeroDivisionError"),
        ("ERROR", "tool_error"),
    ]


def test_handler_of_the_programs_that_raises_leaves_nothing_open_for_long(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs whose end LangChain never tells are given up once there are too many."""
    monkeypatch.setattr(runs, "OPEN_LIMIT", runs.open_count() + 3)

    class Raising(BaseCallbackHandler):
        raise_error = True

        def on_chain_start(self, *args: Any, **kwargs: Any) -> None:
            raise LookupError("mine")

    chain = RunnableLambda(lambda text: text).with_config(run_name="mine")
    before = runs.open_count()
    with auto_trace(store=store):
        for _ in range(10):
            with pytest.raises(LookupError, match="mine"):
                chain.invoke("x", {"callbacks": [Raising()]})

    assert runs.open_count() == before + 3
    for run_id in list(runs._open)[-3:]:
        runs.take(run_id)
