"""The SDK's open spans and traces; spans that add nothing, such as turns, are passed over."""

import functools
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

from opentelemetry import context as otel_context
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from lightning_otel import capture
from lightning_otel.capture import operations
from lightning_otel.instrumentors.openai_agents import model
from lightning_otel.instrumentors.steps import ModelCall
from lightning_otel.types import conventions as c
from lightning_otel.types.values import text_of

SESSION_KEY: Final = otel_context.create_key("lightning-otel-agents-session")

_MODEL_KINDS: Final = ("generation", "response")
_ENCLOSING: Final = ("agent", "function", "guardrail", "handoff")
"""Spans of functions that await all they do: what runs in them can have their context, too."""
_MASK: Final = "Agent run"
"""Under this name the SDK hides the spans around a run whose tracing is disabled."""
_NO_ID: Final = "no-op"

Attributes = dict[str, AttributeValue]


class Node:
    """A span or trace of the SDK that is under way.

    Attributes:
        operation: None if it is passed over, and once it is over.
        deferred: Begins the operation once something stands in it.
        error: An error the SDK noted on a span that keeps none.
        attached: Its context, current until its end if that comes where its start came.
    """

    def __init__(self, parent: "Node | None", group_id: object = None, kind: str = "") -> None:
        session_id = otel_context.get_value(SESSION_KEY)
        owner = next((text for text in (group_id, session_id) if isinstance(text, str)), None)
        self.parent = parent
        self.kind = kind
        self.conversation = owner
        self.operation: operations.Operation | None = None
        self.deferred: Callable[[], operations.Operation] | None = None
        self.error: object = None
        self.attached: capture.attach_context | None = None
        # What is being handled where a run begins is not what the run fails with.
        self._handled = sys.exception()

    def attach(self, context: otel_context.Context) -> None:
        """Make a context current until its end."""
        self.attached = capture.attach_context(context)
        self.attached.__enter__()

    def failure(self) -> BaseException | None:
        """The exception that is on its way through the span."""
        exc = sys.exception()
        return None if exc is self._handled or isinstance(exc, GeneratorExit) else exc

    def enclosing(self) -> operations.Operation | None:
        """The operation it stands for, or of the nearest one around it that stands for one."""
        node: Node | None = self
        while node is not None:
            if node.deferred is not None:
                begin, node.deferred = node.deferred, None
                node.operation = begin()
            # A call is not what the next request of the same model stands in.
            if node.operation is not None and node.kind not in _MODEL_KINDS:
                return node.operation
            node = node.parent
        return None


class SdkSpans:
    """The SDK's open spans and traces; ``scope`` is its own ``Scope``."""

    def __init__(self) -> None:
        self.scope: Any = None
        self._nodes: WeakKeyDictionary[Any, Node] = WeakKeyDictionary()
        self._by_id: WeakValueDictionary[str, Node] = WeakValueDictionary()
        self._names: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()

    def innermost(self) -> operations.Operation | None:
        """The operation of the innermost span under way; a model's call is known to the context."""
        node = self._current_node()
        return node.enclosing() if node is not None else None

    def conversation(self) -> str | None:
        """The conversation of what is under way."""
        node = self._current_node()
        return node.conversation if node is not None else None

    def _current_node(self) -> Node | None:
        if self.scope is None:
            return None
        for current in (self.scope.get_current_span(), self.scope.get_current_trace()):
            node = self._nodes.get(current) if current is not None else None
            if node is not None:
                return node
        return None

    def start(self, span: Any, *, is_current: bool) -> None:
        """Begin what a span stands for, in what the SDK says it stands in."""
        data, has_id = span.span_data, span.span_id != _NO_ID
        is_mask = not has_id and getattr(data, "name", None) == _MASK
        if span in self._nodes or is_mask:
            return
        current = self._current_node()
        parent = self._by_id.get(span.parent_id or span.trace_id) if has_id else None
        parent = parent or current
        node = Node(parent, kind=data.type)
        if parent is not None:
            node.conversation = parent.conversation
        context = None
        if parent is not None and parent is not current:
            outer = parent.enclosing()
            context = outer.within(otel_context.get_current()) if outer is not None else None
        if node.kind in _MODEL_KINDS:
            call = operations.current_call()
            if call is not None and not call.is_over:
                node.operation = call  # which ends by itself
            elif is_current:
                opened = ModelCall(c.CHAT, None, {}, context)
                node.operation = opened.operation
                node.attach(opened.context)
        elif (described := _describe_start(data)) is not None:
            name, attributes = described
            if node.conversation is not None:
                attributes[c.CONVERSATION_ID] = node.conversation
            node.operation = operations.Operation(
                name, SpanKind.INTERNAL, attributes, parent=context
            )
            if is_current and node.kind in _ENCLOSING:
                node.attach(operations.context_within(node.operation))
        self._nodes[span] = node
        if has_id:
            self._by_id[span.span_id] = node

    def start_trace(self, trace: Any) -> None:
        """Begin what a trace stands for; one that is disabled has kept its name elsewhere."""
        if trace in self._nodes:
            return
        name, group_id = self._names.get(trace) or (trace.name, getattr(trace, "group_id", None))
        if name == _NO_ID:
            return
        node = Node(self._current_node(), group_id)
        attributes: Attributes = {c.OPERATION: c.INVOKE_WORKFLOW, c.WORKFLOW_NAME: _read_text(name)}
        if node.conversation is not None:
            attributes[c.CONVERSATION_ID] = node.conversation
        begin = functools.partial(
            operations.Operation,
            f"{c.INVOKE_WORKFLOW} {_read_text(name)}",
            SpanKind.INTERNAL,
            attributes,
            start_ns=time.time_ns(),
            parent=operations.parent_context(),
        )
        if trace.trace_id != _NO_ID:
            node.operation = begin()
            self._by_id[trace.trace_id] = node
        else:
            # Of a streamed run whose tracing is disabled the SDK makes two, and leaves one empty.
            node.deferred = begin
        self._nodes[trace] = node

    def finish(self, span: Any, /, *_: Any, **__: Any) -> None:
        """End what a span or trace stands for; a second finish does nothing."""
        node = self._nodes.get(span)
        if node is None:
            return
        attached, node.attached = node.attached, None
        if attached is not None:
            attached.__exit__(None, None, None)
        operation, node.operation, node.deferred = node.operation, None, None
        if operation is None or operation.is_claimed:
            return  # the client's to end: it may still be reading the answer
        data = getattr(span, "span_data", None)
        if data is not None:
            capture.guard_call(_fill_operation, operation, data)
        if node.kind not in _MODEL_KINDS or attached is not None:
            _end_operation(operation, node.failure(), node.error or getattr(span, "error", None))

    def note_error(self, span: Any, error: object) -> None:
        """Keep what the SDK says of a span that forgets it."""
        node = self._nodes.get(span)
        if node is not None:
            node.error = error

    def note_names(
        self, trace: Any, name: Any = None, trace_id: Any = None, group_id: Any = None, **_: Any
    ) -> None:
        """Keep the names of a trace that forgets them."""
        if trace.trace_id == _NO_ID and isinstance(name, str):
            self._names[trace] = (name, group_id)

    def note_tool_call(self, context: Any, /, *_: Any, **__: Any) -> None:
        """Note the id of the call that the tool under way answers."""
        node = self._current_node()
        call_id = context.tool_call_id
        if node is not None and node.kind == "function" and isinstance(call_id, str):
            operation = node.enclosing()
            if operation is not None:
                operation.attributes.setdefault(c.TOOL_CALL_ID, call_id)


def _read_text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _describe_start(data: Any) -> tuple[str, Attributes] | None:
    name = _read_text(getattr(data, "name", None))
    kinds: Mapping[str, tuple[str, Attributes]] = {
        "agent": (
            f"{c.INVOKE_AGENT} {name}", {c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: name}
        ),
        "function": (
            f"{c.EXECUTE_TOOL} {name}",
            {c.OPERATION: c.EXECUTE_TOOL, c.TOOL_NAME: name, c.TOOL_TYPE: "function"},
        ),
        "guardrail": (f"{c.SPAN_GUARDRAIL} {name}", {c.GUARDRAIL_NAME: name}),
        "handoff": (c.SPAN_HANDOFF, {}),
        "custom": (c.SPAN_OPERATION, {c.OPERATION_NAME: name}),
    }  # fmt: skip
    return kinds.get(data.type)


def _fill_operation(operation: operations.Operation, data: Any) -> None:
    kind = data.type
    if kind in _MODEL_KINDS:
        model.add_facts(operation, model.read_span(data))
    elif kind == "function":
        for key, value in ((c.TOOL_ARGUMENTS, data.input), (c.TOOL_RESULT, data.output)):
            if value is not None:
                operation.body[key] = text_of(value)
    elif kind == "guardrail":
        operation.attributes[c.GUARDRAIL_TRIGGERED] = bool(data.triggered)
    elif kind == "handoff" and isinstance(data.to_agent, str):
        operation.attributes[c.HANDOFF_TARGET] = data.to_agent
        operation.rename(f"{c.SPAN_HANDOFF} {data.to_agent}")
    elif kind == "custom" and data.data:
        operation.body[c.OPERATION_INPUT] = text_of(data.data)


def _end_operation(
    operation: operations.Operation, exc: BaseException | None, error: object
) -> None:
    if exc is not None:
        operation.fail(exc)
    elif isinstance(error, Mapping):
        kind = _read_text(error.get("message")) or "error"
        detail = error.get("data")
        why = detail.get("error") if isinstance(detail, Mapping) else None
        message = f"{kind}: {why}" if isinstance(why, str) else kind
        operation.fail_with(kind, operations.scrub_message(message))
    else:
        operation.stop()
