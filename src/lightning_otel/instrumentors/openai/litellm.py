"""Model calls that LiteLLM sends itself, not by OpenAI's client.

Some of its providers, ``hosted_vllm`` above all, are sent by its own two HTTP handlers: the same
endpoints and bodies, on an ``httpx`` response. Requests in other formats pass untouched.
"""

from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import orjson
from opentelemetry import context as otel_context

from lightning_otel import capture
from lightning_otel.instrumentors.base import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.model_requests import endpoint_of
from lightning_otel.instrumentors.openai import ClientRequest
from lightning_otel.instrumentors.wrappers import bind_names
from lightning_otel.types import conventions as c


class LiteLLMInstrumentor(LibraryInstrumentor):
    """Switches the capture of LiteLLM's own requests on and off; it is never imported for it."""

    requires = ("litellm >= 1.106",)

    def patches(self) -> Mapping[str, Patch]:
        """The module of the two HTTP handlers."""
        return {"litellm.llms.custom_httpx.http_handler": self._patch_handlers}

    def _patch_handlers(self, module: ModuleType) -> None:
        self.wrap_calls(module.HTTPHandler, _begin_request, "post")
        self.wrap_calls(module.AsyncHTTPHandler, _begin_request, "post")


class _LiteLLMCall(ClientRequest):
    def succeed(self, result: Any) -> None:
        self.observe(result)
        super().succeed(result)

    def fail(self, exc: BaseException) -> None:
        response = getattr(exc, "response", None)
        if getattr(response, "is_closed", False):
            capture.guard_call(self.observe, response)
        super().fail(exc)


def _begin_request(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ClientRequest | None:
    arguments = bind_names(("url", "data", "json"), args[:4], kwargs)
    url, data = str(arguments.get("url")), arguments.get("data")
    endpoint = endpoint_of("post", url)
    if endpoint is None:
        return None
    body = orjson.loads(data) if isinstance(data, str | bytes) else data or arguments.get("json")
    if not isinstance(body, dict):
        return None
    # As the reader of the ``openai`` client's requests knows them: client and options in one.
    sent = SimpleNamespace(url=url, json_data=body, base_url="", extra_json=None)
    context = otel_context.get_current()
    request = _LiteLLMCall(sent, sent, endpoint, context, is_stream=endpoint.is_stream(body, url))
    provider = getattr(arguments.get("logging_obj"), "custom_llm_provider", None)
    if isinstance(provider, str):
        request.operation.attributes[c.PROVIDER] = provider
    return request
