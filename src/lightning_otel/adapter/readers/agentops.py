"""AgentOps 0.4 and OpenLLMetry: spans of agents and tools around calls in ``gen_ai.*``.

The tools an answer of AgentOps asks for are on spans of their own below the call; they are put back
into the answer. Agent Lightning 0.3 records by AgentOps, with token ids beside; its rewards,
messages, objects and operations have the keys of ours. A chain of LangChain is an agent by its
type, as it is to Agent Lightning.

Source: AgentOps 0.4.21, ``agentops/semconv``; ``opentelemetry-semantic-conventions-ai`` 0.5;
``traceloop-sdk`` 0.62; Agent Lightning 0.3.0, ``adapter/triplet.py``, ``semconv.py``,
``instrumentation/agentops.py``, ``tracer/otel.py``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from lightning_otel.adapter.attributes import get_text
from lightning_otel.adapter.readers import chat
from lightning_otel.adapter.readers.chat import drop_none
from lightning_otel.adapter.tokens import token_content
from lightning_otel.messages import message, objects, tool_call_part
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import parse_json

_KINDS: Final = ("traceloop.span.kind", "agentops.span.kind")
_OPERATIONS: Final = {
    "agent": (
        c.INVOKE_AGENT, c.AGENT_NAME, ("traceloop.entity.name", "agent.name", "operation.name"),
    ),
    "tool": (
        c.EXECUTE_TOOL,
        c.TOOL_NAME,
        ("traceloop.entity.name", "operation.name", "tool.name", "langchain.tool.name"),
    ),
}  # fmt: skip
"""Operation, and the keys of its name: ours and theirs."""
_CHAIN: Final = "langchain.chain.type"
_TOLD: Final = {
    c.TOOL_ARGUMENTS: ("tool.parameters", "langchain.tool.input"),
    c.TOOL_RESULT: ("tool.result", "langchain.tool.output"),
}
_INPUTS: Final = ("agentops.tool.input", "traceloop.entity.input")
_OUTPUTS: Final = ("agentops.tool.output", "traceloop.entity.output")
_CALL_TYPE: Final = "tool.call.type"
CALLED_TOOL: Final = "lightning.called_tool"
"""On a span that stands for a part of its parent's answer, while spans are read: that part."""

_PROMPT_IDS: Final = "prompt_token_ids"
_RESPONSE_IDS: Final = "response_token_ids"
_LOGPROBS: Final = "logprobs.content"
_REWARDS: Final = ("agentops.task.output", "agentops.entity.output")
"""Where the deprecated ``@reward`` leaves a reward, as JSON."""
_OLD_REWARD: Final = "reward"
"""Where Agent Lightning 0.2 left it, on spans of its own name."""

MARKS = (
    *_KINDS, _CALL_TYPE, _CHAIN, _PROMPT_IDS, _RESPONSE_IDS, _LOGPROBS, *_REWARDS, _OLD_REWARD,
)  # fmt: skip


def summary(name: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the operation and the names of agents and tools, and a reward given the old way."""
    return {**_name_work(attributes), **_read_reward(name, attributes)}


def _read_reward(name: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    for key in _REWARDS:
        text = attributes.get(key)
        if isinstance(text, str) and '"reward"' in text:
            body = parse_json(text)
            if isinstance(body, Mapping) and body.get("type") == "reward":
                value = body.get("value")
                return {} if value is None else {c.REWARD_VALUE: value}
    old = attributes.get(_OLD_REWARD)
    is_old = old is not None and name.startswith("agentlightning.")
    return {c.REWARD_VALUE: old} if is_old and c.REWARD_VALUE not in attributes else {}


def _name_work(attributes: Mapping[str, Any]) -> dict[str, Any]:
    kind = _first_of(attributes, _KINDS) or ""
    if kind == "session":
        return {c.SESSION: True}
    if kind not in _OPERATIONS or _CALL_TYPE in attributes:
        return drop_none({c.AGENT_NAME: get_text(attributes, _CHAIN)})
    operation, key, theirs = _OPERATIONS[kind]
    return drop_none({c.OPERATION: operation, key: _first_of(attributes, theirs)})


def _first_of(attributes: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    return next((text for key in keys if (text := get_text(attributes, key))), None)


def content(span: Span) -> dict[str, Any]:
    """Tokens of a call; a tool's arguments and result; or the part of an answer that it is."""
    get = span.attributes.get
    logprobs = chat.logprobs_of(parse_json(get(_LOGPROBS)))
    values = token_content(get(_PROMPT_IDS), [get(_RESPONSE_IDS)], [logprobs])
    return {**_read_tool(span.attributes), **values}


def _read_tool(attributes: Mapping[str, Any]) -> dict[str, Any]:
    if _CALL_TYPE in attributes:
        get = attributes.get
        part = tool_call_part(get("tool.call.id"), get("tool.name"), get("tool.parameters"))
        return {CALLED_TOOL: part}
    if _first_of(attributes, _KINDS) != "tool":
        return {}
    values = drop_none({key: _first_of(attributes, theirs) for key, theirs in _TOLD.items()})
    # Decorators tell {"args": …, "kwargs": …}, and what the function gave, as JSON.
    arguments, result = parse_json(_first_of(attributes, _INPUTS)), _first_of(attributes, _OUTPUTS)
    if isinstance(arguments, Mapping):
        options = arguments.get("kwargs")
        is_plain = isinstance(options, Mapping) and not arguments.get("args")
        values[c.TOOL_ARGUMENTS] = chat.dump(options if is_plain else arguments)
    if result is not None:
        body = parse_json(result)
        values[c.TOOL_RESULT] = body if isinstance(body, str) else result
    return values


def join_tool_calls(spans: Sequence[Span], parts: Iterable[Span]) -> list[Span]:
    """Return the spans, with tool calls put into the answers that made them, in order of start."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for part in sorted(parts, key=lambda span: (span.start_ns, span.span_id)):
        call = part.trace_id, part.parent_span_id or ""
        groups.setdefault(call, []).append(part.attributes[CALLED_TOOL])
    return [_add_parts(span, groups.get((span.trace_id, span.span_id))) for span in spans]


def _add_parts(span: Span, parts: list[Any] | None) -> Span:
    if not parts:
        return span
    answers = objects(parse_json(span.attributes.get(c.OUTPUT_MESSAGES)))
    first = dict(answers[0]) if answers else message("assistant", [])
    items = objects(first.get("parts"))
    if any(part.get("type") == "tool_call" for part in items):
        return span
    first["parts"] = [*items, *parts]
    dumped = chat.dump([first, *answers[1:]])
    return replace(span, attributes={**span.attributes, c.OUTPUT_MESSAGES: dumped})
