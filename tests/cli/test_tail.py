"""``tail``: each span once, as people read it, whatever the store does meanwhile."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from tests.cli.conftest import Cli, Start

from lightning_otel import Store
from lightning_otel.cli.options import SignalStop
from lightning_otel.cli.spans import ChatLines
from lightning_otel.store.layout import Layout
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import Span
from lightning_otel.types import conventions as c


def _span(number: int, **attributes: object) -> Span:
    return Span(
        trace_id=f"{number + 1:032x}", span_id=f"{number + 1:016x}", parent_span_id=None,
        name="work", start_ns=1_000 + number, end_ns=2_000 + number, attributes=attributes,
    )  # fmt: skip


def test_a_signal_in_the_midst_of_a_wait_ends_it() -> None:
    """At each line of it, and of what it calls: nothing is waited for that it holds itself."""

    def interrupt(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
        return interrupt

    before = sys.gettrace()
    with SignalStop() as stop:
        assert not stop.wait(0.01)
        sys.settrace(interrupt)
        try:
            assert stop.wait(60)
        finally:
            sys.settrace(before)


def test_tail_shows_the_conversation(cli: Cli, kept: Path) -> None:
    """Who says what, tool calls and their answers once, rewards, and a line of counts."""
    done = cli("tail", "--since", "1d", "--once", "--store", kept)

    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert any("user What is" in line for line in lines)
    assert any("calc calls calculator(" in line for line in lines)
    assert sum("tool →" in line for line in lines) == 3
    assert sum("★ reward" in line for line in lines) == 3
    assert "shown: 9 calls" in done.stderr
    assert "\x1b" not in done.stdout


def test_tail_shows_errors_alone_and_agents_alone(cli: Cli, kept: Path) -> None:
    """Filters leave out the others and say how many these were."""
    errors = cli("tail", "--once", "--errors", "--store", kept)
    agent = cli("tail", "--once", "--agent", "plan*", "--store", kept)

    assert "✗" in errors.stdout
    assert "What is" not in errors.stdout
    assert "of others" in errors.stderr
    assert "planner" in agent.stdout
    assert "calc" not in agent.stdout


def test_tail_of_a_conversation_has_the_whole_trace_once_it_is_known(
    cli: Cli, tmp_path: Path
) -> None:
    """Spans that do not name the conversation belong to it by their trace."""
    store = Store(tmp_path / "s.duckdb")
    store.add([
        _span(1, **{c.CONVERSATION_ID: "talk-1", c.OPERATION: c.EXECUTE_TOOL, c.TOOL_NAME: "a"}),
        _span(2, **{c.CONVERSATION_ID: "talk-2", c.OPERATION: c.EXECUTE_TOOL, c.TOOL_NAME: "b"}),
    ])  # fmt: skip
    store.writer().seal()

    done = cli("tail", "--once", "--conversation", "talk-1", "--store", store.name)

    assert "a " in done.stdout
    assert "b " not in done.stdout


def test_tail_from_now_on_loses_and_doubles_nothing_over_rotation_and_settling(
    tmp_path: Path, start: Start
) -> None:
    """What was there is passed over; what comes, comes once, though segments are settled."""
    store = Store(tmp_path / "s.duckdb")
    store.add(_span(number) for number in range(5))
    layout = store.layout
    assert layout is not None
    child = start("tail", "--jsonl", "--store", store.name)
    assert child.stderr is not None
    assert child.stdout is not None
    assert "Ctrl-C ends it" in child.stderr.readline()
    time.sleep(0.2)

    for part in range(4):
        writer = store.writer() if part % 2 else SpanWriter(layout)
        for number in range(10):
            writer.add(_span(100 + 10 * part + number))
        writer.seal()
        store.settle()
        time.sleep(0.1)
    found = [json.loads(child.stdout.readline())["context"]["span_id"] for _ in range(40)]
    child.send_signal(signal.SIGINT)
    rest, told = child.communicate(timeout=20)

    assert sorted(found) == [f"0x{number + 1:016x}" for number in range(100, 140)]
    assert rest == ""
    assert "40 spans, 40 shown" in told
    assert child.returncode == 0
    assert not (layout.root / "followers").exists()


def test_tail_waits_for_a_store(tmp_path: Path, start: Start) -> None:
    """It may be started before anything is recorded, and a killed one leaves nothing behind."""
    store = Store(tmp_path / "s.duckdb")
    layout = Layout(store.name)
    child = start("tail", "--store", store.name)
    assert child.stderr is not None
    assert child.stdout is not None
    assert "waiting" in child.stderr.readline()

    store.add([_span(1, **{c.OPERATION: c.EXECUTE_TOOL, c.TOOL_NAME: "finder"})])
    line = child.stdout.readline()
    os.kill(child.pid, signal.SIGKILL)
    child.communicate(timeout=20)

    assert "finder" in line
    assert not (layout.root / "followers").exists()


def test_chat_shows_no_control_characters_and_no_work() -> None:
    """Model text cannot move the cursor; spans of HTTP or databases are counted, not shown."""
    chat = ChatLines()
    evil = _span(1, **{c.OPERATION: c.EXECUTE_TOOL, c.TOOL_NAME: "\x1b[31m", c.TOOL_RESULT: "\x07"})

    lines = [*chat.lines(evil), *chat.lines(_span(2))]

    assert "\x1b" not in str(lines[0][1][0])
    assert len(lines) == 1
    assert chat.counts == {"tool": 1, "work": 1}


def test_chat_names_a_medium_in_place_of_its_bytes() -> None:
    """An image of megabytes is a word."""
    image = {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "A" * 9_000}
    said = json.dumps([{"role": "user", "parts": [image]}])

    lines = ChatLines().lines(_span(1, **{c.OPERATION: c.CHAT, c.INPUT_MESSAGES: said}))

    assert lines[0][1:] == [("user ", "bold"), ("[image]", "")]
