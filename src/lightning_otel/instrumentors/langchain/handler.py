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
from lightning_otel.instrumentors.langchain.models import StreamPlace, generations_of
from lightning_otel.messages.values import text_of


class Handler:
    """A callback handler; two are equal, so that no manager holds both.

    Attributes:
        run_inline: LangChain calls it in the run's own task, not in a thread.
    """

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

    # --- chains, graphs, nodes -------------------------------------------------------------------

    def on_chain_start(
        self,
        serialized: Mapping[str, Any] | None,
        inputs: object,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        run_type: str | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Start a chain's run."""
        told = runs.Told(
            name or _serialized_name(serialized) or "chain",
            run_type,
            tags or (),
            metadata or {},
            parent_run_id is None,
        )
        capture.guarded(self._start_chain, told, run_id, parent_run_id)

    def _start_chain(self, told: runs.Told, run_id: UUID, parent_run_id: UUID | None) -> None:
        parent, is_wanted = self.parent(parent_run_id)
        if is_wanted:
            runs.add(run_id, runs.start_chain(told, parent))

    def on_chain_end(self, outputs: object, *, run_id: UUID, **kwargs: Any) -> None:
        """End it."""
        run = runs.take(run_id)
        if run is not None:
            capture.guarded(run.stop)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """End it with what it raised."""
        run = runs.take(run_id)
        if run is not None:
            capture.guarded(run.fail, error)

    # --- tools -----------------------------------------------------------------------------------

    def on_tool_start(
        self,
        serialized: Mapping[str, Any] | None,
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Any] | None = None,
        tool_call_id: object = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Start a tool's run."""
        tool = _serialized_name(serialized) or name or "tool"
        attributes: runs.Attributes = {c.OPERATION: c.EXECUTE_TOOL, c.TOOL_NAME: tool}
        place = places.current_place()
        call_id = tool_call_id
        if call_id is None and place is not None and place.run_id is None:
            call_id = place.tool_call_id
        if isinstance(call_id, str):
            attributes[c.TOOL_CALL_ID] = call_id
        content = {c.TOOL_ARGUMENTS: input_str if inputs is None else inputs}
        capture.guarded(
            self._start_operation,
            f"{c.EXECUTE_TOOL} {tool}",
            attributes,
            content,
            run_id,
            parent_run_id,
        )

    def on_tool_end(self, output: object, *, run_id: UUID, **kwargs: Any) -> None:
        """End it with its result."""
        run = runs.take(run_id)
        if run is not None and run.operation is not None:
            capture.guarded(_keep_value, run.operation, c.TOOL_RESULT, output)
            if getattr(output, "status", None) == "error":
                # The tool's own words to the model, which may be anyone's: they stay in the body.
                capture.guarded(run.operation.fail_with, "tool_error", "")
            capture.guarded(run.stop)

    on_tool_error = on_chain_error

    # --- retrievers ------------------------------------------------------------------------------

    def on_retriever_start(
        self,
        serialized: Mapping[str, Any] | None,
        query: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Start a retriever's run."""
        attributes: runs.Attributes = {c.OPERATION: c.RETRIEVAL}
        retriever = name or _serialized_name(serialized) or "retriever"
        content = {c.RETRIEVAL_QUERY: query}
        capture.guarded(
            self._start_operation,
            f"{c.RETRIEVAL} {retriever}",
            attributes,
            content,
            run_id,
            parent_run_id,
        )

    def on_retriever_end(self, documents: object, *, run_id: UUID, **kwargs: Any) -> None:
        """End it with what it found."""
        run = runs.take(run_id)
        if run is not None and run.operation is not None:
            capture.guarded(_keep_value, run.operation, c.RETRIEVAL_DOCUMENTS, documents)
            capture.guarded(run.stop)

    on_retriever_error = on_chain_error

    def _start_operation(
        self,
        name: str,
        attributes: runs.Attributes,
        content: Mapping[str, object],
        run_id: UUID,
        parent_run_id: UUID | None,
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
        for key, value in content.items():
            capture.guarded(_keep_value, operation, key, value)

    # --- models, of which only streams are told here ---------------------------------------------

    def on_chat_model_start(
        self, serialized: object, messages: Sequence[Sequence[Any]], **kwargs: Any
    ) -> None:
        """Start a chat model's stream; other calls are seen where they are made."""
        self.on_llm_start(serialized, messages[0], **kwargs)

    def on_llm_start(
        self,
        serialized: object,
        prompts: Sequence[Any],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Start a completion model's stream."""
        place = places.current_place()
        if isinstance(place, StreamPlace) and place.run_id is None:
            capture.guarded(
                self._start_stream, place, prompts, run_id, parent_run_id, metadata or {}
            )

    def _start_stream(
        self,
        place: StreamPlace,
        given: Sequence[Any],
        run_id: UUID,
        parent_run_id: UUID | None,
        metadata: Mapping[str, Any],
    ) -> None:
        parent, is_wanted = self.parent(parent_run_id)
        if is_wanted:
            place.start(run_id, runs.context_in(parent), given, metadata)

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """End a stream with its whole answer."""
        call = _call_of(run_id)
        if call is not None:
            capture.guarded(call.stop, generations_of(response))

    def on_llm_error(
        self, error: BaseException, *, run_id: UUID, response: Any = None, **kwargs: Any
    ) -> None:
        """End a stream with what ended it, and what was said until then."""
        call = _call_of(run_id)
        if call is not None:
            capture.guarded(call.fail, error, generations_of(response))


def _call_of(run_id: UUID) -> runs.Call | None:
    """The call of a stream that is to end; other calls end where they are made."""
    place = places.current_place()
    if isinstance(place, StreamPlace) and place.run_id == run_id:
        return place.call
    run = runs.find(run_id)
    if run is None or run.call is None:
        return None
    runs.take(run_id)
    return run.call


def _serialized_name(serialized: Mapping[str, Any] | None) -> str | None:
    name = serialized.get("name") if isinstance(serialized, dict) else None
    return name if isinstance(name, str) else None


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
