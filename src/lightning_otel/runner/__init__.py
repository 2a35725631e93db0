"""The runner: an agent and the queue's rollouts become recorded, rewarded attempts."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_otel.runner.attempt import Hook
    from lightning_otel.runner.pool import run_workers
    from lightning_otel.runner.worker import Runner

_HOMES = {"Hook": "attempt", "Runner": "worker", "run_workers": "pool"}

__all__ = ["Hook", "Runner", "run_workers"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
