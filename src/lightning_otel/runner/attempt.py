"""One attempt: the agent acts on a task with its resources, recorded, between hooks."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import Context
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

from opentelemetry import trace

from lightning_otel import capture, config
from lightning_otel.adapter import TripletAdapter
from lightning_otel.adapter.advantages import last_rewards
from lightning_otel.capture import operations
from lightning_otel.errors import ConfigError, StateError
from lightning_otel.instrumentors.substitution import SUBSTITUTED
from lightning_otel.resources import stamps
from lightning_otel.runner.agents import Agent, Answer
from lightning_otel.runner.agents.agent import await_result
from lightning_otel.tracing import Recording, RewardEvaluator, auto_trace
from lightning_otel.tracing.emitters import emit_reward
from lightning_otel.types import Resource, Rollout, Span
from lightning_otel.types import conventions as c

if TYPE_CHECKING:
    from lightning_otel.runner.worker import Runner
    from lightning_otel.state.queue import Lease

log = logging.getLogger(__name__)

_READ_S: Final = 10.0


class ResourceSource(Protocol):
    """A source of an agent's resources."""

    def assigned(
        self, key: str, *, agent: str | None = None, pinned: Mapping[str, int] = ...
    ) -> Mapping[str, Resource]:
        """Return by name what is to be used under a key, such as a rollout's id."""


class Hook:
    """Methods that a runner calls around each attempt; override any, sync or async.

    An error of a hook is logged; the attempt continues.

    Source: Agent Lightning 0.3, ``Hook``, whose names these are.
    """

    def on_rollout_start(self, *, agent: Agent, runner: "Runner", rollout: Rollout) -> Any:
        """Called before an attempt begins, outside its recording."""

    def on_trace_start(
        self, *, agent: Agent, runner: "Runner", rollout: Rollout, recording: Recording
    ) -> Any:
        """Called in the recording, before the agent acts: emitted spans are the rollout's."""

    def on_trace_end(
        self, *, agent: Agent, runner: "Runner", rollout: Rollout, recording: Recording
    ) -> Any:
        """Called in the recording, after the agent acted or failed (``recording.error``)."""

    def on_rollout_end(
        self, *, agent: Agent, runner: "Runner", rollout: Rollout, spans: list[Span]
    ) -> Any:
        """Called after the attempt, with the rollout as it then stands."""


def call_hooks(
    runner: "Runner", name: str, *, recording: Recording | None = None, **arguments: Any
) -> None:
    """Call a runner's hooks that are written; the spans are read where one wants them."""
    for hook in runner.hooks:
        written = getattr(type(hook), name, None)
        if written is None or written is getattr(Hook, name):
            continue
        if name == "on_rollout_end":
            if "spans" not in arguments:
                arguments["spans"] = recording.spans() if recording is not None else []
        elif name != "on_rollout_start":
            arguments["recording"] = recording
        try:
            await_result(getattr(hook, name)(runner=runner, **arguments))
        except Exception:  # a hook looks on; what it watches goes on
            log.warning("%s of %s failed", name, type(hook).__name__, exc_info=True)


class Outcome(NamedTuple):
    """The outcome of an attempt."""

    reward: float | None = None
    reason: str = ""  # of a failure
    recording: Recording | None = None  # None if it failed before it was recorded


Job: TypeAlias = "Future[Outcome]"


def run_attempt(runner: "Runner", agent: Agent, lease: "Lease") -> Outcome:
    """Make the attempt; return any failure as its outcome."""
    recording: Recording | None = None
    rollout = lease.rollout
    try:
        resources = _assign_resources(runner, agent, rollout)
        with auto_trace(
            name=agent.name,
            store=runner.store,
            rollout_id=rollout.rollout_id,
            attempt_id=lease.attempt_id,
            task=rollout.task,
            mode=rollout.mode,
            agent=agent.name,
            track_only=agent.track_only,
            resources=stamps(resources) or None,
            apply=runner.apply,
        ) as recording:
            reward = _run_agent(runner, agent, rollout, resources, recording)
        earned = last_rewards(TripletAdapter().explain(recording.spans()).outcomes)
        # Where nothing is recorded, what was given back is all there is.
        return Outcome(earned.get(rollout.rollout_id, reward), "", recording)
    # An agent that calls sys.exit(), or is cancelled, has failed like any other.
    except BaseException as exc:
        log.debug("an attempt at %s failed", rollout.rollout_id, exc_info=True)
        name = operations.type_name(exc).rpartition(".")[2]
        message = operations.message_of(exc) if capture.process.content.is_kept else ""
        return Outcome(None, f"{name}: {message}" if message else name, recording)


def _assign_resources(runner: "Runner", agent: Agent, rollout: Rollout) -> Mapping[str, Resource]:
    pinned = rollout.resources
    if runner.resources is None:
        if pinned:
            raise ConfigError(
                f"the rollout is pinned to {dict(pinned)}, and the runner has no resources; give "
                "Runner(resources=…)"
            )
        return {}
    resources = runner.resources.assigned(rollout.rollout_id, agent=agent.name, pinned=pinned)
    if agent.takes_resources:
        return resources
    is_applied = config.APPLY.read() if runner.apply is None else runner.apply
    reaching = SUBSTITUTED if is_applied else ()
    lost = sorted(name for name in pinned if name.rpartition("/")[2] not in reaching)
    if lost:
        raise ConfigError(
            f"the rollout is pinned to {', '.join(lost)}, which {agent.name} does not take; "
            f"write it as (task, resources), or name them {' and '.join(SUBSTITUTED)} and have "
            "its requests made with them: apply=True"
        )
    return {name: resources[name] for name in reaching if name in resources}


def _run_agent(
    runner: "Runner",
    agent: Agent,
    rollout: Rollout,
    resources: Mapping[str, Resource],
    recording: Recording,
) -> float | None:
    if rollout.group_id:
        trace.get_current_span().set_attribute(c.TASK_ID, rollout.group_id)
    arguments: dict[str, Any] = {"agent": agent, "rollout": rollout, "recording": recording}
    call_hooks(runner, "on_trace_start", **arguments)
    try:
        if not agent.takes_resources:
            _await_applied(agent, rollout, resources)
        answer = agent.run(rollout.task, resources, rollout)
        return emit_answer(answer, recording, runner.reward_evaluator)
    except BaseException as exc:
        recording.error = exc
        raise
    finally:
        call_hooks(runner, "on_trace_end", **arguments)


def _await_applied(agent: Agent, rollout: Rollout, resources: Mapping[str, Resource]) -> None:
    """Wait until requests are made with the stamped resources."""
    frame = capture.current_frame()
    assigner = frame.assigner if frame is not None else None
    if assigner is None or not resources:
        return
    pinned = {name: resource.version for name, resource in resources.items()}
    until_s = time.monotonic() + _READ_S
    while True:
        versions = assigner.assign(rollout.rollout_id, agent.name, pinned)
        missing = [name for name in pinned if name not in versions]
        if not missing:
            return
        if time.monotonic() > until_s:
            raise StateError(f"{', '.join(missing)} could not be read to be applied within a while")
        time.sleep(0.05)


def emit_answer(
    answer: Answer, recording: Recording, evaluator: RewardEvaluator | None
) -> float | None:
    """Emit the agent's reward, or its evaluator's; return the primary one."""
    recording.result = answer
    is_judged = evaluator is not None
    if evaluator is not None:
        answer = await_result(evaluator(recording))
    if answer is None:
        return None
    if isinstance(answer, Mapping):
        primary = next(iter(answer), None)
        emit_reward(answer, primary=primary)
        return float(answer[primary])
    if not hasattr(answer, "__float__"):  # as numbers have, and arrays of one
        who = "the reward evaluator" if is_judged else "the agent"
        raise ConfigError(
            f"{who} gave back a {type(answer).__name__}, which is no reward; give a number, "
            "named numbers or None" + ("" if is_judged else ", or name a reward_evaluator")
        )
    emit_reward(float(answer))
    return float(answer)


class AttemptThread:
    """A daemon thread that makes attempts, watched by another."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Job, Callable[[], Outcome]] | None] = SimpleQueue()
        self.thread = threading.Thread(
            target=_work_jobs, args=(self._jobs,), name=name, daemon=True
        )
        self.thread.start()

    def start(self, function: Callable[[], Outcome]) -> Job:
        """Make an attempt there; return what its outcome comes to."""
        job: Job = Future()
        self._jobs.put((job, function))
        return job

    def end(self) -> None:
        """End the thread after its present attempt."""
        self._jobs.put(None)


def _work_jobs(jobs: "SimpleQueue[tuple[Job, Callable[[], Outcome]] | None]") -> None:
    while (entry := jobs.get()) is not None:
        job, function = entry
        outcome = Outcome()
        try:
            # In a context that knows nothing of who asked for it.
            outcome = Context().run(function)
        finally:
            job.set_result(outcome)
        del job, function, entry, outcome
