"""APO on a scripted task: a real server, a real store, real GEPA; and what users get wrong."""

import json
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.algorithms.apo.desk import desk

from lightning_otel import Store, emit_message, emit_reward
from lightning_otel.algorithms.apo import APO
from lightning_otel.demo.policy import Reply
from lightning_otel.demo.server import DemoServer
from lightning_otel.errors import ConfigError, TrainingError
from lightning_otel.trainer import Trainer

DESK = desk()
Given = Mapping[str, Any]
Act = Callable[[Any, Given], float | None]


@pytest.fixture
def model() -> Iterator[tuple[DemoServer, openai.OpenAI]]:
    """The example's models, and a client for them."""
    with (
        DemoServer(DESK.Model()) as server,
        openai.OpenAI(base_url=server.base_url, api_key="none") as client,
    ):
        yield server, client


def trainer_of(store: Store, agent: Act | None, apo: APO, **options: Any) -> Trainer:
    """A trainer whose prompt is the example's, tried once a task."""
    resources = options.pop("resources", {"system_prompt": DESK.SEED})
    return Trainer(agent, apo, store=store, resources=resources, max_attempts=1, **options)


def silent(prompt: str) -> str:
    """A model that has nothing to say."""
    return ""


def never(prompt: str) -> str:
    """A model that must not be asked."""
    raise AssertionError("the model was asked")


def test_apo_lifts_the_reward_of_tasks_it_never_saw(
    model: tuple[DemoServer, openai.OpenAI], store: Store
) -> None:
    """Prompts are tried over HTTP, written anew by what was recorded, published and promoted."""
    server, client = model
    train, val, test = DESK.tasks()
    apo = APO(model="writer", base_url=server.base_url, num_candidates=6)
    trainer = trainer_of(store, DESK.agent_of(client), apo)
    before = trainer.evaluate(test[:2])

    fit = trainer.fit(train, val)

    assert before.reward == 0.0
    assert trainer.evaluate(test[:2]).reward == 1.0
    assert fit.promoted == ("system_prompt",)
    versions = trainer.resources.versions("system_prompt")
    assert [each.parent for each in versions] == [None, 1, 2]
    assert versions[-1].run_id == fit.run.run_id
    curve = [each.value for each in trainer.metrics(["val_reward"])]
    assert curve == [0.0, 0.5, 1.0]
    agents = {each.request["model"] for each in server.log if each.request}
    assert agents == {"clerk", "writer"}
    asked = store.sql("SELECT count(*) AS n FROM calls WHERE agent = 'apo'").rows()[0]["n"]
    assert asked == 2
    steps = store.transitions(bodies=False).rows()
    assert {step.agent for step in steps} == {"agent"}
    learnt_from = {step.rollout_id for step in steps if step.mode == "train"}
    assert learnt_from
    assert {v.stat().st_mode & 0o077 for v in store.layout.root.rglob("gepa")} == {0}  # type: ignore[union-attr]  # a local store
