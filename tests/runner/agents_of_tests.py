"""Agents that other processes can import."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning_otel as lo


def doubled(task: int) -> float:
    """Give back a reward."""
    lo.emit_message(f"task {task}")
    return 2.0 * task


def deadly(task: dict[str, Any]) -> float:
    """Die at the first attempt, whatever is around; succeed at the next."""
    mark = Path(task["mark"])
    if not mark.exists():
        mark.write_text(str(os.getpid()))
        with lo.operation("work"):
            os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def hanging(task: float) -> float:
    """Take as long as the task says."""
    time.sleep(task)
    return 1.0


def refuse_to_load() -> None:
    """Fail as an agent's module may."""
    raise ImportError("a library of the agent's is missing")
