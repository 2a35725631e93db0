"""Model calls that do not go through ``openai``: from AutoGen's own request and result.

A client with ``openai`` beneath takes the call over when that sends its request: there is one span.
"""

import sys
import time
from collections.abc import Mapping
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.util.types import AttributeValue

from lightning_otel import capture
from lightning_otel.adapter.tokens import encode_logprobs
from lightning_otel.capture import operations
from lightning_otel.instrumentors.autogen import messages, runs
from lightning_otel.instrumentors.patches import MARK
from lightning_otel.instrumentors.wrappers import bind_names
from lightning_otel.messages import fields_of, read_settings, token_counts
from lightning_otel.types import conventions as c

_OPENAI_CLIENT: Final = "BaseOpenAIChatCompletionClient"
_DELEGATES: Final = frozenset(
    {
        "autogen_ext.models.cache._chat_completion_cache",
        "autogen_ext.experimental.task_centric_memory.utils.chat_completion_client_recorder",
    }
)
"""Modules of clients that only ask another one, or answer from what it said before."""
_PROVIDERS: Final = {
    "openai": "openai",
    "azure": "azure.ai.inference",
    "anthropic": "anthropic",
    "ollama": "ollama",
    "llama_cpp": "llama_cpp",
}
_MODEL_FIELDS: Final = ("_model", "model", "_model_name", "model_name", "_model_id")


def is_delegate(cls: type) -> bool:
    """Return whether a client makes no calls of its own."""
    return cls.__module__ in _DELEGATES


class ModelRun(runs.AutoGenRun):
    """A call of a model, which may give its answer in pieces before the whole of it."""

    def __init__(self, operation: operations.Operation, context: Context) -> None:
        super().__init__(operation, context, _keep_answer)
        self._started_s = time.perf_counter()
        self._pieces: list[str] = []

    def note_item(self, item: Any) -> None:
        """Keep a piece of a streamed answer, or the whole one."""
        if not isinstance(item, str):
            super().note_item(item)
            return
        if not self._pieces:
            first_chunk_s = time.perf_counter() - self._started_s
            self.operation.attributes[c.TIME_TO_FIRST_CHUNK] = first_chunk_s
        self._pieces.append(item)

    def abandon(self) -> None:
        """End it with what was answered so far."""
        if self._pieces and not self.is_complete:
            text = "".join(self._pieces)
            self.operation.body[c.OUTPUT_MESSAGES] = messages.model_answer(text, None)
        super().abandon()


def _keep_answer(operation: operations.Operation, result: Any) -> None:
    if operation.is_over:  # the client that sent the request has ended it
        return
    fields = fields_of(result)
    reason = fields.get("finish_reason")
    if isinstance(reason, str) and reason != "unknown":
        reason = "tool_calls" if reason == "function_calls" else reason
        operation.attributes[c.FINISH_REASONS] = [reason]
    else:
        reason = None
    operation.attributes.update(token_counts(fields.get("usage"), is_zero_known=False))
    operation.body[c.OUTPUT_MESSAGES] = messages.model_answer(result, reason)
    tokens = fields.get("logprobs")
    if isinstance(tokens, list) and tokens:
        logprobs = [fields_of(token).get("logprob") for token in tokens]
        if all(isinstance(value, int | float) for value in logprobs):
            operation.body[c.RESPONSE_LOGPROBS] = encode_logprobs([logprobs])  # type: ignore[list-item]  # numbers, as asked


def begin_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_stream: bool = False
) -> ModelRun | None:
    """Begin the call of a client's ``create``, or of its ``create_stream``."""
    client = args[0]
    if _is_seen_below(client):
        return None
    outside = operations.parent_context()
    attributes, model = _read_request(client, kwargs), _read_model(client)
    if model is not None:
        attributes[c.REQUEST_MODEL] = model
    if is_stream:
        attributes[c.REQUEST_STREAM] = True
    body: dict[str, str | None] = {}
    if capture.process.content.is_kept:
        chat_input = bind_names(("messages",), args, kwargs).get("messages")
        body[c.INPUT_MESSAGES] = capture.guard_call(messages.model_messages, chat_input)
        body[c.TOOL_DEFINITIONS] = capture.guard_call(
            messages.tool_definitions, kwargs.get("tools")
        )
    operation = operations.start_call(
        c.CHAT if model is None else f"{c.CHAT} {model}",
        attributes,
        {key: text for key, text in body.items() if text is not None},
        context=outside,
    )
    # Only the slot and not the span: a second request beneath it stands beside the first.
    return ModelRun(operation, operations.offer_call(operation, outside))


def _is_seen_below(client: object) -> bool:
    if not any(cls.__name__ == _OPENAI_CLIENT for cls in type(client).__mro__):
        return False
    base = sys.modules.get("openai._base_client")
    client_class: Any = getattr(base, "AsyncAPIClient", None)
    return hasattr(getattr(client_class, "request", None), MARK)


def _read_request(client: object, kwargs: Mapping[str, Any]) -> dict[str, AttributeValue]:
    facts: dict[str, AttributeValue] = {c.OPERATION: c.CHAT, c.PROVIDER: runs.PROVIDER}
    for cls in type(client).__mro__:
        package, _, module = cls.__module__.partition("autogen_ext.models.")
        if module and not package:
            facts[c.PROVIDER] = _PROVIDERS.get(module.partition(".")[0], runs.PROVIDER)
            break
    output_format = kwargs.get("json_output")
    if output_format is not None and output_format is not False:
        facts[c.OUTPUT_TYPE] = "json"
    extra = kwargs.get("extra_create_args")
    return facts | read_settings(extra) if isinstance(extra, dict) else facts


def _read_model(client: object) -> str | None:
    fields = fields_of(client)
    arguments = fields.get("_create_args")
    named_by = [arguments.get("model")] if isinstance(arguments, dict) else []
    names = [*named_by, *map(fields.get, _MODEL_FIELDS)]
    return next((name for name in names if isinstance(name, str)), None)
