"""The wire formats of the legacy completions and of embeddings.

Source: OpenAI's API reference; vLLM's ``return_token_ids``.
"""

from collections.abc import Sequence
from typing import Any

from lightning_otel.adapter.tokens import token_content
from lightning_otel.dialects.chat import Chat
from lightning_otel.dialects.dialect import Attributes, Dialect, Json, dump
from lightning_otel.messages import message, object_of, objects
from lightning_otel.messages.media import text_part
from lightning_otel.types import conventions as c


class Completions(Chat):
    """The legacy ``/completions``."""

    operation = c.TEXT_COMPLETION
    api = ""
    token_limit = "max_tokens"
    instruct = Dialect.instruct  # a text to go on with has no instructions

    def spell_setting(self, name: str, value: Any, body: Json) -> dict[str, Any]:
        """Return a setting; this API has no effort."""
        return {} if name == "reasoning_effort" else {name: value}

    def wanted_ids(self, body: Json) -> dict[str, Any]:
        """Return the fields that ask for token ids; of an echoed prompt, no logprobs.

        An echoed prompt has logprobs too: that answer would be another than the agent asked for.
        """
        return {"return_token_ids": True, **({} if body.get("echo") else {"logprobs": 0})}

    def request_content(self, body: Json) -> dict[str, str]:
        """The prompts, one user message each; a prompt of token ids is kept as ids."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return token_content(prompt, (), ())
        return _dump_texts(_asked_texts(prompt))

    def read_answer(self, choice: Json) -> dict[str, Any]:
        """Return the text of a choice as a message."""
        parts = [text_part(str(choice.get("text") or ""))]
        return message("assistant", parts, finish_reason=choice.get("finish_reason"))

    def read_sampled(self, choice: Json) -> tuple[list[Any], list[Any]]:
        """Return the sampled tokens of a choice and their logprobs."""
        sample = object_of(choice.get("logprobs"))
        tokens, logprobs = sample.get("tokens"), sample.get("token_logprobs")
        return (
            tokens if isinstance(tokens, list) else [],
            logprobs if isinstance(logprobs, list) else [],
        )


class Embeddings(Chat):
    """``/embeddings``; the vectors themselves are not kept."""

    operation = c.EMBEDDINGS
    api = ""
    instruct, sample = Dialect.instruct, Dialect.sample
    wanted_ids = Dialect.wanted_ids
    response_content = Dialect.response_content  # vectors are no message

    def request_attributes(self, body: Json) -> Attributes:
        """Attributes of a request, with its encoding."""
        attributes, encoding = super().request_attributes(body), body.get("encoding_format")
        if isinstance(encoding, str):
            attributes[c.REQUEST_ENCODING_FORMATS] = [encoding]
        return attributes

    def request_content(self, body: Json) -> dict[str, str]:
        """The texts, one user message each; nothing where some are token ids."""
        value = body.get("input")
        texts = _asked_texts(value)
        is_whole = len(texts) == (len(value) if isinstance(value, list) else 1)
        return _dump_texts(texts) if is_whole else {}

    def response_attributes(self, body: Json) -> Attributes:
        """Attributes of an answer, with the length of its vectors."""
        attributes = super().response_attributes(body)
        for item in objects(body.get("data"))[:1]:
            vector = item.get("embedding")
            if isinstance(vector, str):  # base64 of float32, which the client asks for by itself
                attributes[c.EMBEDDING_DIMENSIONS] = (len(vector) * 3 // 4 - vector.count("=")) // 4
            elif isinstance(vector, list):
                attributes[c.EMBEDDING_DIMENSIONS] = len(vector)
        return attributes


def _asked_texts(value: object) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    return [text for text in texts if isinstance(text, str)]


def _dump_texts(texts: Sequence[str]) -> dict[str, str]:
    items = [message("user", [text_part(text)]) for text in texts]
    return {c.INPUT_MESSAGES: dump(items)} if items else {}
