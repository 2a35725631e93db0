"""``reward``: a judgement given later, by any id, and seen in the transitions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Cli

from lightning_otel import Store


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


def test_reward_by_span_judges_that_call_alone(cli: Cli, copy: Path) -> None:
    """Linked to the first of two calls, a reward does not slide to the second."""
    calls = list(
        Store(copy).sql(
            "SELECT span_id, rollout_id FROM calls WHERE agent = 'calc' ORDER BY start_ns"
        )
    )
    first = calls[0]

    cli("reward", first["span_id"], "-3", "--store", copy)

    rewards = [step.reward for step in Store(copy).transitions(rollout_id=first["rollout_id"])]
    assert rewards[0] == -3.0
    assert rewards[1] in (0.0, 1.0)


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


def test_reward_that_is_not_kept_is_an_error(copy: Path) -> None:
    """On a full disk, here a limit of nothing, the command fails instead of saying all is well."""
    Store(copy).connect()  # makes the catalogue, for which there is no room later

    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", sys.executable, "-m", "lightning_otel",
         "reward", "@last", "1", "--store", copy],
        capture_output=True, text=True, timeout=50,
    )  # fmt: skip

    assert done.returncode == 4
    assert "refuses the reward" in done.stderr
