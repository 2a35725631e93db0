"""``diff``: two rollouts, traces or versions beside each other."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

from lightning_otel.resources import Resources
from lightning_otel.state import State

Cli = Callable[..., CompletedProcess[str]]


def test_diff_tells_figures_and_what_was_said(cli: Cli, kept: Path) -> None:
    """Counts, tokens, time and rewards with their change; lines of one side have its sign."""
    done = cli("diff", "exp-one", "@last~2", "--store", kept)

    rows = dict(line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line)
    assert done.returncode == 0
    assert done.stdout.startswith("- rollout exp-one\n+ rollout rollout-")
    assert rows["calls"] == "1\t2\t+1"
    assert rows["reward primary"].startswith("\t")
    assert "- user: hi" in done.stdout
    assert "+ user: What is" in done.stdout
    assert "show rollout-" in done.stderr


def test_diff_with_itself_says_the_same(cli: Cli, kept: Path) -> None:
    """Nothing has a sign, and no figure changes."""
    done = cli("diff", "exp-one", "exp-o", "--json", "--store", kept)

    found = json.loads(done.stdout)
    assert {each["sign"] for each in found["said"]} == {" "}
    assert not any(each["change"] for each in found["figures"])
    assert (found["a"], found["left_a"]) == ({"noun": "rollout", "id": "exp-one"}, 0)


def test_diff_of_two_versions(cli: Cli, copy: Path) -> None:
    """Versions of a resource are told apart line by line; those of two resources are not."""
    resources = Resources(State(str(copy)))
    resources.publish("prompt", "Be brief.")
    resources.publish("prompt", "Be kind.")

    done = cli("diff", "prompt@1", "prompt@2", "--store", copy)
    wrong = cli("diff", "prompt@1", "other@2", "--store", copy)

    assert "Be brief." in done.stdout
    assert "Be kind." in done.stdout
    assert "resources diff prompt 1 2" in done.stderr
    assert wrong.returncode == 2


def test_diff_of_what_is_not_there(cli: Cli, kept: Path) -> None:
    """Exit code 3, with the id that was asked for."""
    done = cli("diff", "@last", "nobody", "--store", kept)

    assert done.returncode == 3
    assert "nobody" in done.stderr
