"""The command line, in this process, in its own and in a terminal, and a store to look at."""

import contextlib
import fcntl
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import duckdb
import openai
import pytest
from tests.command import forget_settings, invoke

from lightning_otel import Store, auto_trace, operation
from lightning_otel.demo import train
from lightning_otel.demo.server import DemoServer

Cli = Callable[..., CompletedProcess[str]]
Start = Callable[..., "subprocess.Popen[str]"]

# Colours, moves the cursor, rings, names the window, turns the writing's direction.
EVIL = "\x1b[31mred\x1b[0m\x07 \x9b2J \x1b]0;title\x07 \u202egnp\u2066 \u061c\u200f end"
FORMULAS = "SELECT '=1+1' AS \"=a\", -1.5 AS n, '-x' AS t, '@y' AS u, 'a=b' AS v"
_TIMEOUT_S = 50


def read_ns(text: str) -> int:
    """Read a time of a table, in UTC."""
    query = "SELECT epoch_ns(?::TIMESTAMP_NS)"
    return int(duckdb.execute(query, [text.removesuffix("Z")]).fetchall()[0][0])


def lines_of_error(done: CompletedProcess[str]) -> list[str]:
    """What follows ``error:``, ``why:`` or ``usage:`` (else empty), and ``try:``, in this order."""
    lines = dict(line.split(" ", 1) for line in done.stderr.splitlines())
    assert list(lines) in (["error:", *each, "try:"] for each in ([], ["why:"], ["usage:"]))
    assert done.stdout == ""
    reason = lines.get("why:") or lines.get("usage:", "")
    return [each.strip() for each in (lines["error:"], reason, lines["try:"])]


@pytest.fixture(autouse=True)
def _activated_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our console program is on the PATH, so that next steps are named by it."""
    scripts = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join([scripts, os.environ["PATH"]]))


@pytest.fixture
def cli() -> Cli:
    """Runs a command line in this process; gives exit code, stdout and stderr."""
    return invoke


@pytest.fixture
def terminal(tmp_path: Path) -> Callable[..., str]:
    """Runs a command line in a terminal so many cells wide; gives all that it printed there."""

    def run(*args: object, columns: int = 100, env: Mapping[str, str] | None = None) -> str:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        environment.update(env or {})
        child = subprocess.Popen(
            [sys.executable, "-m", "lightning_otel", *map(str, args)],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=environment,
        )  # fmt: skip
        os.close(theirs)
        found = b""
        with contextlib.suppress(OSError):  # Linux says so where others say end of file
            while block := os.read(ours, 65536):
                found += block
        os.close(ours)
        child.wait(_TIMEOUT_S)
        return found.decode().replace("\r\n", "\n")

    return run


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a command line in a process of its own, which ends with the test."""
    children: list[subprocess.Popen[str]] = []

    def run(*args: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "lightning_otel", *map(str, args)]
        pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        children.append(subprocess.Popen(command, text=True, **pipes))
        return children[-1]

    yield run
    for child in children:
        child.kill()
        with contextlib.suppress(ValueError):  # the test closed a pipe
            child.communicate(timeout=20)


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with five rollouts, made once: three of the demo, ``exp-one`` and ``exp-two``."""
    path = tmp_path_factory.mktemp("kept") / "traces.duckdb"
    store = Store(path)
    with pytest.MonkeyPatch.context() as patch:
        forget_settings(patch)
        train(store, rollouts=3, seed=0)
        with (
            DemoServer() as server,
            openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client,
        ):
            with auto_trace(store=store, rollout_id="exp-one", agent="planner", task={"q": "hi"}):
                _say(client, "hi")
            with (
                auto_trace(store=store, rollout_id="exp-two", agent="writer", task=EVIL),
                operation(EVIL),
            ):
                _say(client, EVIL)
                with pytest.raises(openai.BadRequestError):
                    _say(client, "no", model="fail-400")
    store.writer().seal()
    return path


def _say(client: openai.OpenAI, text: str, model: str = "toy") -> None:
    client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}])


@pytest.fixture
def copy(kept: Path, tmp_path: Path) -> Path:
    """A copy of that store, to be written to."""
    folder = tmp_path / "copy"
    shutil.copytree(kept.parent, folder)
    return folder / kept.name
