"""A framework's own methods as operations: begun before them, ended by what they give or raise.

For frameworks without callbacks that come in time. The method's result, its exception and the
context it leaves behind are exactly as without us.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from lightning_otel import capture
from lightning_otel import conventions as c
from lightning_otel.adapter.messages import message, text_part
from lightning_otel.instrumentors.content import text_of

_KEY = otel_context.create_key("lightning-otel-step")

Arguments: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One run of a framework's method.

    Attributes:
        owner: Whose method it is: the same owner directly within itself is still the same step.
        operation: Its span.
        context: What the method runs in.
    """

    owner: object
    operation: capture.Operation
    context: Context

    @classmethod
    def begin(
        cls,
        owner: object,
        name: str,
        attributes: Mapping[str, AttributeValue],
        body: Mapping[str, str],
    ) -> "Step | None":
        """Start the span of a step; None if it goes on what its owner is already doing."""
        parent = capture.parent_context()
        outer = otel_context.get_value(_KEY, parent)
        if (
            isinstance(outer, Step)
            and outer.owner is owner
            and outer.operation is capture.operation_of(parent)
            and not outer.operation.is_over
        ):
            return None
        content = dict(body) if capture.content_policy().is_kept else None
        operation = capture.Operation(
            capture.clean(name), SpanKind.INTERNAL, attributes, content, parent=parent
        )
        step = cls(owner, operation, operation.context)
        return cls(owner, operation, otel_context.set_value(_KEY, step, operation.context))


Begin: TypeAlias = Callable[[Any, Arguments], Step | None]
"""Starts the step of a method, given its owner and its arguments; None if it is none."""
Ended: TypeAlias = Callable[[capture.Operation, Any], None]
"""Puts on the operation what the method's result says."""


def around(
    is_wanted: Callable[[], bool], names: tuple[str, ...], begin: Begin, ended: Ended
) -> Callable[[Any], Any]:
    """What makes a step of a plain method: for an instrumentor's ``wrap``.

    Args:
        is_wanted: Whether what happens here and now should become a span.
        names: The method's positional parameters after the owner, for ``begin`` to look them up.
        begin: Starts the step.
        ended: Reads the result.
    """

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            step = capture.guarded(_begun, is_wanted, begin, names, args, kwargs)
            if step is None:
                return original(*args, **kwargs)
            try:
                with capture.attached(step.context):
                    result = original(*args, **kwargs)
            except BaseException as exc:
                capture.guarded(step.operation.fail, exc)
                raise
            capture.guarded(_over, step, ended, result)
            return result

        return method

    return make


def around_async(
    is_wanted: Callable[[], bool], names: tuple[str, ...], begin: Begin, ended: Ended
) -> Callable[[Any], Any]:
    """What makes a step of a coroutine method; the arguments are those of :func:`around`."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        async def method(*args: Any, **kwargs: Any) -> Any:
            step = capture.guarded(_begun, is_wanted, begin, names, args, kwargs)
            if step is None:
                return await original(*args, **kwargs)
            try:
                with capture.attached(step.context):
                    result = await original(*args, **kwargs)
            except BaseException as exc:
                capture.guarded(step.operation.fail, exc)
                raise
            capture.guarded(_over, step, ended, result)
            return result

        return method

    return make


def _begun(
    is_wanted: Callable[[], bool],
    begin: Begin,
    names: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Step | None:
    if not is_wanted() or not args:
        return None
    return begin(args[0], {**dict(zip(names, args[1:], strict=False)), **kwargs})


def _over(step: Step, ended: Ended, result: Any) -> None:
    capture.guarded(ended, step.operation, result)
    step.operation.stop()


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
    return {} if text is None else {c.INPUT_MESSAGES: _message("user", text)}


def answered(text: str | None) -> dict[str, str]:
    """The content of a step that gave this."""
    return {} if text is None else {c.OUTPUT_MESSAGES: _message("assistant", text)}


def _message(role: str, text: str) -> str:
    return text_of([message(role, [text_part(text)])])


def word(value: Any) -> str | None:
    """The value if it is a text of more than blanks, without those around it."""
    return (str.strip(value) or None) if issubclass(type(value), str) else None
