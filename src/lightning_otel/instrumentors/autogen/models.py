"""Model calls that do not go through ``openai``: from AutoGen's own request and result.

A client that has ``openai`` beneath it, or another client of AutoGen's, is known only once that one
sends its request: it then takes the call over, and there is one span.
"""

import sys
import time
from collections.abc import Mapping
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.util.types import AttributeValue

from lightning_otel import call_slot, capture
from lightning_otel import conventions as c
from lightning_otel.adapter.tokens import encode_logprobs
from lightning_otel.instrumentors.autogen import runs, said
from lightning_otel.instrumentors.doors import named
from lightning_otel.instrumentors.patching import MARK
from lightning_otel.instrumentors.reading import fields_of, token_counts
from lightning_otel.messages.values import dump

_OPENAI_CLIENT: Final = "BaseOpenAIChatCompletionClient"
_DELEGATES: Final = frozenset(
    {
        "autogen_ext.models.cache._chat_completion_cache",
        "autogen_ext.experimental.task_centric_memory.utils.chat_completion_client_recorder",
    }
)
"""Clients that only ask another one, or answer from what it said before."""
_PROVIDERS: Final = {
    "openai": "openai",
    "azure": "azure.ai.inference",
    "anthropic": "anthropic",
    "ollama": "ollama",
    "llama_cpp": "llama_cpp",
}
_MODEL_FIELDS: Final = ("_model", "model", "_model_name", "model_name", "_model_id")
_REASONS: Final = {"function_calls": "tool_calls"}
_SCALARS: Final[Mapping[str, tuple[str, type | tuple[type, ...]]]] = {
    "temperature": (c.REQUEST_TEMPERATURE, (int, float)),
    "top_p": (c.REQUEST_TOP_P, (int, float)),
    "max_tokens": (c.REQUEST_MAX_TOKENS, int),
    "seed": (c.REQUEST_SEED, int),
}


def is_left_out(cls: type) -> bool:
    """Return whether a client makes no calls of its own."""
    return cls.__module__ in _DELEGATES


class ModelRun(runs.Run):
    """A call of a model."""

    def __init__(self, operation: capture.Operation, context: Context) -> None:
        super().__init__(operation, context)
        self._started_s = time.perf_counter()
        self._pieces: list[str] = []

    def saw(self, item: Any) -> None:
        """Keep a piece of a streamed answer, or the whole one."""
        if isinstance(item, str):
            if not self._pieces:
                first_chunk_s = time.perf_counter() - self._started_s
                self.operation.attributes[c.TIME_TO_FIRST_CHUNK] = first_chunk_s
            self._pieces.append(item)
        elif not self.operation.is_over:
            self.is_complete = True
            self._keep_answer(item)

    def _keep_answer(self, result: Any) -> None:
        held = fields_of(result)
        reason = held.get("finish_reason")
        if isinstance(reason, str) and reason != "unknown":
            reason = _REASONS.get(reason, reason)
            self.operation.attributes[c.FINISH_REASONS] = [reason]
        else:
            reason = None
        self.operation.attributes.update(token_counts(held.get("usage"), is_zero_known=False))
        if capture.content_policy().is_kept:
            self.operation.body[c.OUTPUT_MESSAGES] = said.model_answer(result, reason)
            self.operation.body.update(_read_logprobs(held.get("logprobs")))

    def abandon(self) -> None:
        """End it with what was answered so far."""
        if self._pieces and not self.is_complete and capture.content_policy().is_kept:
            self.operation.body[c.OUTPUT_MESSAGES] = dump(
                [{"role": "assistant", "parts": said.parts("".join(self._pieces))}]
            )
        super().abandon()


def _read_logprobs(tokens: object) -> dict[str, str]:
    if not isinstance(tokens, list) or not tokens:
        return {}
    values = [fields_of(token).get("logprob") for token in tokens]
    if not all(isinstance(value, int | float) for value in values):
        return {}
    return {c.RESPONSE_LOGPROBS: encode_logprobs([values])}  # type: ignore[list-item]  # numbers, as asked


def begin_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_stream: bool = False
) -> ModelRun | None:
    """Begin the call of a client's ``create``, or of its ``create_stream``."""
    client = args[0]
    if _is_seen_below(client):
        return None
    outside = capture.parent_context()
    body = _request_content(named(("messages",), args, kwargs).get("messages"), kwargs.get("tools"))
    attributes, name = _request_attributes(client, kwargs, is_stream=is_stream)
    operation = call_slot.start_call(name, attributes, body, parent=outside)
    # Only the slot and not the span: a second request beneath it stands beside the first.
    return ModelRun(operation, call_slot.CallSlot(operation).within(outside))


def _is_seen_below(client: object) -> bool:
    """Return whether the ``openai`` client makes a span of every request of a client."""
    if not any(cls.__name__ == _OPENAI_CLIENT for cls in type(client).__mro__):
        return False
    base = sys.modules.get("openai._base_client")
    found: Any = getattr(base, "AsyncAPIClient", None)
    return hasattr(getattr(found, "request", None), MARK)


def _request_attributes(
    client: object, kwargs: Mapping[str, Any], *, is_stream: bool
) -> tuple[dict[str, AttributeValue], str]:
    found: dict[str, AttributeValue] = {c.OPERATION: c.CHAT, c.PROVIDER: _provider_of(client)}
    model = _model_of(client)
    if model is not None:
        found[c.REQUEST_MODEL] = model
    if is_stream:
        found[c.REQUEST_STREAM] = True
    wanted = kwargs.get("json_output")
    if wanted is not None and wanted is not False:
        found[c.OUTPUT_TYPE] = "json"
    extra = kwargs.get("extra_create_args")
    given: Mapping[str, Any] = extra if isinstance(extra, dict) else {}
    for name, (key, kind) in _SCALARS.items():
        if isinstance(given.get(name), kind):
            found[key] = given[name]
    return found, c.CHAT if model is None else f"{c.CHAT} {model}"


def _model_of(client: object) -> str | None:
    held = fields_of(client)
    arguments = held.get("_create_args")
    if isinstance(arguments, dict) and isinstance(arguments.get("model"), str):
        return str(arguments["model"])
    return next((held[name] for name in _MODEL_FIELDS if isinstance(held.get(name), str)), None)


def _provider_of(client: object) -> str:
    for cls in type(client).__mro__:
        package, _, rest = cls.__module__.partition("autogen_ext.models.")
        if not package and rest:
            return _PROVIDERS.get(rest.partition(".")[0], runs.PROVIDER)
    return runs.PROVIDER


def _request_content(messages: object, tools: object) -> dict[str, str]:
    if not capture.content_policy().is_kept:
        return {}
    found = {
        c.INPUT_MESSAGES: capture.guarded(said.model_messages, messages),
        c.TOOL_DEFINITIONS: capture.guarded(said.tool_definitions, tools),
    }
    return {key: text for key, text in found.items() if text is not None}
