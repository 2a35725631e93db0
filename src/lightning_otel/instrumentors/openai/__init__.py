"""Model calls of the ``openai`` client as spans, wrapped where every surface of it passes once.

``request`` of the two base clients sees each logical operation exactly once, above retries and with
its JSON made; ``_process_response`` shows the HTTP response. What is not a model call passes
untouched, and the caller gets the very object the client returned.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from lightning_otel import capture
from lightning_otel.instrumentors.library import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.openai import asking
from lightning_otel.instrumentors.openai.request import (
    ModelRequest,
    current_request,
    endpoint_of,
)


class OpenAIInstrumentor(LibraryInstrumentor):
    """Switches the capture of ``openai`` calls on and off; ``openai`` itself is never imported."""

    requires = ("openai >= 2.20",)

    def patches(self) -> Mapping[str, Patch]:
        """The module of the two base clients."""
        return {"openai._base_client": self._patch_clients}

    def _patch_clients(self, module: ModuleType) -> None:
        for client, wrap_request, wrap_response in (
            (module.SyncAPIClient, _sync_request, _sync_response),
            (module.AsyncAPIClient, _async_request, _async_response),
        ):
            self.wrap(client, "request", wrap_request)
            # OpenInference's, switched on first, stands in ``OpenAI`` and calls the bare method.
            self.wrap_past(client, "request", wrap_request)
            if hasattr(client, "_process_response"):
                self.wrap(client, "_process_response", wrap_response)


_instrumentor = OpenAIInstrumentor()


def _begin(client: Any, options: Any, stream: bool) -> ModelRequest | None:  # noqa: FBT001
    if not _instrumentor.is_wanted():
        return None
    applied = capture.applied()
    if applied is None or endpoint_of(options.method, str(options.url)) is None:
        return ModelRequest.begin(client, options, is_stream=stream)
    # Only where it was asked for.
    from lightning_otel.instrumentors.openai.substituting import substituted

    made = capture.guarded(substituted, applied, client, options)
    if made is None:
        return ModelRequest.begin(client, options, is_stream=stream)
    return ModelRequest.begin(client, made.options, is_stream=stream, resources=made.stamp)


def _sync_request(original: Any) -> Any:
    def request(
        self: Any, cast_to: Any, options: Any, *, stream: bool = False, **kwargs: Any
    ) -> Any:
        model_request = capture.guarded(_begin, self, options, stream)
        if model_request is None:
            return original(self, cast_to, options, stream=stream, **kwargs)
        options = model_request.options
        try:
            with capture.attached(model_request.context):
                asked = capture.guarded(asking.asking, model_request, options)
                send = original if asked is None else _asking(original, asked)
                result = send(self, cast_to, options, stream=stream, **kwargs)
        except BaseException as exc:
            capture.guarded(model_request.fail, exc)
            raise
        capture.guarded(model_request.returned, result)
        return result

    return request


def _asking(original: Any, asked: Any) -> Any:
    """Sends what was asked, and what the agent wrote where the server refuses that."""

    def send(self: Any, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        try:
            return original(self, cast_to, asked, **kwargs)
        except Exception as exc:
            if not capture.guarded(asking.is_refusal, exc):
                raise
        # Out here, an exception of the agent's own request does not name the refusal as its cause.
        result = original(self, cast_to, options, **kwargs)
        capture.guarded(asking.note_refusal, self, options)
        return result

    return send


def _async_request(original: Any) -> Any:
    async def request(
        self: Any, cast_to: Any, options: Any, *, stream: bool = False, **kwargs: Any
    ) -> Any:
        model_request = capture.guarded(_begin, self, options, stream)
        if model_request is None:
            return await original(self, cast_to, options, stream=stream, **kwargs)
        options = model_request.options
        try:
            with capture.attached(model_request.context):
                asked = capture.guarded(asking.asking, model_request, options)
                send = original if asked is None else _async_asking(original, asked)
                result = await send(self, cast_to, options, stream=stream, **kwargs)
        except BaseException as exc:
            capture.guarded(model_request.fail, exc)
            raise
        capture.guarded(model_request.returned, result)
        return result

    return request


def _async_asking(original: Any, asked: Any) -> Any:
    async def send(self: Any, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        try:
            return await original(self, cast_to, asked, **kwargs)
        except Exception as exc:
            if not capture.guarded(asking.is_refusal, exc):
                raise
        result = await original(self, cast_to, options, **kwargs)
        capture.guarded(asking.note_refusal, self, options)
        return result

    return send


def _sync_response(original: Any) -> Any:
    def _process_response(self: Any, **kwargs: Any) -> Any:
        capture.guarded(_note_response, self, kwargs.get("response"))
        return original(self, **kwargs)

    return _process_response


def _async_response(original: Any) -> Any:
    async def _process_response(self: Any, **kwargs: Any) -> Any:
        capture.guarded(_note_response, self, kwargs.get("response"))
        return await original(self, **kwargs)

    return _process_response


def _note_response(client: Any, response: Any) -> None:
    model_request = current_request()
    # Another client may ask for something while this one's request is under way, such as a token.
    if model_request is not None and model_request.client is client and response is not None:
        model_request.observe(response)
