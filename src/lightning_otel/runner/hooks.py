"""Hooks around each attempt."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightning_otel.agents import Agent
from lightning_otel.agents.agent import finished
from lightning_otel.tracing import Recording
from lightning_otel.types import Rollout, Span

if TYPE_CHECKING:
    from lightning_otel.runner.worker import Runner

log = logging.getLogger(__name__)


class Hook:
    """Called around each attempt; write those that are wanted, each sync or async.

    One that raises is told of in the log, and disturbs nothing.

    Source: Agent Lightning 0.3, ``Hook``, whose names these are.
    """

    def on_rollout_start(self, *, agent: Agent, runner: "Runner", rollout: Rollout) -> Any:
        """Before an attempt begins, outside its recording."""

    def on_trace_start(
        self, *, agent: Agent, runner: "Runner", rollout: Rollout, recording: Recording
    ) -> Any:
        """Within the recording, before the agent acts: what is emitted here is the rollout's."""

    def on_trace_end(
        self, *, agent: Agent, runner: "Runner", rollout: Rollout, recording: Recording
    ) -> Any:
        """Within the recording, when the agent has acted or failed (``recording.error``)."""

    def on_rollout_end(
        self, *, agent: Agent, runner: "Runner", rollout: Rollout, spans: list[Span]
    ) -> Any:
        """Called after the attempt, with the rollout as the queue has it then."""


class Hooks:
    """Several hooks, called one after the other."""

    def __init__(self, hooks: Iterable[Hook], runner: "Runner") -> None:
        self._hooks = tuple(hooks)
        self._runner = runner

    def rollout_start(self, agent: Agent, rollout: Rollout) -> None:
        """Tell those that want to know."""
        self._call_hooks("on_rollout_start", agent=agent, rollout=rollout)

    def trace_start(self, agent: Agent, rollout: Rollout, recording: Recording) -> None:
        """Tell those that want to know."""
        self._call_hooks("on_trace_start", agent=agent, rollout=rollout, recording=recording)

    def trace_end(self, agent: Agent, rollout: Rollout, recording: Recording) -> None:
        """Tell those that want to know."""
        self._call_hooks("on_trace_end", agent=agent, rollout=rollout, recording=recording)

    def rollout_end(self, agent: Agent, rollout: Rollout, recording: Recording | None) -> None:
        """Tell those that want to know; the spans are read if one does."""
        if any(_is_written(hook, "on_rollout_end") for hook in self._hooks):
            spans = recording.spans() if recording is not None else []
            self._call_hooks("on_rollout_end", agent=agent, rollout=rollout, spans=spans)

    def _call_hooks(self, name: str, **known: Any) -> None:
        for hook in self._hooks:
            if not _is_written(hook, name):
                continue
            try:
                finished(getattr(hook, name)(runner=self._runner, **known))
            except Exception:  # a hook looks on; what it watches goes on
                log.warning("%s of %s failed", name, type(hook).__name__, exc_info=True)


def _is_written(hook: Hook, name: str) -> bool:
    written = getattr(type(hook), name, None)
    return written is not None and written is not getattr(Hook, name)
