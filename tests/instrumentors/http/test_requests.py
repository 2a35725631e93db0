"""Requests of HTTP clients: which are calls, what their attempts and codings tell, who has them."""

import asyncio
import gzip
import io
import json
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from random import Random
from typing import Any
from urllib.request import Request, urlopen

import httpx
import openai
import pytest
from tests.instrumentors.http.drawn import VENDORS
from tests.instrumentors.http.wire import Answer, Wire
from tests.listening import Handler, listen

from lightning_otel import Resources, State, Store, auto_trace, uninstrument
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream"}
BODY: Any = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
MESSAGE = {"role": "assistant", "content": "hi"}
WHOLE = {
    "id": "r1", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}],
}  # fmt: skip
CHUNK = {**WHOLE, "choices": [{"index": 0, "delta": MESSAGE, "finish_reason": "stop"}]}
STREAM = f"data: {json.dumps(CHUNK)}\n\ndata: [DONE]\n\n".encode()
GOOD = Answer(json.dumps(WHOLE).encode(), headers=JSON)
BUSY = Answer(
    json.dumps({"error": {"message": "too much", "type": "busy"}}).encode(), 429,
    {**JSON, "retry-after-ms": "20"},
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore")


def ours(spans: Any) -> list[Span]:
    return [span for span in spans if span.scope == c.SCOPE and c.REQUEST_MODEL in span.attributes]


def said(span: Span) -> str:
    (message,) = json.loads(span.attributes[c.OUTPUT_MESSAGES])
    return "".join(part["content"] for part in message["parts"])


def post(url: str, **more: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={**BODY, **more})


CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": partial(gzip.compress, mtime=0), "deflate": zlib.compress, "identity": bytes,
}  # fmt: skip


@pytest.mark.parametrize("library", ["httpx", "requests", "aiohttp"])
@pytest.mark.parametrize("coding", CODINGS)
def test_coded_answer_passes_as_it_is_and_is_read(
    coding: str, library: str, wire: Wire, store: Store
) -> None:
    """Raw bytes and decoded ones alike."""
    pytest.importorskip(library)
    headers = {**EVENTS, "content-encoding": coding}
    body = CODINGS[coding](STREAM)
    wire.answers = [Answer(body, headers=headers)]
    url, given = f"{wire.url}/v1/chat/completions", {**BODY, "stream": True}

    def read_raw() -> bytes:
        if library == "httpx":
            with httpx.stream("POST", url, json=given) as response:
                return b"".join(response.iter_raw())
        if library == "requests":
            import requests

            with requests.post(url, json=given, stream=True) as answer:
                return bytes(answer.raw.read(decode_content=False))
        import aiohttp

        async def read() -> bytes:
            async with (
                aiohttp.ClientSession(auto_decompress=False) as session,
                session.post(url, json=given) as response,
            ):
                return await response.read()

        return asyncio.run(read())

    with auto_trace(store=store) as recording:
        assert read_raw() == body
    (span,) = ours(recording.spans())
    assert said(span) == "hi"
    assert c.ABANDONED not in span.attributes


def test_what_a_program_answers_itself_is_no_request(store: Store) -> None:
    """Transports within the process: a mock, and an application of either kind."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route
    from starlette.testclient import TestClient

    async def answer(_: Any) -> JSONResponse:
        return JSONResponse(WHOLE)

    application = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])

    def serve(environ: Any, start: Any) -> list[bytes]:
        start("200 OK", [("content-type", "application/json")])
        return [json.dumps(WHOLE).encode()]

    mock = httpx.MockTransport(lambda _: httpx.Response(200, json=WHOLE))
    with auto_trace(store=store) as recording:
        for transport in (mock, httpx.WSGITransport(serve)):
            with httpx.Client(transport=transport, base_url="http://in.process") as client:
                assert client.post("/v1/chat/completions", json=BODY).json() == WHOLE
        assert TestClient(application).post("/v1/chat/completions", json=BODY).json() == WHOLE
    assert not ours(recording.spans())


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/models", "/v1/x:countTokens"])
def test_other_questions_are_no_calls(path: str, wire: Wire, store: Store) -> None:
    """Counting tokens, and lists of models."""
    wire.answers = [Answer(b'{"input_tokens": 3}', headers=JSON)]
    with auto_trace(store=store) as recording:
        httpx.post(wire.url + path, json=BODY)
    assert not ours(recording.spans())


@pytest.mark.parametrize("is_async", [False, True])
def test_body_that_a_generator_makes_is_read_as_it_goes(
    is_async: bool, wire: Wire, store: Store
) -> None:
    """It is made once, and sent as it is made."""
    wire.answers = [GOOD]
    content, url = json.dumps(BODY).encode(), f"{wire.url}/v1/chat/completions"
    headers = {"content-length": str(len(content))}

    def make() -> Iterator[bytes]:
        yield content[:9]
        yield content[9:]

    async def make_async() -> AsyncIterator[bytes]:
        for piece in make():
            yield piece

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.post(url, content=make_async(), headers=headers)

    with auto_trace(store=store):
        answer = (
            asyncio.run(ask()) if is_async else httpx.post(url, content=make(), headers=headers)
        )
    assert answer.json() == WHOLE
    assert wire.asked[0][2] == BODY
    (step,) = store.transitions()
    assert (step.model, step.observation[0]["parts"][0]["content"]) == ("m", "hello")


def test_body_that_cannot_be_read_makes_no_step(wire: Wire, store: Store) -> None:
    """The call is there, and says why."""
    requests = pytest.importorskip("requests")
    wire.answers = [GOOD]
    content = json.dumps(BODY).encode()
    with auto_trace(store=store):
        url, headers = f"{wire.url}/v1/chat/completions", {"content-length": str(len(content))}
        assert requests.post(url, data=io.BytesIO(content), headers=headers).json() == WHOLE
    report = store.transitions().report()
    assert (report.calls, report.transitions) == (1, 0)
    assert [each.reason.partition(":")[0] for each in report.dropped] == ["unreadable"]


def test_failures_are_named(wire: Wire, store: Store) -> None:
    """An answer that says what it is, one that does not, and none at all."""
    wire.answers = [BUSY, Answer(b"<html>", 502), GOOD]
    with auto_trace(store=store) as recording:
        assert [post(wire.url).status_code for _ in range(2)] == [429, 502]
        with pytest.raises(httpx.ConnectError):
            post("http://127.0.0.1:9")
    found = [(span.status, span.attributes[c.ERROR_TYPE]) for span in ours(recording.spans())]
    assert found == [("ERROR", "busy"), ("ERROR", "502"), ("ERROR", "httpx.ConnectError")]
    assert store.transitions().report().transitions == 0


def make_openai(url: str) -> Any:
    """One question by the ``openai`` client, which tries again."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=3) as client:
        return client.chat.completions.create(**BODY).choices[0].message.content


def make_anthropic(url: str) -> Any:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=3) as client:
        return client.messages.create(max_tokens=9, **BODY).content[0].text


def stream_anthropic(url: str) -> Any:
    anthropic = pytest.importorskip("anthropic")
    with (
        anthropic.Anthropic(base_url=url, api_key="k", max_retries=3) as client,
        client.messages.stream(max_tokens=9, **BODY) as stream,
    ):
        return stream.get_final_text()


def make_requests(url: str) -> Any:
    """One question by ``requests``, whose adapter tries again."""
    requests = pytest.importorskip("requests")
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    retry = Retry(3, status_forcelist=[429], allowed_methods=None, backoff_factor=0.01)
    with requests.Session() as session:
        session.mount("http://", HTTPAdapter(max_retries=retry))
        answer = session.post(f"{url}/v1/chat/completions", json=BODY).json()
    return answer["choices"][0]["message"]["content"]


CLAUDE = {
    "id": "r1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn",
    "content": [{"type": "text", "text": "hi"}], "usage": {"input_tokens": 3, "output_tokens": 5},
}  # fmt: skip


CLAUDE_STREAM = VENDORS["anthropic"].stream([{"type": "text", "text": "hi"}], Random(1))
ANSWERS: dict[Callable[[str], Any], Answer] = {
    make_openai: GOOD,
    make_requests: GOOD,
    make_anthropic: Answer(json.dumps(CLAUDE).encode(), headers=JSON),
    stream_anthropic: Answer(CLAUDE_STREAM, headers=EVENTS),
}


@pytest.mark.parametrize("make", ANSWERS)
def test_attempts_are_told_on_the_call_they_are_of(
    make: Callable[[str], Any], wire: Wire, store: Store
) -> None:
    """Status of each that failed and the wait after it; the last one is the call's."""
    wire.answers = [BUSY, BUSY, ANSWERS[make]]
    with auto_trace(store=store) as recording:
        assert make(wire.url) == "hi"
    (span,) = ours(recording.spans())
    attempts = json.loads(span.attributes[c.FAILED_ATTEMPTS])
    assert (span.status, said(span), span.attributes[c.RESENDS]) == ("UNSET", "hi", 2)
    assert [each["outcome"] for each in attempts] == [429, 429]
    if make is not make_requests:  # urllib3 does not say when
        assert all(each["wait_s"] > 0 for each in attempts)
    assert store.transitions().report().transitions == 1


@pytest.mark.parametrize("make", [make_openai, make_anthropic])
def test_call_whose_every_attempt_failed_is_one_that_failed(
    make: Callable[[str], Any], wire: Wire, store: Store
) -> None:
    """With what the program sees, and all attempts."""
    wire.answers = [BUSY]
    with auto_trace(store=store) as recording, pytest.raises(Exception, match="too much"):
        make(wire.url)
    (span,) = ours(recording.spans())
    assert span.status == "ERROR"
    assert str(span.attributes[c.ERROR_TYPE]).endswith("RateLimitError")
    assert span.attributes[c.RESENDS] == 3


class _Relay(Handler):
    """Passes each request on to another server, and its answer back."""

    upstream = ""

    def do_POST(self) -> None:
        path = self.upstream + self.path
        own = {n: t for n, t in self.headers.items() if n.lower() == "x-session-id"}
        with httpx.stream("POST", path, content=self.read_body(), headers=own) as response:
            self.send_response(response.status_code)
            self.send_header("content-type", response.headers["content-type"])
            self.end_headers()
            for chunk in response.iter_raw():
                self.wfile.write(chunk)


@pytest.mark.parametrize("is_stream", [False, True])
def test_relay_and_its_client_are_one_call(is_stream: bool, wire: Wire, store: Store) -> None:
    """16 requests are 16 calls; the relay begins within the recording, as an evaluation's does."""
    with auto_trace(store=store) as recording, listen(_Relay, upstream=wire.url) as url:
        for number in range(16):
            body = {**(CHUNK if is_stream else WHOLE), "id": f"r{number}"}
            text = (
                f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n" if is_stream else json.dumps(body)
            )
            wire.answers = [Answer(text.encode(), headers=EVENTS if is_stream else JSON)]
            with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
                answer: Any = client.chat.completions.create(**BODY, stream=is_stream)
                if is_stream:
                    list(answer)
    report = store.transitions().report()
    assert len(wire.asked) == 16
    assert len(ours(recording.spans())) == 32
    assert report.transitions == 16
    assert len(store.sql("SELECT 1 FROM calls").rows()) == 16
    assert {step.observation[0]["role"] for step in store.transitions()} == {"user"}


def test_session_that_a_relay_names_is_the_block_of_that_id(wire: Wire, store: Store) -> None:
    """The relay stands outside the blocks, and its clients are recorded nowhere."""
    wire.answers = [GOOD]

    def ask(session_id: str) -> None:
        headers = {"x-session-id": session_id, "content-type": "application/json"}
        url, content = f"{address}/v1/chat/completions", json.dumps(BODY).encode()
        with urlopen(Request(url, content, headers)) as answer:
            assert json.load(answer) == WHOLE

    with (
        listen(_Relay, upstream=wire.url) as address,
        auto_trace(store=store, rollout_id="two"),
        auto_trace(store=store, rollout_id="first", conversation_id="one"),
    ):
        for session_id in ("one", "two", "one", "two", "nobody"):
            ask(session_id)
        with openai.OpenAI(base_url=f"{wire.url}/v1", api_key="k") as client:
            client.chat.completions.create(**BODY, extra_headers={"X-Session-ID": "two"})
    assert sorted(step.rollout_id for step in store.transitions()) == [*["first"] * 2, *["two"] * 3]
    names = [span.attributes[c.CONVERSATION_ID] for span in ours(store.spans().rows())]
    assert sorted(names) == ["one", "one", "two", "two", "two"]


def test_server_that_repeats_its_ids_was_asked_as_often_as_it_was(wire: Wire, store: Store) -> None:
    """Of requests at once to one server none was passed on."""
    wire.answers = [Answer(GOOD.body, headers=JSON, pause_s=0.05)]

    async def ask() -> None:
        async with httpx.AsyncClient() as client:
            url = f"{wire.url}/v1/chat/completions"
            await asyncio.gather(*(client.post(url, json=BODY) for _ in range(4)))

    with auto_trace(store=store):
        asyncio.run(ask())
    assert store.transitions().report().transitions == 4
    assert len(store.sql("SELECT 1 FROM calls").rows()) == 4


@pytest.mark.parametrize("library", ["httpx", "aiohttp"])
def test_other_server_is_told_no_secret(library: str, wire: Wire, store: Store) -> None:
    """A live endpoint's address is asked in place of the program's, with a key of its own."""
    pytest.importorskip(library)
    wire.answers = [GOOD]
    Resources(State(store.name)).publish("endpoint", {"base_url": f"{wire.url}/v1", "model": "new"})
    headers = {"Authorization": "Bearer secret", "x-api-key": "secret", "cookie": "secret"}
    url = "http://127.0.0.1:9/openai/v1/chat/completions"
    with auto_trace(store=store, apply=True) as recording:
        if library == "httpx":
            answer = httpx.post(url, json=BODY, headers=headers).json()
        else:
            import aiohttp

            async def ask() -> Any:
                async with (
                    aiohttp.ClientSession() as session,
                    session.post(url, json=BODY, headers=headers) as response,
                ):
                    return await response.json()

            answer = asyncio.run(ask())
    assert answer == WHOLE
    ((path, sent, body),) = wire.asked
    assert (path, body) == ("/v1/chat/completions", {**BODY, "model": "new"})
    assert sent["authorization"] == "Bearer none"
    assert "secret" not in str(sent)
    (span,) = ours(recording.spans())
    assert f"{span.attributes[c.SERVER_ADDRESS]}:{span.attributes[c.SERVER_PORT]}" in wire.url
    assert span.attributes[c.REQUEST_MODEL] == "new"


@pytest.mark.parametrize("library", ["httpx", "requests", "aiohttp"])
def test_server_that_refuses_to_give_token_ids_gets_the_programs_own_request(
    library: str, wire: Wire, store: Store
) -> None:
    """The program sees nothing of it, and the server is not asked again."""
    pytest.importorskip(library)
    from tests.instrumentors.contract import drivers

    refusal = Answer(b'{"error": {"message": "what is return_token_ids?"}}', 400, JSON)
    wire.answers = [refusal, GOOD]
    (driver,) = [each for each in drivers.DRIVERS if each.name == library]
    with auto_trace(store=store, enable_retokenization_fix=True) as recording:
        for _ in range(2):
            assert driver.ask_somehow(f"{wire.url}/v1", "m") == "hi"
    assert ["return_token_ids" in body for *_, body in wire.asked] == [True, False, False]
    assert [span.status for span in ours(recording.spans())] == ["UNSET", "UNSET"]


def test_bedrock_and_unknown_paths_are_named_by_run(spawn: Any, wire: Wire, tmp_path: Any) -> None:
    """What seems to ask a model and is not recorded, and how often."""
    wire.answers = [GOOD]
    code = (
        "import httpx, requests, sys\n"
        "for _ in range(16): httpx.post(sys.argv[1] + '/v1/x', json={})\n"
        "requests.post(sys.argv[1] + '/api/chat', json={})\n"
        "httpx.post(sys.argv[1] + '/v1/traces', json={})\n"
        "httpx.post(sys.argv[1] + '/elsewhere', json={})\n"
    )
    pytest.importorskip("requests")
    done = spawn("run", "--store", tmp_path / "s.duckdb", "--", "python", "-c", code, wire.url)
    host = wire.url.partition("//")[2]
    lines = [line for line in done.stderr.splitlines() if "not recorded" in line]
    assert lines == [
        f"  warning: not recorded: httpx asked {host}/v1/x 16 times, a path of no known dialect",
        f"  warning: not recorded: urllib3 asked {host}/api/chat once, a path of no known dialect",
    ]


def test_switched_off_nothing_is_recorded_and_all_is_as_it_was(wire: Wire, store: Store) -> None:
    """A stream that was begun before goes on; the methods are the library's own again."""
    uninstrument()
    before = httpx.HTTPTransport.handle_request
    wire.answers = [Answer(STREAM, headers=EVENTS)]
    with auto_trace(store=store) as recording:
        with httpx.stream("POST", f"{wire.url}/v1/chat/completions", json=BODY) as response:
            uninstrument()
            assert b"".join(response.iter_raw()) == STREAM
        post(wire.url)
    assert httpx.HTTPTransport.handle_request is before
    assert len(ours(recording.spans())) == 1
