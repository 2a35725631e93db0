"""What the toy model reads out of a request, by the words in it."""

import json
from typing import Any

import pytest

from lightning_otel.demo.wishes import arguments, example, wished_calls, wished_speaker


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A function as a chat body offers it; all its properties are required."""
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


STRING = {"type": "string"}
CALCULATOR = tool("calculator", expression=STRING)
WEATHER = tool("get_weather", city=STRING)
TRANSFER = tool("transfer_to_cashier")


def user(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    """The instructions."""
    return {"role": "system", "content": text}


def called(name: str, **given: Any) -> list[dict[str, Any]]:
    """A model's message that calls a tool, and the tool's answer."""
    function = {"name": name, "arguments": json.dumps(given)}
    return [
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]


def body(*messages: Any, tools: Any = (CALCULATOR, WEATHER, TRANSFER), **more: Any) -> Any:
    """A chat body; a list among the messages stands for several."""
    flat = [m for each in messages for m in (each if isinstance(each, list) else [each])]
    return {"messages": flat, "tools": list(tools), **more}


def test_wished_calls_takes_every_expression_at_once() -> None:
    """A tool for expressions is called once for each."""
    found = wished_calls(body(user("What is 2*3, and what is 4*5?")))

    assert found == [("calculator", {"expression": "2*3"}), ("calculator", {"expression": "4*5"})]


def test_wished_calls_goes_tool_by_tool_in_the_order_of_the_words() -> None:
    """What was called is not called again; then the next one is, then none."""
    question = user("The weather in 'Oslo' first, then 2*3.")
    weather, sums = called("get_weather", city="Oslo"), called("calculator", expression="2*3")

    assert wished_calls(body(question)) == [("get_weather", {"city": "Oslo"})]
    assert wished_calls(body(question, weather)) == [("calculator", {"expression": "2*3"})]
    assert wished_calls(body(question, weather, sums)) == []
    assert wished_calls(body(question, weather, sums, question)) == [
        ("get_weather", {"city": "Oslo"})
    ]


def test_wished_calls_follows_the_instructions_once() -> None:
    """A hand-over that the instructions name is made once, however the talk goes on."""
    rules = system("Send money questions to the cashier.")
    question = user("I want my money back.")

    assert wished_calls(body(rules, question)) == [("transfer_to_cashier", {})]
    assert wished_calls(body(rules, question, called("transfer_to_cashier"), question)) == []


def test_wished_calls_fills_what_the_last_message_lacks_from_earlier_ones() -> None:
    """The number is found where the user said it, not only in the latest message."""
    refund = tool("get_refund", order={"type": "integer"})
    messages = (system("Give a refund."), user("It is order 42."), user("Please."))

    assert wished_calls(body(*messages, tools=[refund])) == [("get_refund", {"order": 42})]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("auto", []),
        ("none", []),
        ("required", ["calculator"]),
        ({"type": "function", "function": {"name": "get_weather"}}, ["get_weather"]),
        ({"type": "function", "name": "get_weather"}, ["get_weather"]),
    ],
)
def test_wished_calls_obeys_the_choice(choice: Any, names: list[str]) -> None:
    """A tool that must be called is called, whatever the words are."""
    found = wished_calls(body(user("hello"), tool_choice=choice))

    assert [name for name, _ in found] == names
    assert all(list(given.values()) == ["hello"] for _, given in found)


@pytest.mark.parametrize("messages", [[], [user("")], [{"role": "tool", "content": "391"}]])
def test_wished_calls_of_nothing_are_none(messages: list[Any]) -> None:
    """No words, no calls; nor where a tool answered that nobody called."""
    assert wished_calls(body(*messages)) == []


def test_wished_speaker_is_who_spoke_least() -> None:
    """The roles of the list are counted in the conversation that the prompt holds."""
    prompt = "Select the next role from ['planner', 'writer'] to play.\n\nplanner: I plan.\n"

    assert wished_speaker({"messages": [system(prompt)]}) == "writer"
    assert wished_speaker({"messages": [system(prompt + "writer: I write.")]}) == "planner"
    assert wished_speaker({"messages": [user("hello")]}) is None


def test_arguments_hold_what_the_text_holds() -> None:
    """Quoted words, numbers and named choices, in the order they stand in the text."""
    schema = {
        "properties": {
            "first": STRING,
            "second": STRING,
            "count": {"type": "integer"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "optional": STRING,
        },
        "required": ["first", "second", "count", "unit"],
    }

    found = arguments(schema, "From 'here' to \"there\", 3 times, in Fahrenheit.")

    assert found == {"first": "here", "second": "there", "count": 3, "unit": "fahrenheit"}


def test_example_satisfies_nested_schemas() -> None:
    """References, constants, choices and lists get a value of their kind."""
    schema = {
        "$defs": {"Step": {"type": "object", "properties": {"n": {"type": "integer"}}}},
        "type": "object",
        "properties": {
            "kind": {"const": "plan"},
            "step": {"$ref": "#/$defs/Step"},
            "mood": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "level": {"enum": ["low", "high"]},
            "tags": {"type": ["array", "null"]},
        },
    }

    found = example(schema, "with high hopes")

    assert found == {
        "kind": "plan", "step": {"n": 1}, "mood": "text", "level": "high", "tags": [],
    }  # fmt: skip
