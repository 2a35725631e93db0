"""What is put into the queue, checked before anything is."""

import json
import secrets
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import get_args

from lightning_otel.errors import ConfigError
from lightning_otel.types import Mode


def check_put(
    tasks: object, mode: str, samples: int, max_attempts: int, timeout_s: float | None
) -> None:
    """Refuse what makes no sense."""
    if isinstance(tasks, (str, bytes, Mapping)):
        raise ConfigError(f"tasks is one {type(tasks).__name__}; put a list of tasks")
    if mode not in get_args(Mode):
        raise ConfigError(f"mode is {mode!r}; it must be one of {', '.join(get_args(Mode))}")
    for name, number in (("samples", samples), ("max_attempts", max_attempts)):
        if number < 1:
            raise ConfigError(f"{name} is {number!r}; it must be 1 or more")
    if timeout_s is not None and not 0 < timeout_s < float("inf"):
        raise ConfigError(f"timeout_s is {timeout_s!r}; give seconds above 0, or None for any time")


def task_json(task: object) -> str:
    """A task as it is kept."""
    try:
        return json.dumps(task, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise ConfigError(
            f"the task {str(task)[:80]!r} cannot be written as JSON ({exc}); "
            "give text, numbers, lists and dicts"
        ) from exc


def finite(reward: float) -> float:
    """A reward that is a number."""
    value = float(reward)
    if not isfinite(value):
        raise ConfigError(f"reward is {reward!r}; it must be finite")
    return value


def groups_of(named: Sequence[str] | None, samples: int, tasks: int) -> Sequence[str]:
    """The group of each task's rollouts: as named, or a new one where there are several."""
    if named is not None:
        return named
    return new_ids("group", tasks) if samples > 1 else [""] * tasks


def new_ids(noun: str, count: int) -> list[str]:
    """So many ids that nothing else has."""
    return [f"{noun}-{secrets.token_hex(8)}" for _ in range(count)]
