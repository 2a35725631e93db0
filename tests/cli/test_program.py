"""Finding the program that ``run`` is to run, and what ``completion`` offers."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Cli

from lightning_otel import Queue, Resources, Store
from lightning_otel.cli.program import (
    ProgramError,
    find_program,
    program_name,
    run_child,
)
from lightning_otel.state import State
from lightning_otel.state.runs import Runs
from lightning_otel.types import Span
from lightning_otel.types import conventions as c


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "words"),
    [("pass", [sys.executable, "app.py"]), ("#!/usr/bin/env python3\n", ["{here}/app.py"])],
)
def test_find_program_runs_a_file(here: Path, text: str, words: list[str]) -> None:
    """By the interpreter that it names, else by our Python, be it executable or not."""
    (here / "app.py").write_text(text)
    (here / "app.py").chmod(0o755)

    assert find_program(["app.py", "x"]) == [*(word.format(here=here) for word in words), "x"]


def test_find_program_looks_beside_python_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Console programs of the environment are found though it is not activated."""
    monkeypatch.setenv("PATH", "/nowhere")

    assert find_program(["lightning-otel"]) == [
        str(Path(sys.executable).with_name("lightning-otel"))
    ]


def test_run_child_knows_what_cannot_run(here: Path) -> None:
    """A file the system cannot execute is refused as a shell would refuse it."""
    (here / "garbage").write_bytes(b"\x00\x01")
    (here / "garbage").chmod(0o755)

    with pytest.raises(ProgramError) as caught:
        run_child([str(here / "garbage")], None)

    assert caught.value.code == 126


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "app/main.py", "x"], "main.py"),
        (["python3.11", "-u", "-m", "package.tool", "--flag"], "package.tool"),
        (["python", "-c", "print(1)"], "python"),
        (["python"], "python"),
        (["/usr/bin/tool", "x.py"], "tool"),
        (["app.py"], "app.py"),
    ],
)
def test_name_of_is_what_a_person_would_say(command: list[str], name: str) -> None:
    """The script or module, not the interpreter; else the program."""
    assert program_name(command) == name


def test_run_child_puts_handlers_back() -> None:
    """After the program, signals do again what they did before."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    code = run_child(["sh", "-c", "exit 3"], {"PATH": os.defpath})

    assert code == 3
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def _asked(spawn: Cli, words: str, **env: str) -> list[str]:
    done = spawn(
        env={"_LIGHTNING_OTEL_COMPLETE": "bash_complete", "COMP_WORDS": f"lightning-otel {words}",
             "COMP_CWORD": str(words.count(" ") + 1), **env},
    )  # fmt: skip
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line.strip()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_of_each_shell_asks_this_program(shell: str, cli: Cli) -> None:
    """The script names our program and the variable it is asked through."""
    done = cli("completion", shell)

    assert done.returncode == 0
    assert "_LIGHTNING_OTEL_COMPLETE" in done.stdout
    assert shell in done.stderr
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n"], input=done.stdout, text=True, check=True, timeout=20)


def test_commands_formats_ids_and_agents_are_completed(spawn: Cli, kept: Path) -> None:
    """What begins so, of what there is; nothing where there is no store."""
    env = {"LIGHTNING_OTEL_STORE": str(kept)}

    assert _asked(spawn, "comp", **env) == ["compact", "completion"]
    assert _asked(spawn, "export tri", **env) == ["triplets"]
    assert _asked(spawn, "show exp-", **env) == ["exp-two", "exp-one"]
    assert _asked(spawn, "export triplets --agents pl", **env) == ["planner"]
    assert _asked(spawn, "show exp-") == []


def test_names_of_the_state_and_of_what_is_installed_are_completed(spawn: Cli, copy: Path) -> None:
    """Resources, runs, queued rollouts, algorithms, metrics, agents and rewards, where they go."""
    env = {"LIGHTNING_OTEL_STORE": str(copy)}
    state = State(copy)
    Resources(state).publish("planner/system_prompt", "Be brief.")
    (queued,) = Queue(state).put(["task"])
    run = Runs(state).start("baseline", {})
    Runs(state).log(run.run_id, 1, {"val/reward": 1.0})
    state.close()

    for words, found in {
        "resources show pl": ["planner/system_prompt"],
        "resources alias pl": ["planner/system_prompt"],
        "train ba": ["baseline"],
        "train apo --resume run": [run.run_id],
        "plot --run run": [run.run_id],
        "plot val": ["val/reward"],
        "plot suc": ["success_rate"],
        "queue cancel ro": [queued.rollout_id],
        "ls --agent pl": ["planner"],
        "export triplets --reward pri": ["primary"],
    }.items():
        assert _asked(spawn, words, **env) == found, words
    assert _asked(spawn, "train ba") == ["baseline"]


def test_names_that_a_shell_would_take_for_more_are_not_offered(spawn: Cli, tmp_path: Path) -> None:
    """A completed word stands in the line as it is: a name may be anybody's."""
    store = Store(tmp_path / "s.duckdb")
    store.add([
        Span(trace_id=f"{n:032x}", span_id=f"{n:016x}", parent_span_id=None, name="w", start_ns=1,
             end_ns=2, attributes={c.ROLLOUT_ID: name})
        for n, name in enumerate(["run-$(reboot)", "run-`x`", "run-;x", "run-a b", "run-good"], 1)
    ])  # fmt: skip
    store.writer().seal()

    assert _asked(spawn, "show run-", LIGHTNING_OTEL_STORE=store.name) == ["run-good"]


def test_completion_says_nothing_of_damage(spawn: Cli, copy: Path) -> None:
    """A shell would show it in the line that is being written."""
    (copy.with_name(f"{copy.name}.d") / "manifest.ndjson").write_text("rubbish\n")

    done = spawn(
        env={"_LIGHTNING_OTEL_COMPLETE": "bash_complete", "COMP_WORDS": "lightning-otel show e",
             "COMP_CWORD": "2", "LIGHTNING_OTEL_STORE": str(copy)},
    )  # fmt: skip

    assert ("exp-one" in done.stdout, done.stderr) == (True, "")
