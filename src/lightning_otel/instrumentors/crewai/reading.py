"""Readers of CrewAI's objects: names, inputs, outputs."""

import asyncio
import inspect
from typing import Any

from lightning_otel import capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors.reading import field_of, word
from lightning_otel.instrumentors.steps import (
    Arguments,
    Step,
    agent_step,
    answered,
    given,
    tool_step,
    workflow_step,
)
from lightning_otel.values import text_of


def crew(owner: Any, arguments: Arguments) -> Step | None:
    """The step of a crew; a crew that streams calls itself again, not streaming, on a thread."""
    if owner.stream or arguments.get("from_checkpoint") is not None:
        return None
    return workflow_step(owner, word(owner.name) or "crew", _read_inputs(arguments))


def flow(owner: Any, arguments: Arguments) -> Step | None:
    """The step of a program's flow; CrewAI's own flows, such as every agent's loop, are none."""
    kind = type(owner)
    is_internal = kind.__module__.partition(".")[0] == "crewai"
    if is_internal or owner.stream or arguments.get("from_checkpoint") is not None:
        return None
    return workflow_step(owner, word(owner.name) or kind.__name__, _read_inputs(arguments))


def _read_inputs(arguments: Arguments) -> str | None:
    inputs = arguments.get("inputs")
    return None if inputs is None else text_of(inputs)


def task(owner: Any, _: Arguments) -> Step | None:
    """The step of a task, within which its agent acts, again where a guardrail asks for it."""
    name = word(owner.name) or word(owner.description) or "task"
    attributes = {c.OPERATION: c.EXECUTE_TASK, c.WORKFLOW_STEP: capture.clean(name)}
    shown = name if len(name) <= _NAME_LIMIT else f"{name[:_NAME_LIMIT]}…"
    return Step.begin(
        owner, f"{c.EXECUTE_TASK} {shown}", attributes, given(word(owner.description))
    )


_NAME_LIMIT = 60
"""Characters of a task's description, where it has no name."""


def agent(owner: Any, arguments: Arguments) -> Step | None:
    """The step of an agent at a task; tried again after an error it is still the same."""
    asked = getattr(arguments.get("task"), "description", None)
    return agent_step(owner, _role_of(owner) or "agent", word(asked))


def agent_alone(owner: Any, arguments: Arguments) -> Step | None:
    """The step of an agent without a crew; in an event loop it only makes a coroutine."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return agent_alone_async(owner, arguments)
    return None


def agent_alone_async(owner: Any, arguments: Arguments) -> Step | None:
    """The step of an agent without a crew."""
    if arguments.get("from_checkpoint") is not None:
        return None
    return agent_step(owner, _role_of(owner) or "agent", text_of(arguments.get("messages")))


def output(operation: capture.Operation, result: Any) -> None:
    """Take a crew's, flow's, task's or agent's result: its text where it has one."""
    if inspect.isawaitable(result):
        return
    raw = getattr(result, "raw", None)
    operation.body.update(answered(raw if isinstance(raw, str) else text_of(result)))


def tool_call(owner: Any, arguments: Arguments) -> Step | None:
    """The step of a tool that a model called by its API."""
    return _of_call(arguments.get("tool_call"), owner.agent)


def planned_tool_call(call: Any, arguments: Arguments) -> Step | None:
    """The step of a tool that a model called while it worked on a step of a plan."""
    return _of_call(call, arguments.get("agent"))


def _of_call(call: Any, agent: Any) -> Step | None:
    call_id, function = field_of(call, "id"), field_of(call, "function")
    name = word(field_of(function, "name")) or word(field_of(call, "name"))
    if name is None:
        return None
    arguments = field_of(function, "arguments")
    if arguments is None:
        arguments = field_of(call, "input")
    return tool_step(call, name, arguments, call_id=word(call_id), agent=_role_of(agent))


def tool_call_result(operation: capture.Operation, result: Any) -> None:
    """Take what a model is told of a tool; that it failed, if it did."""
    operation.body[c.TOOL_RESULT] = text_of(field_of(result, "result"))
    failure = field_of(result, "tool_failure")
    if failure is not None:
        reason = field_of(failure, "reason")
        kind = word(field_of(failure, "code")) or word(getattr(reason, "value", reason))
        operation.fail_with(kind or "tool_error", word(field_of(failure, "message")) or "")


def tool(owner: Any, arguments: Arguments) -> Step | None:
    """The step of a tool that a model asked for in plain words."""
    name = word(owner.name) or "tool"
    return tool_step(owner, name, arguments.get("input"), call_id=None, agent=None)


def tool_result(operation: capture.Operation, result: Any) -> None:
    """Take a tool's own result."""
    operation.body[c.TOOL_RESULT] = text_of(result)


def _role_of(agent: Any) -> str | None:
    return word(getattr(agent, "role", None))
