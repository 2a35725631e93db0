"""Agent Lightning 0.3's algorithms: its trainer runs our agent, and its results are published.

Its trainer, store and algorithm live in this process; each of its rollouts is recorded in our store
under its ids, and returns our spans in the form that its adapters read.

Source: Agent Lightning 0.3.0, ``trainer/trainer.py`` and ``runner/agent.py``: a rollout may return
the spans it consists of.
"""

import importlib
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

from lightning_otel.adapter import readers
from lightning_otel.algorithms.base import BaseAlgorithm
from lightning_otel.algorithms.exchange import choose_backend
from lightning_otel.algorithms.exchange.calls import to_agentlightning
from lightning_otel.errors import ConfigError, NotInstalledError, TrainingError
from lightning_otel.runner.agents.agent import await_result
from lightning_otel.runner.attempt import emit_answer
from lightning_otel.tracing import auto_trace
from lightning_otel.tracing.propagation import call_outside_loop
from lightning_otel.types import Resource, Rollout, Span

if TYPE_CHECKING:
    from lightning_otel.algorithms.options import RunConfig
    from lightning_otel.algorithms.run import Run
    from lightning_otel.runner.agents import Agent

NAMES: Final = {"baseline": "Baseline", "apo": "APO", "verl": "VERL"}
"""Algorithms of its own by the names that they are asked for by."""


class Microsoft(BaseAlgorithm):
    """Learns by an algorithm of Agent Lightning's; its prompts are published as canaries."""

    name: ClassVar[str] = "microsoft"

    def __init__(self, algorithm: object = "baseline", **options: Any) -> None:
        """Take ``baseline``, ``apo``, ``verl`` or an instance, and the options of its class."""
        if isinstance(algorithm, str) and algorithm.lower() not in NAMES:
            raise ConfigError(
                f"Agent Lightning has no algorithm {algorithm!r}; it has {', '.join(NAMES)}"
            )
        if not isinstance(algorithm, str) and options:
            raise ConfigError(
                f"unknown options {', '.join(options)}; give those of an algorithm that is made "
                "already to itself"
            )
        self._algorithm = algorithm
        self._options = options

    def run(self, context: "Run") -> None:
        """Have its trainer run the agent on the tasks, and publish what it learnt.

        Raises:
            ConfigError: Agent Lightning cannot be used; no agent or task; or there are hooks.
            TrainingError: None of the rollouts has a reward.
        """
        choose_backend("microsoft")
        if not context.train:
            raise ConfigError("Agent Lightning learns from tasks; give fit(train=…)")
        if context.config.hooks:
            raise ConfigError(
                "Agent Lightning's runners do not call hooks; leave out hooks, or train with "
                "backend='builtin'"
            )
        agl: Any = importlib.import_module("agentlightning")
        live = [standing.live for _, standing in sorted(context.resources.standings().items())]
        # It has no kind for weights.
        bodies = {item.name: item.body for item in live if item and item.kind != "weights"}
        work = _MicrosoftAgent(agl, context.config)
        store = agl.InMemoryLightningStore(thread_safe=True)
        algorithm = self._make_algorithm(agl)
        # APO asks for messages, others for what its trainer takes by itself.
        is_apo = any(".algorithm.apo" in base.__module__ for base in type(algorithm).__mro__)
        trainer = agl.Trainer(
            algorithm=algorithm,
            adapter=agl.TraceToMessages() if is_apo else None,
            n_runners=max(context.config.workers, 1),
            initial_resources={name: _to_resource(agl, body) for name, body in bodies.items()},
            store=store,
            strategy=agl.SharedMemoryExecutionStrategy(
                n_runners=max(context.config.workers, 1), main_thread="algorithm"
            ),
            tracer=_make_tracer(agl),
        )
        val = list(context.val) or None
        call_outside_loop(lambda: trainer.fit(work.agent(), list(context.train), val_dataset=val))
        latest = await_result(store.get_latest_resources())
        self._publish_results(context, work, bodies, {} if latest is None else latest.resources)

    def find_fault(self) -> str:
        """Return the reason why its algorithm cannot be made; empty if it can."""
        try:
            self._make_algorithm(importlib.import_module("agentlightning"))
        except ConfigError as exc:
            return str(exc)
        return ""

    def _make_algorithm(self, agl: Any) -> Any:
        if isinstance(self._algorithm, str):
            name = NAMES[self._algorithm.lower()]
            try:
                return getattr(agl, name)(**self._options)
            except ImportError as exc:
                raise NotInstalledError(
                    f"Agent Lightning's {name} cannot be imported ({exc}); "
                    f"pip install 'agentlightning[{name.lower()}]==0.3.0'"
                ) from exc
            except TypeError as exc:
                raise ConfigError(
                    f"Agent Lightning's {name} cannot be made of {self._options!r:.200}: {exc}; "
                    "see its options"
                ) from exc
        if not isinstance(self._algorithm, agl.Algorithm):
            raise ConfigError(
                f"{type(self._algorithm).__name__} is no algorithm of Agent Lightning's; give its "
                f"name, of {', '.join(NAMES)}"
            )
        return self._algorithm

    @staticmethod
    def _publish_results(
        context: "Run",
        work: "_MicrosoftAgent",
        bodies: Mapping[str, Mapping[str, Any]],
        learnt: Mapping[str, Any],
    ) -> None:
        rewards = work.rewards
        if not rewards:
            raise TrainingError(
                f"none of {work.rollouts} rollouts has a reward; the agent must give one back"
            )
        measured = {
            "mean_reward": sum(rewards) / len(rewards),
            "rollouts": float(work.rollouts),
            "failed": float(work.failed),
        }
        context.log(context.step + 1, measured)
        context.commit(step=context.step + 1)
        for name, resource in learnt.items():
            original = bodies.get(name, {})
            body = {**original, **(_to_body(resource) or {})}
            if body != original:
                context.publish(name, body, metrics=measured)


class _MicrosoftAgent:
    def __init__(self, agl: Any, config: "RunConfig") -> None:
        self._agl = agl
        self._config = config
        self.rollouts = 0
        self.failed = 0
        self.rewards: list[float] = []
        # Guards that two runners' threads count what they did.
        self._lock = threading.Lock()

    def agent(self) -> Any:
        work, base = self, self._agl.LitAgent

        class Ours(base):  # type: ignore[misc,valid-type]  # it has no stubs
            def rollout(self, task: Any, resources: Any, rollout: Any) -> list[Any]:
                return work.run(task, resources, rollout)

        return Ours()

    def run(self, task: Any, resources: Mapping[str, Any], theirs: Any) -> list[Any]:
        agent: Agent | None = self._config.agent
        assert agent is not None  # asked for before anything began
        attempt = theirs.attempt
        rollout = Rollout(
            theirs.rollout_id, task, "running", theirs.mode or "train", attempts=attempt.sequence_id
        )
        # Its versions have no number, but a name for all of them together.
        bodies = {
            name: Resource(name, 0, _KINDS[resource.resource_type], body)
            for name, resource in resources.items()
            if (body := _to_body(resource)) is not None
        }
        is_done = False
        try:
            with auto_trace(
                name=agent.name,
                store=self._config.store,
                rollout_id=theirs.rollout_id,
                attempt_id=attempt.attempt_id,
                task=task,
                mode=rollout.mode,
                agent=agent.name,
                track_only=agent.track_only,
                resource_version=theirs.resources_id,
            ) as recording:
                answer = agent.run(task, bodies, rollout)
                reward = emit_answer(answer, recording, self._config.reward_evaluator)
            is_done = True
        finally:
            with self._lock:
                self.rollouts += 1
                self.failed += not is_done
        with self._lock:
            self.rewards += [reward] if reward is not None else []
        spans = sorted(recording.spans(), key=lambda span: (span.start_ns, span.sequence))
        return [
            self._make_span(span, number, theirs.rollout_id, attempt.attempt_id)
            for number, span in enumerate(readers.read(spans), 1)
        ]

    def _make_span(self, span: Span, number: int, rollout_id: str, attempt_id: str) -> Any:
        agl = self._agl
        types = importlib.import_module("agentlightning.types")
        span = to_agentlightning(span, with_content=True)
        return agl.Span(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=number,
            trace_id=span.trace_id,
            span_id=span.span_id,
            parent_id=span.parent_span_id,
            name=span.name,
            status=types.TraceStatus(
                status_code=span.status, description=span.status_message or None
            ),
            attributes=dict(span.attributes),
            events=[],
            links=[],
            start_time=span.start_ns / 1e9,
            end_time=None if span.end_ns is None else span.end_ns / 1e9,
            context=None,
            parent=None,
            resource=types.OtelResource(attributes={}, schema_url=""),
        )


_KINDS: Final[Mapping[str, Any]] = {
    "prompt_template": "prompt",
    "llm": "endpoint",
    "proxy_llm": "endpoint",
}


def _to_resource(agl: Any, body: Mapping[str, Any]) -> Any:
    if "template" in body:
        return agl.PromptTemplate(template=body["template"], engine="f-string")
    return agl.LLM(
        endpoint=body.get("base_url") or "",
        model=body.get("model") or "",
        sampling_parameters=dict(body.get("sampling") or {}),
    )


def _to_body(resource: Any) -> dict[str, Any] | None:
    if resource.resource_type == "prompt_template":
        return {"template": resource.template}
    if resource.resource_type in _KINDS:
        bodies = {
            "base_url": resource.get_base_url(None, None),
            "model": resource.model,
            "sampling": dict(resource.sampling_parameters),
        }
        return {key: value for key, value in bodies.items() if value}
    return None


def _make_tracer(agl: Any) -> Any:
    class Nothing(agl.DummyTracer):  # type: ignore[misc]  # it has no stubs
        @asynccontextmanager
        async def trace_context(self, *args: Any, **keywords: Any) -> AsyncIterator[None]:
            yield None

        def get_last_trace(self) -> list[Any]:
            return []

    return Nothing()
