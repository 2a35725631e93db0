"""The callback handler that makes spans of LangChain's runs.

The handler is run inline and attaches nothing that outlives the block around it. Its methods
mirror LangChain's; the class that LangChain gets is made of it once LangChain is there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from opentelemetry.trace import SpanKind

from lightning_otel import capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors.langchain import places, runs
from lightning_otel.instrumentors.langchain.models import ModelCall, StreamPlace, generations_of
from lightning_otel.values import text_of


class Handler:
    """A callback handler; two are equal, so that no manager holds both.

    Attributes:
        run_inline: LangChain calls it in the run's own task, not in a thread.
    """

    is_lightning_otel = True
    run_inline = True
    raise_error = False
    ignore_llm = False
    ignore_retry = True
    ignore_chain = False
    ignore_agent = False
    ignore_retriever = False
    ignore_chat_model = False
    ignore_custom_event = True

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        """Make one.

        Args:
            is_wanted: Whether a run that stands in no known one should become a span.
        """
        self.is_wanted = is_wanted

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handler)

    def __hash__(self) -> int:
        return hash(Handler)

    def __copy__(self) -> "Handler":
        return self

    def __deepcopy__(self, memo: object) -> "Handler":
        return self

    def parent(self, parent_run_id: UUID | None) -> tuple[runs.Run | None, bool]:
        """A run's parent, if it is known, and whether the run should become a span."""
        found = runs.find(parent_run_id)
        return found, found is not None or self.is_wanted()

    def on_chain_start(self, serialized: object, inputs: object, **told: Any) -> None:
        """Start the run of a chain, a graph or a node."""
        capture.guarded(self._start_chain, serialized, **told)

    def _start_chain(
        self,
        serialized: object,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        run_type: str | None = None,
        name: str | None = None,
        **_: Any,
    ) -> None:
        parent, is_wanted = self.parent(parent_run_id)
        if is_wanted:
            name = name or _serialized_name(serialized) or "chain"
            is_outermost = parent_run_id is None
            told = runs.Told(name, run_type, tags or (), metadata or {}, is_outermost)
            runs.add(run_id, runs.start_chain(told, parent))

    def on_chain_end(self, outputs: object, *, run_id: UUID, **_: Any) -> None:
        """End it."""
        run = runs.take(run_id)
        if run is not None:
            capture.guarded(run.stop)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        """End it with what it raised."""
        run = runs.take(run_id)
        if run is not None:
            capture.guarded(run.fail, error)

    def on_tool_start(self, serialized: object, input_str: str, **told: Any) -> None:
        """Start a tool's run; keywords of the tool's caller are among those it is told."""
        capture.guarded(self._start_tool, serialized, input_str, **told)

    def _start_tool(
        self,
        serialized: object,
        input_str: str,
        /,
        *,
        inputs: Mapping[str, Any] | None = None,
        tool_call_id: object = None,
        name: str | None = None,
        **told: Any,
    ) -> None:
        tool = _serialized_name(serialized) or name or "tool"
        attributes: runs.Attributes = {c.OPERATION: c.EXECUTE_TOOL, c.TOOL_NAME: tool}
        place = places.current_place()
        if tool_call_id is None and place is not None and place.run_id is None:
            tool_call_id = place.tool_call_id
        if isinstance(tool_call_id, str):
            attributes[c.TOOL_CALL_ID] = tool_call_id
        given = input_str if inputs is None else inputs
        title = f"{c.EXECUTE_TOOL} {tool}"
        self._start_operation(title, attributes, c.TOOL_ARGUMENTS, given, **told)

    def on_tool_end(self, output: object, *, run_id: UUID, **_: Any) -> None:
        """End it with its result."""
        _end_operation(run_id, c.TOOL_RESULT, output)

    on_tool_error = on_chain_error

    def on_retriever_start(
        self, serialized: object, query: str, *, name: str | None = None, **told: Any
    ) -> None:
        """Start a retriever's run."""
        title = f"{c.RETRIEVAL} {name or _serialized_name(serialized) or 'retriever'}"
        attributes: runs.Attributes = {c.OPERATION: c.RETRIEVAL}
        capture.guarded(self._start_operation, title, attributes, c.RETRIEVAL_QUERY, query, **told)

    def on_retriever_end(self, documents: object, *, run_id: UUID, **_: Any) -> None:
        """End it with what it found."""
        _end_operation(run_id, c.RETRIEVAL_DOCUMENTS, documents)

    on_retriever_error = on_chain_error

    def _start_operation(
        self,
        name: str,
        attributes: runs.Attributes,
        key: str,
        given: object,
        /,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **_: Any,
    ) -> None:
        parent, is_wanted = self.parent(parent_run_id)
        if not is_wanted:
            return
        operation = capture.Operation(
            capture.clean(name), SpanKind.INTERNAL, attributes, parent=runs.context_in(parent)
        )
        run = runs.Run(name, operation.context, operation)
        if parent is not None:
            run.agent, run.integration = parent.agent, parent.integration
        runs.add(run_id, run)
        place = places.current_place()
        if place is not None and place.run_id is None:
            place.take(run_id, run.context)
        _keep_value(operation, key, given)

    # Of models, only streams are told here; other calls are seen where they are made.

    def on_chat_model_start(
        self, serialized: object, messages: Sequence[Sequence[Any]], **told: Any
    ) -> None:
        """Start a chat model's stream."""
        self.on_llm_start(serialized, messages[0], **told)

    def on_llm_start(self, serialized: object, prompts: Sequence[Any], **told: Any) -> None:
        """Start a completion model's stream."""
        place = places.current_place()
        if isinstance(place, StreamPlace) and place.run_id is None:
            capture.guarded(self._start_stream, place, prompts, **told)

    def _start_stream(
        self,
        place: StreamPlace,
        given: Sequence[Any],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        parent, is_wanted = self.parent(parent_run_id)
        if is_wanted:
            place.start(run_id, runs.context_in(parent), given, metadata or {})

    def on_llm_end(self, response: Any, *, run_id: UUID, **_: Any) -> None:
        """End a stream with its whole answer."""
        call = _call_of(run_id)
        if call is not None:
            capture.guarded(call.finish, generations_of(response))

    def on_llm_error(
        self, error: BaseException, *, run_id: UUID, response: Any = None, **_: Any
    ) -> None:
        """End a stream with what ended it, and what was said until then."""
        call = _call_of(run_id)
        if call is not None:
            capture.guarded(call.finish, generations_of(response), exc=error)


def _call_of(run_id: UUID) -> ModelCall | None:
    """The call of a stream that is to end; other calls end where they are made."""
    place = places.current_place()
    if isinstance(place, StreamPlace) and place.run_id == run_id:
        return place.call
    run = runs.find(run_id)
    if run is None or run.call is None:
        return None
    runs.take(run_id)
    call: ModelCall = run.call
    return call


def _serialized_name(serialized: object) -> str | None:
    name = serialized.get("name") if isinstance(serialized, dict) else None
    return name if isinstance(name, str) else None


def _end_operation(run_id: UUID, key: str, value: Any) -> None:
    """End the run of a tool or a retriever with its result."""
    run = runs.take(run_id)
    if run is None or run.operation is None:
        return
    capture.guarded(_keep_value, run.operation, key, value)
    if key == c.TOOL_RESULT and getattr(value, "status", None) == "error":
        # The tool's own words to the model, which may be anyone's: they stay in the body.
        capture.guarded(run.operation.fail_with, "tool_error", "")
    capture.guarded(run.stop)


def _keep_value(operation: capture.Operation, key: str, value: Any) -> None:
    """Keep a value beside the span; of LangChain's own wrappers what they hold."""
    if not capture.content_policy().is_kept:
        return
    if getattr(value, "type", None) == "tool":
        value = value.content
    elif key == c.RETRIEVAL_DOCUMENTS and isinstance(value, list):
        value = [
            {"content": getattr(item, "page_content", None), "id": getattr(item, "id", None)}
            for item in value
        ]
    operation.body[key] = text_of(value)
