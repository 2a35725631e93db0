"""Calls of LangChain's models: their span, offered to the client that sends the request.

Where a client's instrumentor takes the call, it says all there is to say; else the call is filled
with what LangChain's own objects tell.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from lightning_otel import call_slot, capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors.langchain import messages as read
from lightning_otel.instrumentors.langchain import runs
from lightning_otel.instrumentors.langchain.places import Place
from lightning_otel.instrumentors.reading import token_counts

_PROVIDERS: Final = {
    "azure": "azure.ai.openai",
    "google_genai": "gcp.gen_ai",
    "google_vertexai": "gcp.vertex_ai",
    "amazon_bedrock": "aws.bedrock",
    "mistral": "mistral_ai",
    "mistralai": "mistral_ai",
    "xai": "x_ai",
}
"""LangChain's names of providers that the conventions name otherwise."""
_OWN_ID: Final = ("lc_run-", "run-")
"""How the ids begin that LangChain gives to answers without one."""


class ModelCall:
    """One call of a model.

    Attributes:
        operation: Its span.
        context: Where the request is to be sent: in it, the call can be claimed.
    """

    __slots__ = ("_given", "_metadata", "_slot", "_tools", "context", "operation")

    def __init__(
        self,
        model: Any,
        operation_name: str,
        parent: Context,
        given: Sequence[Any],
        metadata: Mapping[str, Any],
        tools: object = None,
    ) -> None:
        """Start the span.

        Args:
            model: LangChain's model.
            operation_name: What is asked of it.
            parent: The context the call stands in.
            given: Its messages, or texts. They are read at the end, and only if nobody else has:
                to write a long history twice would cost more than all the rest.
            metadata: What LangChain knows of the model.
            tools: The tools it was given.
        """
        name = metadata.get("ls_model_name")
        provider = metadata.get("ls_provider")
        attributes: runs.Attributes = {c.OPERATION: operation_name}
        if isinstance(provider, str):
            attributes[c.PROVIDER] = _PROVIDERS.get(provider, provider)
        if isinstance(name, str):
            attributes[c.REQUEST_MODEL] = name
        else:
            name = type(model).__name__
        if "thread_id" in metadata:
            attributes.update(runs.conversation_of(metadata))
        self.operation = capture.Operation(
            capture.clean(f"{operation_name} {name}"), SpanKind.CLIENT, attributes, parent=parent
        )
        self._slot = call_slot.CallSlot(self.operation)
        self.context = self._slot.within(self.operation.context)
        self._given = given
        self._metadata = metadata
        self._tools = tools

    @property
    def _is_settled(self) -> bool:
        """True if the span has ended, or the client that sends the request will end it."""
        return self.operation.is_claimed or self.operation.is_over

    def stop(self, generations: Iterable[Any], model_output: object = None) -> None:
        """End the span with the model's answer."""
        if not self._is_settled:
            capture.guarded(self._fill_answer, generations, model_output)
            self.operation.stop()

    def fail(self, exc: BaseException, generations: Iterable[Any] = ()) -> None:
        """End the span with what ended the call, and what was said until then."""
        if self._is_settled:
            return
        capture.guarded(self._fill_answer, generations, None)
        if runs.is_control_flow(exc):
            if isinstance(exc, GeneratorExit):
                self.operation.attributes[c.ABANDONED] = True
            self.operation.stop()
        else:
            self.operation.fail(exc)

    def _fill_answer(self, generations: Iterable[Any], model_output: object) -> None:
        choices = list(generations)
        attributes = self.operation.attributes
        attributes.update(_read_sampling(self._metadata))
        attributes.update(_answer_attributes(choices, model_output))
        if capture.content_policy().is_kept:
            body = self.operation.body
            body[c.INPUT_MESSAGES] = read.messages_text(self._given)
            if choices:
                body[c.OUTPUT_MESSAGES] = read.answers_text(choices)
            if self._tools:
                tools = read.tools_text(self._tools)
                if tools is not None:
                    body[c.TOOL_DEFINITIONS] = tools


class StreamPlace(Place):
    """The place of a model's stream, entered for each of its steps.

    Attributes:
        call: Its call; None before it started.
    """

    __slots__ = ("_model", "_operation_name", "_tools", "call")

    def __init__(self, model: Any, operation_name: str, tools: object) -> None:
        super().__init__()
        self.call: ModelCall | None = None
        self._model = model
        self._operation_name = operation_name
        self._tools = tools

    def start(
        self, run_id: UUID, parent: Context, given: Sequence[Any], metadata: Mapping[str, Any]
    ) -> None:
        """Start the call's span."""
        call = ModelCall(self._model, self._operation_name, parent, given, metadata, self._tools)
        call.operation.attributes[c.REQUEST_STREAM] = True
        self.call = call
        self.take(run_id, call.context)

    def is_whole(self) -> None:
        """Note that the answer does not come in pieces after all."""
        if self.call is not None:
            self.call.operation.attributes.pop(c.REQUEST_STREAM, None)

    def over(self, exc: BaseException | None = None) -> None:
        """End it if LangChain has not said that it ended."""
        if self.call is not None:
            self.call.fail(exc or GeneratorExit())


def generations_of(response: Any) -> list[Any]:
    """The choices that an answer to one prompt consists of."""
    found = getattr(response, "generations", None)
    choices = found[0] if isinstance(found, list) and found else []
    return choices if isinstance(choices, list) else []


def _read_sampling(metadata: Mapping[str, Any]) -> runs.Attributes:
    """Return the sampling parameters, as far as LangChain knows them."""
    found: runs.Attributes = {}
    temperature, limit = metadata.get("ls_temperature"), metadata.get("ls_max_tokens")
    stop = metadata.get("ls_stop")
    if isinstance(temperature, (int, float)):
        found[c.REQUEST_TEMPERATURE] = float(temperature)
    if isinstance(limit, int):
        found[c.REQUEST_MAX_TOKENS] = limit
    if isinstance(stop, list) and all(isinstance(item, str) for item in stop):
        found[c.REQUEST_STOP] = list(stop)
    return found


def _answer_attributes(choices: Sequence[Any], model_output: object) -> runs.Attributes:
    found: runs.Attributes = {}
    if not choices:
        return found
    reasons = [reason for choice in choices if (reason := read.finish_reason(choice)) is not None]
    if reasons:
        found[c.FINISH_REASONS] = reasons
    answer = getattr(choices[0], "message", None)
    told = {**(model_output if isinstance(model_output, dict) else {})}
    told.update(read.response_metadata(answer))
    response_id = told.get("id") or getattr(answer, "id", None)
    if isinstance(response_id, str) and not response_id.startswith(_OWN_ID):
        found[c.RESPONSE_ID] = response_id
    model = told.get("model_name") or told.get("model")
    if isinstance(model, str):
        found[c.RESPONSE_MODEL] = model
    found.update(token_counts(getattr(answer, "usage_metadata", None) or told.get("token_usage")))
    return found
