"""A store behind a server: what is sent, what is refused, what becomes of a broken answer."""

import logging
import socket
import threading
from collections.abc import Callable

import pytest

from lightning_otel import Store, auto_trace
from lightning_otel.errors import ConfigError, StoreError
from lightning_otel.types import Event, Link, Span

pytest.importorskip("hypercorn")

TOKEN = "a-token-of-some-length"
Served = Callable[..., str]


@pytest.fixture
def answering() -> Callable[[bytes], str]:
    """A function that gives the URL of a server that answers one request with these bytes."""

    def answer(data: bytes) -> str:
        listening = socket.create_server(("127.0.0.1", 0))

        def run() -> None:
            with listening, listening.accept()[0] as peer:
                peer.settimeout(10)
                peer.recv(1 << 16)
                peer.sendall(data)

        threading.Thread(target=run, daemon=True).start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    return answer


def test_spans_added_come_by_otlp(store: Store, served: Served) -> None:
    """They lie in the server's store when the call returns."""
    store.writer()
    span = Span(
        "1" * 32, "2" * 16, "3" * 16, "näme", 10**18, 10**18 + 5, kind="CLIENT", status="ERROR",
        status_message="no", attributes={"i": -1, "f": 1.5, "t": True, "n": None, "big": 2**70,
        "l": [1, "a", [None]], "o": {"k": {}}, "nan": float("nan")},
        events=(Event("e", 10**18, {"a": 1}),), links=(Link("4" * 32, "5" * 16, {"b": "c"}),),
        otel_resource={"service.name": "s"}, scope="my.scope",
    )  # fmt: skip

    Store(served(store)).add([span])

    (found,) = store.spans()
    attributes = dict(found.attributes)
    assert attributes.pop("lightning.received").startswith("otlp")
    expected = {**span.attributes, "big": str(2**70), "nan": "NaN"}
    assert attributes == expected
    for name in ("name", "kind", "status", "status_message", "events", "links", "scope", "end_ns"):
        assert getattr(found, name) == getattr(span, name)
    assert found.otel_resource == span.otel_resource


def test_many_spans_are_added_in_several_requests(
    store: Store, served: Served, make_span: Callable[..., Span], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each small enough for any server; what is rejected is told, and the others are kept."""
    store.writer()
    monkeypatch.setattr("lightning_otel.store.engines.http.ADD_BYTES", 2000)

    with pytest.raises(StoreError, match="rejected 1 of 61"):
        Store(served(store)).add([*(make_span() for _ in range(60)), make_span(span_id="no id")])

    assert len(store.spans().rows()) == 60


def test_a_token_is_asked_for(
    store: Store, served: Served, monkeypatch: pytest.MonkeyPatch, make_span: Callable[..., Span]
) -> None:
    """From the URL or the environment; without the right one nothing is answered."""
    store.add([make_span()])
    url = served(store, TOKEN).replace(f":{TOKEN}@", "")

    with pytest.raises(StoreError, match="401") as raised:
        Store(url).spans().rows()
    with pytest.raises(StoreError, match="401"):
        Store(url.replace("://", "://:wrong@")).add([make_span()])
    assert len(Store(url.replace("://", f"://:{TOKEN}@")).spans().rows()) == 1
    monkeypatch.setenv("LIGHTNING_OTEL_TOKEN", TOKEN)
    assert len(Store(url).spans().rows()) == 1
    assert "LIGHTNING_OTEL_TOKEN" in raised.value.remedy


def test_nothing_is_recorded_over_a_network(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program traced into it runs on, and is told what to do instead."""
    url = "http://127.0.0.1:1"
    with pytest.raises(ConfigError, match="OTLP"):
        Store(url).writer()

    with caplog.at_level(logging.WARNING), auto_trace(store=url):
        answer = 1 + 1

    assert answer == 2
    assert "never waits for a network" in caplog.text


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n", "302"),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 6\r\n\r\nbroken", "broken"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "cannot read spans"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\n<html>", "cannot read spans"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n\xff\xff\xff\xff\r\n",
            "cannot",
        ),
        (b"SSH-2.0-OpenSSH\r\n", "cannot reach"),
        (b"", "cannot reach"),
    ],
)
def test_what_is_no_answer_is_an_error(
    answering: Callable[[bytes], str], answer: bytes, said: str
) -> None:
    """A redirection, a page, a broken connection: never an empty store."""
    with pytest.raises(StoreError, match=said):
        Store(answering(answer)).spans().rows()


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"partialSuccess": {"rejectedSpans": "x"}}'])
def test_an_answer_that_says_nothing_of_the_spans_is_an_error(
    answering: Callable[[bytes], str], make_span: Callable[..., Span], body: bytes
) -> None:
    """A page that a proxy sends for everything is no receipt."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    with pytest.raises(StoreError, match="did not say"):
        Store(answering(answer)).add([make_span()])
