"""Calls of LangChain's models, of the methods through which each request passes once.

These are given the run they serve, with its parent and what is known of the model; so a call begins
and ends here, whatever handlers are told. Where a client's instrumentor takes the call, it says all
there is to say; else the call is filled with what LangChain's own objects tell.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final
from uuid import UUID

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from lightning_otel import call_slot, capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors.doors import Begin, Run, named
from lightning_otel.instrumentors.langchain import messages as read
from lightning_otel.instrumentors.langchain import runs
from lightning_otel.instrumentors.langchain.places import Place, current_place
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


class ModelCall(Run):
    """One call of a model, which is also the run of the method that asks it.

    Attributes:
        operation: Its span.
        context: Where the request is to be sent: in it, the call can be claimed.
        run_id: LangChain's run that it serves.
    """

    __slots__ = ("_given", "_metadata", "_tools", "context", "operation", "run_id")

    def __init__(
        self,
        model: Any,
        operation_name: str,
        run_id: UUID,
        parent: Context,
        given: Sequence[Any],
        metadata: Mapping[str, Any],
        tools: object = None,
    ) -> None:
        """Start the span.

        Args:
            model: LangChain's model.
            operation_name: What is asked of it.
            run_id: LangChain's run.
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
        self.context = call_slot.offer_call(self.operation, self.operation.context)
        self.run_id = run_id
        self._given = given
        self._metadata = metadata
        self._tools = tools

    def returned(self, result: Any) -> None:
        """End it with the answer; of several prompts, with the answers to all."""
        runs.take(self.run_id)
        found = result.generations
        if found and isinstance(found[0], list):
            found = [item for choices in found for item in choices]
        self.finish(found, result.llm_output)

    def fail(self, exc: BaseException) -> None:
        """End it with what was raised."""
        runs.take(self.run_id)
        self.finish((), exc=exc)

    def finish(
        self,
        generations: Iterable[Any],
        model_output: object = None,
        exc: BaseException | None = None,
    ) -> None:
        """End the span with what was said, unless the client that sends the request ends it."""
        operation = self.operation
        if operation.is_claimed or operation.is_over:
            return
        capture.guarded(self._fill_answer, generations, model_output)
        if exc is not None and not runs.is_control_flow(exc):
            operation.fail(exc)
            return
        if isinstance(exc, GeneratorExit):
            operation.attributes[c.ABANDONED] = True
        operation.stop()

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
        asked = self._model, self._operation_name
        self.call = call = ModelCall(*asked, run_id, parent, given, metadata, self._tools)
        call.operation.attributes[c.REQUEST_STREAM] = True
        self.take(run_id, call.context)

    def over(self, exc: BaseException | None = None) -> None:
        """End it if LangChain has not said that it ended."""
        if self.call is not None:
            self.call.finish((), exc=exc or GeneratorExit())


class EventsPlace(StreamPlace):
    """The place of one answer's events, which LangChain adds up itself.

    That is ``BaseChatModel._iter_v2_events``, which is given the run as its call's methods are.
    """

    __slots__ = ("_answer", "_given", "_manager")

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__(args[0], c.CHAT, kwargs.get("tools"))
        self._manager = kwargs.get("run_manager")
        self._answer = kwargs.get("stream")
        self._given = named(("messages",), args, kwargs)["messages"]

    def __enter__(self) -> None:
        super().__enter__()
        if self._manager is not None:
            manager, self._manager = self._manager, None
            capture.guarded(self._begin, manager)

    def _begin(self, manager: Any) -> None:
        parent = _parent_context(manager)
        if parent is not None:
            self.start(manager.run_id, parent, self._given, manager.metadata)
            # Its end may be told where its last step is not taken, and the place never left.
            runs.add(manager.run_id, runs.Run("", parent, None, call=self.call))

    def over(self, exc: BaseException | None = None) -> None:
        """End the call with the whole answer, if it is whole."""
        runs.take(self.run_id)
        message = getattr(self._answer, "output_message", None)
        if message is not None and self.call is not None:
            self.call.finish([SimpleNamespace(message=message)])
        super().over(exc)


def _parent_context(manager: Any) -> Context | None:
    """The context of a new run that is ours to record; None if it is known or not wanted."""
    # Most often its first and only one.
    ours = (each for each in manager.handlers if getattr(each, "is_lightning_otel", 0) is True)
    handler = next(ours, None)
    if handler is None or runs.find(manager.run_id) is not None:
        return None
    parent, is_wanted = handler.parent(manager.parent_run_id)
    return runs.context_in(parent) if is_wanted else None


def _begin_call(
    model: Any, operation_name: str, manager: Any, given: Sequence[Any], tools: object
) -> ModelCall | None:
    """The call of a run that is ours to record, and that nothing around it records already."""
    place = current_place()
    if isinstance(place, StreamPlace) and place.run_id == manager.run_id:
        # A model that has no stream: LangChain asks it once, and gives the answer as one piece.
        if place.call is not None:
            place.call.operation.attributes.pop(c.REQUEST_STREAM, None)
        return None
    parent = _parent_context(manager)
    if parent is None:
        return None
    asked = model, operation_name, manager.run_id, parent
    call = ModelCall(*asked, given, manager.metadata, tools)
    runs.add(manager.run_id, runs.Run("", call.context, None))
    return call


def begin_chat(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelCall | None:
    """Begin the call of ``BaseChatModel._generate_with_cache``."""
    given = named(("messages", "stop", "run_manager"), args, kwargs)
    manager = given.get("run_manager")
    if manager is None:
        return None
    return _begin_call(args[0], c.CHAT, manager, given["messages"], kwargs.get("tools"))


def begin_completion(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelCall | None:
    """Begin that of ``BaseLLM._generate_helper``: one request, each of its prompts a run."""
    given = named(("prompts", "stop", "run_managers"), args, kwargs)
    managers = given.get("run_managers")
    if not managers:
        return None
    return _begin_call(args[0], c.TEXT_COMPLETION, managers[0], given["prompts"], None)


def begin_stream(operation_name: str) -> Begin:
    """Return what begins the place of a model's stream."""

    def begin(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StreamPlace:
        return StreamPlace(args[0], operation_name, kwargs.get("tools"))

    return begin


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
