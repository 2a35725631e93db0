"""``reward`` and ``apply-rewards``: judgements given later, by any id or by a function."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.acting import act
from tests.cli.conftest import Cli

from lightning_otel import Store

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
    for name, answer in (("r1", "4"), ("r2", "0")):
        act(store, name, said=answer, task={"want": "4"})
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
        ("unset.py:judge", "error: no key is set\ntry:"),
        ("no_such_module:judge", "ModuleNotFoundError"),
    ],
)
def test_apply_rewards_names_what_is_not_there(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewards: Path, named: str, fault: str
) -> None:
    """A function that cannot be found or loaded is refused before any store is looked for."""
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("def judge(:\n")
    Path("unset.py").write_text(
        "from lightning_otel.errors import ConfigError\nraise ConfigError('no key is set')"
    )

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


@pytest.mark.parametrize("noun", ["rollout", "trace", "span", "response"])
def test_reward_reaches_the_transition(cli: Cli, copy: Path, noun: str) -> None:
    """A reward by rollout, trace, span or response id is the reward of that very step."""
    (call,) = Store(copy).sql("SELECT * FROM calls WHERE rollout_id = 'exp-one'")
    target = "exp-one" if noun == "rollout" else call[f"{noun}_id"]

    done = cli("reward", target[:20], "0.25", "--store", copy)

    rewards = [(step.rollout_id, step.reward) for step in Store(copy).transitions(agents="*er")]
    assert done.returncode == 0
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"primary = 0.25 on {noun} {target}",
        f"→ lightning-otel show exp-one --transitions --store {copy}",
    ]
    assert rewards == [("exp-one", 0.25), ("exp-two", None)]


def test_reward_may_be_negative_and_named(cli: Cli, copy: Path) -> None:
    """A number that looks like an option is a number, and --name names it."""
    done = cli("reward", "@last", "-1.5", "--name", "tone", "--store", copy)

    (line,) = (
        json.loads(line)
        for line in cli(
            "export", "triplets", "--rollout", "exp-two", "--store", copy
        ).stdout.splitlines()
    )
    assert done.returncode == 0
    assert done.stderr.startswith("tone = -1.5 on rollout exp-two\n")
    assert line["reward"] == -1.5
    assert line["rewards"] == {"tone": -1.5}


def test_a_reward_that_counts_for_nothing_says_so(cli: Cli, copy: Path) -> None:
    """A second one of a name is kept; the first one goes on counting."""
    first = cli("reward", "exp-one", "1", "--store", copy)
    second = cli("reward", "exp-one", "0", "--store", copy)

    (reward,) = {step.reward for step in Store(copy).transitions(rollout_id="exp-one")}
    assert "counts for no step" not in first.stderr
    assert second.stderr.splitlines()[1] == (
        "  it is kept and counts for no step: its call already has a reward of that name, and the "
        "first one counts"
    )
    assert (second.returncode, reward) == (0, 1.0)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_reward_must_be_finite(cli: Cli, tmp_path: Path, value: str) -> None:
    """What no trainer can use is refused before any store is looked for."""
    done = cli("reward", "@last", value, "--store", tmp_path / "none.duckdb")

    assert done.returncode == 2
    assert "finite" in done.stderr


def test_reward_needs_one_target(cli: Cli, copy: Path) -> None:
    """An ambiguous or unknown id gets no reward."""
    codes = [cli("reward", target, "1", "--store", copy).returncode for target in ("exp-", "no")]

    assert codes == [3, 3]
    assert list(Store(copy).sql("SELECT count(*) AS n FROM rewards")) == [{"n": 3}]


def test_reward_is_retracted_by_its_span(cli: Cli, copy: Path) -> None:
    """By a prefix, once; what names none, or nothing alone, retracts nothing."""
    store = Store(copy)
    (row, *_) = store.sql("SELECT span_id, value FROM rewards ORDER BY start_ns")

    done = cli("reward", row["span_id"][:12], "--retract", "--store", copy)
    others = [
        cli("reward", *words, "--retract", "--store", copy)
        for words in ([row["span_id"]], ["@last"], ["@last", "1"])
    ]

    assert (done.returncode, [each.returncode for each in others]) == (0, [3, 3, 2])
    assert f"= {row['value']:g}, span {row['span_id']}" in done.stderr
    assert "list those that count" in others[0].stderr
    assert "--retract takes no VALUE" in others[2].stderr
    assert list(store.sql("SELECT count(*) AS n FROM rewards")) == [{"n": 2}]


def test_reward_that_is_not_kept_is_an_error(copy: Path) -> None:
    """On a full disk, here a limit of nothing, the command fails instead of saying all is well."""
    Store(copy).connect()  # makes the catalogue, for which there is no room later

    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", sys.executable, "-m", "lightning_otel",
         "reward", "@last", "1", "--store", copy],
        capture_output=True, text=True, timeout=50,
    )  # fmt: skip

    assert done.returncode == 4
    assert "refuses it: " in done.stderr
