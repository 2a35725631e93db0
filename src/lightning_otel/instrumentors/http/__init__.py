"""Requests of HTTP clients to models, whichever SDK or program makes them.

The path says which dialect a request is in; one in none passes untouched. The outermost layer that
knows a request records it: within a call of the ``openai`` client or LiteLLM, and within a request
of an HTTP client above, it is an attempt of theirs.
"""

import contextlib
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from lightning_otel import capture, config, debugging
from lightning_otel.capture import operations
from lightning_otel.dialects import Dialect, find_dialect, may_ask_model
from lightning_otel.dialects.dialect import Json, parse_object
from lightning_otel.instrumentors import token_ids
from lightning_otel.instrumentors.body import BodyRecorder
from lightning_otel.instrumentors.http.changes import (
    Changes,
    find_changes,
    moved_headers,
    server_of,
)
from lightning_otel.instrumentors.model_requests import (
    ModelRequest,
    open_request,
    server_attributes,
    session_of,
    within_session,
)
from lightning_otel.instrumentors.wrappers import WrappedRun
from lightning_otel.types import conventions as c

E = TypeVar("E", bound="HttpExchange")

RECORDED: Final = "x-lightning-otel-recorded"
"""The header of requests that are recorded here: ``run --proxy`` takes it off, and records none."""
_AGENT: Final = "x-claude-code-agent-id"
_SDK_KEY: Final = otel_context.create_key("lightning-otel-sdk-call")
_FAILED: Final = 400
_GZIP: Final = b"\x1f\x8b"
_ZLIB: Final = b"\x78"
_ANY_HEADER: Final = 47
"""How coded bodies begin, and what has zlib tell the two apart."""
_PROVIDERS: Final = {
    "groq.com": "groq",
    "mistral.ai": "mistral_ai",
    "x.ai": "x_ai",
    "deepseek.com": "deepseek",
    "perplexity.ai": "perplexity",
    "azure.com": "azure.ai.openai",
}
"""By the end of a host who serves OpenAI's dialect there, as the conventions name it."""


class Sent(NamedTuple):
    """A POST that a client is about to send.

    Attributes:
        read_content: Returns the body: bytes, text, or what JSON is made of.
        write: Returns the arguments to send it to another address, with another body and headers;
            without a body, as it is with these headers besides.
        can_move: Whether it can be sent to another server.
        start_ns: When it was sent, if it was sent already.
    """

    url: str
    read_content: Callable[[], Any]
    headers: Mapping[str, str]
    write: Callable[[str, bytes | None, dict[str, str]], tuple[Any, Any]]
    can_move: bool = True
    start_ns: int | None = None


class SdkCall(WrappedRun):
    """A call of an SDK with retries: all its requests are one call."""

    def __init__(self) -> None:
        self.request: HttpRequest | None = None
        self.is_over = False
        self.context = otel_context.set_value(_SDK_KEY, self)

    def succeed(self, result: Any) -> None:
        """End the call, unless its answer is still to be read."""
        self._end(None)

    def fail(self, exc: BaseException) -> None:
        """End the call with what the SDK raises."""
        self._end(exc)

    def _end(self, exc: BaseException | None) -> None:
        self.is_over = True
        request, self.request, self.context = self.request, None, None
        if request is not None:
            request.end_sdk_call(exc)


class HttpRequest(ModelRequest):
    """A request to a model that nobody above the HTTP client records.

    Of its attempts only the ``latest`` counts.
    """

    latest: "HttpExchange | None" = None
    sdk_call: SdkCall | None = None
    changes: Changes | None = None
    _answer: tuple[bytes | None, dict[str, Any]] | None = None

    def begin_attempt(self, exchange: "HttpExchange") -> None:
        """Let a new attempt count, and not what the one before it gave."""
        self.latest, self._answer = exchange, None

    def take_answer(self, body: bytes | None, *, is_stream: bool = False, **how: Any) -> None:
        """End it with an attempt's answer as :meth:`end` takes it; an SDK may still retry."""
        is_failed = how.get("exc") is not None or how.get("status", 0) >= _FAILED
        waits = self.sdk_call is not None and not self.sdk_call.is_over
        if waits and (is_failed or not is_stream):
            self._answer = body, how
        else:
            self.end(body, **how)

    def end_sdk_call(self, exc: BaseException | None) -> None:
        """End it as the SDK returns or raises, unless its answer is still being read."""
        body, how = self._answer or (None, {"is_whole": True})
        if exc is not None:
            how["exc"] = exc
        if exc is not None or self._answer is not None or self.latest is None:
            self.end(body, **how)

    def release(self) -> None:
        """Let go of the attempts, too."""
        super().release()
        self.latest = self.sdk_call = self.changes = self._answer = None


class HttpExchange(WrappedRun):
    """One HTTP request and its answer: an attempt at a request to a model.

    Where the server refuses to be asked for token ids, it is sent the ``fallback``.
    """

    fallback: tuple[Any, Any] | None = None
    refusing = ""

    def __init__(self, request: ModelRequest, context: Context) -> None:
        self._request = request
        self._started_s = time.perf_counter()
        self._status = 0
        self._server = ""
        if isinstance(request, HttpRequest):
            request.begin_attempt(self)
            if operations.operation_of(context) is not request.operation:
                self.context = request.operation.within(context)

    def change(self, sent: Sent, changes: Changes) -> None:
        """Send it otherwise."""
        content = parse_content(sent.read_content) or {}
        url = changes.url or sent.url
        self._server = server_of(url)
        headers = moved_headers(sent.headers, sent.url, changes.url)
        if url != config.upstream_of(url):
            headers[RECORDED] = "1"
        bodies = [changes.write(content, with_ids=with_ids) for with_ids in (True, False)]
        self.arguments = sent.write(url, bodies[0], headers)
        if changes.wanted:
            self.fallback = sent.write(url, bodies[1], headers)

    def repeats(self, result: Any) -> Callable[[], Any] | None:
        """Return what drops a refusal of what was asked besides, to send the rest alone."""
        status = getattr(result, "status_code", None) or result.status
        if self.fallback is None or not token_ids.is_refusal(status):
            return None
        self.fall_back()
        return self.drop(result)

    def fall_back(self) -> Any:
        """Return the arguments without what was asked besides: they are sent from here on."""
        self.arguments, self.fallback = self.fallback, None
        self.refusing = self._server
        return self.arguments

    def drop(self, result: Any) -> Callable[[], Any]:
        """Return what gives an answer up."""
        close: Callable[[], Any] = result.close
        return close

    def note_status(self, status: int) -> None:
        """Note that an answer begins."""
        self._status = status
        if self.refusing and status < _FAILED:
            token_ids.note_refusal(self.refusing)
        self._request.note_attempt(self._started_s, status)

    def note_earlier(self, outcome: int | str) -> None:
        """Note an attempt that the library made by itself before this answer."""
        self._request.note_attempt(None, outcome)

    def record_body(self) -> BodyRecorder | None:
        """Return the recorder of the answer's body; None where a layer above records it."""
        if not isinstance(self._request, HttpRequest):
            return None
        return BodyRecorder(self._request.started_s, self.end_body)

    def end_body(self, body: bytes, **how: Any) -> None:
        """Take the body, as far as it was read."""
        request = self._request
        if isinstance(request, HttpRequest) and request.latest is self:
            request.take_answer(
                self.decode(body), is_stream=request.is_stream, status=self._status, **how
            )

    def decode(self, body: bytes) -> bytes:
        """Return a body without its coding, where the program reads it as it was sent."""
        is_coded = body[:2] == _GZIP or (body[:1] == _ZLIB and not int.from_bytes(body[:2]) % 31)
        return zlib.decompressobj(_ANY_HEADER).decompress(body) if is_coded else body

    def take_sent(self, body: bytes, url: str) -> None:
        """Take what was sent, where that could only be read as it went."""
        content = parse_object(self.decode(body))
        if content is not None and isinstance(self._request, HttpRequest):
            self._request.read_sent(content, url)

    def fail(self, exc: BaseException) -> None:
        """End the attempt without an answer."""
        request = self._request
        request.note_attempt(self._started_s, operations.type_name(exc))
        if isinstance(request, HttpRequest) and request.latest is self:
            request.take_answer(None, is_whole=True, exc=exc)


def begin_request(library: str, sent: Sent, make: Callable[[ModelRequest, Context], E]) -> E | None:
    """Begin an exchange, if it asks a model and is wanted."""
    endpoint = find_dialect("POST", sent.url)
    if endpoint is None and not may_ask_model(sent.url):
        return None
    with within_session(sent.headers):
        context = otel_context.get_current()
        if _is_told_of(sent, context) or not capture.is_wanted(context):
            return None
        if endpoint is None:
            note_unknown(library, sent.url)
            return None
        sdk_call = context.get(_SDK_KEY)
        request = open_request(context)
        if isinstance(sdk_call, SdkCall) and sdk_call.request is not None:
            request = sdk_call.request
        if request is None:
            if _is_of_openai(sent) and "lightning-openai" in config.DISABLED.read():
                return None
            request = _start_request(endpoint, sent, context)
            if isinstance(sdk_call, SdkCall) and not sdk_call.is_over:
                request.sdk_call, sdk_call.request = sdk_call, request
        exchange = make(request, context)
        if isinstance(request, HttpRequest) and request.changes is not None:
            capture.guard_call(exchange.change, sent, request.changes)
        elif config.upstream_of(sent.url) != sent.url:
            exchange.arguments = capture.guard_call(sent.write, sent.url, None, {RECORDED: "1"})
        return exchange


def _is_of_openai(sent: Sent) -> bool:
    headers = sent.headers
    return "OpenAI/Python" in str(headers.get("user-agent") or headers.get("User-Agent"))


def _is_told_of(sent: Sent, context: Context) -> bool:
    is_outside = capture.current_frame(context) is None and not capture.process.is_global
    return debugging.is_on and is_outside and _is_of_openai(sent)


def note_unknown(library: str, url: str) -> None:
    """Note for ``run``, beside the store, an address that seems to ask a model and is not read."""
    if debugging.is_on:
        debugging.log(f"missed  POST {url.partition('?')[0]}: no dialect reads it")
    if not config.RUN.read():
        return
    parts = urlsplit(url)
    address = f"{parts.netloc.rpartition('@')[2]}{parts.path}"
    place = f"{config.STORE.read()}.d/unrecorded-{config.TRACE_PARENT.read()}"
    with contextlib.suppress(OSError), open(place, "ab") as file:
        file.write(f"{library}\t\t{address}\n".encode())


def _start_request(endpoint: Dialect, sent: Sent, context: Context) -> HttpRequest:
    body, url = parse_content(sent.read_content), sent.url
    changes = None
    if body is not None:
        changes = capture.guard_call(find_changes, endpoint, url, body, can_move=sent.can_move)
    attributes: dict[str, Any] = {}
    if body is not None and changes is not None:
        body, url = {**body, **changes.fields}, changes.url or url
        if changes.stamp is not None:
            attributes[c.RESOURCES] = changes.stamp
    if (session_id := session_of(sent.headers)) is not None:
        attributes[c.CONVERSATION_ID] = session_id
    if isinstance(agent_id := sent.headers.get(_AGENT), str):
        attributes[c.AGENT_ID] = agent_id
    server = server_attributes(url)
    host = str(server.get(c.SERVER_ADDRESS, ""))
    attributes |= {c.PROVIDER: endpoint.provider or _provider_at(host), **server}
    is_stream = endpoint.is_stream(body or {}, url)
    request = HttpRequest(
        endpoint, body, url, context, attributes, is_stream=is_stream, start_ns=sent.start_ns
    )
    request.changes = changes
    return request


def _provider_at(host: str) -> str:
    ends = (_PROVIDERS[end] for end in _PROVIDERS if f".{host}".endswith(f".{end}"))
    return next(ends, "openai")


def parse_content(read_content: Callable[[], Any]) -> Json | None:
    """Return the object that is sent; None where it cannot be read beforehand."""
    content = capture.guard_call(read_content)
    if isinstance(content, str):
        content = content.encode()
    if isinstance(content, bytes | bytearray):
        return parse_object(bytes(content))
    return content if isinstance(content, dict) else None


def take_name(cls: Any, library_class: Any) -> Any:
    """Return a class under the name of the library's class that it extends."""
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(cls, name, getattr(library_class, name))
    return cls
