"""Agent Lightning's algorithms behind our trainer, and what any says without its library."""

import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from lightning_otel import (
    Store,
    Trainer,
    algorithms,
    auto_trace,
    emit_action,
    emit_reward,
    instrument,
    uninstrument,
)
from lightning_otel.algorithms import Batch, models, verl
from lightning_otel.algorithms.exchange import explain_missing
from lightning_otel.algorithms.microsoft import Microsoft
from lightning_otel.errors import ConfigError
from lightning_otel.testing import scripted_server
from lightning_otel.types import Resource

TASKS = [{"question": f"{number}+1", "want": str(number + 1)} for number in range(3)]
needs_all = pytest.mark.skipif(
    not os.environ.get("LIGHTNING_TEST_WHOLE"),
    reason="LIGHTNING_TEST_WHOLE runs it where the whole of agentlightning==0.3.0 is installed",
)


@pytest.mark.skipif(not explain_missing(), reason="agentlightning is installed here")
def test_microsoft_where_it_is_not_installed_is_an_error(store: Store) -> None:
    """Asked for by name, nothing else is done instead."""
    with pytest.raises(ConfigError, match="agentlightning is not installed; pip install"):
        Trainer(lambda task: 1.0, "apo", backend="microsoft", store=store)


@needs_all
@pytest.mark.filterwarnings("default")  # what it imports warns of its own making
@pytest.mark.timeout(300)
def test_its_algorithm_learns_from_our_agent(store: Store, client: openai.OpenAI) -> None:
    """An algorithm of its own sees our steps and rewards, and the prompt it makes is a canary."""
    import agentlightning as agl

    seen: list[Sequence[Any]] = []

    class Better(agl.Algorithm):  # type: ignore[misc,name-defined]  # it has no stubs
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            theirs = self.get_store()
            first = await theirs.update_resources("first", self.get_initial_resources())
            ids = [
                (await theirs.enqueue_rollout(task, "train", first.resources_id)).rollout_id
                for task in train_dataset
            ]
            done: list[Any] = []
            while len(done) < len(ids):
                done = await theirs.wait_for_rollouts(rollout_ids=ids, timeout=1.0)
            for rollout_id in ids:
                spans = await theirs.query_spans(rollout_id)
                seen.append(self.get_adapter().adapt(spans))
            better = agl.PromptTemplate(template="Be brief and right: {q}", engine="f-string")
            await theirs.update_resources("second", {"system_prompt": better})

    def agent(task: Mapping[str, str], resources: Mapping[str, Resource]) -> str:
        prompt = resources["system_prompt"].body["template"].format(q=task["question"])
        client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": prompt}],
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        return task["want"]

    instrument()
    try:
        trainer = Trainer(
            agent, Better(), backend="microsoft", store=store,
            resources={"system_prompt": "Answer: {q}"},
            reward_evaluator=lambda recording: float(recording.result != "2"),
        )  # fmt: skip
        fit = trainer.fit(TASKS)
    finally:
        uninstrument()

    ours = list(store.transitions(mode="train"))
    triplets = [triplet for found in seen for triplet in found]
    assert fit.metrics["mean_reward"] == pytest.approx(2 / 3)
    assert [step.reward for step in ours] == [1.0, 0.0, 1.0]
    assert [triplet.reward for triplet in triplets] == [1.0, 0.0, 1.0]
    assert [triplet.response["token_ids"] for triplet in triplets] == [
        list(step.response_ids) for step in ours
    ]
    made = trainer.resources.get("system_prompt", "canary")
    assert made.body["template"] == "Be brief and right: {q}"
    assert (made.version, trainer.resources.get("system_prompt").version) == (2, 1)


@needs_all
@pytest.mark.filterwarnings("default")
@pytest.mark.timeout(300)
def test_its_apo_writes_a_prompt(store: Store) -> None:
    """Its own APO is given the adapter that it asks for, and its best prompt is published."""
    better = "Answer {q} in one number."

    def answer(body: Mapping[str, Any]) -> str:
        return better if "gpt" in body["model"] else "4"

    def agent(task: Mapping[str, str], resources: Mapping[str, Resource]) -> float:
        prompt = resources["system_prompt"].body["template"]
        ask(prompt.format(q=task["question"]))
        return float("number" in prompt)

    with scripted_server(answer) as server:

        def ask(text: str) -> None:
            with openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client:
                client.chat.completions.create(
                    model="toy", messages=[{"role": "user", "content": text}]
                )

        trainer = Trainer(
            agent, "apo", backend="auto", store=store, resources={"system_prompt": "Answer: {q}"},
            async_openai_client=openai.AsyncOpenAI(base_url=server.base_url, api_key="k"),
            gradient_model="gpt-1", apply_edit_model="gpt-1",
            beam_rounds=1, beam_width=1, branch_factor=1, gradient_batch_size=1,
            val_batch_size=2, rollout_batch_timeout=60.0,
        )  # fmt: skip
        trainer.fit(TASKS, TASKS)

    assert isinstance(trainer.algorithm, Microsoft)
    versions = trainer.resources.versions("system_prompt")
    assert [each.body["template"] for each in versions][-1] == better


@needs_all
@pytest.mark.filterwarnings("default")
def test_auto_is_ours_where_theirs_cannot_be_made(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options of our APO, or a library that its extra installs: ours, with the reason."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with caplog.at_level(logging.WARNING):
        ours = Trainer(lambda task: 1.0, "apo", backend="auto", store=store, model="m")
    monkeypatch.setitem(sys.modules, "poml", None)
    monkeypatch.delitem(sys.modules, "agentlightning.algorithm.apo", raising=False)
    monkeypatch.delitem(sys.modules, "agentlightning.algorithm.apo.apo", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'agentlightning\[apo\]==0\.3\.0'"):
        Trainer(lambda task: 1.0, Microsoft("apo", async_openai_client=None), store=store).fit([1])

    assert type(ours.algorithm).__name__ == "APO"
    assert "backend 'auto' is 'builtin' here: Agent Lightning's APO cannot be made" in caplog.text


@needs_all
@pytest.mark.filterwarnings("default")
def test_what_it_has_not_is_refused(store: Store) -> None:
    """A name, options and objects that mean nothing to it are refused before anything runs."""
    with pytest.raises(ConfigError, match="Agent Lightning has no algorithm 'sft'"):
        Microsoft("sft")
    with pytest.raises(ConfigError, match="unknown options steps; give those"):
        Microsoft(object(), steps=3)
    with pytest.raises(ConfigError, match="object is no algorithm of Agent Lightning's"):
        Trainer(lambda task: 1.0, Microsoft(object()), store=store).fit([1])
    with pytest.raises(ConfigError, match="give fit\\(train=…\\)"):
        Trainer(lambda task: 1.0, Microsoft(), store=store).fit()


def test_train_command_says_why_it_falls_back(store: Store, tmp_path: Path) -> None:
    """``train --backend auto`` goes on with ours where Agent Lightning is not, and says so."""
    if not explain_missing():
        pytest.skip("agentlightning is installed here")
    with auto_trace(store=store, task="hi"):
        emit_action("say", "hi")
        emit_reward(1.0)

    done = subprocess.run(
        [sys.executable, "-m", "lightning_otel", "train", "baseline", "--backend", "auto",
         "--store", store.name],
        capture_output=True, text=True, cwd=tmp_path, timeout=50,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "backend 'auto' is 'builtin' here: agentlightning is not installed" in done.stderr


@pytest.mark.parametrize("name", ["sft", "kto", "dpo", "grpo", "ppo"])
def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The error says what cannot be imported and what to install, before anything is read."""
    monkeypatch.setitem(sys.modules, "trl", None)
    algorithm = algorithms.make_algorithm(name, model="anything")

    with pytest.raises(ConfigError, match=r"needs trl, .*pip install .*\[train\]'"):
        algorithm.train_step(Batch([], number=1, rewards={}, groups={}))

    assert algorithm.extra == models.EXTRA == "train"


def test_names_that_users_know_are_there() -> None:
    """By their classes' names, in any case."""
    assert algorithms.PPO is algorithms.get("PPO") is algorithms.get("ppo")
    assert algorithms.GRPO is algorithms.get("grpo")
    assert algorithms.SFT is algorithms.get("sft")
    assert algorithms.PPO(model="anything", learning_rate=3e-4).name == "ppo"
    with pytest.raises(AttributeError, match="no attribute 'Anything'"):
        _ = algorithms.Anything


def test_a_missing_verl_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is registered where there is nobody to register with."""
    monkeypatch.setitem(sys.modules, "verl.experimental.agent_loop.agent_loop", None)

    with pytest.raises(ConfigError, match=r"pip install .*\[verl\]'"):
        verl.register("nobody")


def test_algorithms_are_looked_at_without_their_libraries() -> None:
    """To name and to make one imports neither torch nor a trainer."""
    code = (
        "import sys; from lightning_otel import algorithms\n"
        "for name in ('sft', 'kto', 'dpo', 'grpo', 'ppo'):\n"
        "    algorithms.make_algorithm(name, model='any')\n"
        "import lightning_otel.algorithms.verl, lightning_otel.algorithms.engines\n"
        "assert not {'torch', 'transformers', 'trl', 'verl', 'ray'} & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
