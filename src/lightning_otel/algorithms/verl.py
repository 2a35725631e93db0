"""verl: its agent loop, which runs a rollout for each prompt and gives back its exact tokens.

verl's trainer owns the loop: the prompt becomes a task in the queue that says where verl's engine
is, which model it serves, and its sampling; a runner runs the agent against it, and records it.

    from lightning_otel.algorithms import verl
    verl.register("lightning", store="traces.duckdb")     # in a module that verl's config names

Source: verl 0.9.1, ``experimental/agent_loop/agent_loop.py`` (``AgentLoopBase``, ``register``,
``AgentLoopOutput``) and ``trainer/ppo/v1/agent_loop_tq.py``, where a run may give several outputs.
"""

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from importlib import import_module
from typing import Any, Final

from lightning_otel.adapter.rows import rows_of
from lightning_otel.adapter.tokens import NO_IDS
from lightning_otel.dataset import Store
from lightning_otel.dataset.formats.format import NO_LOGPROBS
from lightning_otel.errors import ConfigError, NotInstalledError, TrainingError, install_command
from lightning_otel.state import State
from lightning_otel.state.queue import Queue
from lightning_otel.types import Mode, Trajectory

_LIBRARY: Final = "verl.experimental.agent_loop.agent_loop"
_SAMPLED: Final = ("temperature", "top_p", "top_k")
_OF_VERL: Final = ("raw_prompt", "index", "agent_name", "uid", "session_id", "global_steps")


def register(
    name: str = "lightning",
    *,
    store: Store | str | os.PathLike[str] | None = None,
    state: State | None = None,
    agent: str | None = None,
    timeout_s: float = 600.0,
    is_listed: bool = True,
) -> type[Any]:
    """Register an agent loop with verl under a name; return its class.

    Args:
        name: What ``actor_rollout_ref.rollout.agent.default_agent_loop`` says.
        store: The store of the runners.
        state: The state of the queue; by default beside the store.
        agent: The agent that takes the rollouts; by default any.
        timeout_s: Limit of a rollout, seconds.
        is_listed: Return all token sequences of a rollout, as verl's transfer-queue trainers
            take them; else the last one.

    Raises:
        ConfigError: verl is not installed, or cannot be imported.
    """
    library = _load_verl()
    target = store if isinstance(store, Store) else Store(store)
    place = state if state is not None else State.beside(target)

    class LightningLoop(library.AgentLoopBase):  # type: ignore[misc, name-defined]  # not installed everywhere
        """Queues a rollout, waits for it, and gives its rows."""

        async def run(self, sampling_params: Mapping[str, Any], **sample: Any) -> Any:
            config = self.rollout_config
            sampling = read_sampling(sampling_params)
            async with _take_engine(self.server_manager) as address:
                task = read_task(sample)
                task["llm"] = {"base_url": address, "model": _model_name(self.config)}
                task["llm"]["sampling"] = sampling
                outputs = await asyncio.to_thread(
                    run_rollout,
                    target,
                    Queue(place),
                    task,
                    agent=agent,
                    mode="val" if is_validation(sampling, config) else "train",
                    timeout_s=timeout_s,
                    response_length=config.get("response_length"),
                )
            return outputs if is_listed else outputs[-1]

    # verl's workers make it by its module and name.
    LightningLoop.__name__ = LightningLoop.__qualname__ = f"Loop_{name}"
    LightningLoop.__module__ = __name__
    globals()[LightningLoop.__name__] = LightningLoop
    library.register(name)(LightningLoop)
    return LightningLoop


def read_sampling(terms: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling that verl wants, whole: what is left out, an engine fills in."""
    names = (*_SAMPLED, "repetition_penalty")
    return {"min_p": 0.0, **{name: terms[name] for name in names if terms.get(name) is not None}}


def is_validation(sampling: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether verl samples a prompt for validation."""
    held_out = config.get("val_kwargs") or {}
    values = [sampling.get(name) for name in _SAMPLED]
    return values == [held_out.get(name) for name in _SAMPLED] != [config.get(n) for n in _SAMPLED]


@contextlib.asynccontextmanager
async def _take_engine(servers: Any) -> AsyncIterator[str]:
    """Yield the address of an engine of verl's, which counts the rollout as its load meanwhile.

    Source: verl 0.9.1, ``workers/rollout/llm_server.py``: servers are registered by address.
    """
    if servers is None:
        yield ""
        return
    request_id = uuid.uuid4().hex
    address, _ = await servers._acquire_server(request_id)
    try:
        yield f"http://{address}/v1"
    finally:
        servers._release_server(address, request_id)


def _model_name(config: Any) -> str:
    rollout = config.actor_rollout_ref
    name = (rollout.rollout.get("prometheus") or {}).get("served_model_name") or ""
    return name.split("/")[-1] or str((rollout.get("model") or {}).get("path") or "")


def read_task(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The task of a rollout: the prompt's messages, and the rest of its row."""
    messages = sample.get("raw_prompt")
    if messages is None:
        raise ConfigError(
            "verl gives no messages; set data.return_raw_chat=True, so that the agent has a task"
        )
    plain = (str, int, float, bool, dict, list, type(None))
    more = {
        key: value
        for key, value in sample.items()
        if key not in _OF_VERL and isinstance(value, plain)
    }
    return {"messages": list(messages), **more}


def run_rollout(
    store: Store,
    queue: Queue,
    task: Mapping[str, Any],
    *,
    agent: str | None = None,
    mode: Mode = "train",
    timeout_s: float = 600.0,
    response_length: int | None = None,
) -> list[Any]:
    """Have a task run by the queue; return verl's outputs of what was recorded."""
    (rollout,) = queue.put([dict(task)], mode=mode, agent=agent, timeout_s=timeout_s)
    (ended,) = queue.wait([rollout.rollout_id], timeout_s)
    if ended.status != "succeeded":
        if ended.status in ("queuing", "running"):
            queue.cancel(ended.rollout_id, "verl waits no longer")
        raise TrainingError(
            f"the rollout {ended.rollout_id} is {ended.status} after {timeout_s:g} s at most: "
            f"{ended.reason or 'no runner ended it'}; look at it: "
            f"lightning-otel show {ended.rollout_id}"
        )
    paths = list(store.trajectories(rollout_id=ended.rollout_id))
    return make_outputs(paths, reward=ended.reward, response_length=response_length)


def make_outputs(
    trajectories: Iterable[Trajectory],
    *,
    reward: float | None = None,
    response_length: int | None = None,
) -> list[Any]:
    """``AgentLoopOutput`` of each exact token sequence of one rollout, all with its reward."""
    library, paths = _load_verl(), list(trajectories)
    rows = list(rows_of(paths))
    if not rows:
        steps = (step for path in paths for step in path.transitions)
        why = next((step.inexact or NO_IDS for step in steps), "no call of a model was recorded")
        raise TrainingError(f"nothing of the rollout can be trained: {why}")
    if any(len(row.logprobs) != len(row.completion_ids) for row in rows):
        raise TrainingError(f"not all of the rollout can be trained: {NO_LOGPROBS}")
    earned = next((path.reward for path in paths if path.reward is not None), None)
    reward = earned if reward is None else reward
    if reward is None:
        raise TrainingError("the rollout has no reward; the agent must return or emit one")
    return [
        library.AgentLoopOutput(
            prompt_ids=list(row.prompt_ids),
            response_ids=list(row.completion_ids[:response_length]),
            response_mask=list(row.loss_mask[:response_length]),
            response_logprobs=list(row.logprobs[:response_length]),
            reward_score=reward,
            num_turns=2 * len(row.transitions),
            metrics=library.AgentLoopMetrics(),
            extra_fields={
                "rollout_id": row.transitions[0].rollout_id,
                "agent": row.transitions[0].agent,
                # Copied from the last output to the others.
                "reward_extra_info": {},
            },
        )
        for row in sorted(rows, key=lambda row: row.transitions[-1].end_ns)
    ]


def _load_verl() -> Any:
    try:
        return import_module(_LIBRARY)
    except ImportError as exc:
        raise NotInstalledError(
            f"this needs verl, which cannot be imported ({exc}); "
            f"{install_command('verl')} in an environment of its own"
        ) from exc
