"""The methods of LangChain's models through which each request passes once.

They are given the run they serve, with its parent and what is known of the model; so a call begins
and ends here, whatever handlers are told, and however it ends.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from lightning_otel import capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors.langchain import runs
from lightning_otel.instrumentors.langchain.handler import Handler
from lightning_otel.instrumentors.langchain.models import ModelCall, StreamPlace
from lightning_otel.instrumentors.langchain.places import PlaceOf, current_place

_CHAT: Final = c.CHAT
_COMPLETION: Final = c.TEXT_COMPLETION


def _begin(
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


def chat(original: Any) -> Any:
    """``BaseChatModel._generate_with_cache``."""

    def _generate_with_cache(
        self: Any, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Any:
        call = None
        if run_manager is not None:
            tools = kwargs.get("tools")
            call = capture.guarded(_begin, self, _CHAT, run_manager, messages, tools)
        if call is None:
            return original(self, messages, stop=stop, run_manager=run_manager, **kwargs)
        try:
            with capture.attached(call.context):
                result = original(self, messages, stop=stop, run_manager=run_manager, **kwargs)
        except BaseException as exc:
            capture.guarded(call.fail, exc)
            raise
        finally:
            runs.take(run_manager.run_id)
        capture.guarded(_chat_ended, call, result)
        return result

    return _generate_with_cache


def chat_async(original: Any) -> Any:
    """``BaseChatModel._agenerate_with_cache``."""

    async def _agenerate_with_cache(
        self: Any, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Any:
        call = None
        if run_manager is not None:
            tools = kwargs.get("tools")
            call = capture.guarded(_begin, self, _CHAT, run_manager, messages, tools)
        if call is None:
            return await original(self, messages, stop=stop, run_manager=run_manager, **kwargs)
        try:
            with capture.attached(call.context):
                result = await original(
                    self, messages, stop=stop, run_manager=run_manager, **kwargs
                )
        except BaseException as exc:
            capture.guarded(call.fail, exc)
            raise
        finally:
            runs.take(run_manager.run_id)
        capture.guarded(_chat_ended, call, result)
        return result

    return _agenerate_with_cache


def _chat_ended(call: ModelCall, result: Any) -> None:
    call.stop(result.generations, result.llm_output)


def completion(original: Any) -> Any:
    """``BaseLLM._generate_helper``: one request, whose prompts are each a run of their own."""

    def _generate_helper(
        self: Any, prompts: Any, stop: Any, run_managers: Any, **kwargs: Any
    ) -> Any:
        call = None
        if run_managers:
            call = capture.guarded(_begin, self, _COMPLETION, run_managers[0], prompts, None)
        if call is None:
            return original(self, prompts, stop, run_managers, **kwargs)
        try:
            with capture.attached(call.context):
                result = original(self, prompts, stop, run_managers, **kwargs)
        except BaseException as exc:
            capture.guarded(call.fail, exc)
            raise
        finally:
            runs.take(run_managers[0].run_id)
        capture.guarded(_completion_ended, call, result)
        return result

    return _generate_helper


def completion_async(original: Any) -> Any:
    """``BaseLLM._agenerate_helper``."""

    async def _agenerate_helper(
        self: Any, prompts: Any, stop: Any, run_managers: Any, **kwargs: Any
    ) -> Any:
        call = None
        if run_managers:
            call = capture.guarded(_begin, self, _COMPLETION, run_managers[0], prompts, None)
        if call is None:
            return await original(self, prompts, stop, run_managers, **kwargs)
        try:
            with capture.attached(call.context):
                result = await original(self, prompts, stop, run_managers, **kwargs)
        except BaseException as exc:
            capture.guarded(call.fail, exc)
            raise
        finally:
            runs.take(run_managers[0].run_id)
        capture.guarded(_completion_ended, call, result)
        return result

    return _agenerate_helper


def _completion_ended(call: ModelCall, result: Any) -> None:
    call.stop([item for choices in result.generations for item in choices], result.llm_output)


def stream_place(operation_name: str) -> PlaceOf:
    """What makes the place of a model's stream."""

    def place_of(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StreamPlace:
        return StreamPlace(model, operation_name, kwargs.get("tools"))

    return place_of


class EventsPlace(StreamPlace):
    """Where the events of one answer take place: LangChain adds them up itself.

    That is ``BaseChatModel._iter_v2_events``, which is given the run as its call's methods are.
    """

    __slots__ = ("_answer", "_given", "_manager")

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__(model, _CHAT, kwargs.get("tools"))
        self._manager = kwargs.get("run_manager")
        self._answer = kwargs.get("stream")
        self._given = args[0] if args else kwargs["messages"]

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
