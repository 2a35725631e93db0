"""The legacy completions format, read whole and put together from chunks."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_otel.adapter.tokens import decode_ids, decode_logprobs
from lightning_otel.demo import wire
from lightning_otel.demo.policy import Reply, Tokenizer, pieces
from lightning_otel.instrumentors.openai import completions

texts = st.text("ab é\n", min_size=1, max_size=12)


@given(st.lists(texts, min_size=1, max_size=3), st.booleans())
def test_assembled_chunks_say_what_the_whole_answer_says(
    answers: list[str], has_numbers: bool
) -> None:
    """A streamed answer has the attributes and the content of the same answer sent whole."""
    body: Any = {"model": "toy", "prompt": "hi", "stream_options": {"include_usage": True}}
    if has_numbers:
        body |= {"logprobs": 0, "return_token_ids": True}
    replies = [Reply(text, logprobs=(-0.5,) * len(pieces(text))) for text in answers]
    answer = wire.completion(body, [["hi"]], replies, Tokenizer())

    whole = completions.assemble(list(answer.chunks))

    assert completions.response_attributes(whole) == completions.response_attributes(
        answer.response
    )
    assert completions.response_content(whole) == completions.response_content(answer.response)


def test_stream_is_complete_with_its_closing_mark() -> None:
    """Only the closing mark tells that no further choice comes."""
    chunk = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}

    assert completions.is_complete([chunk, {"done": True}])
    assert not completions.is_complete([chunk])


def test_request_of_token_ids_keeps_the_ids() -> None:
    """A prompt of ids has no text, but is exact."""
    content = completions.request_content({"prompt": [5, 6, 7]})

    (ids,) = decode_ids(content["lightning.prompt.token_ids"])
    assert list(ids) == [5, 6, 7]
    assert "gen_ai.input.messages" not in content


def test_request_of_several_prompts_has_a_message_each() -> None:
    """Each prompt is one user message."""
    content = completions.request_content({"prompt": ["a", "b"]})

    found = json.loads(content["gen_ai.input.messages"])
    assert [message["parts"][0]["content"] for message in found] == ["a", "b"]


@pytest.mark.parametrize("prompt", [None, 7, [], [[1, 2], [3]], [1, "two"], {"a": 1}, [True, 2.5]])
def test_request_of_nonsense_has_no_content(prompt: object) -> None:
    """What is neither text nor ids is left out."""
    assert completions.request_content({"prompt": prompt}) == {}


def test_response_content_leaves_out_logprobs_with_a_gap() -> None:
    """An echoed prompt's first token has none: a list that starts with null is not the answer's."""
    choice = {"text": "a b", "logprobs": {"token_logprobs": [None, -0.5]}, "token_ids": [1, 2]}

    content = completions.response_content({"choices": [choice]})

    assert "lightning.response.logprobs" not in content
    assert list(decode_ids(content["lightning.response.token_ids"])[0]) == [1, 2]


def test_response_content_has_ids_and_logprobs_of_every_choice() -> None:
    """Each choice has its own, an empty one where the server gave none."""
    given = [
        {"index": 0, "text": "a", "token_ids": [1], "prompt_token_ids": [9], "logprobs": None},
        {"index": 1, "text": "b", "logprobs": {"token_logprobs": [-0.25, 0]}},
    ]

    content = completions.response_content({"choices": given})

    assert [list(ids) for ids in decode_ids(content["lightning.response.token_ids"])] == [[1], []]
    logprobs = decode_logprobs(content["lightning.response.logprobs"])
    assert [list(values) for values in logprobs] == [[], [-0.25, 0.0]]
    assert list(decode_ids(content["lightning.prompt.token_ids"])[0]) == [9]
