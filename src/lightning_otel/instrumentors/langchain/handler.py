"""The callback handler that makes spans of LangChain's runs.

It runs inline; the class that LangChain gets is made once LangChain is imported.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from lightning_otel import capture
from lightning_otel.capture import operations
from lightning_otel.instrumentors.langchain import runs
from lightning_otel.instrumentors.langchain.models import conversation_of, middleware_of
from lightning_otel.types import conventions as c
from lightning_otel.types.values import text_of

_TRIVIAL: Final = re.compile(
    r"Runnable[A-Z]|Channel(Write|Read)<|_write$|__start__$|<lambda>$|(model|tools)_to_(model|tools)$"
)
_WITHOUT_CALLS: Final = frozenset({"prompt", "parser"})
_GRAPHS: Final = {
    "langgraph": c.INVOKE_WORKFLOW,
    "langchain_create_agent": c.INVOKE_AGENT,
    "deepagents": c.INVOKE_AGENT,
}
"""What graphs say of themselves in a run's metadata, and what each is."""
_UNNAMED: Final = "LangGraph"
_FIRST_NODES: Final = frozenset({"agent", "model"})
"""The first node of ``create_react_agent`` and of ``create_agent``."""
_AGENT_NODES: Final = _FIRST_NODES | {
    "tools",
    "pre_model_hook",
    "post_model_hook",
    "generate_structured_response",
}
"""All their nodes, save those of middleware."""
_NODE_TAG: Final = "graph:step:"
_HIDDEN_TAG: Final = "langsmith:hidden"
_NAME_KEYS: Final = {c.INVOKE_AGENT: c.AGENT_NAME, c.INVOKE_WORKFLOW: c.WORKFLOW_NAME}

Attributes = dict[str, AttributeValue]


class Handler:
    """A callback handler; two are equal, so that no manager holds both."""

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
        self.is_wanted = is_wanted

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handler)

    def __hash__(self) -> int:
        return hash(Handler)

    def __copy__(self) -> "Handler":
        return self

    def __deepcopy__(self, memo: object) -> "Handler":
        return self

    def parent(self, parent_run_id: UUID | None) -> tuple[runs.LangChainRun | None, bool]:
        """A run's parent, if it is known, and whether the run should become a span."""
        run = runs.find(parent_run_id)
        return run, run is not None or self.is_wanted()

    def on_chain_start(self, serialized: object, inputs: object, **facts: Any) -> None:
        """Start the run of a chain, a graph or a node."""
        capture.guard_call(self._start_chain, serialized, **facts)

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
        """Start a run; graphs, their nodes, and named or outermost chains get a span."""
        parent, is_wanted = self.parent(parent_run_id)
        if not is_wanted:
            return
        name = title = name or _serialized_name(serialized) or "chain"
        tags, metadata = tags or (), metadata or {}
        is_outermost = parent_run_id is None
        run = runs.LangChainRun(name, runs.context_in(parent))
        run.agent, run.integration = metadata.get("lc_agent_name"), metadata.get("ls_integration")
        attributes: Attributes = {}
        if any(tag.startswith(_NODE_TAG) for tag in tags):
            title = str(metadata.get("langgraph_node") or name)
            attributes[c.OPERATION] = c.EXECUTE_NODE
            # In a graph that is no agent itself it is the nodes that act.
            if parent is not None and _acts_itself(parent, title):
                attributes[c.AGENT_NAME] = title
        elif parent is not None or is_outermost:  # else its metadata may be inherited
            run.graph = _graph_of(run, parent)
        if run.graph is not None:
            if run.graph == c.INVOKE_AGENT:
                title = str(run.agent or name)
            attributes = {c.OPERATION: run.graph, _NAME_KEYS[run.graph]: title}
            title = f"{run.graph} {title}"
        elif (
            run_type in _WITHOUT_CALLS
            or _HIDDEN_TAG in tags
            or (not is_outermost and _TRIVIAL.match(name) is not None)
        ):
            title = ""
        if title:
            run.operation = operations.Operation(
                title,
                SpanKind.INTERNAL,
                {**attributes, **conversation_of(metadata)},
                parent=run.context,
            )
            run.context = run.operation.context
        runs.add(run_id, run)

    def on_chain_end(self, outputs: object, *, run_id: UUID, **_: Any) -> None:
        """End it."""
        runs.end(run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        """End it with what it raised."""
        runs.end(run_id, error)

    on_tool_error = on_retriever_error = on_chain_error

    def on_tool_start(self, serialized: object, input_str: str, **facts: Any) -> None:
        """Start a tool's run; keywords of the tool's caller are among those it is told."""
        capture.guard_call(self._start_tool, serialized, input_str, **facts)

    def _start_tool(
        self,
        serialized: object,
        input_str: str,
        /,
        *,
        inputs: Mapping[str, Any] | None = None,
        tool_call_id: object = None,
        name: str | None = None,
        **facts: Any,
    ) -> None:
        tool = _serialized_name(serialized) or name or "tool"
        attributes: Attributes = {c.OPERATION: c.EXECUTE_TOOL, c.TOOL_NAME: tool}
        place = runs.current_place()
        if tool_call_id is None and place is not None:
            tool_call_id = place.tool_call_id
        if isinstance(tool_call_id, str):
            attributes[c.TOOL_CALL_ID] = tool_call_id
        tool_input = input_str if inputs is None else inputs
        title = f"{c.EXECUTE_TOOL} {tool}"
        self._start_operation(title, attributes, c.TOOL_ARGUMENTS, tool_input, **facts)

    def on_tool_end(self, output: object, *, run_id: UUID, **_: Any) -> None:
        """End it with its result."""
        _end_operation(run_id, c.TOOL_RESULT, output)

    def on_retriever_start(
        self, serialized: object, query: str, *, name: str | None = None, **facts: Any
    ) -> None:
        """Start a retriever's run."""
        title = f"{c.RETRIEVAL} {name or _serialized_name(serialized) or 'retriever'}"
        attributes: Attributes = {c.OPERATION: c.RETRIEVAL}
        capture.guard_call(
            self._start_operation, title, attributes, c.RETRIEVAL_QUERY, query, **facts
        )

    def on_retriever_end(self, documents: object, *, run_id: UUID, **_: Any) -> None:
        """End it with what it found."""
        _end_operation(run_id, c.RETRIEVAL_DOCUMENTS, documents)

    def _start_operation(
        self,
        name: str,
        attributes: Attributes,
        key: str,
        content: object,
        /,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **_: Any,
    ) -> None:
        parent, is_wanted = self.parent(parent_run_id)
        if not is_wanted:
            return
        operation = operations.Operation(
            name,
            SpanKind.INTERNAL,
            attributes,
            parent=runs.context_in(parent),
        )
        run = runs.LangChainRun(name, operation.context, operation)
        if parent is not None:
            run.agent, run.integration = parent.agent, parent.integration
        runs.add(run_id, run)
        place = runs.current_place()
        if place is not None:
            place.take(run_id, run.context)
        _keep_value(operation, key, content)

    # Of models, only streams are told here; other calls are seen where they are made.

    def on_chat_model_start(
        self, serialized: object, messages: Sequence[Sequence[Any]], **facts: Any
    ) -> None:
        """Start a chat model's stream."""
        self.on_llm_start(serialized, messages[0], **facts)

    def on_llm_start(self, serialized: object, prompts: Sequence[Any], **facts: Any) -> None:
        """Start a completion model's stream."""
        place = runs.current_place()
        if place is not None and place.begin_stream is not None:
            capture.guard_call(self._start_stream, place, prompts, **facts)

    def _start_stream(
        self,
        place: runs.RunPlace,
        content: Sequence[Any],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        parent, is_wanted = self.parent(parent_run_id)
        if is_wanted:
            call = place.begin_stream(
                run_id=run_id,
                parent=runs.context_in(parent),
                content=content,
                metadata=metadata or {},
                is_stream=True,
            )
            place.take(run_id, call.context)

    def on_llm_end(self, response: Any, *, run_id: UUID, **_: Any) -> None:
        """End a stream with its whole answer."""
        self.on_llm_error(None, run_id=run_id, response=response)

    def on_llm_error(
        self, error: BaseException | None, *, run_id: UUID, response: Any = None, **_: Any
    ) -> None:
        """End a stream with what ended it, and what was said until then."""
        run = runs.find(run_id)
        if run is not None and run.call is not None:
            capture.guard_call(run.call.end, response, error)


def _graph_of(run: runs.LangChainRun, parent: runs.LangChainRun | None) -> str | None:
    """Return the graph's operation of a run; inherited metadata does not count."""
    if run.agent is not None and (
        parent is None or parent.agent != run.agent or run.name == run.agent
    ):
        return c.INVOKE_AGENT
    if parent is None or parent.integration != run.integration:
        return _GRAPHS.get(run.integration) if isinstance(run.integration, str) else None
    return None


def _acts_itself(run: runs.LangChainRun, node: str) -> bool:
    """Return whether a node of a run acts under its own name, and not as the run's agent.

    A named graph whose first node is that of prebuilt agents or middleware is an agent; only
    LangChain's newest ``create_agent`` says so itself.
    """
    if run.is_first and run.operation is not None and run.graph != c.INVOKE_AGENT:
        is_named = node in _FIRST_NODES and run.name != _UNNAMED
        run.is_guessed = is_named or bool(middleware_of(node))
        graph = c.INVOKE_AGENT if run.is_guessed else c.INVOKE_WORKFLOW
        if graph != run.graph:
            run.graph = graph
            run.operation.rename(f"{graph} {run.name}")
            run.operation.attributes.update({c.OPERATION: graph, _NAME_KEYS[graph]: run.name})
    run.is_first = False
    is_inner = node in _AGENT_NODES or bool(middleware_of(node))
    return run.graph != c.INVOKE_AGENT or (run.is_guessed and not is_inner)


def _serialized_name(serialized: object) -> str | None:
    name = serialized.get("name") if isinstance(serialized, dict) else None
    return name if isinstance(name, str) else None


def _end_operation(run_id: UUID, key: str, value: Any) -> None:
    run = runs.find(run_id)
    if run is not None and run.operation is not None:
        capture.guard_call(_keep_value, run.operation, key, value)
        if key == c.TOOL_RESULT and getattr(value, "status", None) == "error":
            # The tool's own words to the model, which may be anyone's: they stay in the body.
            capture.guard_call(run.operation.fail_with, "tool_error", "")
    runs.end(run_id)


def _keep_value(operation: operations.Operation, key: str, value: Any) -> None:
    if not capture.process.content.is_kept:
        return
    if getattr(value, "type", None) == "tool":
        value = value.content
    elif key == c.RETRIEVAL_DOCUMENTS and isinstance(value, list):
        value = [
            {"content": getattr(item, "page_content", None), "id": getattr(item, "id", None)}
            for item in value
        ]
    operation.body[key] = text_of(value)
