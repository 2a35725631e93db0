"""verl's agent loop runs a rollout by our queue and gets its exact tokens back."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from examples.closed_loop import tiny
from tests.formats.consumers.recorded import recorded

import lightning_otel as lo
from lightning_otel import Queue, Runner
from lightning_otel.demo.server import DemoServer
from lightning_otel.errors import ConfigError, TrainingError
from lightning_otel.state import State

loops = pytest.importorskip("verl.experimental.agent_loop.agent_loop")

from lightning_otel.algorithms import verl  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
PROMPT = [{"role": "user", "content": "What is 17*23?"}]


@pytest.fixture
def place(store: lo.Store) -> State:
    """The state beside the store."""
    return State(store.name)


class Servers:
    """verl's client of its engines, as far as its load balancer gives addresses."""

    def __init__(self, base_url: str) -> None:
        self.address = base_url.removeprefix("http://").removesuffix("/v1")
        self.held: list[str] = []

    async def _acquire_server(self, request_id: str) -> tuple[str, Any]:
        self.held.append(request_id)
        return self.address, None

    def _release_server(self, server_id: str, request_id: str) -> None:
        assert server_id == self.address
        self.held.remove(request_id)


ROLLOUT = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "response_length": 4,
    "val_kwargs": {"temperature": 0, "top_p": 1.0, "top_k": -1},
}


def made(name: str, servers: Servers) -> Any:
    """The loop as verl's workers make it: by hydra, from what is registered under its name."""
    import hydra
    from omegaconf import OmegaConf

    config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": ROLLOUT, "model": {"path": "toy"}}, "data": {}}
    )
    return hydra.utils.instantiate(
        config=loops._agent_loop_registry[name],
        trainer_config=loops.DictConfigWrap(config=config),
        server_manager=servers,
        tokenizer=tiny.tokenizer(),
        processor=None,
        dataset_cls=None,
        data_config=loops.DictConfigWrap(config=config.data),
        tools=[],
    )


def work(store: lo.Store, state: State, agent: Any, stop: threading.Event) -> threading.Thread:
    """A runner in a thread, until it is told to stop."""

    def run() -> None:
        runner = Runner(agent, store=store, queue=Queue(state))
        runner.run(until_empty=False, stop=stop)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize(("temperature", "mode"), [(1.0, "train"), (0, "val")])
def test_a_prompt_becomes_a_rollout_and_its_rows(
    store: lo.Store, place: State, server: DemoServer, temperature: float, mode: str
) -> None:
    """Made by verl's way, run: the agent asked its engine as it says, its tokens are the output."""

    def agent(task: dict[str, Any]) -> float:
        llm = task["llm"]
        with openai.OpenAI(base_url=llm["base_url"], api_key="none") as client:
            client.chat.completions.create(
                model=llm["model"],
                messages=task["messages"],
                logprobs=True,
                extra_body={"return_token_ids": True, **llm["sampling"]},
            )
        return 0.75

    verl.register("lightning", store=store, state=place, timeout_s=60)
    servers = Servers(server.base_url)
    sampling = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    sample = {"raw_prompt": PROMPT, "data_source": "math", "uid": "u1", "index": 3}
    stop = threading.Event()
    thread = work(store, place, agent, stop)
    try:
        (output,) = asyncio.run(_run(servers, {**sampling, "temperature": temperature}, sample))
    finally:
        stop.set()
        thread.join()

    (exchange,) = server.log
    assert isinstance(output, loops.AgentLoopOutput)
    assert exchange.response is not None
    assert output.prompt_ids == exchange.response["prompt_token_ids"]
    ids = exchange.response["choices"][0]["token_ids"]
    assert len(ids) > 4
    assert output.response_ids == ids[:4]
    assert output.response_mask == [1] * 4
    told = exchange.response["choices"][0]["logprobs"]["content"]
    assert output.response_logprobs == pytest.approx([each["logprob"] for each in told[:4]])
    assert output.reward_score == 0.75
    (rollout,) = Queue(place).rollouts()
    asked = {
        "temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "repetition_penalty": 1.0,
    }  # fmt: skip
    llm = {"base_url": server.base_url, "model": "toy", "sampling": asked}
    assert rollout.task == {"messages": PROMPT, "data_source": "math", "llm": llm}
    assert rollout.mode == mode
    assert output.extra_fields["rollout_id"] == rollout.rollout_id
    assert not servers.held


async def _run(servers: Servers, sampling: dict[str, Any], sample: dict[str, Any]) -> Any:
    return await made("lightning", servers).run(sampling, **sample)


def test_outputs_are_what_verl_stores(tmp_path: Path) -> None:
    """Observed tokens are masked, and ``as_dict`` makes the tensors that verl's trainers take."""
    paths = list(recorded(tmp_path / "traces.duckdb").trajectories(rollout_id="r0"))

    (output,) = verl.make_outputs(paths)

    held = output.as_dict()
    assert held["prompts"].tolist() == [3, 4, 5, 6]
    assert held["responses"].tolist() == [7, 8, 9, 10, 11, 12, 13]
    assert held["response_mask"].tolist() == [1, 1, 1, 0, 0, 1, 1]
    assert held["rollout_log_probs"].tolist() == [-0.5, -0.25, -0.125, 0.0, 0.0, -1.0, -0.75]
    assert held["rm_scores"].tolist() == [0.0] * 6 + [1.0]
    assert held["num_turns"] == 4


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    """Text, missing logprobs and a missing reward: told, not filled up."""
    (path,) = recorded(tmp_path / "traces.duckdb").trajectories(rollout_id="r0")

    def without(**fields: Any) -> list[lo.Trajectory]:
        steps = tuple(replace(s, **fields) for s in path.transitions)
        return [replace(path, transitions=steps, reward=fields.get("reward", path.reward))]

    with pytest.raises(TrainingError, match="nothing of the rollout can be trained"):
        verl.make_outputs(without(prompt_ids=(), response_ids=(), logprobs=(), capture="text"))
    with pytest.raises(TrainingError, match="no logprobs"):
        verl.make_outputs(without(logprobs=()))
    with pytest.raises(TrainingError, match="the rollout has no reward"):
        verl.make_outputs(without(reward=None))
    assert verl.make_outputs(without(reward=None), reward=0.5)[0].reward_score == 0.5
    with pytest.raises(ConfigError, match="return_raw_chat"):
        verl.read_task({"uid": "u1"})


def test_a_rollout_that_nobody_takes_or_that_fails_is_told(store: lo.Store, place: State) -> None:
    """Whoever waits hears why; the rollout is cancelled, so that nobody runs it in vain."""
    queue = Queue(place)
    with pytest.raises(TrainingError, match=r"queuing after 0.2 s at most: no runner ended it"):
        verl.run_rollout(store, queue, {"messages": PROMPT}, timeout_s=0.2)
    assert queue.counts()["cancelled"] == 1

    def agent(task: Any) -> float:
        raise RuntimeError("it broke")

    stop = threading.Event()
    thread = work(store, place, agent, stop)
    try:
        with pytest.raises(TrainingError, match=r"failed after 30 s at most: .*it broke"):
            verl.run_rollout(store, queue, {"messages": PROMPT}, timeout_s=30)
    finally:
        stop.set()
        thread.join()
