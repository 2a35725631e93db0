"""Coding agents as people install them: bare and under ``run``, with a model that is scripted.

Each lives in an environment of its own: ``python3.12 tests/environments.py aider mini inspect
openhands``.
"""

import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests import facts

from lightning_otel import Store
from lightning_otel.demo.policy import Reply, ToolCall
from lightning_otel.demo.server import DemoServer, LogEntry
from lightning_otel.types import conventions as c

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
BROKEN, MENDED = "return a - b", "return a + b"
CALC = f"def add(a, b):\n    {BROKEN}\n"
TESTED = "the application under test"
CHECK = f"""\
import openai
from calc import add
client = openai.OpenAI(max_retries=0)
messages = [{{"role": "user", "content": {TESTED!r}}}]
print(client.chat.completions.create(model="m", messages=messages).choices[0].message.content)
assert add(1, 2) == 3, "add is wrong"
"""
"""What the agent tests calls a model, too."""
MEND = f"sed -i 's/{BROKEN}/{MENDED}/' calc.py"
TEST = f"{sys.executable} check.py"
COMMANDS = ["cat calc.py", TEST, f"{sys.executable} -c 'print(42)'", MEND, TEST]
_DRAWN = re.compile(
    r"[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}|/tmp/tmp\w{8}|"
    r'"x-irid": "\w+"|"[a-z]+_[0-9a-f]{12,}"'
)
"""What an application or the server draws at random: ids and names of folders."""
_DATES = dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), "2026-01-01T00:00:00Z")
"""Commits have the same hashes each time."""
Json = Mapping[str, Any]


def message_text(message: Json) -> str:
    """Return the text of a message whose content is a string, a list of parts or nothing."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in content or ())


@dataclass(frozen=True, slots=True)
class Application:
    """One application, and what its model answers.

    Attributes:
        module: What must be importable.
        command: What the user types; the first word stands beside the Python.
        answers: The agent's, in order, each a text or a call of a tool with its arguments.
        sides: Words in the first message of each kind of side call, with their number.
        samples: Number of agents that work side by side.
        environment: Variables that it needs.
    """

    module: str
    command: tuple[str, ...]
    answers: Sequence[str | tuple[str, Json]]
    sides: Mapping[str, int] = field(default_factory=dict)
    samples: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    def role(self, body: Json) -> str:
        items = body.get("input") or ""
        items = [{"content": items}] if isinstance(items, str) else list(items)
        if body.get("instructions"):
            items.insert(0, {"content": body["instructions"]})
        text = " ".join(map(message_text, body.get("messages", items)[:2]))
        if text == TESTED:
            return TESTED
        return next((words for words in self.sides if words in text), "agent")

    def reply(self, body: Json, rng: random.Random) -> Reply:
        """Answer as the script says, after the last of its answers in the history."""
        if self.role(body) != "agent":
            return Reply("GRADE: C" if "GRADE" in str(body) else "fine")
        said = [message_text(item) for item in body["messages"] if item["role"] == "assistant"]
        steps = [int(number) for text in said for number in re.findall(r"^Step (\d+)", text)]
        step = max(steps, default=0) + 1
        answer = self.answers[step - 1]
        if isinstance(answer, str):
            return Reply(f"Step {step}\n{answer}")
        sample = zlib.crc32(message_text(body["messages"][1]).encode())
        call = ToolCall(f"call_{step}_{sample:x}", answer[0], json.dumps(answer[1]))
        return Reply(f"Step {step}", (call,), finish_reason="tool_calls")


def edit(line: str, new: str) -> str:
    """Return an edit as aider asks its model for one."""
    block = f"<<<<<<< SEARCH\n    {line}\n=======\n    {new}\n>>>>>>> REPLACE"
    return f"calc.py\n```python\n{block}\n```"


AIDER = (
    "aider", "--model", "openai/m", "--yes-always", "--no-check-update", "--no-analytics",
    "--no-show-model-warnings", "--no-show-release-notes", "--no-gitignore", "--map-tokens", "0",
    "--edit-format", "diff", "--test-cmd", TEST, "--auto-test", "--message", "Mend add", "calc.py",
)  # fmt: skip
EDITS = [edit(BROKEN, "return a * b"), edit("return a * b", MENDED)]
APPLICATIONS = {
    "aider": Application("aider", AIDER, EDITS, {"commit message": 2}),
    "aider-whole": Application("aider", (*AIDER, "--no-stream"), EDITS, {"commit message": 2}),
    "mini": Application(
        "minisweagent",
        ("mini", "-m", "openai/m", "-y", "--exit-immediately", "-t", "Mend add"),
        [("bash", {"command": command})
         for command in (*COMMANDS, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")],
        environment={"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
    ),
    "openhands": Application(
        "openhands.sdk",
        ("python", "openhands_agent.py"),
        [*(("terminal", {"command": command}) for command in COMMANDS),
         ("finish", {"message": "It adds."})],
        {"concise, descriptive titles": 1, "context-aware state summary": 1},
    ),
    "inspect": Application(
        "inspect_ai",
        ("inspect", "eval", "inspect_task.py", "--model", "openai/m", "--display", "none",
         "--no-log-realtime"),
        [*(("bash", {"command": command}) for command in COMMANDS),
         ("submit", {"answer": "it adds"})],
        {"GRADE": 3, "hello, world": 1},
        samples=3,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of an application: what the server was asked, and the CPU seconds it took."""

    log: Sequence[LogEntry]
    cpu_s: float


def prepare(folder: Path) -> None:
    """Make the repository that the agent works on, the same each time."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in HERE.glob("[io]*.py"):
        shutil.copy(path, folder)
    (folder / "calc.py").write_text(CALC)
    (folder / "check.py").write_text(CHECK)
    for words in ("init -q", "add .", "commit -q -m first"):
        user = ("-c", "user.name=u", "-c", "user.email=u@localhost")
        command = ["git", *user, *words.split()]
        subprocess.run(command, cwd=folder, check=True, env=os.environ | _DATES)


def run(application: Application, folder: Path, recorder: Sequence[str] = ()) -> Outcome:
    """Run an application on a fresh repository, with a server of its own."""
    prepare(folder)
    name, *arguments = application.command
    with DemoServer(application) as server:
        environment = {
            **os.environ, "HOME": str(folder.parent), "PATH": f"{BIN}:{os.environ['PATH']}",
            "OPENAI_BASE_URL": server.base_url, "OPENAI_API_BASE": server.base_url,
            "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "NO_COLOR": "1", "TERM": "dumb", **_DATES, **application.environment,
        }  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [*recorder, BIN / name, *arguments], cwd=folder, env=environment, timeout=280,
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    times = [usage.ru_utime + usage.ru_stime for usage in (before, after)]
    return Outcome(server.log, times[1] - times[0])


def asked(outcome: Outcome) -> list[str]:
    """Return the requests byte for byte, with their headers, but for what is drawn at random."""
    texts = [facts.sent(exchange) + exchange.sent.decode() for exchange in outcome.log]
    return sorted(_DRAWN.sub("DRAWN", text) for text in texts)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", APPLICATIONS)
def test_steps_are_the_agents_and_requests_as_bare(
    name: str,
    spawn: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    """Side calls and the tested program are apart; the reward is on the agent's last step."""
    application, path, folder = APPLICATIONS[name], tmp_path / "s.duckdb", tmp_path / "work"
    if find_spec(application.module.partition(".")[0]) is None:
        pytest.skip(f"{application.module} is not installed here")
    recorder = [sys.executable, "-m", "lightning_otel", "run", "--store", str(path), "--"]

    bare, recorded = run(application, folder), run(application, folder, recorder)
    judged = spawn("reward", "@last", "1.0", "--store", path)

    assert judged.returncode == 0, judged.stderr
    store, answers = Store(path), {each.response_id: each for each in recorded.log}
    spans = {span.span_id: span for span in store.spans()}
    exchanges = {
        span_id: answers.pop(span.attributes[c.RESPONSE_ID])
        for span_id, span in spans.items()
        if c.RESPONSE_ID in span.attributes
    }
    trajectories = [trajectory.transitions for trajectory in store.trajectories()]
    steps = [step for trajectory in trajectories for step in trajectory]
    roles = Counter(
        tuple(application.role(exchanges[step.span_id].request or {}) for step in trajectory)
        for trajectory in trajectories
    )
    expected = Counter(
        {
            ("agent",) * len(application.answers): application.samples,
            (TESTED,): 2 * application.samples,
            **{(words,): count for words, count in application.sides.items()},
        }
    )
    (rewarded,) = [step for step in steps if step.reward is not None]
    print(  # noqa: T201  # the row of a table, with -rP
        f"{name} | {len(recorded.log)} requests | {len(steps)} transitions | {dict(roles)} | "
        f"CPU {bare.cpu_s:.1f} -> {recorded.cpu_s:.1f} s"
    )

    assert asked(recorded) == asked(bare)
    assert not answers
    assert len(recorded.log) == len(store.sql("SELECT 1 FROM calls").rows()) == len(steps)
    for span_id, exchange in exchanges.items():
        kept = facts.told(spans[span_id])
        content = facts.read(facts.content(exchange))
        assert {key: kept.get(key) for key in content} == content
    assert roles == expected
    assert rewarded.reward == 1.0
    assert rewarded in [path[-1] for path in trajectories if len(path) == len(application.answers)]
