"""Every function of ours fails, one at a time: the program gets what it gets without us."""

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from tests.instrumentors.conftest import broken, list_places
from tests.instrumentors.openai.test_surfaces import ASKED, plain, result_of
from tests.instrumentors.transport import http

from lightning_otel import Store, auto_trace, capture, dialects, messages, redact, uninstrument
from lightning_otel.capture import operations
from lightning_otel.demo.server import DemoServer
from lightning_otel.dialects import chat, completions, responses
from lightning_otel.instrumentors import body, model_requests
from lightning_otel.instrumentors import openai as instrumentor
from lightning_otel.instrumentors.base import LibraryInstrumentor
from lightning_otel.instrumentors.openai import ClientRequest
from lightning_otel.messages import media
from lightning_otel.types import values

MODULES = [
    *(
        module
        for name, module in sorted(sys.modules.items())
        # LiteLLM's is an instrumentor of its own.
        if name.startswith((instrumentor.__name__, dialects.__name__))
        and not name.endswith("litellm")
    ),
    redact, messages, media, values, capture,
]  # fmt: skip
CLASSES = [
    ClientRequest, model_requests.ModelRequest, body.BodyRecorder, body.ResponseRecorder,
    operations.Operation, chat.Chat,
    completions.Completions, completions.Embeddings, responses.Responses,
]  # fmt: skip
FENCE = {"guard_call", "note_fault", "__del__"}
"""What keeps faults in cannot be tried by failing itself."""
HOST = {
    "read", "read_async", "_iter_bytes", "_aiter_bytes", "_iter_raw", "_aiter_raw", "_close",
    "_aclose", "attached",
}  # fmt: skip
"""What the program's own work runs through: failing there is failing to do it."""
SET_UP = {"around", "_send_request", "_send_async"}
"""What runs when instrumentation is switched on, tried apart."""
BOUND = {"_begin_request", "_note_response"}
"""What the wrapped methods hold since then: broken before it is switched on."""

Place = tuple[Any, str]
PLACES = list_places([*MODULES, *CLASSES], FENCE | HOST | SET_UP)


def name_of(place: Place) -> str:
    owner, name = place
    return f"{owner.__name__.rpartition('.')[2]}.{name}"


NAMES = (
    "chat tools", "chat stream n", "chat streaming response", "responses tools", "responses stream",
    "embeddings", "completions", "completions stream",
)  # fmt: skip


def failure(work: Callable[[], object]) -> tuple[type, str]:
    # openai 2 lets a stream's transport error through as it is.
    with pytest.raises((openai.OpenAIError, http.TransportError)) as caught:
        work()
    return type(caught.value), str(caught.value)


def use(c: openai.OpenAI) -> list[object]:
    """What a program gets of streams that it leaves, and of requests that fail."""
    create = c.chat.completions.create
    with create(model="toy", messages=ASKED, stream=True) as stream:
        found = plain(next(stream))
    with c.responses.create(model="toy", input="a b c d", stream=True) as events:
        left = [plain(next(events)) for _ in range(6)]
    return [
        found,
        left,
        failure(lambda: create(model="fail-400", messages=ASKED)),
        failure(lambda: list(create(model="sse-error", messages=ASKED, stream=True))),
        failure(lambda: list(create(model="cut", messages=ASKED, stream=True))),
    ]


Use = Callable[[], list[object]]


@pytest.fixture(scope="module")
def use_all() -> Iterator[Use]:
    """Uses one server through one client of each kind, as making a client is what costs."""
    with (
        DemoServer() as running,
        openai.OpenAI(base_url=running.base_url, api_key="k", max_retries=0) as client,
        asyncio.Runner() as loop,
    ):
        other = openai.AsyncOpenAI(base_url=running.base_url, api_key="k", max_retries=0)
        yield lambda: [
            *use(client),
            *(loop.run(result_of(each, name)) for each in (client, other) for name in NAMES),
        ]
        loop.run(other.close())


@pytest.fixture(scope="module")
def untraced(use_all: Use) -> list[object]:
    """What a program gets without us."""
    uninstrument()
    return use_all()


@pytest.mark.parametrize("place", PLACES, ids=name_of)
@pytest.mark.pain(16)
def test_fault_in_any_function_stays_with_us(
    place: Place,
    store: Store,
    use_all: Use,
    untraced: list[object],
    faults_allowed: None,
) -> None:
    """With one function of ours broken, every call gives what it gives without us."""
    before = capture.process.faults
    with pytest.MonkeyPatch.context() as patch:
        if place[1] in BOUND:
            uninstrument()
            patch.setattr(*place, broken)
        with auto_trace(store=store):
            patch.setattr(*place, broken)
            found = use_all()
            patch.undo()
    if place[1] in BOUND:
        uninstrument()

    assert found == untraced
    assert place[1] not in BOUND or capture.process.faults > before


def test_fault_while_switching_on_leaves_the_program_untraced(
    store: Store,
    use_all: Use,
    untraced: list[object],
    faults_allowed: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the client cannot be patched, it works as it did."""
    monkeypatch.setattr(LibraryInstrumentor, "wrap", broken)

    with auto_trace(store=store):
        found = use_all()

    assert found == untraced


def test_fault_is_counted_and_warned_of_once(
    store: Store,
    client: openai.OpenAI,
    facts: Any,
    faults_allowed: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each fault is counted, the first is a warning, and the span is kept with what is known."""
    gc.collect()  # a stream that another test left open would end in here, and be one more
    monkeypatch.setattr(capture.process, "faults", 0)

    with auto_trace(store=store) as recording:
        monkeypatch.setattr(chat.Chat, "response_content", broken)
        for _ in range(2):
            client.chat.completions.create(model="toy", messages=ASKED)
        with monkeypatch.context() as patch:  # a program's own handler of logs may raise
            patch.setattr(capture.log, "handle", broken)
            client.chat.completions.create(model="toy", messages=ASKED)

    assert capture.process.faults == 3
    warned = [held for held in caplog.records if held.levelname == "WARNING"]
    assert [held.name for held in warned] == ["lightning_otel.capture"]
    spans = facts.calls(recording)
    assert len(spans) == 3
    assert all(span.attributes["gen_ai.response.id"] for span in spans)
    assert all("gen_ai.input.messages" in span.attributes for span in spans)
