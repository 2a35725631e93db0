"""One conversation as the integrations of many frameworks write it into Langfuse."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

SYSTEM, ASKED, RESULT, SAID = "Be brief.", "Weather in Oslo?", "rain", "It rains."
ARGUMENTS = {"city": "Oslo"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
_WRITTEN = json.dumps(ARGUMENTS)
_NAMED = {"name": "weather", "description": "Look."}
_FUNCTION = {**_NAMED, "parameters": SCHEMA}
_OFFER = {"type": "function", "function": _FUNCTION}


class Form(NamedTuple):
    """The words of a framework for the conversation."""

    begin: list[Any]
    call: Any
    result: Any
    answer: Any
    asks: Callable[[Any], Any] = list
    answers: Callable[[Any], Any] = lambda message: message
    beside: Any = None
    made: Any = None
    lacks: tuple[str, ...] = ()


def _say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _part(role: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": kind, **fields}]}


def _told(attributes: dict[str, Any], scope: str = "x") -> dict[str, Any]:
    """What Langfuse keeps of a span that came by OTLP: values that are no text are JSON."""
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in attributes.items()}
    return {"attributes": texts, "scope": {"name": scope}}


_BEGIN = [_say("system", SYSTEM), _say("user", ASKED)]
_MADE = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": _WRITTEN}}
_FLAT = {"id": "c1", "name": "weather", "arguments": _WRITTEN}
_CALL = _say("assistant", None, tool_calls=[_MADE])
_RESULT = _say("tool", RESULT, tool_call_id="c1")
_ANSWER = _say("assistant", SAID)
_CHAT = (_BEGIN, _CALL, _RESULT, _ANSWER)


def _with_tools(messages: Any) -> dict[str, Any]:
    return {"messages": messages, "tools": [_OFFER]}


def _as_text(messages: Any) -> str:
    return json.dumps({"messages": messages})


# --- the Responses API ----------------------------------------------------------------------------
_ITEMS = (
    [_say("user", ASKED)],
    {"type": "function_call", "call_id": "c1", "id": "f1", "name": "weather",
     "arguments": _WRITTEN, "status": "completed"},
    {"type": "function_call_output", "call_id": "c1", "output": RESULT},
    {"type": "message", "id": "m1", "role": "assistant",
     "content": [{"type": "output_text", "text": SAID, "annotations": []}]},
)  # fmt: skip


def _respond(item: Any) -> str:
    thought = {"type": "reasoning", "id": "rs", "summary": []}
    return json.dumps({
        "id": "resp_1", "object": "response", "instructions": SYSTEM, "output": [thought, item],
        "tools": [{"type": "function", **_FUNCTION}], "text": {"format": {"type": "text"}},
    })  # fmt: skip


# --- events of the conventions up to 1.36 ---------------------------------------------------------
def _event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"event.name": f"gen_ai.{kind}", "gen_ai.system": "openai", **fields}


def _choose(message: Any) -> Any:
    return _event("choice", index=0, message=message)


_EVENTS = (
    [_event("system.message", **_BEGIN[0]), _event("user.message", **_BEGIN[1])],
    _event("assistant.message", role="assistant", tool_calls=[_MADE]),
    _event("tool.message", role="tool", id="c1", content=RESULT, name="weather"),
    _say("assistant", [{"kind": "thinking", "text": "hm"}, {"kind": "text", "text": SAID}]),
)


def _kernel(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "gen_ai.event.content": json.dumps(_say(role, content, **more))}


def _choose_text(message: Any) -> dict[str, Any]:
    held = json.loads(message["gen_ai.event.content"])
    body = {"index": 0, "message": {**held, "role": "Assistant"}, "finish_reason": "Stop"}
    return {"gen_ai.event.content": json.dumps(body)}


# --- parts of the conventions ---------------------------------------------------------------------
_PARTS = [_part("system", "text", content=SYSTEM), _part("user", "text", content=ASKED)]
_SPOKEN = {**_part("assistant", "text", content=SAID), "finish_reason": "stop"}
_PYDANTIC = _told({"model_request_parameters": {
    "function_tools": [{**_NAMED, "parameters_json_schema": SCHEMA, "kind": "function"}],
    "output_tools": [],
}}, "pydantic-ai")  # fmt: skip

# --- Google's -------------------------------------------------------------------------------------
_GOOGLE = {**_NAMED, "parameters": {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}}}
_CONFIG = {"system_instruction": SYSTEM, "tools": [{"function_declarations": [_GOOGLE]}]}


def _contents(spelling: str, role: str, **more: Any) -> tuple[list[Any], Any, Any, Any]:
    call, response = spelling.split()
    return (
        [{"role": "user", "parts": [{"text": ASKED}]}],
        {"role": "model", "parts": [{call: {"name": "weather", "args": ARGUMENTS, **more}}]},
        {"role": role,
         "parts": [{response: {"name": "weather", "response": {"result": RESULT}, **more}}]},
        {"role": "model", "parts": [{"text": SAID}]},
    )  # fmt: skip


_SNAKE, _CAMEL = "function_call function_response", "functionCall functionResponse"


def _answer_http(content: Any) -> dict[str, Any]:
    reply = {"sdk_http_response": {"headers": {"server": "x"}}, "model_version": "g"}
    return {**reply, "candidates": [{"content": content, "finish_reason": "STOP"}]}


def _ask_vertex(contents: Any) -> dict[str, Any]:
    rules = {"role": "system", "parts": [{"text": SYSTEM}]}
    tools = [{"functionDeclarations": [_GOOGLE]}]
    return {"systemInstruction": rules, "tools": tools, "contents": contents}


# --- the Vercel AI SDK ----------------------------------------------------------------------------
_VERCEL = [_BEGIN[0], _say("user", [{"type": "text", "text": ASKED}])]


def _vercel(call: str, result: str, said: Any) -> tuple[list[Any], Any, Any, Any]:
    named = {"toolCallId": "c1", "toolName": "weather"}
    asked = {"type": "tool-call", **named, call: ARGUMENTS}
    told = {"type": "tool-result", **named, result: said}
    return _VERCEL, _say("assistant", [asked]), _say("tool", [told]), SAID


def _vercel_tools(schema: str) -> dict[str, Any]:
    tool = json.dumps({"type": "function", **_NAMED, schema: SCHEMA})
    return {"tools": [tool], **_told({"operation.name": "ai.generateText.doGenerate"}, "ai")}


_RAW_CALL = {"toolCallType": "function", "toolCallId": "c1", "toolName": "weather"}

# --- LangChain ------------------------------------------------------------------------------------
_ARGS = {"name": "weather", "args": ARGUMENTS, "id": "c1", "type": "tool_call"}
_USE = {"type": "tool_use", "id": "c1", "name": "weather", "input": ARGUMENTS}


def _among(tool: Any) -> Callable[[Any], Any]:
    return lambda messages: [*messages, _say("tool", tool)]


def _typed(kind: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": kind, "content": content, "additional_kwargs": {}, "id": "u1", **more}


# --- OpenInference, LlamaIndex, Haystack ----------------------------------------------------------
_INFERENCE = _told({"openinference.span.kind": "LLM", "llm.tools.0.tool.json_schema": _OFFER})


def _inner(role: str, **fields: Any) -> dict[str, Any]:
    return {"message": {"role": role, **fields}}


def _blocks(role: str, *blocks: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "additional_kwargs": more, "blocks": list(blocks)}


def _block(text: str) -> dict[str, Any]:
    return {"block_type": "text", "text": text}


_HAYSTACK_CALL = {"tool_name": "weather", "arguments": ARGUMENTS, "id": "c1"}


def _hay(role: str, part: Any) -> dict[str, Any]:
    return {"role": role, "meta": {}, "name": None, "content": [part]}


# --- Bedrock --------------------------------------------------------------------------------------
_BEDROCK_USE = {"toolUse": {"toolUseId": "c1", "name": "weather", "input": ARGUMENTS}}
_BEDROCK_RESULT = {"toolResult": {"toolUseId": "c1", "content": [{"text": RESULT}]}}


def _ask_bedrock(messages: Any) -> dict[str, Any]:
    tool = {"toolSpec": {**_NAMED, "inputSchema": {"json": SCHEMA}}}
    return {"system": [{"text": SYSTEM}], "messages": messages, "toolConfig": {"tools": [tool]}}


def _strand(role: str, block: Any) -> dict[str, Any]:
    return _say(role, json.dumps([block]))


def _ask_anthropic(messages: Any) -> dict[str, Any]:
    rules = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    return {"system": rules, "messages": messages, "tools": [{**_NAMED, "input_schema": SCHEMA}]}


FORMS: dict[str, Form] = {
    "OpenAI": Form(*_CHAT, _with_tools),
    "OpenAI, as text": Form(
        *_CHAT, lambda messages: json.dumps(_with_tools(messages)), json.dumps
    ),
    "LiteLLM": Form(
        *_CHAT, _with_tools, lambda message: {"tool_calls": None, "function_call": None, **message}
    ),
    "choices": Form(
        *_CHAT, _with_tools, lambda message: {"id": "x", "choices": [{"message": message}]}
    ),
    "OpenAI's responses": Form(
        _BEGIN, *_ITEMS[1:], answers=lambda item: [item], lacks=("tools",)
    ),
    "OpenAI Agents by OpenInference": Form(*_ITEMS, json.dumps, _respond),
    "OpenAI Agents by Logfire": Form(*_EVENTS, answers=_choose, lacks=("tools",)),
    "Pydantic AI's events": Form(*_EVENTS, answers=_choose, beside=_PYDANTIC),
    "Pydantic AI": Form(
        _PARTS,
        {"role": "assistant", "parts": [{"type": "thinking", "content": "hm"}, {
            "type": "tool_call", "id": "c1", "name": "weather", "arguments": _WRITTEN}]},
        _part("user", "tool_call_response", id="c1", name="weather", result=RESULT), _SPOKEN,
        json.dumps, lambda message: json.dumps([message]), _PYDANTIC,
    ),
    "Agent Framework": Form(
        _PARTS[1:],
        _part("assistant", "tool_call", id=["r", "c1"], name="weather", arguments=_WRITTEN),
        _part("tool", "tool_call_response", id=["r", "c1"], response=RESULT), _SPOKEN,
        json.dumps, lambda message: json.dumps([message]),
        _told({"gen_ai.system_instructions": [{"type": "text", "content": SYSTEM}],
               "gen_ai.tool.definitions": [_OFFER]}, "agent_framework"),
    ),
    "Microsoft.Extensions.AI": Form(
        _PARTS, _part("assistant", "tool_call", id="c1", name="weather", arguments=ARGUMENTS),
        _part("tool", "tool_call_response", id="c1", response=RESULT), _SPOKEN,
        json.dumps, lambda message: [message],
        {"attributes.gen_ai.tool.definitions": json.dumps([{"type": "function", **_FUNCTION}])},
    ),
    "Semantic Kernel": Form(
        [_kernel("system", SYSTEM), _kernel("user", ASKED)],
        _kernel("assistant", "", tool_calls=[_MADE]), _kernel("tool", RESULT, id="c1"),
        _kernel("assistant", SAID, tool_calls=[]), answers=_choose_text, lacks=("tools",),
    ),
    "ADK": Form(
        *_contents(_SNAKE, "user", id="adk-1"),
        lambda contents: json.dumps({"model": "g", "config": _CONFIG, "contents": contents}),
        lambda content: json.dumps({"content": content, "finish_reason": "STOP"}),
    ),
    "google-genai": Form(
        *_contents(_SNAKE, "user"), lambda contents: {"config": _CONFIG, "contents": contents},
        _answer_http,
    ),
    "Vertex AI": Form(
        *_contents(_CAMEL, "function"), _ask_vertex,
        lambda content: {"response": {"candidates": [{"content": content}], "usageMetadata": {}}},
    ),
    "Vercel AI SDK 4": Form(
        *_vercel("args", "result", RESULT), json.dumps, beside=_vercel_tools("parameters"),
        made=json.dumps([{**_RAW_CALL, "args": _WRITTEN}]),
    ),
    "Vercel AI SDK 5": Form(
        *_vercel("input", "output", {"type": "text", "value": RESULT}), _as_text,
        beside=_vercel_tools("inputSchema"),
        made=json.dumps(_say("assistant", "", tool_calls=json.dumps([
            {**_RAW_CALL, "input": _WRITTEN}]))),
    ),
    "LangChain": Form(
        _BEGIN, _say("assistant", "", additional_kwargs={"tool_calls": [_MADE]}), _RESULT,
        _say("assistant", SAID, additional_kwargs={"refusal": None}), _among(_OFFER),
    ),
    "LangChain, Anthropic": Form(
        _BEGIN, _say("assistant", [{"type": "text", "text": ""}, _USE], tool_calls=[_ARGS]),
        _RESULT, _say("assistant", [{"type": "text", "text": SAID}]),
        _among({**_NAMED, "input_schema": SCHEMA}),
    ),
    "LangChain, Gemini": Form(
        _BEGIN,
        _say("assistant", "", tool_calls=[_ARGS],
             additional_kwargs={"function_call": {"name": "weather", "arguments": _WRITTEN}}),
        _RESULT, _ANSWER, _among({"function_declarations": [_GOOGLE]}),
    ),
    "LangChain.js": Form(
        _BEGIN, _say("assistant", "", additional_kwargs={"tool_calls": [_MADE]}),
        _say("weather", RESULT, additional_kwargs={}), _ANSWER, lacks=("tools",),
    ),
    "LangGraph": Form(
        [_typed("system", SYSTEM), _typed("human", ASKED)], _typed("ai", "", tool_calls=[_ARGS]),
        _typed("tool", RESULT, tool_call_id="c1", name="weather", status="success"),
        _typed("ai", SAID, tool_calls=[]), lambda messages: {"messages": messages},
        lambda message: {"messages": [message]}, {"langgraph_node": "a", "tools": [_OFFER]},
    ),
    "agno": Form(*_CHAT, _as_text, json.dumps, _INFERENCE),
    "BeeAI": Form(
        [_inner("system", content=SYSTEM),
         _inner("user", contents=[{"message_content": {"type": "text", "text": ASKED}}])],
        _inner("assistant", tool_calls=[{"tool_call": _MADE}]),
        _inner("tool", content=RESULT, tool_call_id="c1"), _inner("assistant", content=SAID),
        answers=lambda message: [message], beside=_INFERENCE,
    ),
    "CrewAI": Form(
        *_CHAT, _as_text, lambda message: [_inner(**message)]
        if message is _ANSWER else [_inner("assistant", tool_calls=[{"tool_call": _MADE}])],
        _INFERENCE,
    ),
    "smolagents": Form(
        [_say("system", [{"type": "text", "text": SYSTEM}]), _VERCEL[1]], _CALL,
        _say("tool-response", [{"type": "text", "text": RESULT}]), _ANSWER, _as_text,
        lambda message: json.dumps({**message, "raw": {"id": "x"}}), _INFERENCE, lacks=("tool",),
    ),
    "OpenLLMetry": Form(
        _BEGIN, _say("assistant", "", tool_calls=[_FLAT]), _RESULT, _ANSWER,
        answers=lambda message: [{**message, "finish_reason": "stop"}],
        beside=_told({"llm.request.type": "chat", "llm.request.functions.0.name": "weather",
                      "llm.request.functions.0.parameters": SCHEMA}),
    ),
    "LlamaIndex": Form(
        [_blocks("system", _block(SYSTEM)), _blocks("user", _block(ASKED))],
        _blocks("assistant", {"block_type": "tool_call", "tool_call_id": "c1",
                              "tool_name": "weather", "tool_kwargs": ARGUMENTS},
                tool_calls=[_MADE]),
        _blocks("tool", _block(RESULT), name="weather", tool_call_id="c1"),
        _blocks("assistant", _block(SAID)), _with_tools,
        lambda message: {"message": message, "raw": {"id": "x"}, "delta": None},
    ),
    "Haystack": Form(
        [_hay("system", {"text": SYSTEM}), _hay("user", {"text": ASKED})],
        _hay("assistant", {"tool_call": _HAYSTACK_CALL}),
        _hay("tool", {"tool_call_result": {"result": RESULT, "origin": _HAYSTACK_CALL}}),
        _hay("assistant", {"text": SAID}),
        lambda messages: {"messages": messages, "tools": [{"type": "Tool", "data": _FUNCTION}]},
        lambda message: {"replies": [message]},
    ),
    "AutoGen": Form(
        [{"content": SYSTEM, "type": "SystemMessage"},
         {"content": ASKED, "source": "user", "type": "UserMessage"}],
        {"content": [_FLAT], "thought": None, "source": "a", "type": "AssistantMessage"},
        {"content": [{"content": RESULT, "call_id": "c1", "is_error": False}],
         "type": "FunctionExecutionResultMessage"},
        {"content": SAID}, lambda messages: json.dumps(
            {"messages": messages, "tools": [_FUNCTION]}),
        lambda message: json.dumps({"finish_reason": "x", "content": message["content"],
                                    "usage": {}, "cached": False, "thought": None}),
    ),
    "AG2": Form(*_CHAT, json.dumps, json.dumps, lacks=("tools",)),
    "Anthropic": Form(
        [_say("user", ASKED)],
        _say("assistant", [{"type": "thinking", "thinking": "hm", "signature": "s"}, _USE]),
        _say("user", [{"type": "tool_result", "tool_use_id": "c1", "content": RESULT}]),
        _say("assistant", [{"type": "text", "text": SAID}]), _ask_anthropic,
        lambda message: {"id": "m", "type": "message", "stop_reason": "x", **message},
    ),
    "Anthropic by OpenLLMetry": Form(
        _BEGIN, _strand("assistant", _USE),
        _strand("user", {"type": "tool_result", "tool_use_id": "c1", "content": RESULT}),
        _ANSWER, answers=lambda message: [message], lacks=("tools",),
        made=[_say("assistant", "", tool_calls=[_FLAT], finish_reason="tool_use")],
    ),
    "Bedrock": Form(
        [_say("user", [{"text": ASKED}])], _say("assistant", [_BEDROCK_USE]),
        _say("user", [_BEDROCK_RESULT]), _say("assistant", [{"text": SAID}]), _ask_bedrock,
        lambda message: {"output": {"message": message}, "stopReason": "x"},
    ),
    "Strands": Form(
        [_strand("user", {"text": ASKED})], _strand("assistant", _BEDROCK_USE),
        _strand("tool", _BEDROCK_RESULT), _strand("assistant", {"text": SAID}),
        answers=lambda message: {"finish_reason": "end_turn", "message": message["content"]},
        lacks=("tools", "system"),
    ),
    "Koog": Form(
        _BEGIN, {"role": "assistant", "tool_calls": json.dumps([_MADE])},
        _say("tool", RESULT, id="c1"), {"message": json.dumps(_ANSWER), "index": 0},
        lacks=("tools",),
    ),
    "VAPI": Form(
        _BEGIN, _say("assistant", "", toolCalls=[_MADE]), _say("tool", RESULT, toolCallId="c1"),
        SAID, lacks=("tools",),
    ),
    "LiveKit": Form(
        [_say(each["role"], [each["content"]], type="message") for each in _BEGIN],
        _ITEMS[1], _ITEMS[2], SAID, lambda items: json.dumps({"items": items}),
        made=_CALL, lacks=("tools",),
    ),
}  # fmt: skip


def observe(trace: str, form: Form) -> list[dict[str, Any]]:
    """The observations of a trace: what the agent was given and said, and its two calls."""
    exchanges = [
        (form.asks(form.begin), form.made or form.answers(form.call)),
        (form.asks([*form.begin, form.call, form.result]), form.answers(form.answer)),
    ]
    root = {"id": f"{trace}-r", "traceId": trace, "type": "AGENT", "name": "agent",
            "startTime": "2026-11-01T12:00:00Z", "endTime": "2026-11-01T12:00:09Z",
            "parentObservationId": None, "input": ASKED, "output": SAID}  # fmt: skip
    return [root, *(
        {"id": f"{trace}-{place}", "traceId": trace, "type": "GENERATION", "name": "model",
         "startTime": f"2026-11-01T12:00:0{3 * place + 1}Z",
         "endTime": f"2026-11-01T12:00:0{3 * place + 2}Z", "parentObservationId": f"{trace}-r",
         "model": "m", "input": given, "output": made, "metadata": form.beside or {},
         "usageDetails": {"input": 3, "output": 4}, "level": "DEFAULT"}
        for place, (given, made) in enumerate(exchanges)
    )]  # fmt: skip
