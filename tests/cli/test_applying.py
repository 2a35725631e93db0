"""``apply-rewards``: a function of a file judges what is stored, and says what it did."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import Cli

from lightning_otel import Store, auto_trace, emit_action

REWARDS = """
from beside import WANTED

def exact_match(task, answer):
    return float(answer == task[WANTED])

def fragile(answer):
    return 1 / int(answer)

LIMIT = 3
"""


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    """A file of reward functions, with a module beside it."""
    (tmp_path / "beside.py").write_text('WANTED = "want"\n')
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture
def path(store: Store) -> str:
    """A store with two rollouts."""
    for name, answer in (("r1", "4"), ("r2", "0")):
        with auto_trace(store=store, rollout_id=name, task={"want": "4"}):
            emit_action("say", answer)
    return store.name


def test_apply_rewards_says_what_it_did(cli: Cli, path: str, rewards: Path) -> None:
    """What was given is counted, on a second run as held, and lies in the store."""
    first = cli("apply-rewards", f"{rewards}:exact_match", "--store", path)
    second = cli("apply-rewards", f"{rewards}:exact_match", "--store", path)

    assert (first.returncode, second.returncode) == (0, 0)
    assert first.stdout == ""
    assert first.stderr.splitlines() == [
        "⚡ exact_match: 2 rewards, mean 0.5, of 2 attempts",
        f"→ lightning-otel export triplets --store {path}",
    ]
    assert second.stderr.splitlines() == [
        "⚡ exact_match: 0 rewards, of 2 attempts",
        "  2 judged by it before",
    ]
    assert [step.reward for step in Store(path).transitions()] == [1.0, 0.0]


def test_apply_rewards_dry_run_prints_each_judgement(cli: Cli, path: str, rewards: Path) -> None:
    """A dry run prints rows on stdout and keeps nothing."""
    done = cli("apply-rewards", f"{rewards}:exact_match", "--dry-run", "--jsonl", "--store", path)

    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"rollout_id": name, "attempt_id": "1", "agent": "", "rewards": {"exact_match": value},
         "failure": ""}
        for name, value in (("r1", 1.0), ("r2", 0.0))
    ]  # fmt: skip
    assert "nothing was kept" in done.stderr
    assert Store(path).sql("SELECT * FROM rewards").rows() == []


def test_apply_rewards_that_raises_ends_with_one(cli: Cli, path: str, rewards: Path) -> None:
    """Where the function raised is named, the others are kept, and JSON holds the same."""
    done = cli("apply-rewards", f"{rewards}:fragile", "--json", "--store", path)

    document = json.loads(done.stdout)
    assert done.returncode == 1
    assert (document["rewards"], document["failed"]) == (1, {"ZeroDivisionError": 1})
    assert "  rollout r2: ZeroDivisionError: division by zero" in done.stderr.splitlines()
    assert [step.reward for step in Store(path).transitions()] == [0.25, None]


def test_apply_rewards_takes_one_rollout_by_prefix(cli: Cli, path: str, rewards: Path) -> None:
    """--rollout limits what is judged."""
    done = cli("apply-rewards", f"{rewards}:exact_match", "--rollout", "@last", "--store", path)

    assert "1 reward, mean 0, of 1 attempt" in done.stderr
    assert [step.reward for step in Store(path).transitions()] == [None, 0.0]


@pytest.mark.parametrize(
    ("named", "fault"),
    [
        ("rewards.py", "names no function"),
        ("none.py:judge", "there is no file none.py"),
        ("{}:exact", "there are: exact_match, fragile"),
        ("{}:LIMIT", "there is no function 'LIMIT'"),
        ("broken.py:judge", "SyntaxError"),
        ("no_such_module:judge", "ModuleNotFoundError"),
    ],
)
def test_apply_rewards_names_what_is_not_there(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewards: Path, named: str, fault: str
) -> None:
    """A function that cannot be found or loaded is refused before any store is looked for."""
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("def judge(:\n")

    done = cli("apply-rewards", named.format(rewards))

    assert done.returncode == 2
    assert fault in done.stderr


def test_apply_rewards_shows_a_bar_on_a_terminal(
    terminal: Callable[..., str], path: str, rewards: Path
) -> None:
    """A person sees a bar while it works, and the counts in the end."""
    shown = terminal("apply-rewards", f"{rewards}:exact_match", "--store", path)

    assert "attempts" in shown
    assert "2 rewards, mean 0.5" in shown
