"""Model calls of the ``openai`` client as spans.

``request`` of the two base clients sees each operation exactly once, above retries and with its
JSON made; ``_process_response`` shows the HTTP response.
"""

import copy
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from lightning_otel import capture, config
from lightning_otel.capture import operations
from lightning_otel.dialects import Dialect
from lightning_otel.dialects.dialect import Attributes
from lightning_otel.dialects.stored import find_stored
from lightning_otel.instrumentors import token_ids
from lightning_otel.instrumentors.base import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.body import ResponseRecorder
from lightning_otel.instrumentors.model_requests import (
    ModelRequest,
    endpoint_of,
    session_of,
    within_session,
)
from lightning_otel.instrumentors.openai.stored import StoredRequest, body_of, is_azure, server_of
from lightning_otel.instrumentors.wrappers import WrappedRun, wrap_call
from lightning_otel.types import conventions as c

_CONNECTIONS: Final = (
    "openai.resources.responses.responses", "openai.resources.beta.responses.responses",
)  # fmt: skip


class OpenAIInstrumentor(LibraryInstrumentor):
    """Switches the capture of ``openai`` calls on and off; ``openai`` itself is never imported."""

    requires = ("openai >= 2.20",)

    def patches(self) -> Mapping[str, Patch]:
        """The module of the two base clients, and those of connections by websocket."""
        connections = dict.fromkeys(_CONNECTIONS, self._patch_connections)
        return {"openai._base_client": self._patch_clients, **connections}

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


def _begin_request(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> WrappedRun | None:
    spec = args[2] if len(args) > 2 else kwargs.get("options")
    with within_session(getattr(spec, "headers", None)):
        return _begin_within(args, kwargs, spec)


def _begin_within(args: tuple[Any, ...], kwargs: Mapping[str, Any], spec: Any) -> WrappedRun | None:
    client, context = args[0], otel_context.get_current()
    if spec is None or not _instrumentor.is_active or not capture.is_wanted(context):
        return None
    if stored := find_stored(spec.method, str(spec.url)):
        return StoredRequest(client, spec, *stored)
    endpoint = endpoint_of(spec.method, str(spec.url))
    if endpoint is None:
        return None
    options, resources = spec, None
    frame = capture.current_frame(context)
    if frame is not None and frame.assigner is not None:
        # Only where it was asked for.
        from lightning_otel.instrumentors.openai.options import substitute_resources

        pair = capture.guard_call(substitute_resources, frame.assigner, client, options, endpoint)
        if pair is not None:
            options, resources = pair
    is_stream = bool(kwargs.get("stream"))
    request = ClientRequest(client, options, endpoint, context, resources, is_stream=is_stream)
    with_ids = None
    if capture.asks_for_ids(frame):
        with_ids = capture.guard_call(_ask_for_ids, endpoint, client, options)
    if with_ids is not None:
        request.fallback = _put_options(args, kwargs, options)
    if with_ids is not None or options is not spec:
        request.arguments = _put_options(args, kwargs, with_ids or options)
    return request


def _ask_for_ids(endpoint: Dialect, client: Any, options: Any) -> Any | None:
    body, extra = options.json_data, options.extra_json or {}
    if not isinstance(body, Mapping) or options.files or is_azure(type(client)):  # type: ignore[arg-type]  # a class has a hash
        return None
    id_fields = token_ids.find_wanted(endpoint, {**body, **extra}, _address_of(client, options))
    if not id_fields:
        return None
    variant = copy.copy(options)
    variant.extra_json = {**extra, **id_fields}
    return variant


def _address_of(client: Any, options: Any) -> str:
    parts = urlsplit(str(options.url))
    url = f"{parts.scheme}://{parts.netloc}" if parts.netloc else str(client.base_url)
    return config.upstream_of(url)


def _put_options(args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Any) -> tuple[Any, Any]:
    if len(args) > 2:
        return (*args[:2], options, *args[3:]), kwargs
    return args, {**kwargs, "options": options}


def _note_response(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    operation = operations.operation_of()
    request = operation.request if operation is not None else None
    response = kwargs.get("response")
    # Another client may ask for something while this one's request is under way, such as a token.
    if isinstance(request, ClientRequest) and request.client is args[0] and response is not None:
        request.observe(response)


class ClientRequest(ModelRequest):
    """One request of an ``openai`` client, and the ``fallback`` where added fields are refused."""

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
        """Start the span; ``resources`` are the substituted versions, as spans say them."""
        self.client = client
        self._options = options
        self._response: Any = None
        self._is_streaming = self._is_refused = False
        url, session_id = str(options.url), session_of(getattr(options, "headers", None))
        attributes: Attributes = {
            **server_of(client, url),
            **({c.RESOURCES: resources} if resources is not None else {}),
            **({c.CONVERSATION_ID: session_id} if session_id is not None else {}),
        }
        super().__init__(endpoint, body_of(options), url, context, attributes, is_stream=is_stream)

    def retries(self, exc: BaseException) -> bool:
        """Return whether to send what the agent wrote, as the server refuses what was added."""
        if self.fallback is None or not token_ids.is_refusal(getattr(exc, "status_code", None)):
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
                ResponseRecorder(response, self.started_s, self.end)
                self._is_streaming = True

    def succeed(self, result: Any) -> None:
        """End the span of a call whose answer is there; a stream's span goes on."""
        if self._is_refused:
            token_ids.note_refusal(_address_of(self.client, self._options))
        if not self._is_streaming:
            self.end(capture.guard_call(self._body_of, result), is_whole=True)

    def fail(self, exc: BaseException) -> None:
        """End the span with the exception the caller is about to see, and the answer if it came."""
        self.end(capture.guard_call(self._body_of, None), is_whole=True, exc=exc)

    def release(self) -> None:
        """Let go of the client's own objects, too."""
        super().release()
        self._response = self._options = self.fallback = None

    def _body_of(self, result: Any) -> bytes | None:
        if self._response is not None:
            content: bytes = self._response.content
            return content
        if hasattr(result, "model_dump_json"):
            return bytes(result.model_dump_json().encode())
        return None
