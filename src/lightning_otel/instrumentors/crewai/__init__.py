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
from lightning_otel.instrumentors.library import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.steps import Arguments, Begin, Step, around, around_async


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
        hooks = (self.is_wanted, ("inputs",), reading.crew, reading.output)
        self.wrap(module.Crew, "kickoff", around(*hooks))
        self.wrap(module.Crew, "akickoff", around_async(*hooks))

    def _patch_flow(self, module: ModuleType) -> None:
        hooks = (self.is_wanted, ("inputs",), reading.flow, reading.output)
        self.wrap(module.Flow, "kickoff_async", around_async(*hooks))

    def _patch_task(self, module: ModuleType) -> None:
        hooks = (self.is_wanted, (), reading.task, reading.output)
        self.wrap(module.Task, "_execute_core", around(*hooks))
        self.wrap(module.Task, "_aexecute_core", around_async(*hooks))

    def _patch_agent(self, module: ModuleType) -> None:
        hooks = (self.is_wanted, ("task",), self._seen(reading.agent), reading.output)
        self.wrap(module.Agent, "execute_task", around(*hooks))
        self.wrap(module.Agent, "aexecute_task", around_async(*hooks))
        names = ("messages",)
        self.wrap(
            module.Agent,
            "kickoff",
            around(self.is_wanted, names, self._seen(reading.agent_alone), reading.output),
        )
        self.wrap(
            module.Agent,
            "kickoff_async",
            around_async(
                self.is_wanted, names, self._seen(reading.agent_alone_async), reading.output
            ),
        )

    def _seen(self, begin: Begin) -> Begin:
        """The same beginning of an agent's step, with its model's class made known first."""

        def begin_seen(owner: Any, arguments: Arguments) -> Step | None:
            capture.guarded(self._wrap_model, getattr(owner, "llm", None))
            return begin(owner, arguments)

        return begin_seen

    def _wrap_model(self, model: Any) -> None:
        for cls, name in models.methods_of(model):
            make = models.called if name == "call" else models.called_async
            self.wrap(cls, name, make(self.is_wanted))

    def _patch_lite_agent(self, module: ModuleType) -> None:
        alone = self._seen(reading.agent_alone_async)
        hooks = (self.is_wanted, ("messages",), alone, reading.output)
        self.wrap(module.LiteAgent, "kickoff", around(*hooks))

    def _patch_executor(self, module: ModuleType) -> None:
        hooks = (self.is_wanted, ("tool_call",), reading.tool_call, reading.tool_call_result)
        self.wrap(module.AgentExecutor, "_execute_single_native_tool_call", around(*hooks))

    def _patch_step_executor(self, module: ModuleType) -> None:
        hooks = (self.is_wanted, (), reading.planned_tool_call, reading.tool_call_result)
        self.wrap(module, "execute_single_native_tool_call", around(*hooks))

    def _patch_tool(self, module: ModuleType) -> None:
        hooks = (self.is_wanted, ("input",), reading.tool, reading.tool_result)
        self.wrap(module.CrewStructuredTool, "invoke", around(*hooks))
        self.wrap(module.CrewStructuredTool, "ainvoke", around_async(*hooks))
