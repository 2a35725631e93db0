"""Calls of LangChain's models, of the methods through which each request passes once.

These are given the run they serve, with its parent and what is known of the model; so a call begins
and ends here, whatever handlers are told. Where a client's instrumentor takes the call, it says all
there is to say; else the call is filled with what LangChain's own objects tell.
"""

import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final
from uuid import UUID

from opentelemetry.context import Context
from opentelemetry.util.types import AttributeValue

from lightning_otel import capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors import steps
from lightning_otel.instrumentors.doors import Begin, named
from lightning_otel.instrumentors.langchain import messages as read
from lightning_otel.instrumentors.langchain import runs
from lightning_otel.instrumentors.reading import read_settings, token_counts

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


class ModelCall(steps.ModelCall):
    """One call of a model, which is also the run of the method that asks it."""

    def __init__(
        self,
        model: Any,
        operation: str,
        tools: object,
        *,
        run_id: UUID,
        parent: Context,
        given: Sequence[Any],
        metadata: Mapping[str, Any],
        is_stream: bool = False,
    ) -> None:
        """Start the span.

        Args:
            model: LangChain's model.
            operation: The operation that is asked of it.
            tools: The tools it was given.
            run_id: LangChain's run.
            parent: The context the call stands in.
            given: Its messages, or texts. They are read at the end, and only if nobody else has:
                to write a long history twice would cost more than all the rest.
            metadata: LangChain's facts of the model.
            is_stream: Whether the answer comes in pieces, and its end is told by the run.
        """
        name, provider = metadata.get("ls_model_name"), metadata.get("ls_provider")
        attributes = conversation_of(metadata)
        if isinstance(provider, str):
            attributes[c.PROVIDER] = _PROVIDERS.get(provider, provider)
        if isinstance(name, str):
            attributes[c.REQUEST_MODEL] = name
        title = name if isinstance(name, str) else type(model).__name__
        super().__init__(operation, title, attributes, parent)
        self._run_id = run_id
        self._given = given
        self._metadata = metadata
        self._tools = tools
        run = runs.Run("", self.context)
        run.agent, run.integration = metadata.get("lc_agent_name"), metadata.get("ls_integration")
        if is_stream:
            self.operation.attributes[c.REQUEST_STREAM] = True
            run.call = self
        runs.add(run_id, run)

    def end(self, answer: Any, exc: BaseException | None = None) -> None:
        """End it with LangChain's result, if it has one; to be interrupted is no error."""
        runs.take(self._run_id)
        if exc is not None and not isinstance(exc, GeneratorExit) and runs.is_control_flow(exc):
            exc = None
        super().end(answer, exc)

    def fill(self, answer: Any) -> None:
        """Put on the span what LangChain knows; of several prompts, the answers to all."""
        choices = getattr(answer, "generations", None) or []
        if choices and isinstance(choices[0], list):
            choices = [choice for each in choices for choice in each]
        attributes, body = self.operation.attributes, self.operation.body
        known = self._metadata.items()
        settings = {key[3:]: value for key, value in known if key.startswith("ls_")}
        attributes.update(read_settings(settings))
        attributes.update(_read_answer(choices, getattr(answer, "llm_output", None)))
        if capture.content_policy().is_kept:
            body[c.INPUT_MESSAGES] = read.messages_text(self._given)
            if choices:
                body[c.OUTPUT_MESSAGES] = read.answers_text(choices)
            tools = read.tools_text(self._tools)
            if tools is not None:
                body[c.TOOL_DEFINITIONS] = tools


def conversation_of(metadata: Mapping[str, Any]) -> dict[str, AttributeValue]:
    """The thread's id as the conversation's; one of the program's own class is not asked."""
    thread_id = metadata.get("thread_id")
    if thread_id is None:
        return {}
    is_plain = type(thread_id) in (str, int, UUID)
    return {c.CONVERSATION_ID: str(thread_id) if is_plain else f"<{type(thread_id).__name__}>"}


def _read_answer(choices: Sequence[Any], model_output: object) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {}
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


def begin_stream(operation: str) -> Begin:
    """Return what begins the place of a model's stream."""

    def begin(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> runs.Place:
        place = runs.Place()
        place.begin_stream = functools.partial(ModelCall, args[0], operation, kwargs.get("tools"))
        return place

    return begin


class _EventsPlace(runs.Place):
    """The place of one answer's events, which LangChain adds up itself."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self._answer = answer

    def over(self, exc: BaseException | None = None) -> None:
        """End the call with the whole answer, if it is whole."""
        message, run = getattr(self._answer, "output_message", None), runs.find(self.run_id)
        if message is not None and run is not None and run.call is not None:
            run.call.end(SimpleNamespace(generations=[SimpleNamespace(message=message)]))
        super().over(exc)


def begin_events(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> runs.Place | None:
    """Begin the place of ``BaseChatModel._iter_v2_events``, and its call."""
    given = named(("messages",), args, kwargs)["messages"]
    call = _begin_call(args[0], c.CHAT, kwargs.get("run_manager"), given, kwargs, is_stream=True)
    if call is None:
        return None
    place = _EventsPlace(kwargs.get("stream"))
    place.take(kwargs["run_manager"].run_id, call.context)
    return place


def begin_chat(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelCall | None:
    """Begin the call of ``BaseChatModel._generate_with_cache``."""
    given = named(("messages", "stop", "run_manager"), args, kwargs)
    return _begin_call(args[0], c.CHAT, given.get("run_manager"), given["messages"], kwargs)


def begin_completion(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelCall | None:
    """Begin that of ``BaseLLM._generate_helper``: one request, each of its prompts a run."""
    given = named(("prompts", "stop", "run_managers"), args, kwargs)
    managers = given.get("run_managers") or [None]
    return _begin_call(args[0], c.TEXT_COMPLETION, managers[0], given["prompts"], {})


def _begin_call(
    model: Any,
    operation: str,
    manager: Any,
    given: Sequence[Any],
    options: Mapping[str, Any],
    *,
    is_stream: bool = False,
) -> ModelCall | None:
    """Begin the call of a run that is ours to record, and that nothing around it records."""
    if manager is None:
        return None
    known = runs.find(manager.run_id)
    if known is not None:
        if known.call is not None:
            # A model that has no stream: LangChain asks it once, and gives the answer as one piece.
            known.call.operation.attributes.pop(c.REQUEST_STREAM, None)
        return None
    # Most often the first handler, and the only one.
    ours = (each for each in manager.handlers if getattr(each, "is_lightning_otel", 0) is True)
    handler = next(ours, None)
    if handler is None:
        return None
    parent, is_wanted = handler.parent(manager.parent_run_id)
    if not is_wanted:
        return None
    return ModelCall(
        model,
        operation,
        options.get("tools"),
        run_id=manager.run_id,
        parent=runs.context_in(parent),
        given=given,
        metadata=manager.metadata,
        is_stream=is_stream,
    )
