"""``resources``: publish, look, move aliases and take back, at the command line."""

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.acting import act
from tests.cli.conftest import Start

from lightning_otel import Resources, Store
from lightning_otel.demo.server import DemoServer
from lightning_otel.state import State

AGENT = """\
import sys
import openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="k", max_retries=0)
for line in sys.stdin:
    client.chat.completions.create(
        model="toy",
        messages=[{"role": "system", "content": "own"}, {"role": "user", "content": line}],
    )
    print("done", flush=True)
"""


@pytest.fixture
def at(tmp_path: Path) -> list[str]:
    return ["--store", str(tmp_path / "store" / "traces.duckdb")]


def test_from_publication_to_rollback(cli: Any, at: list[str], tmp_path: Path) -> None:
    """What is printed is the version that came of it; what is said is who is given what."""
    file = tmp_path / "prompt.txt"
    file.write_text("Be kind.\nAnswer.")

    first = cli("resources", "publish", "system_prompt", "Be brief.\nAnswer.", *at)
    second = cli(
        "resources", "publish", "system_prompt", "--file", file, "--alias", "canary",
        "--weight", "0.25", *at,
    )  # fmt: skip
    listed = cli("resources", "list", "--json", *at)
    shown = cli("resources", "show", "system_prompt@canary", *at)
    history = cli("resources", "show", "system_prompt", "--jsonl", *at)
    difference = cli("resources", "diff", "system_prompt", *at)
    promoted = cli("resources", "promote", "system_prompt", *at)
    back = cli("resources", "rollback", "system_prompt", *at)
    none = cli("resources", "alias", "system_prompt", "live", "none", *at)

    assert (first.stdout, second.stdout) == ("system_prompt@1\n", "system_prompt@2\n")
    assert second.stderr == "canary is system_prompt@2 for 25%; live is system_prompt@1\n"
    (row,) = json.loads(listed.stdout)
    assert {name: row[name] for name in ("newest", "live", "canary", "share")} == {
        "newest": 2, "live": 1, "canary": 2, "share": "25%",
    }  # fmt: skip
    assert shown.stdout == "Be kind.\nAnswer.\n"
    assert [json.loads(line)["alias"] for line in history.stdout.splitlines()] == ["live", "canary"]
    assert "-Be brief.\n+Be kind.\n Answer.\n" in difference.stdout
    assert "no task was done with both" in difference.stderr
    assert promoted.stdout == "system_prompt@2\n"
    assert back.stdout == "system_prompt@1\n"
    assert none.stderr == "system_prompt has no alias: nobody is given it\n"


def judge(store: Store, tasks: Iterable[int], version: int, reward: float) -> None:
    for task in tasks:
        act(store, None, reward, task=task, resources={"*": {"endpoint": version}})


@pytest.fixture
def canary(store: Store) -> list[str]:
    """The option that names a store in which version 2 of a resource is the canary."""
    resources = Resources(State(store.name))
    resources.publish("endpoint", {"model": "a"})
    resources.publish("endpoint", {"model": "b"}, alias="canary")
    return ["--store", store.name]


def test_diff_says_which_is_better(cli: Any, store: Store, canary: list[str]) -> None:
    """Bodies first, then the paired rewards with their interval."""
    for version in (1, 2):
        judge(store, range(8), version, float(version))

    done = cli("resources", "diff", "endpoint", *canary)
    wide = ("--if-better", "--range", "-50", "2")
    undecided = cli("resources", "promote", "endpoint", *wide, *canary)
    wrong = cli("resources", "diff", "endpoint", "--range", "2", "1", *canary)
    promoted = cli("resources", "promote", "endpoint", "--if-better", *canary)

    assert "endpoint@2 stays the canary" in undecided.stderr
    assert "assumes" not in undecided.stderr
    assert "reward_range is (2.0, 1.0)" in wrong.stderr
    assert "assumes rewards from 1 to 2, seen so far" in done.stdout
    assert promoted.stdout == "endpoint@2\n"
    assert '-  "model": "a"\n+  "model": "b"\n' in done.stdout
    assert "= +1.000 [+0.004, +1.000] (8 tasks; 8 and 8 rollouts" in done.stdout
    assert done.stdout.endswith(": better\n")


def test_worse_canary_is_withdrawn(cli: Any, store: Store, canary: list[str]) -> None:
    """With --if-worse by its rewards alone; list and show say so afterwards, and why."""
    at = canary
    early = cli("resources", "withdraw", "endpoint", "--if-worse", *at)
    for task in range(8):
        for version, rewards in ((1, (0.0, 1.0)), (2, (0.5, -1.0 + task / 10))):
            for turn, reward in enumerate(rewards):
                judge(store, [task + 8 * turn], version, reward)

    unsure = cli("resources", "withdraw", "endpoint", "--if-worse", *at)
    for version in (1, 2):
        judge(store, range(16, 40), version, -float(version))
    told = cli("resources", "diff", "endpoint", *at)
    kept = cli("resources", "promote", "endpoint", "--if-better", *at)
    done = cli("resources", "withdraw", "endpoint", "--if-worse", *at)
    (listed,) = json.loads(cli("resources", "list", "--json", *at).stdout)
    shown = json.loads(cli("resources", "show", "endpoint", "--json", *at).stdout)
    again = cli("resources", "withdraw", "endpoint", *at)

    assert early.returncode == 2
    assert "cannot be compared" in early.stderr
    assert (unsure.returncode, unsure.stdout) == (0, "")
    assert "endpoint@2 stays: " in unsure.stderr
    assert told.stdout.endswith(": worse\n")
    assert "endpoint@2 stays the canary: " in kept.stderr
    assert "resources withdraw endpoint" in told.stderr
    assert (done.stdout, done.stderr) == ("endpoint@2\n", "live is endpoint@1\n")
    assert (listed["live"], listed["canary"], listed["withdrawn"]) == (1, None, 2)
    assert [row["alias"] for row in shown] == ["live", None]
    assert shown[0]["withdrawn"] is None
    assert shown[1]["withdrawn"].startswith("worse: endpoint@2 − endpoint@1 = -0.")
    assert again.returncode == 3
    assert "no version of endpoint is canary" in again.stderr


def test_mistakes_are_explained(cli: Any, at: list[str]) -> None:
    """What is wrong, and what to do; nothing is made by looking."""
    missing = cli("resources", "list", *at)
    both = cli("resources", "publish", "p", *at)
    bad = cli("resources", "publish", "endpoint", '{"model": "m", "api_key": "k"}', *at)
    cli("resources", "publish", "p", "text", *at)
    secret = cli("resources", "publish", "p", "sk-" + "a1b2c3d4" * 5, *at)
    unknown = cli("resources", "show", "q", *at)

    assert missing.returncode == 4
    assert [each.returncode for each in (both, bad, secret, unknown)] == [2, 2, 2, 3]
    assert "p holds a secret (api_key)" in secret.stderr
    assert "a1b2" not in secret.stderr
    assert "keys of a server stay with the agent" in bad.stderr


@pytest.fixture
def running(store: Store, server: DemoServer, start: Start) -> "subprocess.Popen[str]":
    """An agent that knows nothing of us, under `run --apply`; each line it reads is a call."""
    Resources(State(store.name)).publish("system_prompt", "one")
    program = (sys.executable, "-c", AGENT, server.base_url)
    return start("run", "--apply", "--store", store.name, "--", *program)


def test_running_agent_follows_without_a_restart(
    cli: Any, running: "subprocess.Popen[str]", store: Store, server: DemoServer
) -> None:
    """Published and rolled back while the agent runs: its next requests are made so."""

    def call_until(prompt: str) -> int:
        for count in range(1, 300):
            assert running.stdin is not None
            assert running.stdout is not None
            running.stdin.write("hello\n")
            running.stdin.flush()
            assert running.stdout.readline() == "done\n"
            if (server.log[-1].request or {})["messages"][0]["content"] == prompt:
                return count
            time.sleep(0.05)
        raise AssertionError(f"{prompt!r} is not used")

    at = ("--store", store.name)
    assert call_until("one") == 1
    cli("resources", "publish", "system_prompt", "two", "--alias", "live", *at)
    call_until("two")
    cli("resources", "rollback", "system_prompt", *at)
    call_until("one")
    _, err = running.communicate(timeout=40)

    assert running.returncode == 0, err
    found = [step.resource_version for path in store.trajectories() for step in path.transitions]
    sent = [(exchange.request or {})["messages"][0]["content"] for exchange in server.log]
    versions = {"one": "system_prompt@1", "two": "system_prompt@2"}
    assert found == [versions[prompt] for prompt in sent]
