"""Tools: ``execute_tool`` around each run of one, in place of AutoGen's own span."""

import functools
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Final

from lightning_otel import capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors.autogen import runs, said
from lightning_otel.instrumentors.autogen.agents import IsWanted
from lightning_otel.instrumentors.content import text_of
from lightning_otel.instrumentors.generators import walked

_ERROR: Final = "tool_error"


class ToolRun(runs.Run):
    """A run of a tool; the last it gives is its result."""

    _last: Any = None
    _is_last_only = False

    def of(self, tool: object) -> "ToolRun":
        """This run, which gives what the tool was told to give of a whole conversation."""
        self._is_last_only = said.fields_of(tool).get("_return_value_as_last_message") is True
        return self

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
        held = said.fields_of(self._last)
        if self._last is not None and capture.content_policy().is_kept:
            capture.guarded(self._keep, held)
        if held.get("is_error") is True:
            self.operation.fail_with(_ERROR, "")
        super().stop()

    def abandon(self) -> None:
        """End it as left early: what it gave so far is no result."""
        self._last = None
        super().abandon()

    def _keep(self, held: Mapping[str, Any]) -> None:
        messages = held.get("messages")
        if "stop_reason" in held and isinstance(messages, list):  # an agent's or a team's result
            self.operation.body[c.TOOL_RESULT] = said.result_text(
                messages, is_last_only=self._is_last_only
            )
        else:
            self.operation.body[c.TOOL_RESULT] = text_of(self._last)


def _begin(
    is_wanted: IsWanted, tool: Any, arguments: object, call_id: object, name: object = None
) -> ToolRun | None:
    if not is_wanted():
        return None
    if name is None:
        name = said.text_field(tool, "_name")
    body = {c.TOOL_ARGUMENTS: text_of(arguments)} if capture.content_policy().is_kept else {}
    operation = runs.start(
        f"{c.EXECUTE_TOOL} {name}",
        {
            c.OPERATION: c.EXECUTE_TOOL,
            c.TOOL_NAME: name if isinstance(name, str) else None,
            c.TOOL_DESCRIPTION: said.text_field(tool, "_description"),
            c.TOOL_CALL_ID: call_id if isinstance(call_id, str) else None,
        },
        body,
    )
    context = runs.NativeSpan(operation).within(runs.inside(operation))
    return ToolRun(operation, context).of(tool)


def run_json(is_wanted: IsWanted) -> Callable[[Any], Any]:
    """What stands in for ``BaseTool.run_json``."""

    def make(original: Any) -> Any:
        async def run_json(
            self: Any, args: Any, cancellation_token: Any, call_id: Any = None
        ) -> Any:
            begin = functools.partial(_begin, is_wanted, self, args, call_id)
            return await runs.call(begin, original, self, args, cancellation_token, call_id)

        return run_json

    return make


def run_json_stream(is_wanted: IsWanted) -> Callable[[Any], Any]:
    """What stands in for ``BaseStreamTool.run_json_stream``."""

    def make(original: Any) -> Any:
        def run_json_stream(
            self: Any, args: Any, cancellation_token: Any, call_id: Any = None
        ) -> AsyncGenerator[Any, Any]:
            begin = functools.partial(_begin, is_wanted, self, args, call_id)
            return walked(begin, original(self, args, cancellation_token, call_id))

        return run_json_stream

    return make


def call_tool(is_wanted: IsWanted) -> Callable[[Any], Any]:
    """What stands in for ``McpWorkbench.call_tool``, whose tools are no objects of their own."""

    def make(original: Any) -> Any:
        async def call_tool(
            self: Any,
            name: Any,
            arguments: Any = None,
            cancellation_token: Any = None,
            call_id: Any = None,
        ) -> Any:
            begin = functools.partial(_begin, is_wanted, None, arguments, call_id, name)
            return await runs.call(
                begin, original, self, name, arguments, cancellation_token, call_id
            )

        return call_tool

    return make
