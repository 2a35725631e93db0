"""The proxy as a pipe: what either side sends reaches the other as it came, and is on record."""

import json
import random
import socket
import threading
import time
from pathlib import Path

import pytest
from tests.proxy.conftest import Proxied
from tests.proxy.origin import (
    CODINGS,
    Origin,
    Peer,
    Script,
    answer,
    ask,
    chunked,
    connect,
    play,
    post,
    read,
)
from tests.waiting import wait_until

from lightning_otel.types import conventions as c

WIRE = Path(__file__).parents[1] / "dialects" / "wire"
PATHS = {
    "anthropic": "/v1/messages?beta=true",
    "gemini": "/v1beta/models/gemini-x:streamGenerateContent?alt=sse&key=sk-query-secret",
    "responses": "/v1/responses",
    "chat": "/v1/chat/completions",
}
BODY = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "hi"}]}'
HEAD = {"id": "chatcmpl-1", "model": "m", "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
WHOLE = json.dumps({**HEAD, "choices": [CHOICE]}).encode()
PIECE = {"index": 0, "delta": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
STREAM = b"data: %s\n\ndata: [DONE]\n\n" % json.dumps({**HEAD, "choices": [PIECE]}).encode()
JSON = "content-type: application/json"
EVENTS = "content-type: text/event-stream"
SPLITS = 540


def transcripts() -> dict[str, tuple[str, bytes]]:
    """By name, the path and body of answers: streams of each dialect, and one that is whole."""
    found = {
        each.stem: (PATHS[each.stem.partition("_")[0]], each.read_bytes())
        for each in sorted(WIRE.glob("*.sse"))
    }
    return {**found, "chat": (PATHS["chat"], STREAM), "chat_whole": (PATHS["chat"], WHOLE)}


def cut(draw: random.Random, data: bytes) -> list[bytes]:
    """Return bytes in a few pieces of random size."""
    places = sorted(draw.sample(range(1, len(data)), min(draw.randint(0, 5), len(data) - 1)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def test_every_coding_and_split_passes_byte_for_byte(origin: Origin, proxied: Proxied) -> None:
    """Each answer, cut at random, reaches the program as it was sent, and all are on record."""
    draw, cases, before = random.Random(8), [*transcripts().values()], origin.connections
    with connect(proxied.address) as sock:
        for number in range(SPLITS):
            path, body = cases[number % len(cases)]
            coding = [*CODINGS][draw.randrange(len(CODINGS))]
            coded, headers = CODINGS[coding](body), [f"content-encoding: {coding}", EVENTS]
            form = chunked(*cut(draw, coded), headers=tuple(headers))
            sent = form if draw.random() < 0.7 else answer(coded, *headers)
            origin.script = play(*cut(draw, sent))
            request = post(
                BODY, path, "X-Session-ID: split", "accept-encoding: gzip, deflate, zstd"
            )
            assert ask(sock, request, len(sent)) == sent
            assert origin.asked[-1][1] == BODY
    assert origin.connections == before + 1
    spans = proxied.calls("split")
    assert len(spans) == SPLITS
    texts = {len(span.attributes[c.OUTPUT_MESSAGES]) for span in spans}
    assert len(texts) <= len(cases)
    assert not any(c.UNREAD_ANSWER in span.attributes for span in spans)


@pytest.mark.parametrize("name", transcripts())
def test_answers_are_read_in_their_dialect(name: str, origin: Origin, proxied: Proxied) -> None:
    """The record has what the dialect's reader says of the answer, and no secret of the request."""
    path, body = transcripts()[name]
    is_whole = name == "chat_whole"
    sent = answer(body, JSON) if is_whole else chunked(body)
    origin.script = play(sent)
    secrets = ("authorization: Bearer sk-head-secret", "x-api-key: sk-key-secret")
    session = f"X-Session-ID: {name}"
    with connect(proxied.address) as sock:
        assert ask(sock, post(BODY, path, session, *secrets), len(sent)) == sent
    (span,) = proxied.calls(name)
    provider = {"anthropic": "anthropic", "gemini": "gcp.gemini"}
    assert span.attributes[c.PROVIDER] == provider.get(name.partition("_")[0], "openai")
    assert json.loads(span.attributes[c.OUTPUT_MESSAGES])[0]["role"] == "assistant"
    assert span.attributes[c.SERVER_ADDRESS] == "127.0.0.1"
    assert (c.TIME_TO_FIRST_CHUNK in span.attributes) != is_whole
    head, passed = origin.asked[-1]
    assert passed == BODY
    assert head.lower().count(b"host: 127.0.0.1:") == 1
    assert all(secret.encode() in head for secret in secrets)
    stored = b"".join(each.read_bytes() for each in proxied.folder.rglob("*") if each.is_file())
    assert b"-secret" not in stored


def serve_early(origin: Origin, peer: Peer) -> bool:
    """Answer before the body has come, and take the rest."""
    head = peer.read_head()
    peer.write(answer(WHOLE, JSON))
    origin.asked.append((head, peer.read_body(head)))
    return False


def serve_continue(origin: Origin, peer: Peer) -> bool:
    """Ask for the body first."""
    if head := peer.read_head():
        assert b"expect: 100-continue" in head.lower()
        peer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        origin.asked.append((head, peer.read_body(head)))
        peer.write(answer(WHOLE, JSON))
    return False


def serve_half_closed(origin: Origin, peer: Peer) -> bool:
    """Answer once the program has closed its half."""
    head = peer.read_head()
    origin.asked.append((head, peer.read_body(head)))
    assert peer.file.read() == b""
    peer.write(answer(WHOLE, JSON))
    return False


CLOSED = b"HTTP/1.1 200 OK\r\n%s\r\n\r\n%s" % (JSON.encode(), WHOLE)
LIE = answer(WHOLE, JSON).replace(b"content-length: ", b"content-length: 9")
DEEP = answer(b"[" * 100_000, JSON)
MORE = answer(WHOLE, JSON) + b"more"
OVERLOADED = answer(b'{"error": {"type": "overloaded"}}', JSON, status="529 X")
CHUNKS = b"5\r\n%s\r\n%x;x=y\r\n%s\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])
CHUNKED = post(CHUNKS, PATHS["chat"], "transfer-encoding: chunked")
PLAIN = post(BODY)
Case = tuple[Script, bytes, bytes, bool | str]
HARD: dict[str, Case] = {
    # script, sent, what comes back, and the record: whole, unread or a failure's kind
    "chunked both ways": (play(chunked(STREAM)), CHUNKED, chunked(STREAM), True),
    "early answer": (serve_early, PLAIN, answer(WHOLE, JSON), True),
    "100-continue": (
        serve_continue, post(BODY, PATHS["chat"], "Expect: 100-continue"),
        b"HTTP/1.1 100 Continue\r\n\r\n" + answer(WHOLE, JSON), True,
    ),
    "half-closed": (serve_half_closed, PLAIN, answer(WHOLE, JSON), True),
    "ended by closing": (play(CLOSED, closes=True), PLAIN, CLOSED, True),
    "shorter than it says": (play(LIE, closes=True), PLAIN, LIE, "ConnectionError"),
    "longer than it says": (
        play(MORE, closes=True), PLAIN, MORE, True,
    ),
    "no HTTP": (play(b"what?\r\n\r\n", closes=True), PLAIN, b"what?\r\n\r\n", "ConnectionError"),
    "closed before an answer": (play(closes=True), PLAIN, b"", "ConnectionError"),
    "an error": (
        play(OVERLOADED, closes=True), PLAIN, OVERLOADED, "overloaded",
    ),
    "HTTP/1.0": (
        play(CLOSED, closes=True), PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"), CLOSED, True,
    ),
    "a coding nobody knows": (
        play(answer(b"\x01\x02", JSON, "content-encoding: rot13"), closes=True), PLAIN,
        answer(b"\x01\x02", JSON, "content-encoding: rot13"), False,
    ),
    "nested beyond all depth": (play(DEEP, closes=True), PLAIN, DEEP, False),
    "no JSON": (play(answer(b"<html>", JSON), closes=True), PLAIN, answer(b"<html>", JSON), False),
}  # fmt: skip


@pytest.mark.parametrize("name", HARD)
def test_hard_cases_pass_as_they_are(name: str, origin: Origin, proxied: Proxied) -> None:
    """The program gets what the server gives, and the record says what is missing."""
    origin.script, sent, expected, outcome = HARD[name]
    with connect(proxied.address) as sock:
        session = f"X-Session-ID: hard {name}\r\nhost:".encode()
        sock.sendall(sent.replace(b"host:", session, 1))
        if name == "half-closed":
            sock.shutdown(socket.SHUT_WR)
        assert read(sock, len(expected)) == expected
        if name != "chunked both ways":
            assert read(sock) == b""
    (span,) = proxied.calls(f"hard {name}")
    error = span.attributes.get(c.ERROR_TYPE)
    if isinstance(outcome, str):
        assert error == outcome
    else:
        assert error is None
        assert ("parts" in span.attributes.get(c.OUTPUT_MESSAGES, "")) == outcome
    assert "hi" in span.attributes[c.INPUT_MESSAGES] or name == "early answer"


def test_next_request_may_come_before_the_answer(origin: Origin, proxied: Proxied) -> None:
    """Requests on one connection at once are answered one after the other."""
    sent = answer(WHOLE, JSON)
    origin.script = play(sent)
    request = post(BODY, PATHS["chat"], "X-Session-ID: pipelined")
    with connect(proxied.address) as sock:
        assert ask(sock, request * 3, 3 * len(sent)) == 3 * sent
    assert len(proxied.calls("pipelined")) == 3


def test_long_bodies_pass_both_ways(origin: Origin, proxied: Proxied) -> None:
    """A request of a MB is read whole; an answer of a MB, to a slow reader, too."""
    text = "word " * 200_000
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    reply = answer(WHOLE.replace(b"ok", b"y" * 1_000_000), JSON)
    origin.script = play(reply)
    with connect(proxied.address) as sock:
        sock.sendall(post(body, PATHS["chat"], "X-Session-ID: long"))
        time.sleep(0.3)
        assert read(sock, len(reply)) == reply
    assert origin.asked[-1][1] == body
    (span,) = proxied.calls("long")
    assert len(span.attributes[c.INPUT_MESSAGES]) > len(text)
    assert len(span.attributes[c.OUTPUT_MESSAGES]) > 1_000_000


def test_no_chunk_waits_for_the_next(origin: Origin, proxied: Proxied) -> None:
    """Each of 500 chunks is there before the server sends another one."""
    event = b"data: %s\n\n" % json.dumps({**HEAD, "choices": [PIECE]}).encode()
    chunk = b"%x\r\n%s\r\n" % (len(event), event)
    head = b"HTTP/1.1 200 OK\r\n%s\r\ntransfer-encoding: chunked\r\n\r\n" % EVENTS.encode()
    turn = threading.Semaphore(0)

    def script(server: Origin, peer: Peer) -> bool:
        peer.read_body(peer.read_head())
        for piece in (head, *[chunk] * 500, b"0\r\n\r\n"):
            peer.write(piece)
            assert turn.acquire(timeout=20)
        return False

    origin.script = script
    with connect(proxied.address) as sock:
        sock.sendall(post(BODY, PATHS["chat"], "X-Session-ID: chunks"))
        for piece in (head, *[chunk] * 500, b"0\r\n\r\n"):
            assert read(sock, len(piece)) == piece
            turn.release()
    assert len(proxied.calls("chunks")) == 1


def test_program_that_goes_is_gone_for_the_server(origin: Origin, proxied: Proxied) -> None:
    """The server sees that nobody reads on; the call was abandoned."""
    gone = threading.Event()

    def script(server: Origin, peer: Peer) -> bool:
        peer.read_body(peer.read_head())
        peer.write(chunked(STREAM)[:-30])
        gone.set() if peer.file.read() == b"" else None
        return False

    origin.script = script
    with connect(proxied.address) as sock:
        ask(sock, post(BODY, PATHS["chat"], "X-Session-ID: gone"), 100)
    assert gone.wait(20)
    wait_until(lambda: proxied.calls("gone")[0].end_ns)
    (span,) = proxied.calls("gone")
    assert span.attributes[c.ABANDONED] is True


def test_many_connections_fit_into_little_memory(origin: Origin, proxied: Proxied) -> None:
    """200 at once, with 50 kB each."""
    text = "x" * 50_000
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    sent = answer(WHOLE, JSON)
    origin.script = play(sent)
    request = post(body, PATHS["chat"], "X-Session-ID: many")
    socks = [connect(proxied.address) for _ in range(200)]
    for sock in socks:
        sock.sendall(request)
    assert all(read(sock, len(sent)) == sent for sock in socks)
    for sock in socks:
        sock.close()
    assert len(proxied.calls("many")) == 200
    assert proxied.peak_mb() < 150
