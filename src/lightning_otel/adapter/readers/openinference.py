"""OpenInference: ``openinference.span.kind``, ``llm.*``, ``input.value`` and ``output.value``.

Its calls hold the whole answer as JSON in ``output.value``, and so token ids and logprobs too.

Source: ``openinference-semantic-conventions`` 0.1.42; ``openinference-instrumentation-openai``
0.1.66.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from lightning_otel.adapter.attributes import to_text
from lightning_otel.adapter.readers import chat
from lightning_otel.adapter.readers.chat import drop_none, read_rows
from lightning_otel.messages import content_parts, object_of, objects, read_message
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import parse_json

_KIND: Final = "openinference.span.kind"
_INPUT: Final = "input.value"
_OUTPUT: Final = "output.value"
_PARAMETERS: Final = "llm.invocation_parameters"
_PROMPTS: Final = "llm.prompts"
_MODELS: Final = ("llm.model_name", "embedding.model_name")

MARKS = (_KIND,)

_OPERATIONS: Final = {
    "LLM": c.CHAT,
    "EMBEDDING": c.EMBEDDINGS,
    "AGENT": c.INVOKE_AGENT,
    "TOOL": c.EXECUTE_TOOL,
}
_KEYS: Final = {
    c.INPUT_TOKENS: "llm.token_count.prompt",
    c.OUTPUT_TOKENS: "llm.token_count.completion",
    c.CACHED_TOKENS: "llm.token_count.prompt_details.cache_read",
    c.REASONING_TOKENS: "llm.token_count.completion_details.reasoning",
    c.CONVERSATION_ID: "session.id",
    c.TOOL_NAME: "tool.name",
    c.TOOL_CALL_ID: "tool_call.id",
}
# The id of an answer is a whole's first field; of a stream it comes after the choices, whose tool
# calls have ids of another kind. Only the look-up by a reward's link rests on this.
_ID: Final = re.compile(r'\A\{"id": ?"([^"]+)"|"id": ?"((?:chatcmpl|cmpl|resp|gen)[-_][^"]+)"')

# LlamaIndex' workflows tell the agent of a step at the end of its input, as Python writes it.
_STEP: Final = ".run_agent_step"
_STEP_AGENT: Final = re.compile(r"""current_agent_name='([^'\\]+)'\)"\}\Z""")


def summary(name: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Operation, names, model, id and usage."""
    get = attributes.get
    kind = get(_KIND)
    operation = _OPERATIONS.get(to_text(kind))
    values: dict[str, Any] = {key: get(theirs) for key, theirs in _KEYS.items()}
    if name.endswith(".count_tokens"):  # as of Anthropic's client: no model answers
        operation = None
    if operation == c.CHAT and "llm.prompts.0.prompt.text" in attributes:
        operation = c.TEXT_COMPLETION
    values[c.OPERATION] = operation
    # An agent of this convention may be named by its place in a graph, as AutoGen's are, or by its
    # span alone, as smolagents' are with the method.
    values[c.AGENT_NAME] = get("agent.name") or (
        (get("graph.node.id") or name.removesuffix(".run")) if kind == "AGENT" else None
    )
    if name.endswith(_STEP) and (agent := _STEP_AGENT.search(to_text(get(_INPUT)))):
        values[c.AGENT_NAME] = agent[1]
    if operation in c.CALL_OPERATIONS:
        values[c.PROVIDER] = get("llm.provider") or get("llm.system")
        values[c.RESPONSE_MODEL] = next((model for key in _MODELS if (model := get(key))), None)
        output = get(_OUTPUT)
        match = _ID.search(output) if isinstance(output, str) else None
        values[c.RESPONSE_ID] = match and (match[1] or match[2])
        reason = get("llm.finish_reason")
        values[c.FINISH_REASONS] = [reason] if isinstance(reason, str) else None
    elif kind == "TOOL":
        values[c.TOOL_NAME] = values[c.TOOL_NAME] or name
    return drop_none(values)


def content(span: Span) -> dict[str, Any]:
    """Messages, tools and token ids of a call; arguments and result of a tool."""
    attributes = span.attributes
    kind = attributes.get(_KIND)
    if kind == "TOOL":
        return drop_none(
            {c.TOOL_ARGUMENTS: attributes.get(_INPUT), c.TOOL_RESULT: attributes.get(_OUTPUT)}
        )
    return _read_call(attributes) if kind == "LLM" else {}


def _read_call(attributes: Mapping[str, Any]) -> dict[str, Any]:
    output = attributes.get(_OUTPUT)
    result = parse_json(output)
    body = object_of(result)
    options = object_of(parse_json(attributes.get(_PARAMETERS)))
    choices = objects(body.get("choices"))
    values: dict[str, Any] = dict(chat.choice_tokens(body))
    prompt: list[Any] = _read_messages(attributes, "llm.input_messages")
    prompt = prompt or _read_texts(attributes, "user", _PROMPTS, "prompt")
    is_whole = any("message" in choice for choice in choices)
    answered: list[Any] = chat.read_choices(choices) if is_whole else []
    answered = answered or _read_answers(attributes, body)
    answered = answered or _read_texts(attributes, "assistant", "llm.choices", "completion")
    prompts = attributes.get(_PROMPTS)
    if not prompt and not answered and isinstance(prompts, (list, tuple)):  # as of LlamaIndex
        prompt, answered = chat.make_texts("user", prompts), chat.make_texts("assistant", [output])
    if prompt:
        values[c.INPUT_MESSAGES] = chat.dump(prompt)
    if answered:
        values[c.OUTPUT_MESSAGES] = chat.dump(answered)
    elif isinstance(result, str) and result.startswith("{"):
        values[c.OUTPUT_MESSAGES] = output  # half of a body: the call is unreadable
    values[c.REQUEST_MODEL] = next(
        (name for key in ("model", "model_name") if isinstance(name := options.get(key), str)), None
    )
    values[c.RESPONSE_ID] = body["id"] if isinstance(body.get("id"), str) else None
    values[c.FINISH_REASONS] = chat.read_reasons(choices)
    offered = read_rows(attributes, "llm.tools")
    schemas = [parse_json(_read_mapping(row, "tool").get("json_schema")) for row in offered]
    values[c.TOOL_DEFINITIONS] = chat.dump_tools(schemas)
    return drop_none(values)


def _read_mapping(row: object, key: str) -> Mapping[str, Any]:
    return object_of(object_of(row).get(key))


def _read_answers(attributes: Mapping[str, Any], body: Mapping[str, Any]) -> list[Any]:
    answers = _read_messages(attributes, "llm.output_messages", "assistant")
    if isinstance(body.get("output"), list) and len(answers) > 1:
        answers = [{**answers[0], "parts": [part for item in answers for part in item["parts"]]}]
    thought = body.get("thought")
    if len(answers) == 1 and isinstance(thought, str) and thought:
        answers[0]["parts"] = [*content_parts(thought), *answers[0]["parts"]]
    return answers


def _read_messages(attributes: Mapping[str, Any], prefix: str, role: str = "user") -> list[Any]:
    messages = []
    for row in read_rows(attributes, prefix):
        item = dict(_read_mapping(row, "message"))
        results = row.get("function")
        if item.get("role") == "function" and isinstance(results, list):  # as of AutoGen
            outputs = [object_of(parse_json(text)) for text in results]
            messages += [
                read_message({**body, "role": "tool", "tool_call_id": body.get("call_id")})
                for body in outputs
            ]
            continue
        item.setdefault("content", row.get("thought"))
        if isinstance(item.get("tool_calls"), list):
            calls = [_read_mapping(call, "tool_call") for call in item["tool_calls"]]
            # Of a call without arguments only the name is told.
            item["tool_calls"] = [
                {**call, "function": {"arguments": "{}", **_read_mapping(call, "function")}}
                for call in calls
            ]
        parts = item.get("contents")
        if isinstance(parts, list) and not item.get("content"):
            item["content"] = [_read_part(_read_mapping(part, "message_content")) for part in parts]
        messages.append(read_message(item, role))
    return messages


def _read_part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") == "image":
        url = _read_mapping(_read_mapping(part, "image"), "image").get("url")
        return {"type": "uri", "modality": "image", "uri": url}
    return dict(part)


def _read_texts(attributes: Mapping[str, Any], role: str, prefix: str, inner: str) -> list[Any]:
    return chat.make_texts(
        role, [_read_mapping(row, inner).get("text") for row in read_rows(attributes, prefix)]
    )
