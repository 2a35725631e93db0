"""Asking servers for token ids: on every surface, only when told, and never to the agent's harm."""

import threading
from typing import Any

import openai
import pytest
from tests.instrumentors.openai.test_surfaces import ASKED, IDS, SURFACES, asked_of, sent
from tests.instrumentors.transport import http

from lightning_otel import Store, auto_trace, carried, context
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import conventions as c

CHAT = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
_EXTRAS = ("token_ids", "prompt_token_ids", "logprobs")
# The toy model draws its words from the whole body where a tool has answered.
_DRAWN = ("chat history", "chat stream")
ASKING = [name for name in SURFACES if name.startswith(("chat", "completions", "by hand"))]
UNASKED = [
    name
    for name in ASKING
    # Neither those that ask for ids themselves, nor those that name another fault of the server.
    if SURFACES[name][2].get("extra_body") is not IDS and " null " not in name
]

UNCHANGED = [*UNASKED, *sorted(SURFACES.keys() - {*ASKING, "beta responses"})]


@pytest.fixture(autouse=True)
def _nobody_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What servers refused is known for one test."""
    monkeypatch.setattr("lightning_otel.instrumentors.token_ids._refusing", set())


def asked_in(store: Store) -> Any:
    return auto_trace(store=store, enable_retokenization_fix=True)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "toy", "messages": ASKED, **fields})


def bare(value: Any) -> Any:
    """A result without what was asked for besides: fields, and the helper's events of logprobs."""
    if isinstance(value, dict):
        return {name: bare(item) for name, item in value.items() if name not in _EXTRAS}
    if isinstance(value, list):
        kinds = [item.get("type", "") if isinstance(item, dict) else "" for item in value]
        return [
            bare(item)
            for item, kind in zip(value, kinds, strict=True)
            if not str(kind).startswith("logprobs.")
        ]
    return value


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", [name for name in ASKING if name not in _DRAWN])
def test_asked_surface_gives_the_program_what_it_would_have_got(
    name: str, is_async: bool, store: Store, server: DemoServer
) -> None:
    """Types, words and order are those of an agent without us; the call has ids and logprobs."""
    if name == "chat generator" and is_async:
        pytest.skip("the asynchronous client takes no iterator")
    with DemoServer() as untouched:
        expected = asked_of(name, untouched, is_async=is_async)
        wanted = untouched.log[0].request or {}
    with asked_in(store) as recording:
        found = asked_of(name, server, is_async=is_async)

    (exchange,) = server.log
    assert bare(found) == bare(expected)
    assert (exchange.request or {}).items() >= {**wanted, "return_token_ids": True}.items()
    ((step,),) = [path.transitions for path in recording.trajectories()]
    assert (step.capture, len(step.logprobs)) == ("exact", len(step.response_ids))


@pytest.mark.parametrize("name", UNCHANGED)
def test_request_stays_as_the_agent_wrote_it_to_the_last_byte(
    name: str, store: Store, server: DemoServer
) -> None:
    """Where the surface knows no ids; and, after a refusal, where the server does."""
    with DemoServer() as untouched:
        expected = asked_of(name, untouched)
        (wanted,) = untouched.log
    if name in ASKING:
        server.fault = "strict-422" if name == "chat" else "strict-400"

    with auto_trace(store=store, enable_retokenization_fix=True) as recording:
        found = asked_of(name, server)

    *refused, exchange = server.log
    assert found == expected
    assert len(refused) == (name in ASKING)
    assert (exchange.sent, sent(exchange)) == (wanted.sent, sent(wanted))
    (call,) = [span for span in recording.spans() if c.OPERATION in span.attributes]
    assert call.status == "UNSET"


@pytest.mark.parametrize("is_async", [False, True])
def test_refusal_is_remembered_by_server(
    is_async: bool, store: Store, server: DemoServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The first call costs a request more, those after it none; one warning names the host."""
    server.fault = "strict-400"

    with DemoServer() as willing, asked_in(store):
        for each in (server, server, willing):
            asked_of("chat", each, is_async=is_async)

    assert [CHAT.items() <= (exchange.request or {}).items() for exchange in willing.log] == [True]
    assert [exchange.status for exchange in server.log] == [400, 200, 200]
    told = [
        record.getMessage()
        for record in caplog.records
        if record.name == "lightning_otel.instrumentors.token_ids"
    ]
    assert told == ["127.0.0.1 refuses to be asked for token ids, and is asked no more: "
                    "its calls stay text"]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_agents_own_mistake_is_the_agents_to_see(
    stream: bool, store: Store, server: DemoServer, client: openai.OpenAI
) -> None:
    """A request that is wrong without us fails as it would, and is not held against the server."""
    with asked_in(store):
        with pytest.raises(openai.AuthenticationError):
            ask(client, model="fail-401")
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, model="fail-400", stream=stream)
        ask(client)

    assert caught.value.__cause__ is None
    before = caught.value.__context__
    while before is not None:
        assert not isinstance(before, openai.APIStatusError)
        before = before.__context__
    assert caught.value.response.request.content == server.log[2].sent
    assert asks(server) == [True, True, False, True]


@pytest.mark.parametrize(
    ("fields", "added"),
    [
        ({}, CHAT),
        ({"logprobs": True}, {"return_token_ids": True, "top_logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 5}, {"return_token_ids": True}),
        ({"logprobs": False}, {"return_token_ids": True}),
        ({"logprobs": None}, {"return_token_ids": True}),
        ({"top_logprobs": 2}, {"return_token_ids": True}),
        ({"extra_body": {"return_token_ids": False}}, {"logprobs": True, "top_logprobs": 0}),
        ({"extra_body": {"return_token_ids": True, "logprobs": True, "top_logprobs": 1}}, {}),
        ({"extra_body": {"min_p": 0.1}}, CHAT),
    ],
    ids=str,
)
def test_nothing_the_agent_said_is_changed(
    fields: dict[str, Any],
    added: dict[str, Any],
    store: Store,
    server: DemoServer,
    client: openai.OpenAI,
) -> None:
    """What the agent set stands, though it be None or False; only what it left unsaid is added."""
    given = dict(fields.get("extra_body") or {})
    ask(client, **fields)
    with asked_in(store):
        ask(client, **fields)

    wanted, exchange = server.log
    assert exchange.request == {**(wanted.request or {}), **added}
    assert dict(fields.get("extra_body") or {}) == given


def test_completions_are_asked_in_their_own_way(
    store: Store, server: DemoServer, client: openai.OpenAI
) -> None:
    """The legacy API counts logprobs; of an echoed prompt none are asked for."""
    with asked_in(store):
        client.completions.create(model="toy", prompt="hello")
        client.completions.create(model="toy", prompt="hello", echo=True)

    plain, echoed = [exchange.request or {} for exchange in server.log]
    assert (plain["return_token_ids"], plain["logprobs"]) == (True, 0)
    assert echoed["return_token_ids"] is True
    assert "logprobs" not in echoed


def asks(server: DemoServer) -> list[bool]:
    return ["return_token_ids" in (exchange.request or {}) for exchange in server.log]


def test_option_holds_where_it_was_named(
    store: Store, server: DemoServer, client: openai.OpenAI
) -> None:
    """A block turns it on or off for what is in it, threads included; outside nothing is asked."""
    with auto_trace(store=store):
        ask(client)
        with context(enable_retokenization_fix=True):
            ask(client)
            with context(agent="inner"):
                thread = threading.Thread(target=ask, args=(client,))
                thread.start()
                thread.join()
            with context(enable_retokenization_fix=False):
                ask(client)
            later = carried(ask)
        later(client)
    ask(client)

    assert asks(server) == [False, True, True, False, True, False]


@pytest.mark.parametrize(
    ("url", "is_asked"),
    [
        ("https://api.openai.com/v1", False),
        ("https://eu.api.openai.com/v1/", False),
        ("https://mine.openai.azure.com/openai/v1", False),
        ("https://mine.services.ai.azure.com/openai/v1", False),
        ("https://mine.cognitiveservices.azure.com/openai", False),
        ("http://127.0.0.1:8000/v1", True),
        ("https://vllm.example.com/v1", True),
        ("https://notopenai.com/v1", True),
        ("https://api.openai.com.example.com/v1", True),
    ],
)
def test_hosts_known_to_refuse_are_not_asked(url: str, is_asked: bool, store: Store) -> None:
    """OpenAI and Azure are told by the host's name alone; nobody else is taken for them."""
    seen: list[bool] = []

    def answer(request: http.Request) -> http.Response:
        seen.append(b"return_token_ids" in request.content)
        return http.Response(200, json={"choices": []})

    with http.Client(transport=http.MockTransport(answer)) as transport, asked_in(store):
        options: Any = {"api_key": "k", "http_client": transport}
        ask(openai.OpenAI(base_url=url, **options))
        # A proxy before Azure has any host; the client's class tells.
        ask(openai.AzureOpenAI(azure_endpoint=url, api_version="1", **options))

    assert seen == [is_asked, False]


def test_tokens_named_by_id_are_held_against_those_sampled(
    store: Store, server: DemoServer, client: openai.OpenAI
) -> None:
    """Where the server writes ``token_id:N`` beside its ids, both are kept and compared."""
    named = {"return_tokens_as_token_ids": True}
    with asked_in(store) as recording:
        ask(client.with_options(max_retries=1), model="flaky-500", extra_body=named)

    (call,) = [span for span in recording.spans() if c.OPERATION in span.attributes]
    assert call.attributes[c.LOGPROB_TOKEN_IDS] == call.attributes[c.RESPONSE_TOKEN_IDS]
    assert asks(server) == [True, True]
    ((step,),) = [path.transitions for path in recording.trajectories()]
    assert step.capture == "exact"
