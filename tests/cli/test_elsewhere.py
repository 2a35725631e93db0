"""The commands over a store on another machine."""

import json
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.types import Span

pytest.importorskip("hypercorn")

Cli = Callable[..., "CompletedProcess[str]"]
TOKEN = "a-token-of-some-length"


@pytest.fixture
def url(store: Store, served: Callable[..., str]) -> str:
    """A served store of one rollout, with the token that it asks for."""
    attributes = {c.ROLLOUT_ID: "r1", c.OPERATION: c.CHAT, c.RESPONSE_ID: "response-1"}
    store.add([Span("1" * 32, "2" * 16, None, "chat", 10**18, 10**18 + 1, attributes=attributes)])
    return served(store, TOKEN)


def test_a_reward_is_given_to_what_lies_there(cli: Cli, store: Store, url: str) -> None:
    """By a prefix of its id, and the token is not repeated to the terminal."""
    done = cli("reward", "resp", "0.5", "--store", url)

    assert done.returncode == 0, done.stderr
    assert [row["reward"] for row in store.rollouts()] == [0.5]
    assert "show r1" in done.stderr
    assert TOKEN not in done.stdout + done.stderr


def test_stats_show_no_number_that_was_not_counted(cli: Cli, url: str) -> None:
    """Files and losses are known where the spans are recorded."""
    shown, found = cli("stats", "--store", url), cli("stats", "--json", "--store", url)

    assert "1 in 1 rollout" in shown.stdout
    assert "lost" not in shown.stdout
    assert "counted where" in shown.stderr
    assert set(json.loads(found.stdout)) == {"store", "funnel", "left_out"}
    assert TOKEN not in shown.stdout + shown.stderr + found.stdout


def test_run_needs_a_store_on_disk(cli: Cli, url: str) -> None:
    """Nothing is run that would not be recorded."""
    done = cli("run", "--store", url, "--", "true")

    assert done.returncode == 2
    assert "send the spans on by OTLP" in done.stderr
    assert TOKEN not in done.stderr
