"""Spans read into calls: what makes a transition, and the reason where nothing does."""

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.adapter.forest import call_attributes, said, text_of, token_attributes

from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter, calls, exactness
from lightning_otel.adapter.tokens import encode_ids, encode_logprobs
from lightning_otel.types import Call, Span


def span(attributes: dict[str, Any], *, end_ns: int | None = 2, status: str = "UNSET") -> Span:
    """A span of one second."""
    return Span("t", "s", None, "chat", 1, end_ns, status=status, attributes=attributes)


def chat(**changes: Any) -> Span:
    """A sound call, with attributes changed; None takes one away."""
    names = {"given": c.INPUT_MESSAGES, "answered": c.OUTPUT_MESSAGES}
    attributes = call_attributes("question", "answer")
    for name, value in changes.items():
        attributes[names[name]] = value
    return span({key: value for key, value in attributes.items() if value is not None})


def read(one: Span, agent: str = "") -> Call:
    """The call, which must be readable."""
    found = calls.read_call(one, agent)
    assert isinstance(found, Call)
    return found


@pytest.mark.parametrize("operation", ["chat", "text_completion", "generate_content"])
def test_read_call_reads_every_generative_operation(operation: str) -> None:
    """Chat, text completion and content generation are calls that become actions."""
    one = span({**call_attributes("question", "answer"), c.OPERATION: operation})

    found = read(one, "planner")

    assert text_of(found.observation) == "question"
    assert text_of(found.action) == "answer"
    assert found.agent == "planner"


@pytest.mark.parametrize("operation", ["execute_tool", "invoke_agent", "", None, ["chat"], 5])
def test_is_call_refuses_other_operations(operation: object) -> None:
    """Tools, agents, and operations of a strange name or type are no calls."""
    assert not calls.is_call(span({c.OPERATION: operation}))


def test_is_call_counts_embeddings() -> None:
    """An embedding is a request to a model, though no action follows from it."""
    one = span({**call_attributes("question", "answer"), c.OPERATION: c.EMBEDDINGS})

    assert calls.is_call(one)
    assert calls.read_call(one, "") == calls.EMBEDDING


def test_read_call_drops_an_incomplete_call() -> None:
    """A call that never ended has no answer to learn from."""
    assert calls.read_call(replace(chat(), end_ns=None), "") == calls.INCOMPLETE


def test_read_call_drops_an_abandoned_stream() -> None:
    """A stream the program left early holds only part of the answer."""
    one = chat()

    found = calls.read_call(replace(one, attributes={**one.attributes, c.ABANDONED: True}), "")

    assert found == calls.ABANDONED


@pytest.mark.parametrize(
    ("attributes", "message", "reason"),
    [
        ({c.ERROR_TYPE: "RateLimitError"}, "slow down", "failed: RateLimitError"),
        ({}, "slow down", "failed: slow down"),
        ({}, "", "failed: the call ended in an error"),
    ],
)
def test_read_call_drops_a_failed_call(
    attributes: dict[str, str], message: str, reason: str
) -> None:
    """A call that ended in an error is dropped, with what is known of the error."""
    one = replace(chat(), status="ERROR", status_message=message)

    found = calls.read_call(replace(one, attributes={**one.attributes, **attributes}), "")

    assert found == reason


def test_read_call_keeps_an_answer_its_client_could_not_use() -> None:
    """An error after the model's answer came to its end leaves a call that can be trained on."""
    one = replace(chat(), status="ERROR", status_message="1 validation error for Plan")

    found = calls.read_call(
        replace(one, attributes={**one.attributes, c.FINISH_REASONS: ["stop"]}), ""
    )

    assert isinstance(found, Call)
    assert found.action


def test_read_call_drops_an_untracked_agent() -> None:
    """Where track_only names other agents, the call is dropped with that reason."""
    one = span({**call_attributes("question", "answer"), c.TRACK_ONLY: ["critic"]})

    assert calls.read_call(one, "planner") == calls.NOT_TRACKED
    assert isinstance(calls.read_call(one, "critic"), Call)


def test_read_call_drops_a_call_without_content() -> None:
    """Where content was not captured there is neither observation nor action."""
    assert calls.read_call(chat(given=None, answered=None), "") == calls.NO_CONTENT


@pytest.mark.parametrize("answered", [None, "[]", '[{"role": "assistant", "parts": []}]'])
def test_read_call_drops_a_call_without_output(answered: str | None) -> None:
    """A model that answered nothing took no action."""
    assert calls.read_call(chat(answered=answered), "") == calls.NO_OUTPUT


@pytest.mark.parametrize("which", ["given", "answered"])
@pytest.mark.parametrize("damaged", ['[{"role": "us', "{}", "[1]", "[" * 100_000, 7])
def test_read_call_drops_messages_it_cannot_read(which: str, damaged: object) -> None:
    """Messages that are no list of objects are never taken for an empty conversation."""
    assert calls.read_call(chat(**{which: damaged}), "") == calls.UNREADABLE


@pytest.mark.parametrize("which", ["given", "answered"])
def test_read_call_says_that_messages_were_cut(which: str) -> None:
    """Messages the store had to cut are told apart from damaged ones."""
    one = chat(**{which: '[{"role": "us'})

    found = calls.read_call(replace(one, attributes={**one.attributes, c.CUT: "{}"}), "")

    assert found == calls.CUT


def test_read_call_keeps_a_cut_call_with_token_ids() -> None:
    """The server's own ids are whole where the messages are not."""
    one = chat(given="[", answered="[")
    attributes = {**one.attributes, c.CUT: "{}", **token_attributes([1, 2], [3])}

    found = read(replace(one, attributes=attributes))

    assert (list(found.prompt_ids), list(found.response_ids)) == ([1, 2], [3])
    assert (found.observation, found.action) == ((), ())


def test_read_call_puts_instructions_first() -> None:
    """System instructions that stand apart open the observation."""
    instructions = json.dumps([{"type": "text", "content": "be brief"}])
    one = span({**call_attributes("question", "answer"), c.SYSTEM_INSTRUCTIONS: instructions})

    found = read(one)

    assert [item["role"] for item in found.observation] == ["system", "user"]
    assert text_of(found.observation) == "be brief question"


def test_read_call_reads_tools_and_every_choice() -> None:
    """Tool definitions and all choices are kept; an empty choice beside a full one is no harm."""
    answered = json.dumps([{"role": "assistant", "parts": []}, said("assistant", "two")])
    one = chat(answered=answered)
    tools = json.dumps([{"type": "function", "name": "add"}])

    found = read(replace(one, attributes={**one.attributes, c.TOOL_DEFINITIONS: tools}))

    assert [tool["name"] for tool in found.tools] == ["add"]
    assert text_of(found.action) == "two"
    assert len(found.action) == 2


def test_read_call_makes_text_whole() -> None:
    """Half a surrogate pair becomes a question mark, as no file takes it; whole pairs stay."""
    one = chat(answered=json.dumps([said("assistant", "\ud83d\ude00 and \ud800")]))

    assert text_of(read(one).action) == "\U0001f600 and ?"


def test_read_call_is_exact_with_the_ids_of_prompt_and_response() -> None:
    """Both lists of ids make a call exact; its logprobs come with them."""
    one = span({**call_attributes("question", "answer"), **token_attributes([1, 2], [3], [-0.5])})

    found = read(one)

    assert found.capture == "exact"
    assert (list(found.prompt_ids), list(found.response_ids)) == ([1, 2], [3])
    assert list(found.logprobs) == [-0.5]


@pytest.mark.parametrize(("prompt", "response"), [([], []), ([1], []), ([], [1])])
def test_read_call_is_text_without_both_lists_of_ids(
    prompt: list[int], response: list[int]
) -> None:
    """A call that lacks one of the two lists was captured as text."""
    one = span({**call_attributes("question", "answer"), **token_attributes(prompt, response)})

    assert read(one).capture == "text"


def test_read_call_takes_the_first_choice_of_several() -> None:
    """Of several choices the ids and logprobs of the first one count."""
    one = span(
        {
            **call_attributes("question", "answer"),
            c.PROMPT_TOKEN_IDS: encode_ids([[1]]),
            c.RESPONSE_TOKEN_IDS: encode_ids([[2, 3], [4]]),
            c.RESPONSE_LOGPROBS: encode_logprobs([[-1.0, -2.0], [-3.0]]),
        }
    )

    found = read(one)

    assert list(found.response_ids) == [2, 3]
    assert list(found.logprobs) == [-1.0, -2.0]


@pytest.mark.parametrize("damaged", ["@@@@", "AAA", "AAAAAAA=", "Aé==", 5, [1, 2], b"AAAA"])
@pytest.mark.parametrize("key", [c.PROMPT_TOKEN_IDS, c.RESPONSE_TOKEN_IDS])
def test_read_call_reads_text_where_ids_are_damaged(key: str, damaged: object) -> None:
    """Ids that are no packed numbers leave a call captured as text, and lose nothing else."""
    one = span({**call_attributes("q", "a"), **token_attributes([1], [2], [-1.0]), key: damaged})

    found = read(one)

    assert (found.capture, found.inexact) == ("text", exactness.DAMAGED_IDS)
    assert text_of(found.action) == "a"


def test_read_call_without_messages_says_what_is_wrong_with_its_tokens() -> None:
    """Where tokens were all that was recorded, what failed their check is the reason."""
    tokens = token_attributes([1], [2, 3], [-1.0])

    found = calls.read_call(span({c.OPERATION: c.CHAT, **tokens}), "")

    assert found == exactness.LENGTHS


def test_explain_reports_each_dropped_call_with_its_reason() -> None:
    """What is dropped is counted as a call and named in the report, beside the sound ones."""
    embedding = span({c.OPERATION: c.EMBEDDINGS})
    never_ended = replace(chat(), span_id="never", end_ns=None)
    sound = replace(chat(), span_id="sound")

    found = TripletAdapter().explain([embedding, never_ended, sound])

    assert found.report.calls == 3
    assert {(each.span_id, each.noun, each.reason) for each in found.report.dropped} == {
        ("s", "call", calls.EMBEDDING),
        ("never", "call", calls.INCOMPLETE),
    }
