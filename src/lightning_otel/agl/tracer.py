"""``agl.Tracer``: recording and looking, bound to a store; blocks that apply what was learnt."""

import functools
from typing import Any

from lightning_otel import tracing
from lightning_otel.dataset import Store
from lightning_otel.tracing import Traced
from lightning_otel.views.analysis import Analysis, analyze_episode


@functools.wraps(tracing.auto_trace)
def auto_trace(function: Any = None, /, **options: Any) -> Any:
    """Record as ``lightning_otel.auto_trace`` does, with what the store has published."""
    return tracing.auto_trace(function, **_apply_published(options))


@functools.wraps(tracing.context)
def context(**options: Any) -> Traced:
    """Name what goes on, as ``lightning_otel.context`` does, with what the store has published."""
    return tracing.context(**_apply_published(options))


def _apply_published(options: dict[str, Any]) -> Any:
    return options if options.get("apply") is not None else {**options, "apply": "published"}


class Tracer:
    """Records into a store, and looks at what is in it."""

    def __init__(self, store: Store | None = None) -> None:
        self.store = store

    def trace_context(self, name: str = "rollout", **options: Any) -> Traced:
        """Record a rollout; see :func:`lightning_otel.auto_trace`."""
        return tracing.auto_trace(name=name, store=self.store, **options)

    def analyze_episode(self, episode_id: str = "@last", **options: Any) -> Analysis:
        """Analyze a rollout; see :func:`lightning_otel.analyze_episode`."""
        return analyze_episode(episode_id, store=self.store, **options)
