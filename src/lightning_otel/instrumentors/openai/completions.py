"""The wire format of the legacy ``/completions``, with vLLM's token ids.

Source: OpenAI's API reference for completions; vLLM puts ``prompt_token_ids`` on each choice there.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning_otel import conventions as c
from lightning_otel.adapter.messages import message, text_part
from lightning_otel.instrumentors.openai import fields
from lightning_otel.instrumentors.openai.fields import Attributes, Json

OPERATION: Final = c.TEXT_COMPLETION


def request_attributes(body: Json) -> Attributes:
    """Attributes of the request."""
    return fields.request_scalars(body)


def request_content(body: Json) -> dict[str, str]:
    """The prompts, one user message each; a prompt of token ids is kept as ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt:
        if isinstance(prompt[0], int):
            return fields.token_content(list(prompt), (), ())
        if not isinstance(prompt[0], str):
            return {}
        texts = [str(item) for item in prompt]
    else:
        texts = [prompt] if isinstance(prompt, str) else []
    return {c.INPUT_MESSAGES: fields.dump([message("user", [text_part(text)]) for text in texts])}


def response_attributes(body: Json) -> Attributes:
    """Attributes of the answer."""
    reasons = [
        reason
        for choice in _choices(body)
        if isinstance(reason := choice.get("finish_reason"), str)
    ]
    found = {**fields.response_scalars(body), **fields.usage(body)}
    if reasons:
        found[c.FINISH_REASONS] = reasons
    return found


def response_content(body: Json) -> dict[str, str]:
    """Texts, token ids and logprobs of the answer."""
    choices = _choices(body)
    messages = [
        message(
            "assistant",
            [text_part(str(choice.get("text") or ""))],
            finish_reason=choice.get("finish_reason"),
        )
        for choice in choices
    ]
    prompt_ids = body.get("prompt_token_ids") or next(
        (choice["prompt_token_ids"] for choice in choices if choice.get("prompt_token_ids")), None
    )
    return {
        c.OUTPUT_MESSAGES: fields.dump(messages),
        **fields.token_content(
            prompt_ids,
            [choice.get("token_ids") for choice in choices],
            [(choice.get("logprobs") or {}).get("token_logprobs") for choice in choices],
        ),
    }


def _choices(body: Json) -> list[Json]:
    return [choice for choice in body.get("choices") or () if isinstance(choice, Mapping)]


def is_complete(events: list[Json]) -> bool:
    """Whether the stream said so."""
    return any(event.get("done") for event in events[-1:])


def assemble(events: list[Json]) -> Json:
    """The answer that the chunks add up to."""
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for name, value in event.items():
            if name not in ("choices", "done") and value is not None:
                whole[name] = value
        for chunk in _choices(event):
            choice = choices.setdefault(chunk.get("index") or 0, {"logprobs": {}})
            for name, value in chunk.items():
                if name == "logprobs":
                    for kind, tokens in (value or {}).items():
                        choice["logprobs"][kind] = fields.extended(
                            choice["logprobs"].get(kind), tokens
                        )
                elif name in ("text", "token_ids"):
                    choice[name] = fields.extended(choice.get(name), value)
                elif value is not None:
                    choice[name] = value
    whole["choices"] = [choices[index] for index in sorted(choices)]
    return whole
