"""The wire format of ``/embeddings``; the vectors themselves are not kept.

Source: OpenAI's API reference for embeddings.
"""

from collections.abc import Sequence
from typing import Final

from lightning_otel import conventions as c
from lightning_otel.instrumentors.openai import fields
from lightning_otel.instrumentors.openai.fields import Attributes, Json
from lightning_otel.instrumentors.reading import token_counts
from lightning_otel.messages import message, objects, text_part

OPERATION: Final = c.EMBEDDINGS


def request_attributes(body: Json) -> Attributes:
    """Attributes of the request."""
    found = fields.request_scalars(body)
    encoding = body.get("encoding_format")
    if isinstance(encoding, str):
        found[c.REQUEST_ENCODING_FORMATS] = [encoding]
    return found


def request_content(body: Json) -> dict[str, str]:
    """The texts, one user message each; inputs of token ids have no text."""
    given = body.get("input")
    texts = given if isinstance(given, list) else [given]
    messages = [message("user", [text_part(text)]) for text in texts if isinstance(text, str)]
    return {c.INPUT_MESSAGES: fields.dump(messages)} if len(messages) == len(texts) else {}


def response_attributes(body: Json) -> Attributes:
    """Attributes of the answer, with the length of its vectors where they came as numbers."""
    found = {**fields.response_scalars(body), **token_counts(body.get("usage"))}
    for item in objects(body.get("data"))[:1]:
        vector = item.get("embedding")
        if isinstance(vector, str):  # base64 of float32, which the client asks for by itself
            found[c.EMBEDDING_DIMENSIONS] = (len(vector) * 3 // 4 - vector.count("=")) // 4
        elif isinstance(vector, list):
            found[c.EMBEDDING_DIMENSIONS] = len(vector)
    return found


def response_content(body: Json) -> dict[str, str]:
    """Nothing: vectors are no message."""
    return {}


def is_complete(events: Sequence[Json]) -> bool:
    """Embeddings are not streamed."""
    return True


def assemble(events: Sequence[Json]) -> Json:
    """Embeddings are not streamed."""
    return {}
