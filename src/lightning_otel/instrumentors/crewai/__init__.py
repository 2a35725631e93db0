"""CrewAI's crews, flows, tasks, agents and tools as spans, by its few methods of execution.

Its event bus runs handlers on other threads, too late to give a context to what follows; and its
own telemetry, a provider of its own, is none of our business. Model calls are left to the layer
that sends them, where that is the ``openai`` client or LiteLLM.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from lightning_otel import capture
from lightning_otel.instrumentors.crewai import models, reading
from lightning_otel.instrumentors.doors import Begin, Run
from lightning_otel.instrumentors.library import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.steps import steps


class CrewAIInstrumentor(LibraryInstrumentor):
    """Switches the capture of CrewAI on and off; ``crewai`` itself is never imported."""

    requires = ("crewai >= 1.15",)

    def patches(self) -> Mapping[str, Patch]:
        """The modules of what is executed."""
        return {
            "crewai.crew": self._patch_crew,
            "crewai.flow.runtime": self._patch_flow,
            "crewai.task": self._patch_task,
            "crewai.agent.core": self._patch_agent,
            "crewai.lite_agent": self._patch_lite_agent,
            "crewai.agents.agent_executor": self._patch_executor,
            "crewai.agents.step_executor": self._patch_step_executor,
            "crewai.tools.structured_tool": self._patch_tool,
        }

    def _patch_crew(self, module: ModuleType) -> None:
        begin = steps(("inputs",), reading.crew, reading.output)
        self.wrap_calls(module.Crew, begin, "kickoff", "akickoff")

    def _patch_flow(self, module: ModuleType) -> None:
        begin = steps(("inputs",), reading.flow, reading.output)
        self.wrap_calls(module.Flow, begin, "kickoff_async")

    def _patch_task(self, module: ModuleType) -> None:
        begin = steps((), reading.task, reading.output)
        self.wrap_calls(module.Task, begin, "_execute_core", "_aexecute_core")

    def _patch_agent(self, module: ModuleType) -> None:
        begin = steps(("task",), reading.agent, reading.output)
        self.wrap_calls(module.Agent, self._seen(begin), "execute_task", "aexecute_task")
        for name, alone in (
            ("kickoff", reading.agent_alone),
            ("kickoff_async", reading.agent_alone_async),
        ):
            begin = steps(("messages",), alone, reading.output)
            self.wrap_calls(module.Agent, self._seen(begin), name)

    def _seen(self, begin: Begin) -> Begin:
        """The same beginning of an agent's step, with its model's class made known first."""

        def begin_seen(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run | None:
            capture.guarded(self._wrap_model, getattr(args[0], "llm", None))
            return begin(args, kwargs)

        return begin_seen

    def _wrap_model(self, model: Any) -> None:
        for cls, name in models.methods_of(model):
            self.wrap_calls(cls, models.begin_call, name)

    def _patch_lite_agent(self, module: ModuleType) -> None:
        begin = steps(("messages",), reading.agent_alone_async, reading.output)
        self.wrap_calls(module.LiteAgent, self._seen(begin), "kickoff")

    def _patch_executor(self, module: ModuleType) -> None:
        begin = steps(("tool_call",), reading.tool_call, reading.tool_call_result)
        self.wrap_calls(module.AgentExecutor, begin, "_execute_single_native_tool_call")

    def _patch_step_executor(self, module: ModuleType) -> None:
        begin = steps((), reading.planned_tool_call, reading.tool_call_result)
        self.wrap_calls(module, begin, "execute_single_native_tool_call")

    def _patch_tool(self, module: ModuleType) -> None:
        begin = steps(("input",), reading.tool, reading.tool_result)
        self.wrap_calls(module.CrewStructuredTool, begin, "invoke", "ainvoke")
