"""``demo``: the whole way, offline, as a newcomer sees it."""

from pathlib import Path

import pytest
from tests.cli.conftest import Cli

from lightning_otel import Store


def test_demo_shows_the_whole_way(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans, transitions with token ids, rewards as a picture, and three lines for one's agent."""
    path = tmp_path / "demo.duckdb"
    monkeypatch.setenv("LIGHTNING_OTEL_STORE", str(path))

    done = cli("demo", "--rollouts", 5)

    text = done.stdout
    assert done.returncode == 0
    assert f"20 spans, 10 calls, 5 traces → {path}" in text
    assert "10 transitions, 10 with the server's own token ids" in text
    assert "STEP  OBSERVATION" in text
    assert text.count("yes") >= 2
    assert "The policy learnt 1 time from such transitions, read back from DuckDB" in text
    assert "reward  5 values  mean of 5: " in text
    assert "rollout, in the order they began" in text
    assert "lightning-otel run -- python your_agent.py" in text
    assert "lightning-otel reward @last 1.0" in text
    assert "lightning-otel export triplets -o triplets.jsonl" in text
    assert done.stderr == "→ lightning-otel plot --by version\n"
    assert len(Store(path).rollouts().rows()) == 5


def test_demo_counts_its_own_run_only(cli: Cli, tmp_path: Path) -> None:
    """The same seed gives the same rewards; a second demo in the same store tells of itself."""
    path = tmp_path / "demo.duckdb"

    first, second = (cli("demo", "--rollouts", 3, "--store", path) for _ in range(2))

    pictures = [
        done.stdout.partition("5. The policy")[2].rpartition(" s, no key")[0]
        for done in (first, second)
    ]
    assert pictures[0].rpartition("\n")[0] == pictures[1].rpartition("\n")[0] != ""
    assert "12 spans, 6 calls, 3 traces →" in second.stdout
    assert "6 transitions, 6 with" in second.stdout
    assert second.stderr == f"→ lightning-otel plot --by version --store {path}\n"
    assert len(Store(path).rollouts().rows()) == 6


def test_demo_keeps_its_curve_and_has_a_control(cli: Cli, tmp_path: Path) -> None:
    """The picture is a file; shuffled rewards are told, and those in the store stay as they are."""
    options = ("--rollouts", 4, "--shuffle", "--store", tmp_path / "demo.duckdb")

    done = cli("demo", *options, "--plot", tmp_path / "curve.svg")
    refused = cli("demo", *options, "--plot", tmp_path / "curve.gif")

    assert "what 4 answers earned, dealt out at random:" in done.stdout
    assert f"   curve → {tmp_path / 'curve.svg'}\n" in done.stdout
    assert (tmp_path / "curve.svg").read_text().startswith("<svg")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert len(Store(tmp_path / "demo.duckdb").rollouts().rows()) == 4


@pytest.mark.parametrize(
    ("name", "value"), [("LIGHTNING_OTEL", "0"), ("OTEL_SDK_DISABLED", "true")]
)
def test_demo_needs_recording(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """With recording switched off there is nothing to show, which is said before anything runs."""
    monkeypatch.setenv(name, value)

    done = cli("demo", "--store", tmp_path / "demo.duckdb")

    assert done.returncode == 2
    assert name in done.stderr
    assert not (tmp_path / "demo.duckdb.d").exists()


def test_demo_needs_a_place_for_its_store(cli: Cli, tmp_path: Path) -> None:
    """A store that cannot be made is a store error, not an empty table."""
    (tmp_path / "file").write_text("")

    done = cli("demo", "--store", tmp_path / "file" / "demo.duckdb")

    assert done.returncode == 4
    assert "cannot make the store" in done.stderr
