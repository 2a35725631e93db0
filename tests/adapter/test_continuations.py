"""Requests that name the answer they go on from: their history is joined, or said to be missing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tests.adapter.forest import text_of

from lightning_otel import Store, auto_trace, emit_reward
from lightning_otel.demo.server import DemoServer


@pytest.fixture
def client() -> Iterator[OpenAI]:
    """A client of the fake model, on loopback."""
    with DemoServer() as server, OpenAI(base_url=server.base_url, api_key="none") as opened:
        yield opened


def told(step: Any) -> list[tuple[str, Any]]:
    """Return the roles and texts of what a step saw."""
    return [(item["role"], text_of([item])) for item in step.observation]


def test_history_on_the_server_is_joined_within_a_rollout(tmp_path: Path, client: OpenAI) -> None:
    """Messages and answers are carried on, each once; instructions are those of the request."""
    store = Store(tmp_path / "s.duckdb")
    previous, said, seen = None, list[tuple[str, Any]](), []
    with auto_trace(store=store):
        for rules, text in (("Be brief.", "one"), ("Be brief.", "two"), ("Be kind.", "three")):
            answer = client.responses.create(
                model="demo", input=text, instructions=rules, previous_response_id=previous
            )
            seen.append([("system", rules), *said, ("user", text)])
            said += [("user", text), ("assistant", answer.output_text)]
            previous = answer.id
        emit_reward(1.0)

    steps = {step.response_id: step for step in store.transitions()}

    assert [told(step) for step in steps.values()] == seen
    assert [step.reward for step in steps.values()] == [None, 1.0, None]  # the main conversation
    first, second = (path.transitions for path in store.trajectories())
    assert (len(first), len(second)) == (2, 1)  # other rules are another agent's


def test_history_in_other_rollouts_is_looked_up(tmp_path: Path, client: OpenAI) -> None:
    """Each turn of a chat is a rollout, as in a web server; one alone is asked for."""
    store = Store(tmp_path / "s.duckdb")
    previous, said = None, []
    for turn in range(4):
        with auto_trace(store=store, rollout_id=f"turn-{turn}"):
            answer = client.responses.create(
                model="demo", input=f"turn {turn}", previous_response_id=previous
            )
            previous = answer.id
        said += [("user", f"turn {turn}"), ("assistant", answer.output_text)]

    for _ in ("live", "settled"):
        (step,) = store.transitions(rollout_id="turn-3")
        assert told(step) == said[:-1]
        assert len(list(store.transitions())) == 4
        store.settle()
