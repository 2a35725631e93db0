"""CrewAI's crews, flows, tasks, agents, tools and models as spans, by its methods of execution.

Its event bus runs handlers on other threads, too late to give a context to what follows.
"""

import asyncio
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

from opentelemetry.util.types import AttributeValue

from lightning_otel.capture import operations, read_attribute
from lightning_otel.instrumentors.base import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.steps import (
    Arguments,
    FrameworkStep,
    ModelCall,
    begin_owned_step,
    begin_tool_step,
    bind_step,
    input_content,
    output_content,
)
from lightning_otel.instrumentors.wrappers import Begin, WrappedRun, bind_names, wrap_call
from lightning_otel.messages import (
    field_of,
    message,
    objects,
    read_message,
    read_word,
    text_part,
    tool_call_part,
)
from lightning_otel.types import conventions as c
from lightning_otel.types.values import text_of

_NAME_LIMIT: Final = 60
"""Characters of a task's description, where it has no name."""
_BY_OPENAI: Final = "OpenAICompletion"
"""CrewAI's class of the models that go through the ``openai`` client and are seen there."""


class CrewAIInstrumentor(LibraryInstrumentor):
    """Switches the capture of CrewAI on and off; ``crewai`` itself is never imported."""

    requires = ("crewai >= 1.15",)

    def patches(self) -> Mapping[str, Patch]:
        """The modules of what is executed."""
        crew = bind_step(("inputs",), _begin_crew, _keep_output)
        flow = bind_step(("inputs",), _begin_flow, _keep_output)
        task = bind_step((), _begin_task, _keep_output)
        call = bind_step(("tool_call",), _begin_tool_call, _keep_call_result)
        tool = bind_step(("input",), _begin_tool, _keep_tool_result)
        alone = bind_step(("messages",), _begin_alone, _keep_output)
        called = "execute_single_native_tool_call"
        return {
            "crewai.crew": self._patch("Crew", crew, "kickoff", "akickoff"),
            "crewai.flow.runtime": self._patch("Flow", flow, "kickoff_async"),
            "crewai.task": self._patch("Task", task, "_execute_core", "_aexecute_core"),
            "crewai.agent.core": self._patch_agent,
            "crewai.llms.base_llm": self._patch_models,
            "crewai.lite_agent": self._patch("LiteAgent", alone, "kickoff"),
            "crewai.agents.agent_executor": self._patch("AgentExecutor", call, f"_{called}"),
            "crewai.agents.step_executor": self._patch(None, call, called),
            "crewai.tools.structured_tool": self._patch(
                "CrewStructuredTool", tool, "invoke", "ainvoke"
            ),
        }

    def _patch(self, owner: str | None, begin: Begin, *names: str) -> Patch:
        def patch(module: ModuleType) -> None:
            self.wrap_calls(module if owner is None else getattr(module, owner), begin, *names)

        return patch

    def _patch_agent(self, module: ModuleType) -> None:
        for names, parameter, begin in (
            (("execute_task", "aexecute_task"), "task", _begin_agent),
            (("kickoff",), "messages", _begin_alone_here),
            (("kickoff_async",), "messages", _begin_alone),
        ):
            self.wrap_calls(module.Agent, bind_step((parameter,), begin, _keep_output), *names)

    def _patch_models(self, module: ModuleType) -> None:
        """Wrap each model's calls; whichever client sends the request takes the call over."""
        make = wrap_call(self.if_wanted(_begin_call))
        self.wrap_family(module.BaseLLM, {"call": make, "acall": make}, _is_seen_elsewhere)


def _is_seen_elsewhere(cls: type) -> bool:
    return cls.__name__ == "BaseLLM" or any(base.__name__ == _BY_OPENAI for base in cls.__mro__)


def _begin_crew(owner: Any, arguments: Arguments, name: str = "crew") -> FrameworkStep | None:
    """Begin a crew; a crew that streams calls itself again, not streaming, on a thread."""
    if owner.stream or arguments.get("from_checkpoint") is not None:
        return None
    inputs = arguments.get("inputs")
    prompt = None if inputs is None else text_of(inputs)
    return begin_owned_step(
        owner, c.INVOKE_WORKFLOW, read_word(owner.name) or name, body=input_content(prompt)
    )


def _begin_flow(owner: Any, arguments: Arguments) -> FrameworkStep | None:
    """Begin a program's flow; CrewAI's own flows, such as every agent's loop, are none."""
    kind = type(owner)
    is_internal = kind.__module__.partition(".")[0] == "crewai"
    return None if is_internal else _begin_crew(owner, arguments, kind.__name__)


def _begin_task(owner: Any, _: Arguments) -> FrameworkStep | None:
    """Begin a task, within which its agent acts, again where a guardrail asks for it."""
    description = read_word(owner.description)
    name = read_word(owner.name) or description or "task"
    title = name if len(name) <= _NAME_LIMIT else f"{name[:_NAME_LIMIT]}…"
    body = {**input_content(description), c.WORKFLOW_STEP: operations.clean_text(name)}
    return begin_owned_step(owner, c.EXECUTE_TASK, title, body=body)


def _begin_agent(owner: Any, arguments: Arguments) -> FrameworkStep | None:
    """Begin an agent at a task; tried again after an error it is still the same step."""
    prompt = read_word(getattr(arguments.get("task"), "description", None))
    return _begin_role(owner, prompt)


def _begin_alone(owner: Any, arguments: Arguments) -> FrameworkStep | None:
    if arguments.get("from_checkpoint") is not None:
        return None
    return _begin_role(owner, text_of(arguments.get("messages")))


def _begin_role(agent: Any, prompt: str | None) -> FrameworkStep | None:
    return begin_owned_step(
        agent, c.INVOKE_AGENT, _role_of(agent) or "agent", body=input_content(prompt)
    )


def _begin_alone_here(owner: Any, arguments: Arguments) -> FrameworkStep | None:
    """Begin an agent without a crew, except in an event loop, where it only makes a coroutine."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _begin_alone(owner, arguments)
    return None


def _keep_output(operation: operations.Operation, result: Any) -> None:
    if inspect.isawaitable(result):
        return
    raw = getattr(result, "raw", None)
    operation.body.update(output_content(raw if isinstance(raw, str) else text_of(result)))


def _begin_tool_call(owner: Any, arguments: Arguments) -> FrameworkStep | None:
    call = arguments.get("tool_call", owner)
    agent = arguments.get("agent", getattr(owner, "agent", None))
    call_id, name, tool_input = _read_call(call)
    if name is None:
        return None
    return begin_tool_step(call, name, tool_input, call_id=call_id, agent=_role_of(agent))


def _read_call(call: Any) -> tuple[str | None, str | None, Any]:
    function = field_of(call, "function")
    name = read_word(field_of(function, "name")) or read_word(field_of(call, "name"))
    tool_input = field_of(function, "arguments")
    return (
        read_word(field_of(call, "id")),
        name,
        field_of(call, "input") if tool_input is None else tool_input,
    )


def _keep_call_result(operation: operations.Operation, result: Any) -> None:
    _keep_tool_result(operation, field_of(result, "result"))
    failure = field_of(result, "tool_failure")
    if failure is not None:
        reason = field_of(failure, "reason")
        kind = read_word(field_of(failure, "code")) or read_word(getattr(reason, "value", reason))
        operation.fail_with(kind or "tool_error", read_word(field_of(failure, "message")) or "")


def _begin_tool(owner: Any, arguments: Arguments) -> FrameworkStep | None:
    name = read_word(owner.name) or "tool"
    return begin_tool_step(owner, name, arguments.get("input"), call_id=None, agent=None)


def _keep_tool_result(operation: operations.Operation, result: Any) -> None:
    operation.body[c.TOOL_RESULT] = text_of(result)


def _role_of(agent: Any) -> str | None:
    return read_word(read_attribute(agent, "role"))


def _begin_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> WrappedRun | None:
    if operations.unclaimed_call() is not None:
        return None
    model, messages = args[0], bind_names(("messages",), args, kwargs).get("messages")
    facts = ((c.REQUEST_MODEL, model.model), (c.PROVIDER, model.provider))
    attributes: dict[str, AttributeValue] = {key: value for key, value in facts if read_word(value)}
    items = [{"content": messages}] if isinstance(messages, str) else objects(messages)
    prompt = text_of([read_message(item) for item in items])  # before the span, which must end then
    call = _CrewAICall(c.CHAT, str(model.model), attributes)
    call.operation.body[c.INPUT_MESSAGES] = prompt
    return call


class _CrewAICall(ModelCall):
    def fill(self, answer: Any) -> None:
        if type(answer) is list:
            parts = [tool_call_part(*_read_call(call)) for call in answer]
        elif answer is not None:
            parts = [text_part(text_of(answer))]
        else:
            return
        self.operation.body[c.OUTPUT_MESSAGES] = text_of([message("assistant", parts)])
