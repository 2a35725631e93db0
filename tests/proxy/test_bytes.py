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
    BODY,
    CHAT,
    CODINGS,
    HEAD,
    JSON,
    WHOLE,
    Origin,
    Peer,
    Script,
    answer,
    ask,
    chunked,
    chunks,
    connect,
    play,
    post,
    read,
    whole,
)  # fmt: skip
from tests.waiting import wait_until

from lightning_otel.types import conventions as c

WIRE = Path(__file__).parents[1] / "dialects" / "wire"
PATHS = {
    "anthropic": "/v1/messages?beta=true",
    "gemini": "/v1beta/models/gemini-x:streamGenerateContent?alt=sse&key=sk-query-secret",
    "responses": "/v1/responses",
}
PIECE = {"index": 0, "delta": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
STREAM = b"data: %s\n\ndata: [DONE]\n\n" % json.dumps({**HEAD, "choices": [PIECE]}).encode()
EVENTS = "content-type: text/event-stream"
SPLITS = 540


def transcripts() -> dict[str, tuple[str, bytes]]:
    streams = {
        file.stem: (PATHS[file.stem.partition("_")[0]], file.read_bytes())
        for file in sorted(WIRE.glob("*.sse"))
    }
    return {**streams, "chat": (CHAT, STREAM), "chat_whole": (CHAT, WHOLE)}


def cut(draw: random.Random, data: bytes) -> list[bytes]:
    places = sorted(draw.sample(range(1, len(data)), min(draw.randint(0, 5), len(data) - 1)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def test_every_coding_and_split_passes_byte_for_byte(origin: Origin, proxied: Proxied) -> None:
    draw, cases, before = random.Random(8), [*transcripts().values()], origin.connections
    with connect(proxied.address) as sock:
        for number in range(SPLITS):
            path, body = cases[number % len(cases)]
            coding = [*CODINGS][draw.randrange(len(CODINGS))]
            coded, headers = CODINGS[coding](body), [f"content-encoding: {coding}", EVENTS]
            form = chunked(*cut(draw, coded), headers=tuple(headers))
            sent = form if draw.random() < 0.7 else answer(coded, *headers)
            origin.script = play(*cut(draw, sent))
            accepted = "accept-encoding: gzip, deflate, zstd"
            request = post(BODY, path, "X-Session-ID: split", accepted)
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
    stored = b"".join(file.read_bytes() for file in proxied.folder.rglob("*") if file.is_file())
    assert b"-secret" not in stored


def serve(order: str, *pieces: bytes) -> Script:
    """A script by steps: b reads the body, e the end of what is sent, w writes a piece."""

    def script(origin: Origin, peer: Peer) -> bool:
        head, rest = peer.read_head(), iter(pieces)
        for step in order:
            if step == "b":
                origin.asked.append((head, peer.read_body(head)))
            elif step == "e":
                assert peer.file.read() == b""
            else:
                peer.write(next(rest))
        return False

    return script


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CLOSED = b"HTTP/1.1 200 OK\r\n%s\r\n\r\n%s" % (JSON.encode(), WHOLE)
LIE = whole().replace(b"content-length: ", b"content-length: 9")
DEEP = answer(b"[" * 100_000, JSON)
MORE = whole() + b"more"
OVERLOADED = answer(b'{"error": {"type": "overloaded"}}', JSON, status="529 X")
CHUNKS = b"5\r\n%s\r\n%x;x=y\r\n%s\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])
CHUNKED = post(CHUNKS, CHAT, "transfer-encoding: chunked")
PLAIN = post(BODY)
OLD = PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0")
CODED = answer(b"\x01\x02", JSON, "content-encoding: rot13")
Case = tuple[Script, bytes, bytes, bool | str]
HARD: dict[str, Case] = {
    # script, sent, what comes back, and the record: whole, unread or a failure's kind
    "chunked both ways": (play(chunked(STREAM)), CHUNKED, chunked(STREAM), True),
    "early answer": (serve("wb", whole()), PLAIN, whole(), True),
    "100-continue": (
        serve("wbw", CONTINUE, whole()), post(BODY, CHAT, "Expect: 100-continue"),
        CONTINUE + whole(), True,
    ),
    "half-closed": (serve("bew", whole()), PLAIN, whole(), True),
    "ended by closing": (play(CLOSED, closes=True), PLAIN, CLOSED, True),
    "shorter than it says": (play(LIE, closes=True), PLAIN, LIE, "ConnectionError"),
    "longer than it says": (play(MORE, closes=True), PLAIN, MORE, True),
    "no HTTP": (play(b"what?\r\n\r\n", closes=True), PLAIN, b"what?\r\n\r\n", "ConnectionError"),
    "closed before an answer": (play(closes=True), PLAIN, b"", "ConnectionError"),
    "an error": (play(OVERLOADED, closes=True), PLAIN, OVERLOADED, "overloaded"),
    "HTTP/1.0": (play(CLOSED, closes=True), OLD, CLOSED, True),
    "a coding nobody knows": (play(CODED, closes=True), PLAIN, CODED, False),
    "nested beyond all depth": (play(DEEP, closes=True), PLAIN, DEEP, False),
    "no JSON": (play(answer(b"<html>", JSON), closes=True), PLAIN, answer(b"<html>", JSON), False),
}  # fmt: skip


@pytest.mark.parametrize("name", HARD)
def test_hard_cases_pass_as_they_are(name: str, origin: Origin, proxied: Proxied) -> None:
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
    sent = whole()
    origin.script = play(sent)
    request = post(BODY, CHAT, "X-Session-ID: pipelined")
    with connect(proxied.address) as sock:
        assert ask(sock, request * 3, 3 * len(sent)) == 3 * sent
    assert len(proxied.calls("pipelined")) == 3


def test_long_bodies_pass_both_ways(origin: Origin, proxied: Proxied) -> None:
    text = "word " * 200_000
    body = BODY.replace(b"hi", text.encode())
    reply = answer(WHOLE.replace(b"ok", b"y" * 1_000_000), JSON)
    origin.script = play(reply)
    with connect(proxied.address) as sock:
        sock.sendall(post(body, CHAT, "X-Session-ID: long"))
        time.sleep(0.3)
        assert read(sock, len(reply)) == reply
    assert origin.asked[-1][1] == body
    (span,) = proxied.calls("long")
    assert len(span.attributes[c.INPUT_MESSAGES]) > len(text)
    assert len(span.attributes[c.OUTPUT_MESSAGES]) > 1_000_000


def test_no_chunk_waits_for_the_next(origin: Origin, proxied: Proxied) -> None:
    event = b"data: %s\n\n" % json.dumps({**HEAD, "choices": [PIECE]}).encode()
    chunk = chunks(event)
    head = chunked().removesuffix(b"0\r\n\r\n")
    pieces, turn = (head, *[chunk] * 500, b"0\r\n\r\n"), threading.Semaphore(0)

    def script(server: Origin, peer: Peer) -> bool:
        peer.read_body(peer.read_head())
        for piece in pieces:
            peer.write(piece)
            assert turn.acquire(timeout=20)
        return False

    origin.script = script
    with connect(proxied.address) as sock:
        sock.sendall(post(BODY, CHAT, "X-Session-ID: chunks"))
        for piece in pieces:
            assert read(sock, len(piece)) == piece
            turn.release()
    assert len(proxied.calls("chunks")) == 1


def test_program_that_goes_is_gone_for_the_server(origin: Origin, proxied: Proxied) -> None:
    gone = threading.Event()

    def script(server: Origin, peer: Peer) -> bool:
        peer.read_body(peer.read_head())
        peer.write(chunked(STREAM)[:-30])
        gone.set() if peer.file.read() == b"" else None
        return False

    origin.script = script
    with connect(proxied.address) as sock:
        ask(sock, post(BODY, CHAT, "X-Session-ID: gone"), 100)
    assert gone.wait(20)
    wait_until(lambda: proxied.calls("gone")[0].end_ns)
    (span,) = proxied.calls("gone")
    assert span.attributes[c.ABANDONED] is True


def test_many_connections_fit_into_little_memory(origin: Origin, proxied: Proxied) -> None:
    text = "x" * 50_000
    body = BODY.replace(b"hi", text.encode())
    sent = whole()
    origin.script = play(sent)
    request = post(body, CHAT, "X-Session-ID: many")
    socks = [connect(proxied.address) for _ in range(200)]
    for sock in socks:
        sock.sendall(request)
    assert all(read(sock, len(sent)) == sent for sock in socks)
    for sock in socks:
        sock.close()
    assert len(proxied.calls("many")) == 200
    assert proxied.peak_mb() < 150
