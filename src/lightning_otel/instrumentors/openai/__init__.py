"""Model calls of the ``openai`` client as spans, wrapped where every surface of it passes once.

``request`` of the two base clients sees each logical operation exactly once, above retries and with
its JSON made; ``_process_response`` shows the HTTP response. What is not a model call passes
untouched, and the caller gets the very object the client returned.
"""

import functools
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import wrapt
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]  # not in its __all__

from lightning_otel import capture
from lightning_otel.instrumentors.openai.request import ModelRequest, current_request

_MODULE = "openai._base_client"
_MARK = "__lightning_otel_wrapped__"


class OpenAIInstrumentor(BaseInstrumentor):  # type: ignore[misc]  # the base class is untyped
    """Switches the capture of ``openai`` calls on and off; ``openai`` itself is never imported."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """The releases this is tested with."""
        return ("openai >= 2",)

    def instrument(self, **kwargs: Any) -> Any:
        """Switch on: for every call, or with ``only_in_recordings`` for those within recordings."""
        # Here, because the base class passes over a second call: a recording may have come first.
        if not kwargs.get("only_in_recordings"):
            capture.capture_everywhere(enabled=True)
        return super().instrument(**kwargs)

    def _instrument(self, **kwargs: Any) -> None:
        _state.is_active = True
        capture.refresh_settings()
        if not _state.is_hooked:
            _state.is_hooked = True
            wrapt.register_post_import_hook(_patch_if_active, _MODULE)
        elif (module := _state.module) is not None:
            _patch_if_active(module)

    def _uninstrument(self, **kwargs: Any) -> None:
        _state.is_active = False
        capture.capture_everywhere(enabled=False)
        if _state.module is not None:
            _unpatch(_state.module)


class _State:
    """Whether capture is on, and the module once it was imported."""

    def __init__(self) -> None:
        self.is_active = False
        self.is_hooked = False
        self.module: ModuleType | None = None


_state = _State()


def _patch_if_active(module: ModuleType) -> None:
    _state.module = module
    if _state.is_active:
        capture.guarded(_patch, module)


def _patch(module: ModuleType) -> None:
    for client, wrap_request, wrap_response in (
        (module.SyncAPIClient, _sync_request, _sync_response),
        (module.AsyncAPIClient, _async_request, _async_response),
    ):
        _wrap(client, "request", wrap_request)
        if hasattr(client, "_process_response"):
            _wrap(client, "_process_response", wrap_response)


def _wrap(owner: type, name: str, make: Callable[[Any], Any]) -> None:
    """Put a plain function in a method's place: it pickles and inspects as the method did."""
    original = owner.__dict__[name]
    if getattr(original, _MARK, None) is None:
        wrapper = functools.wraps(original)(make(original))
        setattr(wrapper, _MARK, original)
        setattr(owner, name, wrapper)


def _unpatch(module: ModuleType) -> None:
    for client in (module.SyncAPIClient, module.AsyncAPIClient):
        for name in ("request", "_process_response"):
            found = client.__dict__.get(name)
            # If another tool wrapped after us, ours stays beneath it and passes everything through.
            original = getattr(found, _MARK, None) if not hasattr(found, "__self__") else None
            if original is not None and found.__wrapped__ is original:
                setattr(client, name, original)


def _begin(client: Any, options: Any, stream: bool) -> ModelRequest | None:  # noqa: FBT001
    if not _state.is_active or not capture.is_wanted():
        return None
    return ModelRequest.begin(client, options, is_stream=stream)


def _sync_request(original: Any) -> Any:
    def request(
        self: Any, cast_to: Any, options: Any, *, stream: bool = False, **kwargs: Any
    ) -> Any:
        model_request = capture.guarded(_begin, self, options, stream)
        if model_request is None:
            return original(self, cast_to, options, stream=stream, **kwargs)
        try:
            with capture.attached(model_request.context):
                result = original(self, cast_to, options, stream=stream, **kwargs)
        except BaseException as exc:
            capture.guarded(model_request.fail, exc)
            raise
        capture.guarded(model_request.returned, result)
        return result

    return request


def _async_request(original: Any) -> Any:
    async def request(
        self: Any, cast_to: Any, options: Any, *, stream: bool = False, **kwargs: Any
    ) -> Any:
        model_request = capture.guarded(_begin, self, options, stream)
        if model_request is None:
            return await original(self, cast_to, options, stream=stream, **kwargs)
        try:
            with capture.attached(model_request.context):
                result = await original(self, cast_to, options, stream=stream, **kwargs)
        except BaseException as exc:
            capture.guarded(model_request.fail, exc)
            raise
        capture.guarded(model_request.returned, result)
        return result

    return request


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
