"""Model calls of the ``openai`` client as spans, wrapped where every surface of it passes once.

``request`` of the two base clients sees each logical operation exactly once, above retries and with
its JSON made; ``_process_response`` shows the HTTP response. What is not a model call passes
untouched, and the caller gets the very object the client returned.
"""

import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from lightning_otel import capture, debugging
from lightning_otel.capture import operations
from lightning_otel.dialects import Dialect, find_dialect
from lightning_otel.dialects.dialect import Attributes, Json
from lightning_otel.dialects.stored import find_stored
from lightning_otel.instrumentors.base import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.openai import token_ids
from lightning_otel.instrumentors.openai.body import BodyRecorder
from lightning_otel.instrumentors.openai.stored import StoredRequest, body_of, server_of
from lightning_otel.instrumentors.wrappers import Run, wrap_call
from lightning_otel.types import conventions as c


class OpenAIInstrumentor(LibraryInstrumentor):
    """Switches the capture of ``openai`` calls on and off; ``openai`` itself is never imported."""

    requires = ("openai >= 2.20",)

    def patches(self) -> Mapping[str, Patch]:
        """The module of the two base clients, and that of connections by websocket."""
        return {
            "openai._base_client": self._patch_clients,
            "openai.resources.responses.responses": self._patch_connections,
        }

    def _patch_clients(self, module: ModuleType) -> None:
        request = wrap_call(_begin_request)
        for client in (module.SyncAPIClient, module.AsyncAPIClient):
            self.wrap(client, "request", request)
            # OpenInference's, switched on first, stands in ``OpenAI`` and calls the bare method.
            self.wrap_past(client, "request", request)
            if hasattr(client, "_process_response"):
                self.wrap(client, "_process_response", wrap_call(_note_response))

    def _patch_connections(self, module: ModuleType) -> None:
        from lightning_otel.instrumentors.openai.sockets import patch_connections

        names = ("ResponsesConnection", "AsyncResponsesConnection")  # not in older releases
        patch_connections(self, *(getattr(module, name) for name in names if hasattr(module, name)))


_instrumentor = OpenAIInstrumentor()


def _begin_request(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run | None:
    client, given = args[0], args[2] if len(args) > 2 else kwargs.get("options")
    context = otel_context.get_current()
    if given is None or not _instrumentor.is_active or not capture.is_wanted(context):
        return None
    if stored := find_stored(given.method, str(given.url)):
        return StoredRequest(client, given, *stored)
    endpoint = endpoint_of(given.method, str(given.url))
    if endpoint is None:
        return None
    options, resources = given, None
    frame = capture.current_frame(context)
    if frame is not None and frame.assigner is not None:
        # Only where it was asked for.
        from lightning_otel.instrumentors.substitution.requests import substitute_resources

        made = capture.guard_call(substitute_resources, frame.assigner, client, options, endpoint)
        if made is not None:
            options, resources = made
    is_stream = bool(kwargs.get("stream"))
    request = ModelRequest(client, options, endpoint, context, resources, is_stream=is_stream)
    with_ids = None
    if capture.asks_for_ids(frame):
        with_ids = capture.guard_call(token_ids.add_requests, endpoint, client, options)
    if with_ids is not None:
        request.fallback = _put_options(args, kwargs, options)
    if with_ids is not None or options is not given:
        request.arguments = _put_options(args, kwargs, with_ids or options)
    return request


def _put_options(args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Any) -> tuple[Any, Any]:
    if len(args) > 2:
        return (*args[:2], options, *args[3:]), kwargs
    return args, {**kwargs, "options": options}


def _note_response(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    operation = operations.operation_of()
    request = operation.request if operation is not None else None
    response = kwargs.get("response")
    # Another client may ask for something while this one's request is under way, such as a token.
    if isinstance(request, ModelRequest) and request.client is args[0] and response is not None:
        request.observe(response)


def endpoint_of(method: str, url: str) -> Dialect | None:
    """The dialect of a request to a model; None for everything else."""
    dialect = find_dialect(method, url)
    if dialect is None and debugging.is_on:
        debugging.log(f"missed  {method} {url}: it asks no model")
    return dialect


class ModelRequest(Run):
    """One request to a model: its span from the first attempt to the last byte of the answer.

    Attributes:
        client: The client that sends it.
        operation: Its span.
        fallback: Arguments to send where the server refuses what is asked besides; None if nothing
            is.
    """

    fallback: tuple[Any, Any] | None = None

    def __init__(
        self,
        client: Any,
        options: Any,
        endpoint: Dialect,
        context: Context,
        resources: str | None = None,
        *,
        is_stream: bool,
    ) -> None:
        """Start the span.

        Args:
            client: The client that sends it.
            options: The client's options of it, as it is sent.
            endpoint: The endpoint it goes to.
            context: The current context.
            resources: The versions it is made with, as spans say it, where some were substituted.
            is_stream: Whether the answer is streamed.
        """
        self.client = client
        self._options = options
        self._endpoint = endpoint
        self._response: Any = None
        self._is_streaming = self._is_refused = False
        body = body_of(options)
        model = endpoint.model_of(body, str(options.url))
        attributes: Attributes = {
            c.OPERATION: endpoint.operation,
            **server_of(client, str(options.url)),
        }
        name = endpoint.operation
        if model is not None:
            attributes[c.REQUEST_MODEL], name = model, f"{name} {model}"
        if is_stream:
            attributes[c.REQUEST_STREAM] = True
        if resources is not None:
            attributes[c.RESOURCES] = resources
        # Read before sending: the program may change its own lists while it waits.
        content: dict[str, str] = {}
        capture.guard_call(_read_request, endpoint, body, attributes, content)
        self.operation = operations.start_call(name, attributes, content, context)
        self.operation.request = self
        if operations.operation_of(context) is not self.operation:  # as a framework's call may be
            self.context = self.operation.context
        self._started_s = time.perf_counter()

    def retries(self, exc: BaseException) -> bool:
        """Return whether to send what the agent wrote, as the server refuses what was added."""
        if self.fallback is None or not token_ids.is_refusal(exc):
            return False
        self.arguments, self.fallback = self.fallback, None
        self._is_refused = True
        return True

    def observe(self, response: Any) -> None:
        """Note the HTTP response: read after the client has read it, or as it passes by."""
        if self._response is None and not self._is_streaming:
            if response.is_closed:
                self._response = response
            else:
                BodyRecorder(response, self._started_s, self._end)
                self._is_streaming = True

    def succeed(self, result: Any) -> None:
        """End the span of a call whose answer is there; a stream's span goes on."""
        if self._is_refused:
            token_ids.note_refusal(self.client, self._options)
        if not self._is_streaming:
            self._end(None, is_whole=True, result=result)

    def fail(self, exc: BaseException) -> None:
        """End the span with the exception the caller is about to see, and the answer if it came."""
        self._end(None, is_whole=True, exc=exc)

    def _end(
        self,
        body: bytes | None,
        *,
        is_whole: bool,
        first_chunk_s: float | None = None,
        exc: BaseException | None = None,
        result: Any = None,
    ) -> None:
        """End the span with the answer's body, as far as it was read.

        Args:
            body: A JSON document, or server-sent events; None for that of the response.
            is_whole: Whether the body was read to its end.
            first_chunk_s: Seconds from the span's start to the first byte of a stream.
            exc: What ended the call instead.
            result: What the client made of the response, which it may hide.
        """
        operation = self.operation
        if operation.is_over:
            return
        read = capture.guard_call(self._read_answer, body, result, first_chunk_s)
        answer, is_complete = read or ({}, False)
        # Apart, both and the answer's body are freed at once.
        operation.request = self.context = self._response = None
        self._options = self.arguments = self.fallback = None
        error = self._endpoint.error_of(answer)
        if exc is not None:
            operation.fail(exc)
        elif error is not None:
            operation.fail_with(*error)
        else:
            if not is_whole and not is_complete:
                operation.attributes[c.ABANDONED] = True
            operation.stop()

    def _read_answer(
        self, body: bytes | None, result: Any, first_chunk_s: float | None
    ) -> tuple[Json, bool]:
        """Put an answer on the span; return it, and whether a stream said that it is over."""
        if body is None and self._response is not None:
            body = self._response.content
        elif body is None and hasattr(result, "model_dump_json"):
            body = result.model_dump_json().encode()
        if not body:
            return {}, False
        answer = self._endpoint.read_body(body)
        if answer.is_stream and first_chunk_s is not None:
            self.operation.attributes[c.TIME_TO_FIRST_CHUNK] = first_chunk_s
        if answer.body:
            capture.guard_call(self._take_answer, answer.body)
        elif capture.process.content.is_kept and body.strip():
            self.operation.body[c.UNREAD_ANSWER] = body.decode(errors="replace")
        return answer.body, answer.is_complete

    def _take_answer(self, answer: Json) -> None:
        self.operation.attributes.update(self._endpoint.response_attributes(answer))
        if capture.process.content.is_kept:
            self.operation.body.update(self._endpoint.response_content(answer))


def _read_request(
    endpoint: Dialect, body: Json, attributes: Attributes, content: dict[str, str]
) -> None:
    attributes.update(endpoint.request_attributes(body))
    if capture.process.content.is_kept:
        content.update(endpoint.request_content(body))
