"""What OpenInference's instrumentors of LangChain, AutoGen and OpenAI really recorded."""

from typing import Any

import pytest
from tests.adapter.fixtures import recorded
from tests.adapter.readers.test_readers import one

from lightning_otel.adapter import TripletAdapter
from lightning_otel.types import Message

CALL = ["tool_call call_1"]
SAID = ["text I will work it out", *CALL]
RESULT = ["tool_call_response call_1"]


def shown(messages: tuple[Message, ...]) -> list[list[str]]:
    """The parts of messages but instructions, each by its kind and what tells it apart."""
    return [
        [f"{part['type']} {part.get('id') or part.get('content')}" for part in message["parts"]]
        for message in messages
        if message["role"] not in ("system", "developer")
    ]


@pytest.mark.parametrize(
    ("name", "only", "expected"),
    [
        ("langchain", "", [([["text hello"]], [["text it is 42"]])]),
        ("responses", "", [([["text go"]], [SAID])]),
        *(
            (
                "autogen",
                only,
                [
                    ([["text go"]], [SAID]),
                    ([["text go"], SAID, RESULT], [["text it is 42"]]),
                ],
            )
            for only in ("", "autogen_agentchat")
        ),
    ],
)
def test_each_request_is_one_whole_call(name: str, only: str, expected: list[Any]) -> None:
    """One for two records that name the model with and without a date; results and texts in it."""
    spans = [span for span in recorded(f"openinference/{name}") if only in span.scope]

    (path,) = TripletAdapter().adapt(spans)

    steps = path.transitions
    assert [(shown(step.observation), shown(step.action)) for step in steps] == expected
    if not only:
        assert [(step.model, bool(step.response_id)) for step in steps] == [
            ("toy-2024-07-18", True)
        ] * len(expected)


def test_arguments_that_are_left_out_are_none_and_not_null() -> None:
    """A tool that takes none is called with none."""
    said = "llm.output_messages.0.message"
    span = one(
        {
            "openinference.span.kind": "LLM",
            "llm.input_messages.0.message.content": "go",
            f"{said}.tool_calls.0.tool_call.function.name": "stop",
        }
    )

    (path,) = TripletAdapter().adapt([span])

    assert path.transitions[0].action[0]["parts"][0]["arguments"] == {}


def test_prompts_in_a_list_are_asked() -> None:
    """As LlamaIndex has them, whose answer is plain text."""
    found = {"openinference.span.kind": "LLM", "llm.prompts": ["Once"], "output.value": "upon"}

    (path,) = TripletAdapter().adapt([one(found)])

    (step,) = path.transitions
    assert (shown(step.observation), shown(step.action)) == ([["text Once"]], [["text upon"]])
