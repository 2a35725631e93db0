"""Reward functions: what one may ask for by its parameters' names, and what it may give back.

Whatever a user's function raises belongs to the rollout it was applied to, and to no other.
"""

import asyncio
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from lightning_otel.errors import ConfigError
from lightning_otel.messages.chat import messages_of
from lightning_otel.tracing.propagation import call_outside_loop
from lightning_otel.types import Rollout, Trajectory

ASKABLE: Final = ("task", "answer", "trajectory", "trajectories", "rewards", "rollout")
"""What a reward function may have for a parameter; one sole parameter of another name gets the
trajectory."""
_TRAJECTORY: Final = "trajectory"
_LONGEST_MESSAGE: Final = 200


class Case(NamedTuple):
    """The input of a reward function."""

    rollout: Rollout
    attempt_id: str
    trajectories: tuple[Trajectory, ...]  # all of the attempt
    rewards: Mapping[str, float]  # of its steps; of one name their sum
    trajectory: Trajectory  # that is judged; if the function asks for none, the one that ended last

    @property
    def answer(self) -> str:
        """The text of the trajectory's last answer; empty if it has none."""
        spoken = messages_of(self.trajectory.transitions[-1].action[:1])
        content = spoken[-1].get("content") if spoken else None
        if isinstance(content, list):
            return "".join(str(part.get("text", "")) for part in content)
        return content if isinstance(content, str) else ""


class Score(float):
    """A reward with the reason for it, which is stored beside it."""

    explanation: str

    def __new__(cls, value: float, explanation: str) -> "Score":
        """Return the number with its reason."""
        score = super().__new__(cls, value)
        score.explanation = explanation
        return score


class JudgeError(ConfigError):
    """A judge can judge nothing for now: the rest of the rollouts is not tried."""


class RewardFailure(NamedTuple):
    """The reason why a function gave no reward."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function that judges what an agent did."""

    call: Callable[..., object]
    name: str  # of its reward, where it gives a plain number
    version: str  # empty for the first; else behind each name, as in exact_match@2
    asked: Mapping[str, str]  # its input by parameter
    source: str  # the hash of its source text; empty if there is none

    @classmethod
    def of(cls, function: Callable[..., object], version: str = "") -> "RewardFunction":
        """Return the function with its name and input; raise ConfigError if it is unfit."""
        if not callable(function):
            raise ConfigError(
                f"a reward function is called, and {function!r} cannot be; give a function"
            )
        name = getattr(function, "__name__", "") or getattr(function, "name", "")
        if not isinstance(name, str) or not name or name == "<lambda>":
            raise ConfigError(
                f"the reward function {function!r} has no name, by which its rewards are known "
                "again; write it with def"
            )
        return cls(
            function, name, version, _find_parameters(function, name), _hash_source(function)
        )

    @property
    def prompt(self) -> str:
        """What it asks a chat model by; empty if it asks none."""
        prompt = getattr(self.call, "prompt", "")
        return prompt if isinstance(prompt, str) else ""

    @property
    def judges_each_trajectory(self) -> bool:
        """True if it is called for each trajectory, not once an attempt."""
        return _TRAJECTORY in self.asked.values()

    def judge(self, case: Case) -> dict[str, float] | RewardFailure | None:
        """The rewards by name, the primary one first; None if it gives none."""
        values = {
            name: case.rollout.task if what == "task" else getattr(case, what)
            for name, what in self.asked.items()
        }
        try:
            result = self.call(**values)
            if inspect.iscoroutine(result):
                result = call_outside_loop(partial(asyncio.run, result))
        except JudgeError:
            raise
        except Exception as exc:  # noqa: BLE001  # a user's function may raise anything
            kind = type(exc).__name__
            return RewardFailure(kind, _one_line_of(f"{kind}: {exc}"))
        return self._name_result(result)

    def _name_result(self, result: object) -> dict[str, float] | RewardFailure | None:
        if result is None:
            return None
        values = result if isinstance(result, Mapping) else {self.name: result}
        if not values:
            return None
        suffix = f"@{self.version}" if self.version else ""
        numbers: dict[str, float] = {}
        for name, value in values.items():
            number = _read_number(value)
            if number is None:
                text = _one_line_of(repr(value))
                return RewardFailure(
                    f"no number, but {type(value).__name__}", f"{name} is {text}, no number"
                )
            if not math.isfinite(number):
                return RewardFailure("not finite", f"{name} is {number}; a reward must be finite")
            numbers[f"{name}{suffix}"] = number
        return numbers


def _find_parameters(function: Callable[..., object], name: str) -> dict[str, str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as exc:
        raise ConfigError(
            f"nothing tells what {name}() takes ({exc}); wrap it in a function"
        ) from exc
    needed = [
        parameter
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and (parameter.default is parameter.empty or parameter.name in ASKABLE)
    ]
    if len(needed) == 1 and needed[0].name not in ASKABLE:
        inputs = {needed[0].name: _TRAJECTORY}
    else:
        inputs = {parameter.name: parameter.name for parameter in needed}
    unknown = [name for name in inputs.values() if name not in ASKABLE]
    hidden = [parameter.name for parameter in needed if parameter.kind is parameter.POSITIONAL_ONLY]
    if not inputs or unknown or hidden:
        fault = (
            f"takes {', '.join(unknown or hidden)}"
            if inputs
            else "takes nothing that it could judge"
        )
        raise ConfigError(f"{name}() {fault}; it may ask by name for {', '.join(ASKABLE)}")
    return inputs


def _hash_source(function: Callable[..., object]) -> str:
    text = getattr(function, "source_text", None)
    try:
        text = text if isinstance(text, str) else inspect.getsource(function)
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_number(value: object) -> float | None:
    if isinstance(value, (str, bytes, bytearray)):
        return None
    if isinstance(value, Score):
        return value
    try:
        return float(value)  # type: ignore[arg-type]  # that is what is found out
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        return None


def _one_line_of(text: str) -> str:
    return " ".join(text.split())[:_LONGEST_MESSAGE]
