"""LangChain's open runs: which span each has, if any, and the context of what happens within it.

Parentage comes from LangChain's run ids alone; the context at hand only decides whether a span of
the program's own stands between two runs.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from lightning_otel import capture
from lightning_otel import conventions as c

OPEN_LIMIT: Final = 10_000
"""Open runs that are kept. A run may never be told to end, as where a handler of the program's
raises when it starts; the oldest is then given up."""

_TRIVIAL: Final = re.compile(
    r"Runnable[A-Z]|Channel(Write|Read)<|_write$|__start__$|<lambda>$|(model|tools)_to_(model|tools)$"
)
_WITHOUT_CALLS: Final = frozenset({"prompt", "parser"})
_GRAPHS: Final = {
    "langgraph": c.INVOKE_WORKFLOW,
    "langchain_create_agent": c.INVOKE_AGENT,
}
"""What LangGraph and ``create_agent`` say of themselves in a run's metadata, and what each is."""
_UNNAMED: Final = "LangGraph"
"""What a graph is called that was given no name."""
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
_NO_METADATA: Final[Mapping[str, Any]] = {}

Attributes = dict[str, AttributeValue]


class Run:
    """One open run of LangChain's.

    Attributes:
        name: What LangChain calls it.
        context: The context of what happens within it.
        operation: Its own span; None if it has none, and what happens in it is its parent's.
        graph: The operation it is as a graph, such as ``invoke_agent``; None if it is no graph.
        agent: The agent's name that LangChain gives to everything within this run.
        integration: What made the run, as LangChain's metadata say.
        call: The call of a model whose end LangChain tells by its run only.
    """

    __slots__ = (
        "_is_first",
        "_is_guessed",
        "agent",
        "call",
        "context",
        "graph",
        "integration",
        "name",
        "operation",
    )

    def __init__(
        self,
        name: str,
        context: Context,
        operation: capture.Operation | None,
        metadata: Mapping[str, Any] = _NO_METADATA,
        graph: str | None = None,
        call: Any = None,
    ) -> None:
        self.name = name
        self.call = call
        self._is_first = True
        self._is_guessed = False
        self.context = context
        self.operation = operation
        self.graph = graph
        self.agent = metadata.get("lc_agent_name")
        self.integration = metadata.get("ls_integration")

    def acts_as(self, node: str) -> str | None:
        """The agent's name that a node of this run's acts under; None if it is the run's own.

        The first node makes a run a graph, whatever it seemed to be until then. A graph that has a
        name, and of whose nodes the first is the one that prebuilt agents begin with, is an agent:
        only LangChain's newest ``create_agent`` says so itself.
        """
        if self._is_first and self.operation is not None and self.graph != c.INVOKE_AGENT:
            is_agent = node in _FIRST_NODES and self.name != _UNNAMED
            graph = c.INVOKE_AGENT if is_agent else c.INVOKE_WORKFLOW
            self._is_guessed = is_agent
            if graph != self.graph:
                self.graph = graph
                self.operation.span.update_name(capture.clean(f"{graph} {self.name}"))
                self.operation.attributes.update(_graph_attributes(graph, self.name))
        self._is_first = False
        if self.graph == c.INVOKE_AGENT and not (self._is_guessed and node not in _AGENT_NODES):
            return None
        return node

    def stop(self) -> None:
        """End its span, if it has one."""
        if self.operation is not None:
            self.operation.stop()

    def fail(self, exc: BaseException) -> None:
        """End its span with what ended the run."""
        if self.operation is None:
            return
        if is_control_flow(exc):
            self.operation.stop()
        else:
            self.operation.fail(exc)


_open: dict[UUID, Run] = {}


def find(run_id: Any) -> Run | None:
    """The open run of an id, if it is known."""
    return _open.get(run_id) if run_id is not None else None


def add(run_id: UUID, run: Run) -> None:
    """Keep a run until it is taken."""
    _open[run_id] = run
    if len(_open) > OPEN_LIMIT:
        given_up = take(next(iter(_open)))
        if given_up is not None:
            given_up.stop()


def take(run_id: Any) -> Run | None:
    """The open run of an id, which is open no more."""
    return _open.pop(run_id, None)


def open_count() -> int:
    """Count the open runs."""
    return len(_open)


def context_in(parent: Run | None) -> Context:
    """The context of a new run: its parent's, or a span's that the program opened within that."""
    if parent is None:
        return capture.parent_context()
    current = otel_context.get_current()
    if current is parent.context:
        return current
    owner = capture.operation_of(parent.context)
    return current if owner is None or owner.encloses(current) else parent.context


def is_control_flow(exc: BaseException) -> bool:
    """Return whether a run was left or interrupted on purpose, which is no error."""
    return isinstance(exc, GeneratorExit) or any(
        cls.__name__ == "GraphBubbleUp" for cls in type(exc).__mro__
    )


class Told(NamedTuple):
    """The data of a chain that starts."""

    name: str
    run_type: str | None
    tags: Sequence[str]
    metadata: Mapping[str, Any]
    is_outermost: bool
    """Whether it has no parent at all, known to us or not."""


def start_chain(told: Told, parent: Run | None) -> Run:
    """Start the run of a chain, graph or node, with a span if it is worth one.

    Worth one are graphs, their nodes, and chains that are named or that stand in no other; the
    steps that LangChain makes of an expression are not.
    """
    context = context_in(parent)
    graph = None
    attributes: Attributes = {}
    name = told.name
    if _is_node(told.tags):
        name = str(told.metadata.get("langgraph_node") or name)
        # In a graph that is no agent itself it is the nodes that act.
        acting = None if parent is None else parent.acts_as(name)
        if acting is not None:
            attributes[c.AGENT_NAME] = acting
    else:
        graph = _graph_of(told, parent)
        if graph == c.INVOKE_AGENT:
            name = str(told.metadata.get("lc_agent_name") or name)
        if graph is not None:
            attributes = _graph_attributes(graph, name)
            name = f"{graph} {name}"
    if graph is None and _is_trivial(told):
        return Run(told.name, context, None, told.metadata)
    if "thread_id" in told.metadata:
        attributes.update(conversation_of(told.metadata))
    operation = capture.Operation(
        capture.clean(name), SpanKind.INTERNAL, attributes, parent=context
    )
    return Run(told.name, operation.context, operation, told.metadata, graph)


def _is_node(tags: Sequence[str]) -> bool:
    return bool(tags) and any(tag.startswith(_NODE_TAG) for tag in tags)


def conversation_of(metadata: Mapping[str, Any]) -> Attributes:
    """The thread's id as the conversation's."""
    thread_id = metadata.get("thread_id")
    return {} if thread_id is None else {c.CONVERSATION_ID: _plain_id(thread_id)}


def _plain_id(thread_id: object) -> str:
    # An id of the program's own class is not asked what it says.
    known = (str, int, UUID)
    return str(thread_id) if type(thread_id) in known else f"<{type(thread_id).__name__}>"


def _graph_of(told: Told, parent: Run | None) -> str | None:
    """Return the graph's operation of a run; inherited metadata does not count."""
    if parent is None and not told.is_outermost:
        return None
    agent = told.metadata.get("lc_agent_name")
    if agent is not None and (parent is None or parent.agent != agent or told.name == agent):
        return c.INVOKE_AGENT
    integration = told.metadata.get("ls_integration")
    if isinstance(integration, str) and (parent is None or parent.integration != integration):
        return _GRAPHS.get(integration)
    return None


def _graph_attributes(graph: str, name: str) -> Attributes:
    return {c.OPERATION: graph, _NAME_KEYS[graph]: name}


def _is_trivial(told: Told) -> bool:
    if told.run_type in _WITHOUT_CALLS or _HIDDEN_TAG in told.tags:
        return True
    return not told.is_outermost and _TRIVIAL.match(told.name) is not None
