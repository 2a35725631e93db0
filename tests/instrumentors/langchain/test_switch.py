"""Switching the instrumentor on and off, and programs that hand LangChain bad things."""

import json
import time
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler, CallbackManager
from langchain_core.tools import tool
from tests.instrumentors.langchain.conftest import Chat
from tests.instrumentors.outline import all_named

from lightning_otel import Store, auto_trace
from lightning_otel import conventions as c


def test_programs_own_handlers_stay_as_they_are(chat: Chat, store: Store) -> None:
    """A list of handlers that was given is not changed, and its handlers are told the same."""
    told: list[str] = []

    class Own(BaseCallbackHandler):
        def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
            told.append("start")

        def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
            told.append("end")

    own = [Own()]
    with auto_trace(store=store):
        manager = CallbackManager(own)
        chat().invoke("hello", {"callbacks": manager})
        chat().invoke("hello", {"callbacks": own})

    assert len(own) == 1
    assert told == ["start", "end"] * 2


class Hostile:
    """An object that must not be asked for anything."""

    def __str__(self) -> str:
        time.sleep(5)
        raise AssertionError("asked")

    __repr__ = __str__


BAD_VALUES: dict[str, Any] = {
    "an object": Hostile,
    "half a pair": lambda: "\ud800 and on",
    "100 MB": lambda: "x" * 100_000_000,
    "a generator": lambda: (number for number in range(3)),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_tool_gets_and_gives_bad_values_untouched(name: str, store: Store) -> None:
    """The tool has the very object it was given, and the program what the tool gave."""
    value = BAD_VALUES[name]()
    seen: list[Any] = []

    @tool(response_format="content")
    def take(value: Any) -> Any:
        """Takes anything."""
        seen.append(value)
        return value

    class Quiet(dict[str, Any]):
        # LangChain itself writes a tool's input as text before it runs it.
        def __str__(self) -> str:
            return "quiet"

    started = time.monotonic()
    with auto_trace(store=store) as recording:
        result = take.run(Quiet(value=value)) if name != "an object" else take.func(value)  # type: ignore[attr-defined]  # a plain tool

    assert time.monotonic() - started < 4
    assert result is value or result == value or value != value
    assert seen[0] is value
    if name == "a generator":
        assert list(value) == [0, 1, 2]
    for span in all_named(recording, "execute_tool take"):
        arguments = span.attributes.get(c.TOOL_ARGUMENTS)
        assert arguments is not None
        assert len(arguments) < 9_000_000


def test_tool_that_is_run_with_keywords_of_any_name_is_a_span(store: Store) -> None:
    """LangChain hands them on to its handlers."""

    @tool
    def take(value: int) -> int:
        """Takes a number."""
        return value

    odd = dict.fromkeys(("key", "given", "attributes", "function", "title", "place"), 1)
    with auto_trace(store=store) as recording:
        result = take.run({"value": 7}, **odd)  # type: ignore[arg-type]  # any that are not its own

    (span,) = all_named(recording, "execute_tool take")
    assert (result, json.loads(span.attributes[c.TOOL_ARGUMENTS])) == (7, {"value": 7})
