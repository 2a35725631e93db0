"""``analyze``: one rollout in a terminal, in a pipe and as JSON."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

Cli = Callable[..., CompletedProcess[str]]


def test_a_pipe_gets_whole_lines(cli: Cli, kept: Path) -> None:
    """Totals, task, a line a step, each reward, and what stands out."""
    store = ("--store", kept)

    done = cli("analyze", "exp-two", *store)
    last = cli("analyze", *store)

    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert lines[0].startswith("exp-two · 1 step · 2 calls · ")
    assert lines[1].startswith("task ")
    assert lines[2].startswith("step\tobservation\taction\treward\tcredit")
    assert any(line.startswith("! chat") and "BadRequestError" in line for line in lines)
    assert "! nobody gave it a reward" in lines
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2066\u061c]", done.stdout)
    assert done.stderr == f"→ lightning-otel show exp-two --store {kept}\n"
    assert last.stdout.startswith("exp-two · ")


def test_json_has_prices_and_findings(cli: Cli, kept: Path) -> None:
    """What a million tokens cost, by model; all that is known of each step."""
    found = json.loads(
        cli("analyze", "exp-one", "--price", "toy=1,2", "--json", "--store", kept).stdout
    )

    (step,) = found["steps"]
    assert found["rollout_id"] == "exp-one"
    assert step["cost"] == (step["input_tokens"] + 2 * step["output_tokens"]) / 1e6
    assert found["cost"] == step["cost"]
    assert {each["kind"] for each in found["findings"]} == {"no_reward", "inexact"}


def test_a_terminal_gets_a_table(terminal: Callable[..., str], kept: Path) -> None:
    """As wide as it is, and in colour."""
    text = terminal("analyze", "exp-one", "--store", kept, columns=70)

    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "STEP" in bare
    assert "\x1b[33m! nobody gave it a reward" in text
    assert max(map(len, bare.splitlines()[:-1])) <= 70


def test_what_is_wrong_is_told(cli: Cli, kept: Path) -> None:
    """A price that is none, and a rollout that is not there."""
    price = cli("analyze", "--price", "cheap", "--store", kept)
    nobody = cli("analyze", "nobody", "--store", kept)

    assert price.returncode == 2
    assert "--price cheap is no price" in price.stderr
    assert nobody.returncode == 3
