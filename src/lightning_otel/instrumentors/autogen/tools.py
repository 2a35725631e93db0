"""Tools: ``execute_tool`` around each run of one, in place of AutoGen's own span."""

from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context

from lightning_otel import capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors.autogen import runs, said
from lightning_otel.instrumentors.doors import named
from lightning_otel.instrumentors.reading import fields_of
from lightning_otel.messages.values import text_of


class ToolRun(runs.Run):
    """A run of a tool; the last it gives is its result."""

    def __init__(self, operation: capture.Operation, context: Context, tool: object) -> None:
        super().__init__(operation, context)
        self._last: Any = None
        # Told to give so much of a whole conversation.
        self._is_last_only = fields_of(tool).get("_return_value_as_last_message") is True

    def saw(self, item: Any) -> None:
        """Keep the result, or what of a stream may be the last."""
        self._last = item

    def returned(self, result: Any) -> None:
        """End it with its result, which may be none."""
        if result is None and capture.content_policy().is_kept:
            self.operation.body[c.TOOL_RESULT] = text_of(None)
        super().returned(result)

    def stop(self) -> None:
        """End it with its result; a workbench gives what its tool raised as a result, too."""
        held = fields_of(self._last)
        if self._last is not None and capture.content_policy().is_kept:
            capture.guarded(self._keep_values, held)
        if held.get("is_error") is True:
            self.operation.fail_with("tool_error", "")
        super().stop()

    def abandon(self) -> None:
        """End it as left early: what it gave so far is no result."""
        self._last = None
        super().abandon()

    def _keep_values(self, held: Mapping[str, Any]) -> None:
        messages = held.get("messages")
        if "stop_reason" in held and isinstance(messages, list):  # an agent's or a team's result
            self.operation.body[c.TOOL_RESULT] = said.result_text(
                messages, is_last_only=self._is_last_only
            )
        else:
            self.operation.body[c.TOOL_RESULT] = text_of(self._last)


def begin_tool(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ToolRun:
    """Begin the run of ``BaseTool.run_json`` or ``BaseStreamTool.run_json_stream``."""
    given = named(("args", "cancellation_token", "call_id"), args, kwargs)
    name = said.text_field(args[0], "_name")
    return _begin_tool(args[0], name, given.get("args"), given.get("call_id"))


def begin_server_tool(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ToolRun:
    """Begin that of ``McpWorkbench.call_tool``, whose tools are no objects of their own."""
    given = named(("name", "arguments", "cancellation_token", "call_id"), args, kwargs)
    return _begin_tool(None, given.get("name"), given.get("arguments"), given.get("call_id"))


def _begin_tool(tool: Any, name: object, arguments: object, call_id: object) -> ToolRun:
    operation = runs.start(
        c.EXECUTE_TOOL,
        str(name),
        {
            c.TOOL_NAME: name if isinstance(name, str) else None,
            c.TOOL_DESCRIPTION: said.text_field(tool, "_description"),
            c.TOOL_CALL_ID: call_id if isinstance(call_id, str) else None,
        },
        lambda: {c.TOOL_ARGUMENTS: text_of(arguments)},
    )
    return ToolRun(operation, runs.with_native(operation, runs.inside(operation)), tool)
