"""Debug mode tells what is kept, what is not, and why; and nothing at all while it is off."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.pages import ran

import lightning_otel as lo
from lightning_otel import capture, debugging
from lightning_otel.demo.server import DemoServer

SECRET = "nobody-else-may-read-this"


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    """No test leaves debug mode on."""
    yield
    lo.set_debug_mode(False)
    assert not debugging.is_on
    debugging.flush()


def ask(client: openai.OpenAI, model: str = "toy") -> Any:
    """One request that says something secret."""
    messages: Any = [{"role": "user", "content": SECRET}]
    return client.chat.completions.create(model=model, messages=messages)


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("lightning-otel: ") for line in lines)
    return [line.removeprefix("lightning-otel: ") for line in lines]


def test_recording_tells_what_it_keeps_and_came_to(
    store: lo.Store, client: openai.OpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where spans go, which libraries are instrumented, each span, and the funnel; no content."""
    with lo.auto_trace(store=store, rollout_id="r1", agent="a", debug=True) as recording:
        ask(client)
        lo.emit_reward(1.0)

    lines = told(capsys)
    assert f"on      r1 → {store.name}" in lines
    (instrumented,) = [line for line in lines if line.startswith("on      instrumentors of ")]
    assert "openai" in instrumented.partition(";")[0]
    kept = [line for line in lines if line.startswith("kept")]
    assert [line.split(" · ")[0] for line in kept] == [
        "kept    chat toy", "kept    agentlightning.annotation", "kept    agentlightning.rollout",
    ]  # fmt: skip
    assert " · agent a · " in kept[0]
    assert recording.span_id in kept[2]
    assert "done    r1: 3 spans, 1 calls, 1 transitions, 1 of 1 rewards placed" in lines
    assert SECRET not in str(lines)
    assert not debugging.is_on


def test_recording_tells_why_something_is_no_training_data(
    store: lo.Store, client: openai.OpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed call and a reward without a call are told with their spans and reasons."""
    with lo.auto_trace(store=store, debug=True) as recording:
        with pytest.raises(openai.BadRequestError):
            ask(client, "fail-400")
        lo.emit_reward(1.0)

    lines = told(capsys)
    (call,) = (line for line in lines if line.startswith("dropped call"))
    assert call.endswith("failed: openai.BadRequestError")
    assert [each.span_id in call for each in recording.report().dropped].count(True) == 1
    assert any(line.startswith("dropped reward") for line in lines)
    assert "ERROR openai.BadRequestError" in str(lines)


def test_calls_outside_a_recording_are_told_with_what_to_do(
    store: lo.Store, client: openai.OpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call in a bare thread and a request to no model say why."""
    lo.set_debug_mode(True)
    with lo.auto_trace(store=store):
        with pytest.raises(openai.NotFoundError):
            client.post("/moderations", cast_to=object, body={})
        lo.set_debug_mode(True)
    ask(client)

    lines = told(capsys)
    missed = [line for line in lines if line.startswith("missed")]
    assert missed == [
        "missed  post /moderations: not a model endpoint",
        "missed  what goes on in openai: no recording is open here; "
        "use auto_trace(), carried() or lightning-otel run",
    ]


def test_refused_and_dropped_spans_are_told(
    store: lo.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a transform drops is told by that reason; a fault of ours by its words."""
    with lo.auto_trace(store=store, transforms=[lambda span: None], debug=True):
        lo.emit_action("a")
        capture.guard_call(lambda: 1 // 0)

    lines = told(capsys)
    assert "refused 1 ended span(s): a transform dropped them" in lines
    assert "fault   ZeroDivisionError: integer division or modulo by zero" in lines


def test_nothing_recorded_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where recording is switched off, debug mode says so at once."""
    monkeypatch.setenv("LIGHTNING_OTEL", "0")

    with lo.auto_trace(debug=True):
        pass

    assert told(capsys) == ["missed  nothing is recorded here; see: lightning-otel doctor"]
    assert not debugging.is_on


def test_many_lines_are_cut_and_counted(
    store: lo.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """However busy the program, a second has so many lines, and the rest is counted."""
    with lo.auto_trace(store=store, debug=True):
        for index in range(3000):
            lo.emit_action(str(index))

    lines = told(capsys)
    counts = [line for line in lines if line.startswith("… ")]
    left_out = sum(int(line.split()[1].replace(",", "")) for line in counts)
    assert len(lines) - len(counts) + left_out >= 3000
    assert len(lines) < 3000
    assert "within a second" in counts[0]


def test_lines_are_safe_for_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that a program or model made up moves no cursor and makes no line of its own."""
    debugging.log("evil \x1b[31m\nname \u202e" + "x" * 1000)

    (line,) = told(capsys)
    assert line.startswith("evil \ufffd[31m name \ufffdxxx")
    assert len(line) <= 300


def test_off_there_is_not_a_line(
    store: lo.Store, client: openai.OpenAI, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Without it nothing is told, and no text is made for it."""
    monkeypatch.setattr(debugging, "log", None)
    monkeypatch.setattr(debugging, "log_kept", None)
    monkeypatch.setattr(debugging, "log_missed", None)

    with lo.auto_trace(store=store):
        ask(client)
    ask(client)

    assert told(capsys) == []


def test_recordings_at_once_keep_it_on_until_the_last_ends(store: lo.Store) -> None:
    """It is on while one that asked for it is open, in whichever thread."""
    with lo.auto_trace(store=store, debug=True):
        with lo.auto_trace(store=store, debug=True):
            pass
        still = debugging.is_on
        thread = threading.Thread(target=lambda: lo.emit_action("a"))
        thread.start()
        thread.join()

    assert still
    assert not debugging.is_on


def test_run_tells_of_the_program(
    tmp_path: Path, server: DemoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``run --debug`` has the program's own process tell, on stderr alone."""
    program = (
        "import openai; c = openai.OpenAI(); m = [{'role': 'user', 'content': 'hi'}]; "
        "print(c.chat.completions.create(model='toy', messages=m).choices[0].message.content)"
    )
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "k")

    done = ran(
        [sys.executable, "-m", "lightning_otel", "run", "--debug", "--store", "s.duckdb", "--",
         sys.executable, "-c", program],
        tmp_path,
    )  # fmt: skip

    assert done.stdout == "You said: hi\n"
    assert "keeps its spans in" in done.stderr
    assert "lightning-otel: on      the instrumentor of openai" in done.stderr
    assert "lightning-otel: kept    chat toy" in done.stderr
    assert "1 calls, 1 transitions" in done.stderr
