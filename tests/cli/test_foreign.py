"""``ls`` and ``show`` on spans of other conventions."""

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.adapter.fixtures import recorded

from lightning_otel import Store

Cli = Callable[..., CompletedProcess[str]]
SOURCES = ("current", "legacy", "openinference", "openllmetry", "agentops", "agentlightning")


@pytest.fixture(params=SOURCES)
def foreign(request: pytest.FixtureRequest, store: Store) -> Path:
    """A store with the recorded conversation as one source told it."""
    store.add(recorded(request.param))
    assert store.layout is not None
    return store.layout.catalogue


def test_ls_counts_the_calls(cli: Cli, foreign: Path) -> None:
    """Each source's four requests are four calls of one rollout."""
    header, row = cli("ls", "--store", foreign).stdout.splitlines()

    assert dict(zip(header.split("\t"), row.split("\t"), strict=True))["calls"] == "4"


def test_show_tells_what_was_said_and_used(cli: Cli, foreign: Path) -> None:
    """The tree holds question, answer and tokens of each call."""
    shown = cli("show", "--store", foreign).stdout

    assert "66→4 tok" in shown
    assert "→ The answer is 42" in shown


def test_show_finds_a_call_by_its_response(cli: Cli, foreign: Path) -> None:
    """A response id names its call, wherever the convention keeps it."""
    done = cli("show", "chatcmpl-000000000000000000000002", "--store", foreign)

    assert done.returncode == 0, done.stderr
    assert "→ The answer is 391" in done.stdout
    assert "The answer is 42" not in done.stdout.splitlines()[0]
