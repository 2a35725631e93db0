"""Haystack's spans: components of a pipeline, its agents, and the tools that these run.

Its generators stand around the call that another make records, and are none themselves.

Source: ``haystack-ai`` 3.4, ``haystack.tracing`` and ``haystack.components.agents``.
"""

from collections.abc import Mapping
from typing import Any, Final

from lightning_otel.adapter.attributes import to_text
from lightning_otel.adapter.readers.chat import drop_none
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

_COMPONENT: Final = "haystack.component.name"
_KIND: Final = "haystack.component.type"
_TOOL: Final = "haystack.tool.name"
_STEP: Final = "haystack.agent.step.tool"
_INPUTS: Final = (f"{_STEP}.input", "haystack.tool.input")
_OUTPUTS: Final = (f"{_STEP}.output", "haystack.tool.output")

MARKS = (_COMPONENT, _TOOL, *_INPUTS)


def summary(name: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Operation and names."""
    if c.OPERATION in attributes:
        return {}
    if _TOOL in attributes or any(key in attributes for key in _INPUTS):
        return {c.OPERATION: c.EXECUTE_TOOL, c.TOOL_NAME: attributes.get(_TOOL) or name}
    if to_text(attributes.get(_KIND) or "").rpartition(".")[2] == "Agent":
        return {c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: attributes[_COMPONENT]}
    return {}


def content(span: Span) -> dict[str, Any]:
    """Arguments and result of a tool."""
    get = span.attributes.get
    return drop_none(
        {
            c.TOOL_ARGUMENTS: next((text for key in _INPUTS if (text := get(key))), None),
            c.TOOL_RESULT: next((text for key in _OUTPUTS if (text := get(key))), None),
        }
    )
