"""The wire format of the legacy ``/completions``, with vLLM's token ids.

Source: OpenAI's API reference for completions; vLLM puts ``prompt_token_ids`` on each choice there.
"""

from collections.abc import Sequence
from typing import Any, Final

from lightning_otel import conventions as c
from lightning_otel.adapter.tokens import token_content
from lightning_otel.instrumentors.openai import fields
from lightning_otel.instrumentors.openai.fields import Attributes, Json
from lightning_otel.instrumentors.reading import token_counts
from lightning_otel.messages import message, object_of, objects, text_part

OPERATION: Final = c.TEXT_COMPLETION

_GROWING: Final = frozenset({"text", "logprobs", "token_ids"})


def request_attributes(body: Json) -> Attributes:
    """Attributes of the request."""
    return fields.request_scalars(body)


def request_content(body: Json) -> dict[str, str]:
    """The prompts, one user message each; a prompt of token ids is kept as ids."""
    prompt = body.get("prompt")
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list):
        return {}
    if prompts and isinstance(prompts[0], int):
        return token_content(prompts, (), ())
    texts = [text for text in prompts if isinstance(text, str)]
    if not texts:
        return {}
    return {c.INPUT_MESSAGES: fields.dump([message("user", [text_part(text)]) for text in texts])}


def response_attributes(body: Json) -> Attributes:
    """Attributes of the answer."""
    return {
        **fields.response_scalars(body),
        **token_counts(body.get("usage")),
        **fields.finish_reasons(body),
    }


def response_content(body: Json) -> dict[str, str]:
    """Texts, token ids and logprobs of the answer."""
    choices = objects(body.get("choices"))
    messages = [
        message(
            "assistant",
            [text_part(str(choice.get("text") or ""))],
            finish_reason=choice.get("finish_reason"),
        )
        for choice in choices
    ]
    content = {
        c.OUTPUT_MESSAGES: fields.dump(messages),
        **token_content(
            fields.prompt_ids_of(body, choices),
            [choice.get("token_ids") for choice in choices],
            [_read_list(choice, "token_logprobs") for choice in choices],
        ),
    }
    return fields.add_named_ids(content, [_read_list(choice, "tokens") for choice in choices])


def _read_list(choice: Json, name: str) -> list[Any]:
    """A list that stands in a choice's logprobs."""
    found = object_of(choice.get("logprobs")).get(name)
    return found if isinstance(found, list) else []


def is_complete(events: Sequence[Json]) -> bool:
    """Return whether the stream ended."""
    return any(event.get("done") for event in events[-1:])


def assemble(events: Sequence[Json]) -> Json:
    """The answer that the chunks add up to."""
    return fields.assembled(events, lambda chunks: fields.grown(chunks, _GROWING))
