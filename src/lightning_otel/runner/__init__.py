"""The runner: an agent and the queue's rollouts become recorded, rewarded attempts.

One worker is a :class:`Runner`; several at once, in threads, processes or on Ray, are
:func:`run_workers`.
"""

from lightning_otel.runner.attempt import Hook
from lightning_otel.runner.crew import run_workers
from lightning_otel.runner.worker import Runner

__all__ = ["Hook", "Runner", "run_workers"]
