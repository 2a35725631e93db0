"""A search whose process was killed goes on where it stood, and runs nothing that others wrote."""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algorithms.apo.desk import EXAMPLES, desk

from lightning_otel import Store
from lightning_otel.algorithms.apo import APO
from lightning_otel.algorithms.apo.search import decode_state, encode_state, write_state
from lightning_otel.demo.policy import Reply
from lightning_otel.demo.server import DemoServer
from lightning_otel.errors import TrainingError
from lightning_otel.trainer import Trainer

DESK = desk()
CHILD = """
import runpy, sys
import openai
from lightning_otel import Store
from lightning_otel.algorithms.apo import APO
from lightning_otel.trainer import Trainer
example, url, place = sys.argv[1:]
desk = runpy.run_path(example)
train, val, _ = desk["tasks"]()
agent = desk["agent_of"](openai.OpenAI(base_url=url, api_key="none"))
apo = APO(model="writer", base_url=url)
Trainer(agent, apo, store=Store(place), resources={"system_prompt": desk["SEED"]}).fit(
    train[:2], val
)
"""


class Killer:
    """The example's models, of which the writer kills who asks it a second time."""

    def __init__(self) -> None:
        self.model = DESK.Model()
        self.child: subprocess.Popen[bytes] | None = None
        self.asked = 0

    def reply(self, body: Mapping[str, Any], rng: Random) -> Reply:
        """As the example's."""
        self.asked += body["model"] == "writer"
        if self.asked == 2 and body["model"] == "writer" and self.child is not None:
            self.child.kill()
        return self.model.reply(body, rng)  # type: ignore[no-any-return]  # a script's


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)


def test_apo_goes_on_after_a_kill(
    store: Store, tmp_path: Path, server: DemoServer, client: openai.OpenAI
) -> None:
    """What was tried is not tried again, what was found is kept, and no pickle is trusted."""
    assert store.layout is not None
    train, val, _ = DESK.tasks()
    server.policy = killer = Killer()
    bomb = Bomb(tmp_path / "exploded")
    command = [sys.executable, "-c", CHILD, EXAMPLES / "apo.py", server.base_url, store.name]
    with subprocess.Popen(command) as killer.child:
        killer.child.wait(50)
    assert killer.child.returncode == -signal.SIGKILL
    for folder in store.layout.root.glob("runs/*/gepa"):
        (folder / "gepa_state.bin").write_bytes(pickle.dumps(bomb))

    apo = APO(model="writer", base_url=server.base_url)
    resumed = Trainer(DESK.agent_of(client), apo, store=store)
    fit = resumed.resume_from_checkpoint("@last").fit(train[:2], val)

    assert not bomb.place.exists()
    assert fit.promoted == ("system_prompt",)
    steps = [(each.step, each.value) for each in resumed.metrics(["val_reward"])]
    assert steps == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert killer.asked == 3  # once for the first step, twice for the one that was cut short
    tried = {step.rollout_id: step for step in store.transitions(mode="val")}
    by_seed = [each for each in tried.values() if each.resources["system_prompt"] == "1"]
    assert len(by_seed) == 2 * len(val)  # at the beginning, and to compare with in the end
    saved = resumed.save_checkpoint(tmp_path / "saved")
    assert {each.suffix for each in saved.rglob("*") if each.is_file()} == {".json"}


class State:
    """What has GEPA's attributes."""

    def __init__(self, held: object) -> None:
        self.held = held


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
STATES = st.recursive(
    PLAIN | st.sets(st.integers()),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner, inner),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(STATES)
def test_state_is_the_same_after_json(held: Any) -> None:
    """Sets, tuples and keys that are no text survive, and nothing else than JSON is written."""
    state: Any = State(held)

    found = decode_state(json.loads(json.dumps(encode_state(state))))

    assert found["held"] == held


def test_nobody_but_the_owner_reads_what_gepa_is_given(tmp_path: Path) -> None:
    """Neither the folder nor the file."""
    state: Any = State(3)
    folder = tmp_path / "gepa"

    write_state(encode_state(state), folder)

    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "gepa_state.bin").stat().st_mode & 0o077 == 0


def test_a_search_on_other_tasks_does_not_go_on(store: Store) -> None:
    """Where one search stood says nothing of another."""

    def agent(task: int, resources: Mapping[str, Any]) -> float:
        return 0.5

    def fit(apo: APO, train: list[int], val: list[int]) -> None:
        resources = {"system_prompt": DESK.SEED}
        Trainer(agent, apo, store=store, resources=resources, max_iterations=1).fit(train, val)

    first, second = (APO(reflection_lm=lambda prompt: "Go on.") for _ in range(2))
    fit(first, [1], [2])
    second.load_state_dict(first.state_dict())

    with pytest.raises(TrainingError, match="on other tasks"):
        fit(second, [3], [4])


@pytest.mark.parametrize("held", [{"i": {"bag": []}}, {"i": {}}, {"i": {"map": 3}}])
def test_damaged_state_is_refused(held: dict[str, Any]) -> None:
    """A checkpoint that somebody changed says so."""
    with pytest.raises(TrainingError, match="is damaged"):
        decode_state(held)
