"""A framework's own methods as operations: begun before them, ended by what they give or raise.

For frameworks without callbacks that come in time. The method's result, its exception and the
context it leaves behind are exactly as without us.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from lightning_otel import capture, operations
from lightning_otel import conventions as c
from lightning_otel.instrumentors.doors import Begin, Run, named
from lightning_otel.messages import message, text_part
from lightning_otel.values import text_of

_KEY = otel_context.create_key("lightning-otel-step")

Arguments: TypeAlias = Mapping[str, Any]
Ended: TypeAlias = Callable[[operations.Operation, Any], None]


class Step(Run):
    """One run of a framework's method.

    Attributes:
        owner: Whose method it is: the same owner directly within itself is still the same step.
        operation: Its span.
        context: What the method runs in.
        ended: Puts on the operation what the method's result says.
    """

    __slots__ = ("context", "ended", "operation", "owner")

    def __init__(self, owner: object, operation: operations.Operation) -> None:
        self.owner = owner
        self.operation = operation
        self.ended: Ended | None = None
        within = operations.context_within(operation)
        self.context = otel_context.set_value(_KEY, self, within)

    @classmethod
    def begin(
        cls,
        owner: object,
        name: str,
        attributes: Mapping[str, AttributeValue],
        body: Mapping[str, str],
    ) -> "Step | None":
        """Start the span of a step; None if it goes on what its owner is already doing."""
        parent = operations.parent_context()
        outer = otel_context.get_value(_KEY, parent)
        if (
            isinstance(outer, Step)
            and outer.owner is owner
            and outer.operation is operations.operation_of(parent)
            and not outer.operation.is_over
        ):
            return None
        content = dict(body) if capture.content_policy().is_kept else None
        operation = operations.Operation(
            operations.clean(name), SpanKind.INTERNAL, attributes, content, parent=parent
        )
        return cls(owner, operation)

    def returned(self, result: Any) -> None:
        """End it with what its result says."""
        if self.ended is not None:
            capture.guarded(self.ended, self.operation, result)
        self.operation.stop()

    def fail(self, exc: BaseException) -> None:
        """End it with what was raised."""
        self.operation.fail(exc)


class ModelCall(Run):
    """A call of a model, offered to whichever client sends its request.

    Attributes:
        operation: Its span.
        context: The context in which the request is sent.
    """

    def __init__(
        self,
        operation: str,
        model: str | None,
        attributes: Mapping[str, AttributeValue],
        parent: Context | None = None,
    ) -> None:
        """Start the span.

        Args:
            operation: The operation's name in the conventions.
            model: The model's name, for the title.
            attributes: Attributes of the span.
            parent: The context it stands in.
        """
        title = operations.clean(operation if model is None else f"{operation} {model}")
        known = {c.OPERATION: operation, **attributes}
        self.operation = operations.Operation(title, SpanKind.CLIENT, known, parent=parent)
        self.context = operations.offer_call(self.operation, self.operation.context)

    def fill(self, answer: Any) -> None:
        """Put on the operation what the framework knows; no client has claimed the call."""

    def returned(self, result: Any) -> None:
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
        capture.guarded(self.fill, answer)
        if exc is not None and not isinstance(exc, GeneratorExit):
            operation.fail(exc)
            return
        if exc is not None:
            operation.attributes[c.ABANDONED] = True
        operation.stop()


def steps(
    names: tuple[str, ...], begin: Callable[[Any, Arguments], Step | None], ended: Ended
) -> Begin:
    """Return what makes a step of each call of a method.

    Args:
        names: The method's positional parameters after the owner, for ``begin`` to look them up.
        begin: Starts the step of a method, given its owner and its arguments; None if it is none.
        ended: Reads the result.
    """

    def begin_step(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Step | None:
        step = begin(args[0], named(names, args, kwargs)) if args else None
        if step is not None:
            step.ended = ended
        return step

    return begin_step


def agent_step(owner: object, agent: str, said: str | None) -> Step | None:
    """The step of an agent: ``invoke_agent NAME``."""
    attributes = {c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: agent}
    return Step.begin(owner, f"{c.INVOKE_AGENT} {agent}", attributes, given(said))


def workflow_step(owner: object, workflow: str, said: str | None) -> Step | None:
    """The step of a team, a crew or a flow: ``invoke_workflow NAME``."""
    attributes = {c.OPERATION: c.INVOKE_WORKFLOW, c.WORKFLOW_NAME: workflow}
    return Step.begin(owner, f"{c.INVOKE_WORKFLOW} {workflow}", attributes, given(said))


def tool_step(
    owner: object, tool: str, arguments: object, *, call_id: str | None, agent: str | None
) -> Step | None:
    """The step of a tool: ``execute_tool NAME``."""
    attributes: dict[str, AttributeValue] = {c.OPERATION: c.EXECUTE_TOOL, c.TOOL_NAME: tool}
    if call_id is not None:
        attributes[c.TOOL_CALL_ID] = call_id
    if agent is not None:
        attributes[c.AGENT_NAME] = agent
    body = {c.TOOL_ARGUMENTS: text_of(arguments)}
    return Step.begin(owner, f"{c.EXECUTE_TOOL} {tool}", attributes, body)


def given(text: str | None) -> dict[str, str]:
    """The content of a step that was told this."""
    return {} if text is None else {c.INPUT_MESSAGES: _make_message("user", text)}


def answered(text: str | None) -> dict[str, str]:
    """The content of a step that gave this."""
    return {} if text is None else {c.OUTPUT_MESSAGES: _make_message("assistant", text)}


def _make_message(role: str, text: str) -> str:
    return text_of([message(role, [text_part(text)])])
