"""Calls of LangChain's models, of the methods through which each request passes once.

A client's instrumentor may take the call; else it is filled with what LangChain's objects hold.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final
from uuid import UUID

from opentelemetry.context import Context
from opentelemetry.util.types import AttributeValue

from lightning_otel import capture
from lightning_otel.capture import operations
from lightning_otel.instrumentors import steps
from lightning_otel.instrumentors.langchain import runs
from lightning_otel.instrumentors.wrappers import Begin, bind_names
from lightning_otel.messages import (
    SETTINGS,
    fields_of,
    flatten_tools,
    message,
    objects,
    part_of,
    read_message,
    read_settings,
    reasoning_part,
    text_part,
    token_counts,
    tool_response_part,
)
from lightning_otel.types import conventions as c
from lightning_otel.types.values import dump

_PROVIDERS: Final = {
    "azure": "azure.ai.openai",
    "google_genai": "gcp.gen_ai",
    "google_vertexai": "gcp.vertex_ai",
    "amazon_bedrock": "aws.bedrock",
    "mistral": "mistral_ai",
    "mistralai": "mistral_ai",
    "xai": "x_ai",
}
"""LangChain's names of providers that the conventions name otherwise."""
_SETTINGS: Final = {f"ls_{name}": name for name in (*SETTINGS, "stop")}
"""By the key of LangChain's metadata a request's field."""
_CACHE_HIT: Final = "cache_hit"
"""The operation of a run that sent no request: it is no call, and used nothing."""
_HOOKS: Final = ("before_agent", "before_model", "after_model", "after_agent")
"""Hooks of middleware that ``create_agent`` makes nodes of, named after both."""
_OWN_ID: Final = ("lc_run-", "run-")
"""How the ids begin that LangChain gives to answers without one."""


class LangChainCall(steps.ModelCall):
    """One call of a model, which is also the run of the method that asks it."""

    def __init__(
        self,
        model: Any,
        operation: str,
        tools: object,
        *,
        run_id: UUID,
        parent: Context,
        content: Sequence[Any],
        metadata: Mapping[str, Any],
        is_stream: bool = False,
    ) -> None:
        """Start the span.

        The ``content`` is read at the end, and only if no client's instrumentor has: to
        write a long history twice would cost more than all the rest. ``parent`` is its context.
        """
        name, provider = metadata.get("ls_model_name"), metadata.get("ls_provider")
        attributes = conversation_of(metadata)
        if middleware := middleware_of(metadata.get("langgraph_node")):
            attributes[c.AGENT_NAME] = middleware  # what it asks is no step of its agent
        if isinstance(provider, str):
            attributes[c.PROVIDER] = _PROVIDERS.get(provider, provider)
        if isinstance(name, str):
            attributes[c.REQUEST_MODEL] = name
        title = name if isinstance(name, str) else type(model).__name__
        super().__init__(operation, title, attributes, parent)
        self._run_id = run_id
        self._given = content
        self._metadata = metadata
        self._tools = tools
        run = runs.LangChainRun("", self.context)
        run.agent, run.integration = metadata.get("lc_agent_name"), metadata.get("ls_integration")
        if is_stream:
            self.operation.attributes[c.REQUEST_STREAM] = True
            run.call = self
        runs.add(run_id, run)

    def end(self, answer: Any, exc: BaseException | None = None) -> None:
        """End it with LangChain's result, if it has one; to be interrupted is no error."""
        runs.take(self._run_id)
        exc = exc and runs.read_cause(exc)
        if exc is not None and not isinstance(exc, GeneratorExit) and runs.is_control_flow(exc):
            exc = None
        super().end(answer, exc)

    def fill(self, answer: Any) -> None:
        """Put on the span what LangChain knows; of several prompts, the answers to all."""
        choices = getattr(answer, "generations", None) or []
        if choices and isinstance(choices[0], list):
            choices = [choice for group in choices for choice in group]
        messages = [fields_of(getattr(choice, "message", None)) for choice in choices]
        reasons = list(map(_finish_reason, choices, messages))
        attributes, metadata = self.operation.attributes, self._metadata
        settings = {_SETTINGS[key]: metadata[key] for key in metadata if key in _SETTINGS}
        if settings:
            attributes.update(read_settings(settings))
        if attributes.get(c.OPERATION) == _CACHE_HIT:
            self.operation.rename(f"{_CACHE_HIT} {metadata.get('ls_model_name') or ''}".strip())
        elif choices:
            _read_facts(messages[0], getattr(answer, "llm_output", None), attributes)
        if finish_reasons := [reason for reason in reasons if reason is not None]:
            attributes[c.FINISH_REASONS] = finish_reasons
        if not capture.process.content.is_kept:
            return
        body = self.operation.body
        body[c.INPUT_MESSAGES] = dump([_read_message(item) for item in self._given])
        if choices:
            body[c.OUTPUT_MESSAGES] = dump(list(map(_read_choice, choices, messages, reasons)))
        if self._tools and isinstance(self._tools, list | tuple):
            body[c.TOOL_DEFINITIONS] = _tools_text(self._tools)


def conversation_of(metadata: Mapping[str, Any]) -> dict[str, AttributeValue]:
    """The thread's id as the conversation's; one of the program's own class is not asked."""
    thread_id = metadata.get("thread_id")
    if thread_id is None:
        return {}
    is_plain = type(thread_id) in (str, int, UUID)
    return {c.CONVERSATION_ID: str(thread_id) if is_plain else f"<{type(thread_id).__name__}>"}


def middleware_of(node: object) -> str:
    """Return the name of the middleware that a node of an agent is a hook of; empty for others."""
    name, _, hook = node.rpartition(".") if isinstance(node, str) else ("", "", "")
    return name if hook in _HOOKS else ""


def _read_facts(
    answer: Mapping[str, Any], model_output: object, facts: dict[str, AttributeValue]
) -> None:
    output = {**model_output} if isinstance(model_output, dict) else {}
    metadata = answer.get("response_metadata")
    if isinstance(metadata, dict):
        output.update(metadata)
    response_id = output.get("id") or answer.get("id")
    if isinstance(response_id, str) and not response_id.startswith(_OWN_ID):
        facts[c.RESPONSE_ID] = response_id
    model = output.get("model_name") or output.get("model")
    if isinstance(model, str):
        facts[c.RESPONSE_MODEL] = model
    facts.update(token_counts(answer.get("usage_metadata") or output.get("token_usage")))


def begin_stream(operation: str) -> Begin:
    """Return what begins the place of a model's stream."""

    def begin(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> runs.RunPlace:
        place = runs.RunPlace()
        place.begin_stream = functools.partial(
            LangChainCall, args[0], operation, kwargs.get("tools")
        )
        return place

    return begin


class _EventsPlace(runs.RunPlace):
    """The place of one answer's events, which LangChain adds up itself."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self._answer = answer

    def over(self, exc: BaseException | None = None) -> None:
        message, run = getattr(self._answer, "output_message", None), runs.find(self.run_id)
        if message is not None and run is not None and run.call is not None:
            run.call.end(SimpleNamespace(generations=[SimpleNamespace(message=message)]))
        super().over(exc)


def begin_events(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> runs.RunPlace | None:
    """Begin the place of ``BaseChatModel._iter_v2_events``, and its call."""
    messages = bind_names(("messages",), args, kwargs)["messages"]
    call = _begin_call(args[0], c.CHAT, kwargs.get("run_manager"), messages, kwargs, is_stream=True)
    if call is None:
        return None
    place = _EventsPlace(kwargs.get("stream"))
    place.take(kwargs["run_manager"].run_id, call.context)
    return place


def begin_chat(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LangChainCall | None:
    """Begin the call of ``BaseChatModel._generate_with_cache``."""
    arguments = bind_names(("messages", "stop", "run_manager"), args, kwargs)
    return _begin_call(args[0], c.CHAT, arguments.get("run_manager"), arguments["messages"], kwargs)


def note_cache_hit(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Note that the call under way is answered from LangChain's cache, and asks no model."""
    call = operations.unclaimed_call()
    if call is not None:
        call.attributes[c.OPERATION] = _CACHE_HIT


def begin_completion(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LangChainCall | None:
    """Begin that of ``BaseLLM._generate_helper``: one request, each of its prompts a run."""
    arguments = bind_names(("prompts", "stop", "run_managers"), args, kwargs)
    managers = arguments.get("run_managers") or [None]
    return _begin_call(args[0], c.TEXT_COMPLETION, managers[0], arguments["prompts"], {})


def _begin_call(
    model: Any,
    operation: str,
    manager: Any,
    content: Sequence[Any],
    options: Mapping[str, Any],
    *,
    is_stream: bool = False,
) -> LangChainCall | None:
    if manager is None:
        return None
    run = runs.find(manager.run_id)
    if run is not None:
        if run.call is not None:
            # A model that has no stream: LangChain asks it once, and gives the answer as one piece.
            run.call.operation.attributes.pop(c.REQUEST_STREAM, None)
        return None
    for handler in manager.handlers:  # most often the first one
        if getattr(handler, "is_lightning_otel", 0) is True:
            break
    else:
        return None
    parent, is_wanted = handler.parent(manager.parent_run_id)
    if not is_wanted:
        return None
    return LangChainCall(
        model,
        operation,
        options.get("tools"),
        run_id=manager.run_id,
        parent=runs.context_in(parent),
        content=content,
        metadata=manager.metadata,
        is_stream=is_stream,
    )


# --- messages, read past the objects' own ``__str__`` and ``__repr__`` ----------------------------

_ROLES: Final = {
    "human": "user",
    "ai": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
}
_REASONINGS: Final = ("reasoning", "thinking")
_MORE: Final = ("name", "tool_calls", "invalid_tool_calls", "additional_kwargs")
_CALLS: Final = frozenset({"tool_use", "tool_call", "function_call", "invalid_tool_call"})
"""Blocks that say again what the message's list of tool calls says."""


def _read_message(item: Any, **extra: Any) -> dict[str, Any]:
    if isinstance(item, str):
        return message("user", [text_part(item)])
    fields = fields_of(item)
    role, content = _role_of(fields), fields.get("content")
    if content and type(content) is str and role != "tool" and not any(map(fields.get, _MORE)):
        # Most messages of a long history are this plain, and each is read anew with every call.
        return message(role, [text_part(content)], **extra)
    if role == "tool":
        return message(role, [tool_response_part(fields.get("tool_call_id"), content)])
    if isinstance(content, list):
        content = [part for block in content if (part := _read_block(block)) is not None]
    more = fields.get("additional_kwargs")
    calls = objects(fields.get("tool_calls")) + objects(fields.get("invalid_tool_calls"))
    spoken = {
        "role": role,
        "content": content,
        "name": fields.get("name"),
        "tool_calls": [{**call, "arguments": call.get("args")} for call in calls],
        "reasoning_content": more.get("reasoning_content") if isinstance(more, dict) else None,
    }
    return read_message(spoken, **extra)


def _role_of(fields: Mapping[str, Any]) -> str:
    kind = fields.get("type")
    if type(kind) is str and kind in _ROLES:
        return _ROLES[kind]
    if not isinstance(kind, str):
        return "user"
    kind = kind.removesuffix("MessageChunk").lower()
    if kind == "chat":
        kind = str(fields.get("role", kind))
    return _ROLES.get(kind, kind)


def _read_choice(choice: Any, fields: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
    if fields:
        return _read_message(choice.message, finish_reason=reason)
    text = getattr(choice, "text", "")
    return message("assistant", [text_part(text)] if text else [], finish_reason=reason)


def _finish_reason(choice: Any, fields: Mapping[str, Any]) -> str | None:
    for info in (getattr(choice, "generation_info", None), fields.get("response_metadata")):
        if info and isinstance(info, dict):
            reason = info.get("finish_reason") or info.get("stop_reason") or info.get("done_reason")
            if isinstance(reason, str):
                return reason
    return None


def _read_block(block: object) -> dict[str, Any] | None:
    if isinstance(block, str):
        return text_part(block)
    if not isinstance(block, dict):
        return {"type": type(block).__name__}
    kind = block.get("type")
    if kind in _REASONINGS:
        return reasoning_part(str(block.get(kind, "")))
    return None if kind in _CALLS else part_of(block)


def _tools_text(tools: Iterable[Any]) -> str:
    return dump([part for tool in tools for part in flatten_tools([tool]) or [_read_tool(tool)]])


def _read_tool(tool: Any) -> dict[str, Any]:
    # Its schema is not asked for: making one runs code of the program's.
    name, description = (capture.read_attribute(tool, key) for key in ("name", "description"))
    spec = {"type": "function", "name": name if isinstance(name, str) else type(tool).__name__}
    return {**spec, "description": description} if isinstance(description, str) else spec
