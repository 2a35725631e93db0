"""AgentOps 0.4: ``agentops.span.kind`` around calls that are told in the old ``gen_ai.*``.

The tools an answer asks for are not on the call but on spans of their own below it, which are no
executions; they are put back into the answer. A chain of LangChain is an agent by its type, as it
is to Agent Lightning: in a graph that is the name of the node.

Source: AgentOps 0.4.21, ``agentops/semconv``; Agent Lightning 0.3.0, ``adapter/triplet.py``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from lightning_otel import conventions as c
from lightning_otel.adapter.attributes import text
from lightning_otel.adapter.readers import chat
from lightning_otel.adapter.readers.flat import known, loaded
from lightning_otel.messages import message, objects, tool_call_part
from lightning_otel.types import Span

_KIND: Final = "agentops.span.kind"
_CHAIN: Final = "langchain.chain.type"
_NAMES: Final = {
    c.AGENT_NAME: ("agent.name", "operation.name"),
    c.TOOL_NAME: ("operation.name", "tool.name", "langchain.tool.name"),
}
_ARGUMENTS: Final = ("tool.parameters", "langchain.tool.input")
_RESULTS: Final = ("tool.result", "langchain.tool.output")
_CALL_TYPE: Final = "tool.call.type"
_CALL_ID: Final = "tool.call.id"
CALLED_TOOL: Final = "lightning.called_tool"
"""On a span that stands for a part of its parent's answer, while spans are read: that part."""

MARKS = (_KIND, _CALL_TYPE, _CHAIN)


def summary(name: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the operation and the names of agents and tools."""
    kind = text(attributes, _KIND) or ""
    if kind == "session":
        return {c.SESSION: True}
    operation, key = chat.KINDS.get(kind, (None, ""))
    if operation is None or _CALL_TYPE in attributes:
        return known({c.AGENT_NAME: text(attributes, _CHAIN)})
    return known({c.OPERATION: operation, key: _first_of(attributes, _NAMES[key])})


def _first_of(attributes: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    return next((found for key in keys if (found := text(attributes, key))), None)


def content(span: Span) -> dict[str, Any]:
    """A tool's arguments and result; or the part of an answer that the span stands for."""
    get = span.attributes.get
    if _CALL_TYPE in span.attributes:
        part = tool_call_part(get(_CALL_ID), get("tool.name"), get("tool.parameters"))
        return {CALLED_TOOL: part}
    if get(_KIND) != "tool":
        return {}
    told = {
        c.TOOL_ARGUMENTS: _first_of(span.attributes, _ARGUMENTS),
        c.TOOL_RESULT: _first_of(span.attributes, _RESULTS),
    }
    return known(told) | chat.called(get("agentops.tool.input"), get("agentops.tool.output"))


def joined(spans: Sequence[Span], parts: Iterable[Span]) -> list[Span]:
    """The spans, with tool calls put into the answers that made them, in order of their start.

    Args:
        spans: Spans that were read.
        parts: Those that stand for a tool call of their parent's answer.
    """
    wanted: dict[tuple[str, str], list[Any]] = {}
    for part in sorted(parts, key=lambda span: (span.start_ns, span.span_id)):
        call = part.trace_id, part.parent_span_id or ""
        wanted.setdefault(call, []).append(part.attributes[CALLED_TOOL])
    return [
        replace(span, attributes=_add_parts(span.attributes, wanted[span.trace_id, span.span_id]))
        if (span.trace_id, span.span_id) in wanted
        else span
        for span in spans
    ]


def _add_parts(attributes: Mapping[str, Any], parts: list[Any]) -> dict[str, Any]:
    """Attributes with further parts in the first answer, unless it has tool calls of its own."""
    answers = objects(loaded(attributes.get(c.OUTPUT_MESSAGES)))
    first = dict(answers[0]) if answers else message("assistant", [])
    own = objects(first.get("parts"))
    if any(part.get("type") == "tool_call" for part in own):
        return dict(attributes)
    first["parts"] = [*own, *parts]
    return {**attributes, c.OUTPUT_MESSAGES: chat.dump([first, *answers[1:]])}
