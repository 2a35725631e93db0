"""The methods of LangChain's models through which each request passes once.

They are given the run they serve, with its parent and what is known of the model; so a call begins
and ends here, whatever handlers are told, and however it ends.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

from lightning_otel import capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors.doors import Begin, Run, named
from lightning_otel.instrumentors.langchain import runs
from lightning_otel.instrumentors.langchain.handler import Handler
from lightning_otel.instrumentors.langchain.models import ModelCall, StreamPlace
from lightning_otel.instrumentors.langchain.places import current_place

_CHAT: Final = c.CHAT
_COMPLETION: Final = c.TEXT_COMPLETION


def _begin_call(
    model: Any, operation_name: str, manager: Any, given: Sequence[Any], tools: object
) -> ModelCall | None:
    """The call of a run that is ours to record, and that nothing around it records already."""
    handler = _handler_of(manager)
    place = current_place()
    run_id = manager.run_id
    if isinstance(place, StreamPlace) and place.run_id == run_id:
        # A model that has no stream: LangChain asks it once, and gives the answer as one piece.
        place.is_whole()
        return None
    if handler is None:
        return None
    if runs.find(run_id) is not None:
        return None
    parent, is_wanted = handler.parent(manager.parent_run_id)
    if not is_wanted:
        return None
    parent_context = runs.context_in(parent)
    call = ModelCall(model, operation_name, parent_context, given, manager.metadata, tools)
    runs.add(run_id, runs.Run("", call.context, None))
    return call


def _handler_of(manager: Any) -> Handler | None:
    """Our handler among a manager's: most often its first and only one."""
    for handler in manager.handlers:
        if isinstance(handler, Handler):
            return handler
    return None


class _Request(Run):
    """A call's method under way, of the run that it serves."""

    def __init__(
        self, call: ModelCall, run_id: UUID, choices_of: Callable[[Any], list[Any]]
    ) -> None:
        self.context = call.context
        self._call = call
        self._run_id = run_id
        self._choices_of = choices_of

    def returned(self, result: Any) -> None:
        """End the call with its answer."""
        runs.take(self._run_id)
        self._call.stop(self._choices_of(result), result.llm_output)

    def fail(self, exc: BaseException) -> None:
        """End the call with what was raised."""
        runs.take(self._run_id)
        self._call.fail(exc)


def begin_chat(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Request | None:
    """Begin the call of ``BaseChatModel._generate_with_cache``."""
    given = named(("messages", "stop", "run_manager"), args, kwargs)
    manager = given.get("run_manager")
    if manager is None:
        return None
    call = _begin_call(args[0], _CHAT, manager, given["messages"], kwargs.get("tools"))
    return None if call is None else _Request(call, manager.run_id, lambda found: found.generations)


def begin_completion(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Request | None:
    """Begin that of ``BaseLLM._generate_helper``: one request, each of its prompts a run."""
    given = named(("prompts", "stop", "run_managers"), args, kwargs)
    if not given.get("run_managers"):
        return None
    manager = given["run_managers"][0]
    call = _begin_call(args[0], _COMPLETION, manager, given["prompts"], None)
    return None if call is None else _Request(call, manager.run_id, _flatten_result)


def _flatten_result(result: Any) -> list[Any]:
    return [item for choices in result.generations for item in choices]


def begin_stream(operation_name: str) -> Begin:
    """Return what begins the place of a model's stream."""

    def begin(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StreamPlace:
        return StreamPlace(args[0], operation_name, kwargs.get("tools"))

    return begin


class EventsPlace(StreamPlace):
    """The place of one answer's events, which LangChain adds up itself.

    That is ``BaseChatModel._iter_v2_events``, which is given the run as its call's methods are.
    """

    __slots__ = ("_answer", "_given", "_manager")

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__(args[0], _CHAT, kwargs.get("tools"))
        self._manager = kwargs.get("run_manager")
        self._answer = kwargs.get("stream")
        self._given = named(("messages",), args, kwargs)["messages"]

    def __enter__(self) -> None:
        super().__enter__()
        if self._manager is not None:
            manager, self._manager = self._manager, None
            capture.guarded(self._begin, manager)

    def _begin(self, manager: Any) -> None:
        handler = _handler_of(manager)
        if handler is None or runs.find(manager.run_id) is not None:
            return
        parent, is_wanted = handler.parent(manager.parent_run_id)
        if is_wanted:
            context = runs.context_in(parent)
            self.start(manager.run_id, context, self._given, manager.metadata)
            # Its end may be told where its last step is not taken, and the place never left.
            runs.add(manager.run_id, runs.Run("", context, None, call=self.call))

    def over(self, exc: BaseException | None = None) -> None:
        """End the call with the whole answer, if it is whole."""
        runs.take(self.run_id)
        message = getattr(self._answer, "output_message", None)
        if message is not None and self.call is not None:
            self.call.stop([_Choice(message)])
        super().over(exc)


class _Choice(NamedTuple):
    """An answer as LangChain's other methods give it."""

    message: Any
