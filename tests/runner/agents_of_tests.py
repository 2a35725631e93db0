"""Agents that other processes can import."""

import os
import signal
import time
from pathlib import Path

import lightning_otel as lo


def doubled(task: int) -> float:
    """Give back a reward."""
    lo.emit_message(f"task {task}")
    return 2.0 * task


def dangerous(task: str | float) -> float:
    """Die at the first attempt if the task is a path; sleep so long if it is a fraction."""
    if isinstance(task, str) and not Path(task).exists():
        Path(task).touch()
        with lo.operation("work"):
            os.kill(os.getpid(), signal.SIGKILL)
    if isinstance(task, float):
        time.sleep(task)
    return 1.0


def refuse_to_load() -> None:
    """Fail as an agent's module may."""
    raise ImportError("a library of the agent's is missing")
