"""Models, retrievers, tools and handlers of the program's own: LangChain's own words are kept."""

import asyncio
import json
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler, CallbackManager
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
from tests.instrumentors.langchain.conftest import Chat, all_of
from tests.instrumentors.outline import all_named, outline

from lightning_otel import Store, auto_trace
from lightning_otel.demo.server import DemoServer
from lightning_otel.instrumentors.langchain import runs
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

MESSAGES = (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES)
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
        return ChatResult(generations=[ChatGeneration(message=answer)])


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


def whole(span: Span) -> dict[str, Any]:
    """A span's attributes, with its content read, and how it ended."""
    found = {
        key: json.loads(value) if key in (*MESSAGES, c.TOOL_DEFINITIONS) else value
        for key, value in span.attributes.items()
    }
    return {**found, "ended": span.status, "kind": span.kind}


def answer(*parts: Any, **more: Any) -> list[dict[str, Any]]:
    texts = [{"type": "text", "content": each} if type(each) is str else each for each in parts]
    return [{"role": "assistant", "parts": texts, **more}]


def pieces(model: Any, *, is_async: bool = False) -> None:
    stream = model.astream(HISTORY) if is_async else model.stream(HISTORY)
    found = asyncio.run(all_of(stream)) if is_async else list(stream)
    assert [piece.content for piece in found] == ["we", "ll", ""]


def leave(*_: Any) -> None:
    """Two streams that are left after their first piece."""

    async def main() -> None:
        stream: Any = AsyncStreaming().astream(HISTORY)
        await anext(stream)
        await stream.aclose()

    for _ in Streaming().stream(HISTORY):
        break
    asyncio.run(main())


def fail(kind: Any) -> None:
    """A stream and a batch that raise; of the batch LangChain tells no later end."""
    for ask in (
        lambda model: list(model.stream(HISTORY)),
        lambda model: model.generate([HISTORY, HISTORY, HISTORY]),
    ):
        with pytest.raises(RuntimeError, match="no house"):
            ask(kind(fails=True))


@tool
def breaks(a: int) -> int:
    """Breaks."""
    raise ZeroDivisionError("mine")


def _break() -> None:
    with pytest.raises(ZeroDivisionError, match="mine"):
        breaks.invoke({"a": 1})


def _break_quietly() -> None:
    handled = breaks.model_copy(update={"handle_validation_error": True})
    handled.invoke({"type": "tool_call", "name": "breaks", "args": {"a": "x"}, "id": "c1"})


def shelf_of(server: DemoServer) -> Shelf:
    """A retriever that embeds what it is asked."""
    embeddings: Any = OpenAIEmbeddings(
        model="toy", base_url=server.base_url, api_key="k", check_embedding_ctx_length=False
    )
    return Shelf(embeddings=embeddings)


def events_of(model: Any) -> None:
    """The newest way to read a model, by its events."""
    if not hasattr(BaseChatModel, "stream_events"):
        pytest.skip("this LangChain has no events of a model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert str(model.stream_events(HISTORY[:2], version="v3").text)


WHOLE = {
    c.OPERATION: "chat",
    c.PROVIDER: "house",
    c.INPUT_MESSAGES: GIVEN,
    c.OUTPUT_MESSAGES: answer(
        "well",
        {"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 1}},
        finish_reason="tool_calls",
    ),
    c.FINISH_REASONS: ["tool_calls"],
    c.RESPONSE_ID: "house-1",
    c.RESPONSE_MODEL: "house-2",
    c.INPUT_TOKENS: 11,
    c.OUTPUT_TOKENS: 5,
    c.CACHED_TOKENS: 3,
    c.REASONING_TOKENS: 2,
    "ended": "UNSET",
    "kind": "CLIENT",
}
STREAMED = {
    c.INPUT_MESSAGES: GIVEN,
    c.OUTPUT_MESSAGES: answer("well", finish_reason="stop"),
    c.FINISH_REASONS: ["stop"],
    c.RESPONSE_ID: "house-1",
    c.INPUT_TOKENS: 11,
    c.REQUEST_STREAM: True,
    c.ABANDONED: None,
}
LEFT = {c.ABANDONED: True, "ended": "UNSET", c.OUTPUT_MESSAGES: answer("we")}
FAILED = {"ended": "ERROR", c.ERROR_TYPE: "RuntimeError", c.INPUT_MESSAGES: GIVEN}
FOUND = {
    c.OPERATION: "retrieval",
    c.RETRIEVAL_QUERY: "trees",
    c.RETRIEVAL_DOCUMENTS: '[{"content":"on trees","id":"d1"}]',
}
HOUSE, STREAM, SHELF = (
    "chat House\n  mine", "chat Streaming\n  mine", "retrieval Shelf\n  mine\n    embeddings toy"
)  # fmt: skip
SCHEMA: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}


def told(prompts: list[str], answers: list[str]) -> dict[str, Any]:
    asked = [{"role": "user", "parts": [{"type": "text", "content": each}]} for each in prompts]
    found = [message for each in answers for message in answer(each)]
    return {"text_completion Teller": {c.INPUT_MESSAGES: asked, c.OUTPUT_MESSAGES: found}}


CASES: dict[str, tuple[Callable[[Chat, DemoServer], object], str, dict[str, dict[str, Any]]]] = {
    "invoke": (lambda *_: House().invoke(HISTORY), HOUSE, {"chat House": WHOLE}),
    "ainvoke": (lambda *_: asyncio.run(House().ainvoke(HISTORY)), HOUSE, {"chat House": WHOLE}),
    # LangChain answers a stream of a model without one by asking it once.
    "stream": (lambda *_: list(House().stream(HISTORY)), HOUSE, {"chat House": WHOLE}),
    "astream": (
        lambda *_: asyncio.run(all_of(House().astream(HISTORY))), HOUSE, {"chat House": WHOLE}
    ),
    "pieces": (lambda *_: pieces(Streaming()), STREAM, {"chat Streaming": STREAMED}),
    "pieces of a thread": (
        lambda *_: pieces(Streaming(), is_async=True), STREAM, {"chat Streaming": STREAMED}
    ),
    "pieces of a loop": (
        lambda *_: pieces(AsyncStreaming(), is_async=True), "chat AsyncStreaming",
        {"chat AsyncStreaming": {c.OUTPUT_MESSAGES: answer("well"), c.ABANDONED: None}},
    ),
    "left": (
        leave, f"{STREAM}\nchat AsyncStreaming",
        {"chat Streaming": LEFT, "chat AsyncStreaming": LEFT},
    ),
    "fails": (lambda *_: fail(House), f"{HOUSE}\n{HOUSE}", {"chat House": FAILED}),
    "fails in a stream": (
        lambda *_: fail(Streaming), f"{STREAM}\n{STREAM}", {"chat Streaming": FAILED}
    ),
    # Tools that were bound to a model stand on its call, if only by name and purpose.
    "tool": (
        lambda *_: House().bind(tools=[breaks]).invoke("hello"), HOUSE,
        {"chat House": {c.TOOL_DEFINITIONS: [
            {"type": "function", "name": "breaks", "description": "Breaks."}
        ]}},
    ),
    "tool's schema": (
        lambda *_: House().bind(tools=[SCHEMA]).invoke("hello"), HOUSE,
        {"chat House": {c.TOOL_DEFINITIONS: [
            {"type": "function", "name": "f", "parameters": {}}
        ]}},
    ),
    "text": (
        lambda *_: Teller().invoke("abc"), "text_completion Teller", told(["abc"], ["cba"])
    ),
    "text, async": (
        lambda *_: asyncio.run(Teller().ainvoke("ab")), "text_completion Teller",
        told(["ab"], ["ba"]),
    ),
    # Several at once are one request.
    "texts": (
        lambda *_: Teller().generate(["one", "two"]), "text_completion Teller",
        told(["one", "two"], ["eno", "owt"]),
    ),
    "stream of text": (
        lambda *_: list(Teller().stream("xy")), "text_completion Teller", told(["xy"], ["yx"])
    ),
    "events": (
        lambda *_: events_of(Streaming()), STREAM,
        {"chat Streaming": {c.OUTPUT_MESSAGES: answer("well", finish_reason="stop")}},
    ),
    "events of a client": (lambda chat, _: events_of(chat()), "chat toy", {}),
    "retriever": (
        lambda _, server: shelf_of(server).invoke("trees"), SHELF, {"retrieval Shelf": FOUND}
    ),
    "retriever, async": (
        lambda _, server: asyncio.run(shelf_of(server).ainvoke("trees")), SHELF,
        {"retrieval Shelf": FOUND},
    ),
    "tool that raises": (
        lambda *_: _break(), "execute_tool breaks",
        {"execute_tool breaks": {"ended": "ERROR", c.ERROR_TYPE: "ZeroDivisionError"}},
    ),
    # It tells the model of its failure.
    "tool that is refused": (
        lambda *_: _break_quietly(), "execute_tool breaks",
        {"execute_tool breaks": {"ended": "ERROR", c.ERROR_TYPE: "tool_error"}},
    ),
}  # fmt: skip
"""By name: what is run, its outline, and what its spans say, at least."""


@pytest.mark.usefixtures("own_client")
@pytest.mark.parametrize("name", CASES)
def test_run_is_recorded_whole(name: str, chat: Chat, server: DemoServer, store: Store) -> None:
    """Messages, calls, usage, finish reason and ids come from LangChain's own objects."""
    run, lines, said = CASES[name]

    with auto_trace(store=store) as recording:
        run(chat, server)

    assert outline(recording) == lines
    for title, wanted in said.items():
        for span in all_named(recording, title):
            found = whole(span)
            assert {key: found.get(key) for key in wanted} == wanted
    if name == "invoke":
        ((_,),) = [path.transitions for path in recording.trajectories()]


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


def test_programs_own_handlers_stay_as_they_are(chat: Chat, store: Store) -> None:
    """A list of handlers that was given is not changed, and its handlers are told the same."""
    told: list[str] = []

    class Own(BaseCallbackHandler):
        def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
            told.append("start")

        def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
            told.append("end")

    own = [Own()]
    with auto_trace(store=store):
        manager = CallbackManager(own)
        chat().invoke("hello", {"callbacks": manager})
        chat().invoke("hello", {"callbacks": own})

    assert len(own) == 1
    assert told == ["start", "end"] * 2


class Hostile:
    """An object that must not be asked for anything."""

    def __str__(self) -> str:
        time.sleep(5)
        raise AssertionError("asked")

    __repr__ = __str__


BAD_VALUES: dict[str, Any] = {
    "an object": Hostile,
    "half a pair": lambda: "\ud800 and on",
    "100 MB": lambda: "x" * 100_000_000,
    "a generator": lambda: (number for number in range(3)),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_tool_gets_and_gives_bad_values_untouched(name: str, store: Store) -> None:
    """The tool has the very object it was given, and the program what the tool gave."""
    value = BAD_VALUES[name]()
    seen: list[Any] = []

    @tool(response_format="content")
    def take(value: Any) -> Any:
        """Takes anything."""
        seen.append(value)
        return value

    class Quiet(dict[str, Any]):
        # LangChain itself writes a tool's input as text before it runs it.
        def __str__(self) -> str:
            return "quiet"

    started = time.monotonic()
    with auto_trace(store=store) as recording:
        result = take.run(Quiet(value=value)) if name != "an object" else take.func(value)  # type: ignore[attr-defined]  # a plain tool

    assert time.monotonic() - started < 4
    assert result is value or result == value or value != value
    assert seen[0] is value
    if name == "a generator":
        assert list(value) == [0, 1, 2]
    for span in all_named(recording, "execute_tool take"):
        arguments = span.attributes.get(c.TOOL_ARGUMENTS)
        assert arguments is not None
        assert len(arguments) < 9_000_000


def test_tool_that_is_run_with_keywords_of_any_name_is_a_span(store: Store) -> None:
    """LangChain hands them on to its handlers."""

    @tool
    def take(value: int) -> int:
        """Takes a number."""
        return value

    odd = dict.fromkeys(("key", "given", "attributes", "function", "title", "place"), 1)
    with auto_trace(store=store) as recording:
        result = take.run({"value": 7}, **odd)  # type: ignore[arg-type]  # any that are not its own

    (span,) = all_named(recording, "execute_tool take")
    assert (result, json.loads(span.attributes[c.TOOL_ARGUMENTS])) == (7, {"value": 7})
