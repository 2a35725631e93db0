"""Row S10: a stored message of any JSON shape damages itself at most.

Valid messages are changed at every depth: other types, missing and doubled keys, much nesting.
"""

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import duckdb
import pytest
from tests.command import invoke
from tests.viewer.browsing import KEY
from tests.viewer.client import Asking

from lightning_otel import LightningSpanProcessor, Store
from lightning_otel.adapter.tokens import encode_ids
from lightning_otel.dataset import formats
from lightning_otel.store.table import json_line
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

DRAWN: Final = 20_000
SHOWN: Final = 20
TABS: Final = ("tree", "waterfall", "chat", "tools", "tokens", "rewards", "attributes", "raw")
VIEWS: Final = ("--tree", "--transitions", "--findings", "--json", "@last")
COMMANDS: Final = (
    "ls", "ls traces --json", "stats", "doctor", "plot", "tail --once --since 1970-01-01",
    "export sft", "export triplets",
)  # fmt: skip
ODD: Final = [
    None, True, 0, -1, 1.5, 1e308, 2**70, "", "x", "tool_call", "blob", "image_url", "\ud800",
    "{", "[1]", [], {}, [[]], [None], [7], {"type": []}, {"url": 7}, float("nan"), float("inf"),
    *(f"deep {levels}" for levels in (60, 300, 480, 700, 1000, 5000)), "9" * 4200,
]  # fmt: skip
CHAT: Final[Any] = json.loads("""[
{"role": "user", "name": "u", "parts": [{"type": "text", "content": "hi"},
  {"type": "uri", "modality": "image", "uri": "http://x/y.png", "mime_type": "image/png"},
  {"type": "blob", "modality": "audio", "mime_type": "audio/wav", "content": "AAAA"},
  {"type": "image_url", "image_url": {"url": "http://x", "detail": "low"}},
  {"type": "file", "file": {"file_data": "data:x;base64,AA", "filename": "n"}}]},
{"role": "assistant", "parts": [{"type": "reasoning", "content": "hm"},
  {"type": "tool_call", "id": "c1", "name": "f", "arguments": {"x": [1, {"y": null}]}},
  {"type": "refusal", "content": "no"}], "finish_reason": "tool_calls"},
{"role": "tool", "parts": [
  {"type": "tool_call_response", "id": "c1", "response": [{"type": "text", "text": "4"}]}]},
{"role": "assistant", "content": null, "reasoning_content": "r", "tool_calls": [
  {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
{"role": "tool", "tool_call_id": "c2", "content": "7"}]""")
ATIF: Final[Any] = {
    "step": {"metrics": {"x": 1}}, "document": {"agent": {}}, "place": [0], "reward": 1,
    "others": [[[1], {}]], "nulls": [["steps", 0, "x"]], "after": [{"source": "user"}],
}  # fmt: skip
ANSWER: Final[Any] = [{**CHAT[1], "atif": ATIF}, CHAT[3]]
TOOLS: Final[Any] = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}},
    {"type": "function", "function": {"name": "g"}}, {"type": "web_search", "name": None},
]  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a value with each of its keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(pairs):
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)


def draw(value: Any, rng: random.Random) -> str:
    """The JSON text of a value that is changed in up to three places, or not at all."""
    root = [deepcopy(value)]
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        container, key = rng.choice(list(places(root)))
        kind = rng.random()
        if kind < 0.15:
            del container[key]
        elif kind < 0.3:
            container[key] = rng.choice(([container[key]], {"type": container[key]}))
        else:
            container[key] = deepcopy(rng.choice(ODD))
        root = root or [None]
    text = json.dumps(root[0])
    for levels in (60, 300, 480, 700, 1000, 5000):
        text = text.replace(f'"deep {levels}"', "[" * levels + "]" * levels)
    return text.replace('"role":', '"role": 7, "role":') if rng.random() < 0.05 else text


def call(number: int, rng: random.Random) -> Span:
    """A model call; ten of them are a rollout, and four rollouts a task."""
    attributes: dict[str, Any] = {
        c.OPERATION: "chat", c.REQUEST_MODEL: "m", c.RESPONSE_ID: f"r{number}", c.TASK_ID: "t",
        c.INPUT_MESSAGES: draw(CHAT[: rng.randrange(1, 6)], rng),
        c.OUTPUT_MESSAGES: draw(ANSWER, rng), c.TOOL_DEFINITIONS: draw(TOOLS, rng),
        c.SYSTEM_INSTRUCTIONS: draw([{"type": "text", "content": "be good"}], rng),
        c.TOOL_ARGUMENTS: draw({"x": 1}, rng), c.TOOL_RESULT: draw([1], rng),
        c.PROMPT_TOKEN_IDS: encode_ids([[1, 2]]), c.RESPONSE_TOKEN_IDS: encode_ids([[3]]),
        c.REWARD_NAME: "primary", c.REWARD_VALUE: number % 2, c.FINISH_REASONS: ["stop"],
        c.INPUT_TOKENS: 7, c.OUTPUT_TOKENS: 3, c.TASK: draw({"q": "x"}, rng),
    }  # fmt: skip
    if rng.random() < 0.3:
        attributes[rng.choice(list(attributes)[5:])] = rng.choice([7, "7", True, ["a"], [7], "x"])
    at, trace = number * 1_000_000_000, f"{number // 10 + 1:032x}"
    scope = rng.choice([c.SCOPE, c.SCOPE, "others"])
    return Span(trace, f"{number + 1:016x}", None, "chat m", at, at + 9, attributes=attributes,
                scope=scope)  # fmt: skip


def odd(path: Path, count: int) -> Store:
    """A store of odd calls."""
    made, rng = Store(path / "traces.duckdb"), random.Random(10)
    made.add(call(number, rng) for number in range(count))
    LightningSpanProcessor().shutdown()  # closes the segment, which is read anew at each look
    assert made.settle().rows == count
    return made


@pytest.mark.timeout(600)
def test_s10_every_format_counts_each_step(tmp_path: Path) -> None:
    """A step is in a row of JSON, or left out with a reason."""
    paths = list(odd(tmp_path, DRAWN).trajectories())
    steps = len({step.span_id for path in paths for step in path.transitions})
    assert steps > DRAWN / 2

    for name in formats.names():
        notes: list[formats.LeftOut] = []
        rows = sum(bool(json_line(row)) for row in formats.rows(name, paths, left_out=notes.append))
        lost = sum(not note.is_row_written for note in notes)
        assert rows > 0, name
        if name in ("triplets", "kto", "openai-sft", "agentlightning"):
            assert rows + lost == steps, name


@pytest.mark.timeout(600)
def test_s10_every_export_command_and_page_goes_on(
    tmp_path: Path, served: Callable[..., str]
) -> None:
    """Each command ends with 0, each page with 200, and a file holds the rows that are counted."""
    store = odd(tmp_path, DRAWN // 10)
    spans = list(store.spans())[:: DRAWN // 10 // SHOWN]
    for name in formats.names():
        path = tmp_path / f"{name}.parquet"
        done = store.export(name, path)
        ((rows,),) = duckdb.sql(f"SELECT count(*) FROM '{path}'").fetchall()
        assert rows == done.rows, name
        assert done.left_out.keys() <= done.span_ids.keys()
        assert (done.in_rows or 0) + sum(done.left_out.values()) == done.steps, name
    ask = Asking(served(store, "", key=KEY))
    paths = ["/", "/transitions", "/traces", "/rollouts", "/transitions/export"]
    for span in spans:
        trace = f"/traces/{span.trace_id}"
        paths += [f"{trace}?span={span.span_id}&tab={tab}" for tab in TABS]
        paths += [trace, f"{trace}/raw", f"{trace}/spans/{span.span_id}"]
    answers = {path: ask.get(path).status for path in paths}
    words = [*COMMANDS, *(f"show {span.trace_id} {view}" for span in spans for view in VIEWS)]
    codes = {line: invoke(*line.split(), "--store", store.name).returncode for line in words}

    assert {path: status for path, status in answers.items() if status != 200} == {}
    assert {line: code for line, code in codes.items() if code} == {}


def test_s10_an_odd_message_leaves_its_own_step_out(store: Store) -> None:
    """The two that ended every export: the report counts each and names its span."""
    calls: list[Span] = []
    odd = ([{"type": ["a"]}], 7, [{"type": "text", "content": "x"}])
    for number, parts in enumerate(odd):
        said = json.dumps([{"role": "user", "parts": parts}])
        own = {c.INPUT_MESSAGES: said, c.OUTPUT_MESSAGES: json.dumps(CHAT[3:4])}
        attributes = {c.OPERATION: "chat", c.REQUEST_MODEL: "m", **own}
        calls.append(Span("1" * 32, f"{number + 1:016x}", None, "chat m", number, number + 1,
                          attributes=attributes))  # fmt: skip
    store.add(calls)

    done = invoke("export", "openai-sft", "--store", store.name)

    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1)
    for kind, span in zip(("'[\"a\"]'", "'number'"), calls, strict=False):
        assert f"a part of type {kind}; export" in done.stderr
        assert f"(first: span {span.span_id})" in done.stderr
