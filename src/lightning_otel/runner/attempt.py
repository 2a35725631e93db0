"""One attempt: the agent acts on its task, recorded, with the resources that are its."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import Context
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from opentelemetry import trace

from lightning_otel import capture, config, operations
from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter
from lightning_otel.adapter.advantages import last_rewards
from lightning_otel.agents import Agent, Answer
from lightning_otel.agents.agent import finished
from lightning_otel.dataset import Store
from lightning_otel.emitters import emit_reward
from lightning_otel.errors import ConfigError, StateError
from lightning_otel.resources import stamps
from lightning_otel.substitution import SUBSTITUTED
from lightning_otel.tracing import Recording, RewardEvaluator, auto_trace
from lightning_otel.types import Resource, Rollout

if TYPE_CHECKING:
    from lightning_otel.runner.hooks import Hooks
    from lightning_otel.state.queue import Lease

log = logging.getLogger(__name__)

_READ_S: Final = 10.0


class ResourceSource(Protocol):
    """A source of an agent's resources."""

    def assigned(
        self, key: str, *, agent: str | None = None, pinned: Mapping[str, int] = ...
    ) -> Mapping[str, Resource]:
        """By name what is to be used under a key, such as a rollout's id."""


class Outcome(NamedTuple):
    """The outcome of an attempt.

    Attributes:
        reason: Why it failed; empty if it did not.
        recording: Its spans; None if it failed before it was recorded.
    """

    reward: float | None = None
    reason: str = ""
    recording: Recording | None = None


class Course(NamedTuple):
    """The settings that all attempts of a runner share."""

    store: Store
    resources: ResourceSource | None
    hooks: "Hooks"
    reward_evaluator: RewardEvaluator | None
    apply: bool | None

    def run(self, agent: Agent, lease: "Lease") -> Outcome:
        """Make the attempt; whatever goes wrong in it is its outcome."""
        recording: Recording | None = None
        rollout = lease.rollout
        try:
            assigned = self._assign_resources(agent, rollout)
            with auto_trace(
                name=agent.name,
                store=self.store,
                rollout_id=rollout.rollout_id,
                attempt_id=lease.attempt_id,
                task=rollout.task,
                mode=rollout.mode,
                agent=agent.name,
                track_only=agent.track_only,
                resources=stamps(assigned) or None,
                apply=self.apply,
            ) as recording:
                given = self._run_agent(agent, rollout, assigned, recording)
            earned = last_rewards(TripletAdapter().explain(recording.spans()).outcomes)
            # Where nothing is recorded, what was given back is all there is.
            return Outcome(earned.get(rollout.rollout_id, given), "", recording)
        # An agent that calls sys.exit(), or is cancelled, has failed like any other.
        except BaseException as exc:
            log.debug("an attempt at %s failed", rollout.rollout_id, exc_info=True)
            return Outcome(None, _word_reason(exc), recording)

    def _assign_resources(self, agent: Agent, rollout: Rollout) -> Mapping[str, Resource]:
        """Return the resources of an attempt, without those that do not reach the agent."""
        pinned = rollout.resources
        if pinned and self.resources is None:
            raise ConfigError(
                f"the rollout is pinned to {dict(pinned)}, and the runner has no resources; give "
                "Runner(resources=…)"
            )
        if self.resources is None:
            return {}
        found = self.resources.assigned(rollout.rollout_id, agent=agent.name, pinned=pinned)
        if agent.takes_resources:
            return found
        is_applied = config.APPLY.read() if self.apply is None else self.apply
        reaching = SUBSTITUTED if is_applied else ()
        lost = sorted(name for name in pinned if name.rpartition("/")[2] not in reaching)
        if lost:
            raise ConfigError(
                f"the rollout is pinned to {', '.join(lost)}, which {agent.name} does not take; "
                f"write it as (task, resources), or name them {' and '.join(SUBSTITUTED)} and have "
                "its requests made with them: apply=True"
            )
        return {name: found[name] for name in reaching if name in found}

    def _run_agent(
        self,
        agent: Agent,
        rollout: Rollout,
        assigned: Mapping[str, Resource],
        recording: Recording,
    ) -> float | None:
        """The reward that the agent, or who judges it, gave back."""
        if rollout.group_id:
            trace.get_current_span().set_attribute(c.TASK_ID, rollout.group_id)
        self.hooks.trace_start(agent, rollout, recording)
        try:
            if not agent.takes_resources:
                _await_applied(agent, rollout, assigned)
            answer = agent.run(rollout.task, assigned, rollout)
            recording.result = answer
            if self.reward_evaluator is not None:
                answer = finished(self.reward_evaluator(recording))
            return _emit_answer(answer, is_judged=self.reward_evaluator is not None)
        except BaseException as exc:
            recording.error = exc
            raise
        finally:
            self.hooks.trace_end(agent, rollout, recording)


def _await_applied(agent: Agent, rollout: Rollout, assigned: Mapping[str, Resource]) -> None:
    """Wait until requests are made with what the attempt is said to be made with.

    Raises:
        StateError: They are not, since it cannot be read.
    """
    frame = capture.current_frame()
    applied = frame.applied if frame is not None else None
    if applied is None or not assigned:
        return
    pinned = {name: resource.version for name, resource in assigned.items()}
    until_s = time.monotonic() + _READ_S
    while True:
        given = applied.given(rollout.rollout_id, agent.name, pinned)
        missing = [name for name in pinned if name not in given]
        if not missing:
            return
        if time.monotonic() > until_s:
            raise StateError(f"{', '.join(missing)} could not be read to be applied within a while")
        time.sleep(0.05)


def _emit_answer(answer: Answer, *, is_judged: bool) -> float | None:
    """The reward an agent gave back, which is emitted; of several the primary, None if none."""
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


def _word_reason(exc: BaseException) -> str:
    said = operations.message_of(exc)
    name = operations.type_name(exc).rpartition(".")[2]
    return f"{name}: {said}" if said else name


class Hand:
    """A thread that makes attempts one after the other, so that another one can look on.

    It does not keep the program from ending.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread = threading.Thread(
            target=_work_jobs, args=(self._jobs,), name=name, daemon=True
        )
        self.thread.start()

    def start(self, function: Callable[[], Outcome]) -> "Job":
        """Begin with something."""
        job = Job(function)
        self._jobs.put(job.run)
        return job

    def end(self) -> None:
        """Let the thread end when it is done with what it does."""
        self._jobs.put(None)


class Job:
    """Something that is done in another thread."""

    def __init__(self, function: Callable[[], Outcome]) -> None:
        self._function = function
        self._is_done = threading.Event()
        self.outcome = Outcome()

    def run(self) -> None:
        """Do it, in a context that knows nothing of who asked for it."""
        try:
            self.outcome = Context().run(self._function)
        finally:
            self._is_done.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait some seconds; return whether it is done."""
        return self._is_done.wait(timeout_s)


def _work_jobs(jobs: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
