"""The embeddings format; the vectors themselves are not kept."""

import base64
import json
import struct

import pytest

from lightning_otel.instrumentors.openai import embeddings


@pytest.mark.parametrize("size", [1, 2, 3, 8, 1536])
def test_dimensions_are_the_vectors_length(size: int) -> None:
    """As numbers, and as the base64 text that the client asks for by itself."""
    vector = [0.5] * size
    packed = base64.b64encode(struct.pack(f"<{size}f", *vector)).decode()

    for held in (vector, packed):
        found = embeddings.response_attributes({"data": [{"embedding": held}]})

        assert found == {"gen_ai.embeddings.dimension.count": size}


def test_texts_are_messages_and_ids_are_not() -> None:
    """Each text is a user message; inputs of token ids have no text."""
    one = embeddings.request_content({"input": "a"})
    two = embeddings.request_content({"input": ["a", "b"]})

    assert len(json.loads(one["gen_ai.input.messages"])) == 1
    assert len(json.loads(two["gen_ai.input.messages"])) == 2
    for nonsense in (None, 7, [1, 2], [[1], [2]], {"a": 1}, ["a", 1]):
        assert embeddings.request_content({"input": nonsense}) == {}


@pytest.mark.parametrize("data", [None, 7, "text", [], [None], [{}], [{"embedding": 7}]])
def test_answers_of_nonsense_have_no_dimensions(data: object) -> None:
    """What is no vector has no length."""
    assert embeddings.response_attributes({"model": "toy", "data": data}) == {
        "gen_ai.response.model": "toy"
    }


def test_answers_are_neither_content_nor_streams() -> None:
    """An embedding says nothing and comes at once."""
    assert embeddings.response_content({"data": [{"embedding": [0.5]}]}) == {}
    assert embeddings.assemble([]) == {}
    assert embeddings.is_complete([])
