"""A framework's own methods as operations; results, exceptions and contexts stay as without us."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from lightning_otel import capture
from lightning_otel.capture import operations
from lightning_otel.instrumentors.wrappers import Begin, WrappedRun, bind_names
from lightning_otel.messages import message, text_part
from lightning_otel.types import conventions as c
from lightning_otel.types.values import text_of

_KEY = otel_context.create_key("lightning-otel-step")
"""Where a context has the innermost step with an owner: the owner's identity, and its operation."""
_NAMES: Final = {
    c.INVOKE_AGENT: c.AGENT_NAME,
    c.INVOKE_WORKFLOW: c.WORKFLOW_NAME,
    c.EXECUTE_TOOL: c.TOOL_NAME,
    c.CREATE_AGENT: c.AGENT_NAME,
}
Arguments: TypeAlias = Mapping[str, Any]
Read: TypeAlias = Callable[[operations.Operation, Any], None]
Known: TypeAlias = Mapping[str, AttributeValue | None]
_NOTHING: Final[Mapping[str, Any]] = {}


class FrameworkStep(WrappedRun):
    """One run of a framework's method or stream, whose result ``read`` puts on the operation.

    A stream that is left once it ``is_complete``, its result being seen, was not abandoned.
    """

    def __init__(
        self, operation: operations.Operation, context: Context, read: Read | None = None
    ) -> None:
        self.operation = operation
        self.context = context
        self.read = read
        self.is_complete = False
        self._is_left = False

    def __del__(self) -> None:
        """A run whose generator or coroutine was dropped, never to go on, was abandoned."""
        # At the interpreter's end the module may be gone before the last runs are.
        if not self.operation.is_over and capture is not None:
            capture.guard_call(self.abandon)

    def succeed(self, result: Any) -> None:
        """End it with what its result says."""
        if self.read is not None:
            capture.guard_call(self.read, self.operation, result)
        self.operation.stop()

    def stop(self) -> None:
        """End it."""
        self.operation.stop()

    def note_throw(self, exc: BaseException) -> None:
        """Note what is thrown into a stream; a closing loop cancels streams that nobody reads."""
        self._is_left = isinstance(exc, asyncio.CancelledError)

    def fail(self, exc: BaseException) -> None:
        """End it with what was raised; a generator or coroutine that is closed was abandoned."""
        if isinstance(exc, GeneratorExit) or self._is_left:
            self.abandon()
        else:
            self.operation.fail(exc)

    def abandon(self) -> None:
        """End it as left by the program before its end."""
        if not self.is_complete:
            self.operation.attributes[c.ABANDONED] = True
        self.operation.stop()


def start_operation(
    operation: str,
    name: str,
    facts: Known = _NOTHING,
    body: Mapping[str, str | None] = _NOTHING,
    parent: Context | None = None,
) -> operations.Operation:
    """Start the span of ``OPERATION NAME`` with attributes and content; None is left out."""
    attributes = {c.OPERATION: operation, **facts}
    if operation in _NAMES:
        attributes = {_NAMES[operation]: name, **attributes}
    return operations.Operation(
        f"{operation} {name}",
        SpanKind.INTERNAL,
        {key: value for key, value in attributes.items() if value is not None},
        {key: text for key, text in body.items() if text is not None},
        parent=parent,
    )


def begin_owned_step(
    owner: object,
    operation: str,
    name: str,
    facts: Known = _NOTHING,
    body: Mapping[str, str | None] = _NOTHING,
) -> FrameworkStep | None:
    """Begin a step of an owner; None if it continues the owner's own step."""
    parent = operations.parent_context()
    outer = operations.operation_of(parent)
    is_own = owner is not None and otel_context.get_value(_KEY, parent) == (id(owner), outer)
    if is_own and outer is not None and not outer.is_over:
        return None
    started = start_operation(operation, name, facts, body, parent)
    # By its identity: a context may outlive the owner, and must not keep it.
    mark = (id(owner), started)
    return FrameworkStep(
        started, otel_context.set_value(_KEY, mark, operations.context_within(started))
    )


class ModelCall(WrappedRun):
    """A call of a model, offered to whichever client sends its request."""

    context: Context

    def __init__(
        self,
        operation: str,
        model: str | None,
        attributes: Mapping[str, AttributeValue],
        parent: Context | None = None,
    ) -> None:
        title = operation if model is None else f"{operation} {model}"
        facts = {c.OPERATION: operation, **attributes}
        self.operation = operations.Operation(title, SpanKind.CLIENT, facts, parent=parent)
        self.context = operations.offer_call(self.operation, self.operation.context)

    def fill(self, answer: Any) -> None:
        """Put on the operation what the framework knows; no client has claimed the call."""

    def succeed(self, result: Any) -> None:
        """End it with its answer."""
        self.end(result)

    def fail(self, exc: BaseException) -> None:
        """End it with what was raised; a generator that is closed was left early."""
        self.end(None, exc)

    def end(self, answer: Any, exc: BaseException | None = None) -> None:
        """End the span, unless that is a client's to do."""
        operation = self.operation
        if operation.is_claimed or operation.is_over:
            return
        capture.guard_call(self.fill, answer)
        if exc is not None and not isinstance(exc, GeneratorExit):
            operation.fail(exc)
            return
        if exc is not None:
            operation.attributes[c.ABANDONED] = True
        operation.stop()


def bind_step(
    names: tuple[str, ...], begin: Callable[[Any, Arguments], FrameworkStep | None], read: Read
) -> Begin:
    """Return what begins a step of each call, with positional arguments by ``names``."""

    def begin_step(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FrameworkStep | None:
        step = begin(args[0], bind_names(names, args, kwargs)) if args else None
        if step is not None:
            step.read = read
        return step

    return begin_step


def begin_tool_step(
    owner: object, tool: str, arguments: object, *, call_id: str | None, agent: str | None
) -> FrameworkStep | None:
    """Begin the step of a tool."""
    attributes = {c.TOOL_CALL_ID: call_id, c.AGENT_NAME: agent}
    return begin_owned_step(
        owner, c.EXECUTE_TOOL, tool, attributes, {c.TOOL_ARGUMENTS: text_of(arguments)}
    )


def input_content(text: str | None) -> dict[str, str]:
    """Return the content of a step that was told this."""
    return {} if text is None else {c.INPUT_MESSAGES: _make_message("user", text)}


def output_content(text: str | None) -> dict[str, str]:
    """Return the content of a step that gave this."""
    return {} if text is None else {c.OUTPUT_MESSAGES: _make_message("assistant", text)}


def _make_message(role: str, text: str) -> str:
    return text_of([message(role, [text_part(text)])])
