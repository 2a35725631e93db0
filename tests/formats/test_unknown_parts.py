"""Parts that chat has no word for: a row without them where the rest can be said, else none."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.command import invoke

from lightning_otel import Store
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

ODD = {"type": "acme.hologram", "data": [1]}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "content": content}


def calls(*ids: str) -> list[dict[str, Any]]:
    return [{"type": "tool_call", "id": each, "name": "look", "arguments": {}} for each in ids]


def result(call_id: str, response: Any) -> dict[str, Any]:
    return {"type": "tool_call_response", "id": call_id, "response": response}


ANSWER = [text("done")]
CASES: dict[str, tuple[list[tuple[str, list[Any]]], list[Any], list[str] | None]] = {
    "beside a text": ([("user", [text("a"), ODD])], ANSWER, ["a"]),
    "a message of its own": ([("user", [text("a")]), ("user", [ODD])], ANSWER, ["a"]),
    "in a system prompt": (
        [("system", [ODD, text("s")]), ("user", [text("a")])], ANSWER, ["s", "a"],
    ),
    "all that was asked": ([("user", [ODD])], ANSWER, None),
    "all since an answer": (
        [("user", [text("a")]), ("assistant", [text("b")]), ("user", [ODD])], ANSWER, None,
    ),
    "all before an answer": (
        [("user", [ODD]), ("assistant", [text("b")]), ("user", [text("c")])], ANSWER, None,
    ),
    "in an earlier answer": (
        [("user", [text("a")]), ("assistant", [text("b"), ODD]), ("user", [text("c")])],
        ANSWER, None,
    ),
    "all that was asked beside instructions": (
        [("system", [text("s")]), ("user", [ODD])], ANSWER, None,
    ),
    "a result of two": (
        [("user", [text("a")]), ("assistant", calls("1", "2")),
         ("tool", [result("1", "ok"), result("2", [ODD])])],
        ANSWER, None,
    ),
    "in a result": (
        [("user", [text("a")]), ("assistant", calls("1")),
         ("tool", [result("1", [{"type": "text", "text": "ok"}, ODD])])],
        ANSWER, ["a", "", "ok"],
    ),
    "in the answer": ([("user", [text("a")])], [text("done"), ODD], None),
}  # fmt: skip


@pytest.mark.parametrize("name", ["sft", "prompt-completion", "openai-sft"])
@pytest.mark.parametrize("case", CASES)
def test_a_part_without_a_place(tmp_path: Path, case: str, name: str) -> None:
    """Whether there is a row or not, the report names the part."""
    said, answer, kept = CASES[case]
    messages = [{"role": role, "parts": parts} for role, parts in said]
    attributes = {
        c.OPERATION: c.CHAT, c.REQUEST_MODEL: "m", c.RESPONSE_ID: "r",
        c.INPUT_MESSAGES: orjson.dumps(messages).decode(),
        c.OUTPUT_MESSAGES: orjson.dumps([{"role": "assistant", "parts": answer}]).decode(),
    }  # fmt: skip
    store, file = Store(tmp_path / "s.duckdb"), tmp_path / "rows.jsonl"
    store.add([Span("1" * 32, "2" * 16, None, "chat m", 10**18, 10**18 + 5, attributes=attributes)])

    done = invoke("export", name, file, "--store", store.name)

    rows = [orjson.loads(line) for line in file.read_text().splitlines()]
    assert "a part of type 'acme.hologram'" in done.stderr
    if kept is None:
        assert rows == []
    else:
        (row,) = rows
        turns = row["prompt"] if "prompt" in row else row["messages"][:-1]
        assert [turn["content"] or "" for turn in turns] == kept


@pytest.mark.parametrize("name", ["sft", "prompt-completion", "openai-sft"])
def test_an_answer_of_encrypted_reasoning_says_nothing(tmp_path: Path, name: str) -> None:
    """It trains nothing; beside a text it is left away."""
    sealed = {"type": "reasoning", "content": "", "encrypted_content": "gAAA"}
    store, file = Store(tmp_path / "s.duckdb"), tmp_path / "rows.jsonl"
    for number, answer in enumerate([[sealed], [sealed, text("done")]]):
        attributes = {
            c.OPERATION: c.CHAT, c.REQUEST_MODEL: "m", c.RESPONSE_ID: f"r{number}",
            c.INPUT_MESSAGES: orjson.dumps([{"role": "user", "parts": [text("a")]}]).decode(),
            c.OUTPUT_MESSAGES: orjson.dumps([{"role": "assistant", "parts": answer}]).decode(),
        }  # fmt: skip
        ids = (f"{number + 1}" * 32, f"{number + 1}" * 16)
        store.add([Span(*ids, None, "chat m", 10**18, 10**18 + 5, attributes=attributes)])

    invoke("export", name, file, "--store", store.name)

    (row,) = [orjson.loads(line) for line in file.read_text().splitlines()]
    assert (row.get("completion") or row["messages"])[-1] == {
        "role": "assistant",
        "content": "done",
    }
