"""``show``: the tree, the steps and the picture; and how values become text, safe and fit."""

import csv
import io
import json
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from tests.adapter.forest import SECOND, Forest, draw, reward_attributes, said
from tests.cli.conftest import EVIL, Cli
from tests.test_picture import CHAIN, LOOPED

from lightning_otel import Store
from lightning_otel.cli.output import (
    format_age_since,
    format_ns,
    format_size,
    json_text,
    printable,
    program_command,
    to_json_value,
)
from lightning_otel.cli.spans import tree_lines
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.text import one_line
from lightning_otel.views.folding import select_rows
from lightning_otel.views.previews import preview_spans
from lightning_otel.views.trace import Row, SpanKey, make_trace

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def preview_rows(rows: Sequence[Row], cells: int | None) -> Mapping[SpanKey, str]:
    return preview_spans([row.span for row in rows], cells)


def told(spans: list[Span], limit: int | None = None, width: int | None = None) -> list[str]:
    found = make_trace(spans)
    is_shown = None if limit is None else select_rows(found.rows, limit)
    lines = tree_lines(found, preview_rows, width, is_shown)
    return [one_line("".join(text for text, _ in line), width) for line in lines]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one rollout of two agents and three branches, rewards of all kinds, faults."""
    forest = Forest(rollout_id="trip")
    asked = [said("user", "日本へ行く 🦆🦆")]
    with forest.inside(c.SPAN_ROLLOUT, **{c.OPERATION_NAME: "trip"}):
        with forest.agent("planner"):
            forest.call("plan", asked, response_id="resp-1")
            after = [*asked, said("assistant", "plan"), said("user", EVIL)]
            left, right = forest.open_call("left", after), forest.open_call("right", after)
            forest.close(left, right)
            forest.reward(("correct", 1.0), ("short", 0.5), span_id=right)
        with forest.agent("writer"):
            forest.make(
                "execute_tool search",
                {c.OPERATION: c.EXECUTE_TOOL, c.TOOL_ARGUMENTS: '{"q": 1}', c.TOOL_RESULT: "7"},
            )
            forest.call("text")
            failed = {c.OPERATION: c.CHAT, c.ERROR_TYPE: "RateLimit"}
            forest.make("chat", failed, status="ERROR", status_message="slow down")
            forest.open("chat", {c.OPERATION: c.CHAT})
    forest.reward(0.25)
    forest.reward(9.0, span_id="f" * 16)
    path = tmp_path_factory.mktemp("trip") / "traces.duckdb"
    Store(path).add(forest.spans)
    return path


def test_tree_says_who_did_what_and_where_credit_went(cli: Cli, path: Path) -> None:
    """Steps are numbered by agent and branch; each reward names its step, or why it has none."""
    lines = cli("show", "trip", "--tree", "--store", path).stdout.splitlines()

    text = [line.lstrip("│├└─ ") for line in lines]
    assert text[0].startswith("rollout trip (trip)")
    assert text[1].startswith("invoke_agent planner  ")
    assert text[2].startswith("planner #0  chat  1.0 s  日本へ行く 🦆🦆 → plan")
    assert [line.split("  ")[0] for line in text[3:5]] == ["planner #1", "planner #1 branch 1"]
    assert "branch: " in text[4] or "reward 1" in text[4]
    assert text[5].startswith("reward correct 1, short 0.5 for ")
    assert text[5].endswith("→ planner #1 branch 1 by link")
    assert text[7] == 'execute_tool search  1.0 s  {"q": 1} → 7'
    assert "ERROR RateLimit  slow down" in text[9]
    assert "left out: incomplete: the call never ended" in text[10]
    assert text[11] == (
        "reward 0.25  → planner #1 branch 1 by outcome: the last step of the main conversation"
    )
    assert "left out: its link" in text[12]


def test_tree_as_json_is_what_became_of_each_span(cli: Cli, path: Path) -> None:
    """Programs get each node with its parent, its step and what its credit went to."""
    nodes = json.loads(cli("show", "trip", "--tree", "--json", "--store", path).stdout)
    spans = json.loads(cli("show", "trip", "--json", "--store", path).stdout)

    by_id = {node["span_id"]: node for node in nodes}
    (judged,) = (node for node in nodes if node["name"] == c.SPAN_ANNOTATION and node["depth"] > 1)
    assert len(nodes) == len(spans) == 13
    assert by_id[judged["credited_to"][0]]["label"] == "planner #1 branch 1"
    assert by_id[judged["credited_to"][0]]["reward"] == 1.0
    assert nodes[0]["parent_span_id"] is None
    assert {node["kind"] for node in nodes} == {"rollout", "agent", "call", "tool", "reward"}
    assert "attributes" in spans[0]


def test_transitions_name_their_branch(cli: Cli, path: Path) -> None:
    """One line a step, on its branch with its cause, and the reasons for what is in none."""
    done = cli("show", "trip", "--transitions", "--store", path)

    rows = list(csv.DictReader(io.StringIO(done.stdout), delimiter="\t", quoting=csv.QUOTE_NONE))
    assert [(row["agent"], row["step"], row["action"]) for row in rows] == [
        ("planner", "0", "plan"),
        ("planner", "1", "left"),
        ("planner", "1", "right"),
        ("writer", "0", "text"),
    ]
    assert rows[2]["branch"].startswith("1")
    assert [row["reward"] for row in rows] == ["", "", "1.0", ""]
    assert "left out: 1 × incomplete: the call never ended" in done.stderr
    assert "left out: 1 × its link" in done.stderr


@pytest.mark.parametrize(
    ("env", "is_coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_terminal_gets_lines_that_fit(
    terminal: Callable[..., str], path: Path, env: dict[str, str], is_coloured: bool
) -> None:
    """Wide signs are counted as such, and who wants no colours, or knows none, gets none."""
    coloured = terminal("show", "trip", "--store", path, columns=60, env=env)

    text = COLOURS.sub("", coloured)
    assert max(map(cell_len, text.splitlines()[:13])) <= 60
    assert (coloured != text) == is_coloured
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(text)


@pytest.mark.pain(13)
def test_terminal_is_not_flooded(terminal: Callable[..., str], cli: Cli, tmp_path: Path) -> None:
    """Of many spans a terminal gets so many and hears of the rest; a pipe gets all."""
    forest = Forest(rollout_id="many")
    with forest.inside("loop"):
        for index in range(300):
            forest.make(f"work {index}")
    path = tmp_path / "many.duckdb"
    Store(path).add(forest.spans)

    lines = COLOURS.sub("", terminal("show", "many", "--store", path)).splitlines()
    piped = cli("show", "many", "--store", path).stdout.splitlines()

    assert "├─ ⋯ 101 more spans" in lines
    assert lines[201] == "200 of 301 spans · --all for the rest, or show SPAN for what is below one"
    assert len(piped) == 301


def test_cycles_and_deep_chains_are_told() -> None:
    """Parents in a circle, and each inside the one before, lose no span."""
    lines = told(CHAIN, limit=200, width=80)

    names = sorted(line.lstrip("└─ ").split("  ")[0] for line in told(LOOPED))
    assert names == ["one", "self", "two"]
    assert len(lines) == 201
    assert lines[-1].endswith("⋯ 19,800 more spans")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("value", ["text", None, True, [1], float("nan"), 10**400])
def test_odd_rewards_are_told(value: object) -> None:
    """A reward that is no number is shown as what it is."""
    attributes = {c.REWARD_VALUE: value, c.REWARD_NAME: "odd"}
    odd = {c.INPUT_MESSAGES: 3, c.OUTPUT_MESSAGES: "[", c.OUTPUT_TOKENS: "many", c.MARK_NAME: 7}
    spans = [
        Span("t", "r", None, c.SPAN_ANNOTATION, 1, 2, attributes=attributes),
        Span("t", "s", None, "chat", 1, 2, attributes=odd),
    ]

    lines = told(spans)

    assert lines[1].startswith("chat 7") or lines[0].startswith("chat 7")
    assert any(line.startswith(("reward", c.SPAN_ANNOTATION)) for line in lines)


def test_picture_is_written(cli: Cli, path: Path, tmp_path: Path) -> None:
    """--svg writes a file that only its owner reads, or to stdout."""
    made = tmp_path / "trip.svg"

    done = cli("show", "trip", "--svg", made, "--store", path)
    piped = cli("show", "trip", "--svg", "-", "--store", path)
    refused = cli("show", "trip", "--svg", tmp_path / "no" / "x.svg", "--store", path)
    confused = cli("show", "trip", "--svg", made, "--transitions", "--store", path)

    assert done.stderr == f"13 spans → {made}\n"
    assert made.stat().st_mode & 0o077 == 0
    assert made.read_text() == piped.stdout.rstrip("\n")
    assert ElementTree.fromstring(piped.stdout).tag.endswith("svg")
    assert (refused.returncode, confused.returncode) == (2, 2)
    assert "name a writable place" in refused.stderr


def test_a_late_reward_is_found_by_its_own_ids(cli: Cli, tmp_path: Path) -> None:
    """A reward in a trace of its own is shown with the step it was given to, whatever names it."""
    forest = Forest()
    call = forest.call("a")
    given = reward_attributes(1.0, span_id=call)
    late = Span("c" * 32, "d" * 16, None, c.SPAN_ANNOTATION, SECOND, SECOND, attributes=given)
    path = tmp_path / "late.duckdb"
    Store(path).add([*forest.spans, late])

    by_trace = cli("show", "ccc", "--store", path)
    by_span = cli("show", "ddd", "--store", path)

    step, reward = by_trace.stdout.splitlines()
    assert step.startswith("#0  chat  reward 1")
    assert reward.endswith("→ #0 by link")
    assert by_span.stdout.startswith(f"reward 1 for {call}")


def test_a_long_rollout_shows_each_step_and_its_reward(cli: Cli, tmp_path: Path) -> None:
    """Each call has its number, and each reward the call that it was given to."""
    forest = Forest(rollout_id="many")
    with forest.agent("planner"):
        for turn in range(300):
            forest.call(f"answer {turn}", [said("user", f"task {turn}")], response_id=f"r-{turn}")
            forest.reward(1.0)
    store = Store(tmp_path / "many.duckdb")
    store.add(replace(span, scope=c.SCOPE) for span in forest.spans)

    rows = json.loads(cli("show", "many", "--tree", "--json", "--store", store.name).stdout)

    assert [row["label"] for row in rows if row["kind"] == "call"] == [f"#{n}" for n in range(300)]
    assert len(rows) == 601
    ids = {row["label"]: row["span_id"] for row in rows}
    credited = [row["credited_to"] for row in rows if row["kind"] == "reward"]
    assert credited == [[ids[f"#{n}"]] for n in range(300)]


def test_a_retraction_and_what_waits_are_told(cli: Cli, tmp_path: Path) -> None:
    """What counts for no step is a line too, with the reason."""
    drawing = "root( a !1@as=given !undo@span=given !2@span=gone )"
    path = tmp_path / "t.duckdb"
    Store(path).add(draw(drawing).spans)

    text = cli("show", "@last", "--store", path).stdout

    assert re.search(r"reward 1 +left out: it was retracted", text)
    assert "retraction" in text
    assert re.search(r"reward 2 for \S+ +left out: its link", text)


UNSAFE = {
    *map(chr, range(32)), *map(chr, range(127, 160)), *map(chr, range(0x2028, 0x202F)),
    *map(chr, range(0x2066, 0x206A)), *"\u061c\u200e\u200f",
}  # fmt: skip
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN = st.none() | st.booleans() | st.integers() | TEXTS


@settings(deadline=None)
@given(st.text(), st.integers(2, 60))
def test_shown_is_one_safe_line_that_can_be_cut(text: str, width: int) -> None:
    """No part of it steers the terminal; too wide, it ends in an ellipsis, wide signs as two."""
    line = printable(text)
    found = one_line(text, width)

    assert not UNSAFE & set(line)
    assert len(line) == len(text)
    assert line.encode() is not None
    assert cell_len(found) <= width
    assert found == line or found.endswith("…")


@settings(deadline=None)
@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner)))
def test_json_text_is_safe_and_loses_nothing(value: object) -> None:
    """JSON holds the very value, in characters that cannot steer the terminal."""
    text, indented = json_text(value), json_text(value, indent=2)

    assert not UNSAFE & set(text + indented.replace("\n", ""))
    assert json.loads(text) == json.loads(indented) == value


def _age_of(ago_s: int) -> str:
    return format_age_since(time.time_ns() - ago_s * 1_000_000_000)


@pytest.mark.parametrize(
    ("words", "value", "wanted"),
    [
        (printable, None, ""),
        (printable, 1.5, "1.5"),
        (printable, {"a": [1]}, '{"a": [1]}'),
        (printable, [1, "ä"], '[1, "ä"]'),
        (printable, "tab\tline\n", "tab line "),
        (printable, "\ud800", "�"),
        (to_json_value, {1: (b"ab", math.nan), "x": 2j}, {"1": ["YWI=", None], "x": "2j"}),
        *((format_ns, ns, text) for ns, text in (
            (0, "0 ms"), (8_400_000, "8 ms"), (1_240_000_000, "1.2 s"), (600 * 10**9, "10 min"))),
        *((format_size, size_bytes, text) for size_bytes, text in (
            (0, "0 kB"), (51_300, "51 kB"), (2_340_000, "2.3 MB"))),
        *((_age_of, ago, text) for ago, text in (
            (-5, "0 s"), (5, "5 s"), (600, "10 min"), (36_000, "10 h"), (864_000, "10 d"))),
    ],
)  # fmt: skip
def test_values_are_worded(words: Callable[..., object], value: object, wanted: object) -> None:
    """In one unit, as people would say it; nothing is empty, objects and lists are JSON."""
    assert words(value) == wanted


def test_program_can_be_called_as_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the PATH the program is its name; else where it lies, as short as that can be said."""
    beside = Path(sys.executable).with_name("lightning-otel")

    assert program_command() == "lightning-otel"
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(beside.parent.parent)
    assert program_command() == f"{beside.parent.name}/lightning-otel"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "a folder" / "python"))
    assert program_command() == f"'{tmp_path}/a folder/python' -m lightning_otel"
