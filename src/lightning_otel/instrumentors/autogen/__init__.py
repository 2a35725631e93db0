"""AutoGen's agents, teams, tools and models as spans, for ``autogen_agentchat`` and ``_core`` 0.7.

AutoGen makes spans of agents and tools itself: without content, and with its context left attached
across every yield. Ours stand in their place, so that there is one span of each; of a team, which
AutoGen has none of, there is one too.
"""

import functools
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from lightning_otel import capture
from lightning_otel.instrumentors.autogen import (
    agents,
    core,
    models,
    runs,
    teams,
    tools,
    tracebacks,
)
from lightning_otel.instrumentors.doors import Make, around, around_steps
from lightning_otel.instrumentors.library import LibraryInstrumentor, Patch
from lightning_otel.instrumentors.patching import subclasses_of


class AutoGenInstrumentor(LibraryInstrumentor):
    """Switches the capture of AutoGen on and off; AutoGen itself is never imported."""

    requires = ("autogen-core >= 0.7.5, < 0.8",)

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(self, "_leave"):
            self._leave: list[Callable[[], None]] = []

    def patches(self) -> Mapping[str, Patch]:
        """The modules that hold the methods themselves, not those they are imported into."""
        teams_at = "autogen_agentchat.teams._group_chat"
        return {
            "autogen_core._telemetry._tracing": self._patch_messaging,
            "autogen_core._routed_agent": self._patch_core_agents,
            "autogen_core._single_threaded_agent_runtime": self._patch_runtime,
            "autogen_core.tools._base": self._patch_tools,
            "autogen_core.models._model_client": self._patch_models,
            "autogen_agentchat.agents._base_chat_agent": self._patch_agents,
            f"{teams_at}._base_group_chat": self._patch_teams,
            f"{teams_at}._sequential_routed_agent": self._patch_delivery,
            f"{teams_at}._chat_agent_container": self._patch_containers,
            f"{teams_at}._events": self._patch_errors,
            "autogen_ext.tools.mcp._workbench": self._patch_mcp,
        }

    def _wrap_span(self, owner: Any, name: str, block_of: Callable[..., Any]) -> None:
        self.wrap(owner, name, runs.instead(self.is_wanted, block_of))

    def _patch_messaging(self, module: ModuleType) -> None:
        self._wrap_span(module.TraceHelper, "trace_block", core.skip_messaging)

    def _patch_core_agents(self, module: ModuleType) -> None:
        self.wrap_calls(module.RoutedAgent, core.begin_message, "on_message_impl")

    def _patch_runtime(self, module: ModuleType) -> None:
        runtime = module.SingleThreadedAgentRuntime
        self.wrap(module, "get_telemetry_envelope_metadata", core.metadata(self.is_wanted))
        for name, is_published in (("_process_send", False), ("_process_publish", True)):
            begin = core.begin_delivery(is_published=is_published)
            self.wrap(runtime, name, around(self.if_active(begin)))

    def _patch_tools(self, module: ModuleType) -> None:
        self._wrap_span(module, "trace_tool_span", runs.take_native)
        self.wrap_calls(module.BaseTool, tools.begin_tool, "run_json")
        self.wrap_steps(module.BaseStreamTool, tools.begin_tool, "run_json_stream")

    def _patch_models(self, module: ModuleType) -> None:
        stream = functools.partial(models.begin_call, is_stream=True)
        methods = {
            "create": around(self.if_wanted(models.begin_call)),
            "create_stream": around_steps(self.if_wanted(stream)),
        }
        base = module.ChatCompletionClient
        self._wrap_family(base, methods, models.is_left_out)

    def _patch_agents(self, module: ModuleType) -> None:
        self._wrap_span(module, "trace_invoke_agent_span", runs.take_native)
        self._wrap_span(module, "trace_create_agent_span", agents.make_creation)
        self.wrap_calls(module.BaseChatAgent, agents.begin_run, "run")
        self.wrap_steps(module.BaseChatAgent, agents.begin_run, "run_stream")
        begin = self.if_wanted(agents.begin_messages)
        methods = {"on_messages": around(begin), "on_messages_stream": around_steps(begin)}
        self._wrap_family(module.BaseChatAgent, methods)

    def _patch_teams(self, module: ModuleType) -> None:
        self.wrap_steps(module.BaseGroupChat, teams.begin_run, "run_stream")

    def _patch_delivery(self, module: ModuleType) -> None:
        begin = self.if_active(teams.begin_delivery)
        self.wrap(module.SequentialRoutedAgent, "on_message_impl", around(begin))

    def _patch_containers(self, module: ModuleType) -> None:
        self._wrap_span(module, "trace_invoke_agent_span", teams.speak)
        note = self.if_active(teams.note_message)
        self.wrap(module.ChatAgentContainer, "_log_message", around(note))

    def _patch_errors(self, module: ModuleType) -> None:
        self._leave.append(tracebacks.from_exception(module.SerializableException))

    def _patch_mcp(self, module: ModuleType) -> None:
        self._wrap_span(module, "trace_tool_span", runs.take_native)
        self.wrap_calls(module.McpWorkbench, tools.begin_server_tool, "call_tool")

    def _uninstrument(self, **kwargs: Any) -> None:
        super()._uninstrument(**kwargs)
        while self._leave:
            self._leave.pop()()

    def _wrap_family(
        self,
        base: Any,
        methods: Mapping[str, Make],
        is_left_out: Callable[[type], bool] = lambda cls: False,
    ) -> None:
        """Wrap methods in a class and its subclasses: those there are, and those to come.

        Where each defines them, because a library's abstract methods hold nothing to replace.
        """

        def adopt(cls: type) -> None:
            for name, make in methods.items():
                original: Any = cls.__dict__.get(name)
                # Another tool's wrapper of wrapt's says that it is a function, too.
                is_own = isinstance(original, FunctionType) and not is_left_out(cls)
                if is_own and not getattr(original, "__isabstractmethod__", False):
                    self.wrap(cls, name, make)

        hook = base.__dict__.get("__init_subclass__")

        def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:  # noqa: N807  # the hook's name
            if hook is None:
                super(base, cls).__init_subclass__(**kwargs)
            else:
                hook.__func__(cls, **kwargs)
            capture.guarded(adopt, cls)

        def leave() -> None:
            if hook is not None:
                base.__init_subclass__ = hook
            elif "__init_subclass__" in base.__dict__:
                del base.__init_subclass__

        for cls in (base, *subclasses_of(base)):
            adopt(cls)
        base.__init_subclass__ = classmethod(__init_subclass__)
        self._leave.append(leave)
