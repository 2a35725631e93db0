"""Model calls of the ``openai`` client as spans, wrapped where every surface of it passes once.

``request`` of the two base clients sees each logical operation exactly once, above retries and with
its JSON made; ``_process_response`` shows the HTTP response. What is not a model call passes
untouched, and the caller gets the very object the client returned.
"""

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from lightning_otel import capture
from lightning_otel.instrumentors.base import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.openai import token_ids
from lightning_otel.instrumentors.openai.request import (
    ModelRequest,
    current_request,
    endpoint_of,
)
from lightning_otel.instrumentors.wrappers import wrap_call


class OpenAIInstrumentor(LibraryInstrumentor):
    """Switches the capture of ``openai`` calls on and off; ``openai`` itself is never imported."""

    requires = ("openai >= 2.20",)

    def patches(self) -> Mapping[str, Patch]:
        """The module of the two base clients."""
        return {"openai._base_client": self._patch_clients}

    def _patch_clients(self, module: ModuleType) -> None:
        for client, send in (
            (module.SyncAPIClient, _send_request),
            (module.AsyncAPIClient, _send_async),
        ):

            def request(original: Any, send: Any = send) -> Any:
                return wrap_call(_begin_request)(functools.wraps(original)(send(original)))

            self.wrap(client, "request", request)
            # OpenInference's, switched on first, stands in ``OpenAI`` and calls the bare method.
            self.wrap_past(client, "request", request)
            if hasattr(client, "_process_response"):
                self.wrap(client, "_process_response", wrap_call(_note_response))


_instrumentor = OpenAIInstrumentor()


def _begin_request(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelRequest | None:
    client, options = args[0], args[2] if len(args) > 2 else kwargs.get("options")
    if options is None or not _instrumentor.is_wanted():
        return None
    sent, stamp = options, None
    assigner = capture.current_assigner()
    if assigner is not None and endpoint_of(options.method, str(options.url)) is not None:
        # Only where it was asked for.
        from lightning_otel.instrumentors.substitution.requests import substitute_resources

        made = capture.guard_call(substitute_resources, assigner, client, options)
        if made is not None:
            sent, stamp = made
    is_stream = bool(kwargs.get("stream"))
    request = ModelRequest.begin(client, sent, is_stream=is_stream, resources=stamp)
    if request is not None:
        request.given = options
    return request


def _send_request(original: Any) -> Any:
    """Send what is to be sent, and what the agent wrote where the server refuses what is asked."""

    def request(self: Any, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        sent, asked = capture.guard_call(token_ids.sent_for, options) or (options, None)
        if asked is not None:
            try:
                return original(self, cast_to, asked, **kwargs)
            except Exception as exc:
                if not capture.guard_call(token_ids.is_refusal, exc):
                    raise
        # Out here, an exception of the agent's own request does not name the refusal as its cause.
        result = original(self, cast_to, sent, **kwargs)
        if asked is not None:
            capture.guard_call(token_ids.note_refusal, self, sent)
        return result

    return request


def _send_async(original: Any) -> Any:
    async def request(self: Any, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        sent, asked = capture.guard_call(token_ids.sent_for, options) or (options, None)
        if asked is not None:
            try:
                return await original(self, cast_to, asked, **kwargs)
            except Exception as exc:
                if not capture.guard_call(token_ids.is_refusal, exc):
                    raise
        result = await original(self, cast_to, sent, **kwargs)
        if asked is not None:
            capture.guard_call(token_ids.note_refusal, self, sent)
        return result

    return request


def _note_response(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    request, response = current_request(), kwargs.get("response")
    # Another client may ask for something while this one's request is under way, such as a token.
    if request is not None and request.client is args[0] and response is not None:
        request.observe(response)
