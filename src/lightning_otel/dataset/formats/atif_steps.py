"""Steps of ATIF documents: what a message, a call, a tool's call and its result become.

What an imported document says beyond that lies under :data:`KEY` of its messages and parts, and is
restored. Source: as :mod:`lightning_otel.dataset.formats.atif`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from mimetypes import guess_type
from typing import Any, Final, TypeAlias

from lightning_otel.dataset.formats.format import Row
from lightning_otel.messages import read_message
from lightning_otel.messages.media import to_text
from lightning_otel.messages.parts import part_of
from lightning_otel.types import Message, Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.instants import utc_text

KEY: Final = "atif"
"""Key of a message or part for what its step, call or result says beyond it."""
NESTED: Final = frozenset({"agent", "metrics", "observation", "final_metrics"})
_SOURCES: Final = {"assistant": "agent", "user": "user"}
_MEDIA: Final = frozenset({
    "image/jpeg", "image/png", "image/gif", "image/webp", "audio/wav", "audio/mpeg", "audio/mp4",
    "audio/aac", "audio/ogg", "audio/flac", "audio/webm", "audio/aiff",
})  # fmt: skip
_MICROSECONDS: Final = len("2026-11-24T12:00:00.000000")
Note: TypeAlias = Callable[[str], None]
"""Takes the reason why something has no place in the format."""


def call_step(step: Transition, note: Note) -> Row:
    """Return the agent's step that a call makes, with what the server counted and sampled."""
    made = message_step(step.action[0] if step.action else {"role": "assistant"}, note)
    made.pop("is_copied_context", None)
    metrics = {
        "prompt_tokens": step.input_tokens,
        "completion_tokens": step.output_tokens,
        "prompt_token_ids": list(step.prompt_ids) or None,
        "completion_token_ids": list(step.response_ids) or None,
        "logprobs": list(step.logprobs) or None,
    }
    known = {name: value for name, value in metrics.items() if value is not None}
    is_told = step.reward is None or step.reward == call_record(step).get("reward")
    parts = [part for message in step.action[:1] for part in parts_of(message)]
    refusals = [to_text(part.get("content")) for part in parts if part.get("type") == "refusal"]
    if any(part.get("type") == "reasoning" and not part.get("content") for part in parts):
        note("encrypted reasoning; export triplets, which hold every part")
    stated = {
        "finish_reason": step.finish_reason,
        "response_id": step.response_id,
        "refusal": "\n".join(refusals) or None,
        "reward": None if is_told else step.reward,
    }
    extra: Row = {name: value for name, value in stated.items() if value is not None}
    if "reward" in extra and list(step.rewards) != [c.PRIMARY_REWARD]:
        extra["rewards"] = dict(step.rewards)
    return restore(
        {**made, "timestamp": f"{utc_text(step.start_ns)[:_MICROSECONDS]}Z"},
        {
            "source": "agent",
            "model_name": step.model,
            "metrics": known or None,
            "llm_call_count": 1,
            "extra": extra or None,
        },
    )


def message_step(message: Message, note: Note) -> Row:
    """Return the step that a message makes; an answer in a prompt is copied context."""
    source = _SOURCES.get(str(message.get("role")), "system")
    parts = [part for part in parts_of(message) if part.get("type") != "tool_call_response"]
    if source != "agent":
        return {"source": source, "message": content_of(parts, note)}
    thought = [part for part in parts if part.get("type") == "reasoning"]
    calls = [part for part in parts if part.get("type") == "tool_call"]
    said = [part for part in parts if part.get("type") not in ("reasoning", "tool_call")]
    found: Row = {"source": source, "message": content_of(said, note), "is_copied_context": True}
    if thought:
        found["reasoning_content"] = "\n".join(str(part.get("content", "")) for part in thought)
    if calls:
        found["tool_calls"] = [
            restore(tool_call_of(part, index), part.get(KEY) or {})
            for index, part in enumerate(calls)
        ]
    return found


def tool_call_of(part: Mapping[str, Any], index: int) -> Row:
    """Return the call of a tool that a part asks for; arguments that are no object go to extra."""
    arguments, name = part.get("arguments"), part.get("name")
    found: Row = {
        "tool_call_id": str(part.get("id") or f"call_{index}"),
        "function_name": str(name or ""),
        "arguments": arguments if isinstance(arguments, dict) else {},
    }
    if not isinstance(arguments, dict | None):
        found["extra"] = {"arguments": arguments}
    return found


def result_of(part: Mapping[str, Any], called: Sequence[str], note: Note) -> Row:
    """Return what a tool answered; only a call of the same step can be named."""
    call_id, response = part.get("id"), part.get("response")
    found: Row = {"source_call_id": call_id} if call_id in called else {}
    if not found and len(called) == 1 and call_id is None:
        found = {"source_call_id": called[0]}
    if isinstance(response, list) and response and all(isinstance(each, dict) for each in response):
        return {**found, "content": content_of(response, note)}
    return found if response is None else {**found, "content": to_text(response)}


def content_of(parts: Iterable[Mapping[str, Any]], note: Note) -> str | list[Row]:
    """Return parts as the format writes content: one text, or a list of parts."""
    found: list[Row] = []
    for part in map(part_of, parts):
        media = _media_of(part)
        if part.get("type") in ("text", "refusal"):
            found.append({"type": "text", "text": to_text(part.get("content"))})
        elif media:
            found.append(media)
        else:
            note(f"a part of type {part.get('type')!r}; export triplets, which hold every part")
    if len(found) == 1 and "text" in found[0]:
        return str(found[0]["text"])
    return found or ""


def _media_of(part: Mapping[str, Any]) -> Row | None:
    """Return an image or sound as the format refers to it; None where it has no place for it."""
    path = part.get("uri")
    mime_type = part.get("mime_type") or guess_type(str(path))[0]
    if part.get("type") == "blob":
        path = f"data:{mime_type};base64,{part.get('content')}"
    if str(mime_type) not in _MEDIA or not isinstance(path, str):
        return None
    source = {"media_type": mime_type, "path": path}
    return {"type": str(mime_type).partition("/")[0], "source": source}


def parts_of(message: Message) -> list[Mapping[str, Any]]:
    """Return the parts of a message of the conventions or of the chat API."""
    held = message.get("parts")
    parts = held if isinstance(held, list) else read_message(message)["parts"]
    return [part for part in parts if isinstance(part, Mapping)]


def call_record(step: Transition) -> Row:
    """Return what an answer says beyond its step: of an imported document, or of its cost."""
    return message_record(step.action[0]) if step.action else {}


def message_record(message: Message) -> Row:
    """Return the same of any message."""
    record = message.get(KEY)
    return dict(record) if isinstance(record, Mapping) else {}


def restore(natural: Row, rest: Mapping[str, Any]) -> Row:
    """Return an object of the format with the rest of it; a reward given since stays."""
    found = {**natural, **rest}
    for name in NESTED & natural.keys() & rest.keys():
        if natural[name] is not None and rest[name] is not None:
            found[name] = restore(natural[name], rest[name])
    if natural.get("extra") and "extra" in rest:
        found["extra"] = {**(rest["extra"] or {}), **natural["extra"]}
    return {name: value for name, value in found.items() if value is not None}
