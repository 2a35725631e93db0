"""The one fake model: an OpenAI-compatible server for demo, examples and tests."""

from __future__ import annotations

import hashlib
import json
import random
import re
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self, cast
from urllib.parse import unquote, urlsplit

from lightning_otel.demo import wire
from lightning_otel.demo.policy import PieceTokenizer, Policy, Reply, ToyPolicy, pieces, shape
from lightning_otel.demo.wire import Json, WireAnswer

_ROUTE = re.compile(
    r"(?:/v1|/openai(?:/v1)?|/openai/deployments/(?P<model>[^/]+))?"
    r"/(?P<name>chat/completions|responses|completions|embeddings|models)/?"
)
_FAILURES = {
    "fail-400": (400, "invalid_request_error"),
    "fail-401": (401, "authentication_error"),
    "fail-429": (429, "rate_limit_error"),
    "fail-500": (500, "server_error"),
}
_FIXED_TEXTS = {
    "surrogate": "half a pair: \ud800 and on",
    "big": " ".join(f"word{i}" for i in range(200)),
    "legion": "We are legion. " * 1366,
}
_STRICT = {"strict-400": 400, "strict-422": 422}
_BEYOND_OPENAI = ("return_token_ids", "return_tokens_as_token_ids", "top_k", "min_p")
_LAST_HTTP_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One request and what was answered to it."""

    path: str
    """As requested, with the query."""
    request: Json | None
    status: int
    response: Json | None
    """The answer; of a stream what its chunks add up to, None if it was not sent to its end."""
    headers: Mapping[str, str]
    is_stream: bool = False
    chunks: tuple[Json, ...] = ()
    client_gone: bool = False
    sent: bytes = b""
    """The request's body as it came."""

    @property
    def response_id(self) -> str | None:
        """The answer's id, also of a broken stream, if it has one."""
        first = self.chunks[0] if self.chunks else {}
        value = (self.response or first.get("response") or first).get("id")
        return None if value is None else str(value)


class DemoServer:
    """Answers OpenAI requests from a policy until the `with` block ends.

    The same seed and bodies give the same words, whatever order concurrent requests come in. The
    request's model name chooses a fault, and `fault` forces one on every request: `fail-400`,
    `fail-401`, `fail-429`, `fail-500`, `flaky-500`, `slow`, `cut`, `sse-error`, `null-choices`,
    `null-index`, `empty`, `html`, `surrogate`, `big`, `legion`; `left`, whose streams wait for the
    client to leave; and `strict-400` and `strict-422`, which refuse the fields of vLLM's that
    OpenAI's API does not know.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        seed: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
        chunk_delay_s: float = 0.0,
    ) -> None:
        self.policy: Policy = policy or ToyPolicy()
        self.tokenizer = PieceTokenizer()
        self.fault: str | None = None
        self.chunk_delay_s = chunk_delay_s
        self._seed = seed
        self._address = (host, port)
        self._http: _HTTPServer | None = None
        self._thread: threading.Thread | None = None
        # Guards: the log holds each exchange once, and a body's occurrences are counted once each.
        self._changed = threading.Condition()
        self._log: list[LogEntry] = []
        self._seen: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def base_url(self) -> str:
        """The ``base_url`` for clients, with ``/v1``.

        Raises:
            RuntimeError: The server is not running.
        """
        if self._http is None:
            raise RuntimeError("the demo server has no address before start(); call it first")
        host, port = self._http.server_address[:2]
        return f"http://{host!s}:{port}/v1"

    @property
    def log(self) -> list[LogEntry]:
        """A copy of the exchanges so far; one is there before its client has the last byte."""
        with self._changed:
            return list(self._log)

    def wait_for_log(self, count: int, *, timeout_s: float = 5.0) -> list[LogEntry]:
        """The log once it holds that many exchanges; needed where a client leaves early.

        Raises:
            TimeoutError: It does not in that time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._log) >= count, timeout_s):
                raise TimeoutError(f"{len(self._log)} of {count} exchanges after {timeout_s} s")
            return list(self._log)

    def start(self) -> None:
        """Bind the address and answer from a daemon thread."""
        if self._http is not None:
            return
        self._http = _HTTPServer(self._address, self)
        # The default poll of 0.5 s is what stop() would wait for.
        run = self._http.serve_forever
        self._thread = threading.Thread(target=run, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and close every connection, idle ones too."""
        if self._http is None or self._thread is None:
            return
        self._http.shutdown()
        self._thread.join()
        self._http.close_all()
        self._http = self._thread = None

    def record(self, exchange: LogEntry, *, instead_of: LogEntry | None = None) -> None:
        """Append an exchange to the log, or put it in another's place."""
        with self._changed:
            places = [i for i, entry in enumerate(self._log) if entry is instead_of]
            if places:
                self._log[places[0]] = exchange
            else:
                self._log.append(exchange)
            self._changed.notify_all()

    def count_turn(self, key: str) -> int:
        """Return how often this key came so far, this time included."""
        with self._changed:
            self._seen[key] += 1
            return self._seen[key]

    def answer(self, name: str, body: Json, fault: str) -> WireAnswer:
        """The answer of one endpoint to a body."""
        if name == "embeddings":
            return wire.embeddings(body, self.tokenizer.texts(body["input"]))
        if name == "responses":
            chat_body = wire.responses_to_chat(body)
            (reply,) = self._sample_replies(chat_body, 1, fault) or [Reply(text="")]
            return wire.response(body, reply)
        count = int(body.get("n") or 1)
        if name == "chat/completions":
            return wire.chat(body, self._sample_replies(body, count, fault), self.tokenizer)
        replies: list[Reply] = []
        texts = self.tokenizer.texts(body["prompt"])
        for text in texts:
            messages = [{"role": "user", "content": text}]
            query = {**body, "messages": messages}
            replies += self._sample_replies(query, count, fault)
        return wire.completion(body, [pieces(text) for text in texts], replies, self.tokenizer)

    def _sample_replies(self, body: Json, count: int, fault: str) -> list[Reply]:
        if fault == "empty":
            return []
        # Drawn from the body and how often it came, not from a shared generator: the order in
        # which threads get here would decide the words.
        draw = {key: value for key, value in body.items() if not key.startswith("stream")}
        digest = hashlib.sha256(wire.json_bytes(draw)).hexdigest()
        rng = random.Random(f"{self._seed}/{digest}/{self.count_turn(digest)}")
        fixed = Reply(text=_FIXED_TEXTS[fault]) if fault in _FIXED_TEXTS else None
        return [shape(fixed or self.policy.reply(body, rng), body) for _ in range(count)]


class _HTTPServer(ThreadingHTTPServer):
    # The default backlog of 5 refuses connections when a test opens dozens at once.
    request_queue_size = 128
    daemon_threads = True

    def __init__(self, address: tuple[str, int], owner: DemoServer) -> None:
        self.owner = owner
        # Guards: a socket is in the set exactly while its thread serves it.
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        super().__init__(address, _RequestHandler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = threading.current_thread()
        super().finish_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._lock:
            self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that left; a fault of the policy still prints its traceback."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def close_all(self) -> None:
        self.server_close()
        with self._lock:
            still_open = dict(self._open)
        for connection, thread in still_open.items():
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
            thread.join(1.0)


class _RequestHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    _sent = b""
    timeout = 30
    # Nagle's algorithm against the client's delayed ACK costs 40 ms for each small write.
    disable_nagle_algorithm = True

    @property
    def owner(self) -> DemoServer:
        return cast("_HTTPServer", self.server).owner

    def log_message(self, format: str, *args: object) -> None:
        """Keep requests off stderr; `DemoServer.log` has them."""

    def do_GET(self) -> None:
        route = _ROUTE.fullmatch(urlsplit(self.path).path)
        if route is None or route["name"] != "models":
            self._send_failure(404, "invalid_request_error", None)
            return
        model = {"id": "toy", "object": "model", "created": 0, "owned_by": "lightning-otel"}
        self._send_json(200, {"object": "list", "data": [model]}, None)

    def do_POST(self) -> None:
        body = self._read_body()
        route = _ROUTE.fullmatch(urlsplit(self.path).path)
        if route is None or route["name"] == "models":
            self._send_failure(404, "invalid_request_error", body)
            return
        needed = {"chat/completions": "messages", "completions": "prompt"}.get(route["name"])
        needed = needed or "input"
        if body is None or not isinstance(body.get(needed), list | str):
            self._send_failure(400, "invalid_request_error", body)
            return
        query = body if body.get("model") else {**body, "model": unquote(route["model"] or "toy")}
        fault = self.owner.fault or str(query["model"])
        if fault == "slow":
            time.sleep(0.5)
        if fault == "html":
            self._send_answer(
                200, b"<html>not an API</html>", "text/html", self._make_exchange(200, body)
            )
        elif fault in _STRICT and any(name in body for name in _BEYOND_OPENAI):
            self._send_failure(_STRICT[fault], "invalid_request_error", body)
        elif fault in _FAILURES:
            self._send_failure(*_FAILURES[fault], body)
        elif (
            fault == "flaky-500"
            and self.owner.count_turn(f"flaky {self.headers.get('idempotency-key')}") == 1
        ):
            self._send_failure(*_FAILURES["fail-500"], body)
        else:
            answer = self.owner.answer(route["name"], query, fault)
            if body.get("stream") and answer.chunks:
                self._send_stream(body, answer, fault)
            elif fault == "cut":
                self._send_half(answer.response, body)
            else:
                self._send_json(answer.status, answer.response, body)

    def _read_body(self) -> Json | None:
        self._sent = self.rfile.read(int(self.headers.get("content-length") or 0))
        try:
            body = json.loads(self._sent)
        except ValueError:
            return None
        return body if isinstance(body, dict) else None

    def _make_exchange(
        self, status: int, body: Json | None, response: Json | None = None
    ) -> LogEntry:
        headers = {name.lower(): value for name, value in self.headers.items()}
        return LogEntry(self.path, body, status, response, headers, sent=self._sent)

    def _send_failure(self, status: int, kind: str, body: Json | None) -> None:
        message = f"the demo server refuses {self.path} with {status}"
        error = {"message": message, "type": kind, "param": None, "code": kind}
        self._send_json(status, {"error": error}, body)

    def _send_json(self, status: int, value: Json, body: Json | None) -> None:
        exchange = self._make_exchange(status, body, value)
        self._send_answer(status, wire.json_bytes(value), "application/json", exchange)

    def _send_answer(self, status: int, data: bytes, content_type: str, exchange: LogEntry) -> None:
        exchange = replace(exchange, client_gone=self._is_client_gone())
        # Before the write: a client that has its answer must find it in the log.
        self.owner.record(exchange)
        self._send_head(status, content_type, "Content-Length", str(len(data)))
        self.wfile.write(data)

    def _send_half(self, value: Json, body: Json | None) -> None:
        data = wire.json_bytes(value)
        self.owner.record(self._make_exchange(200, body))
        self._send_head(200, "application/json", "Content-Length", str(len(data)))
        self.wfile.write(data[: len(data) // 2])
        self.close_connection = True

    def _send_head(self, status: int, content_type: str, name: str, value: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("x-request-id", f"req_{random.getrandbits(64):016x}")
        self.send_header(name, value)
        if status in (429, 500):
            self.send_header("retry-after-ms", "1")
        self.end_headers()

    def _send_stream(self, body: Json, answer: WireAnswer, fault: str) -> None:
        chunks = wire.spoil(answer.chunks, fault)
        ending = b"" if answer.has_event_names else _http_chunk(b"data: [DONE]\n\n")
        ending = b"" if fault == "cut" else ending + _LAST_HTTP_CHUNK
        response = None if fault in ("cut", "sse-error") else answer.response
        exchange = replace(self._make_exchange(200, body, response), is_stream=True, chunks=chunks)
        sent = 0
        is_recorded = False
        try:
            self._send_head(200, "text/event-stream", "Transfer-Encoding", "chunked")
            for chunk in chunks:
                if self._is_client_gone(30_000 if fault == "left" and sent == 3 else 0):
                    raise ConnectionAbortedError
                frame = _http_chunk(_format_event(chunk, has_name=answer.has_event_names))
                is_last = sent == len(chunks) - 1
                if is_last:
                    self.owner.record(exchange)
                    is_recorded = True
                self.wfile.write(frame + ending if is_last else frame)
                sent += 1
                time.sleep(self.owner.chunk_delay_s)
        except ConnectionError:
            partial = replace(exchange, response=None, chunks=chunks[:sent], client_gone=True)
            self.owner.record(partial, instead_of=exchange if is_recorded else None)
            self.close_connection = True
        if fault == "cut":
            self.close_connection = True

    def _is_client_gone(self, patience_ms: int = 0) -> bool:
        # The first write to a socket its peer has closed succeeds; only a read tells.
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        try:
            return bool(poll.poll(patience_ms)) and not self.connection.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            return True


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _format_event(chunk: Json, *, has_name: bool) -> bytes:
    name = f"event: {chunk['type']}\n".encode() if has_name and "type" in chunk else b""
    return b"%sdata: %s\n\n" % (name, wire.json_bytes(chunk))
