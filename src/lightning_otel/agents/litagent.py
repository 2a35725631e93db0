"""Agents as classes, with one method to learn by and one to be judged by.

Source: Agent Lightning 0.3, ``agentlightning/litagent/litagent.py``, whose names these are.
"""

from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from lightning_otel.agents.agent import Agent, Answer, Resources, finished
from lightning_otel.errors import ConfigError
from lightning_otel.types import Rollout

T = TypeVar("T")

_TRAIN: Final = ("training_rollout", "rollout", "validation_rollout")
_OTHERWISE: Final = ("validation_rollout", "rollout", "training_rollout")
_METHODS: Final = tuple(f"{name}{ending}" for name in _TRAIN for ending in ("", "_async"))


class LitAgent(Agent, Generic[T]):
    """An agent as a class; write ``rollout``, or ``training_rollout`` and ``validation_rollout``.

    Each may be a coroutine function, or be called with ``_async`` at the end of its name. Where the
    one for a mode is not written, ``rollout`` is taken, then the other one.
    """

    def __init__(self, *, trained_agents: str | None = None) -> None:
        """Make the agent.

        Args:
            trained_agents: A regular expression of the agents within whose calls are trained on.
        """
        self.track_only = None if trained_agents is None else f"re:{trained_agents}"

    def run(self, task: Any, resources: Resources, rollout: Rollout) -> Answer:
        """Call the method that is for the rollout's mode."""
        return _run_agent(self, task, resources, rollout)

    def training_rollout(self, task: T, resources: Resources, rollout: Rollout) -> Answer:
        """Act on a task to learn from."""
        raise NotImplementedError

    def validation_rollout(self, task: T, resources: Resources, rollout: Rollout) -> Answer:
        """Act on a task to be judged by."""
        raise NotImplementedError

    def rollout(self, task: T, resources: Resources, rollout: Rollout) -> Answer:
        """Act on a task of any mode."""
        raise NotImplementedError

    async def training_rollout_async(
        self, task: T, resources: Resources, rollout: Rollout
    ) -> Answer:
        """As :meth:`training_rollout`."""
        raise NotImplementedError

    async def validation_rollout_async(
        self, task: T, resources: Resources, rollout: Rollout
    ) -> Answer:
        """As :meth:`validation_rollout`."""
        raise NotImplementedError

    async def rollout_async(self, task: T, resources: Resources, rollout: Rollout) -> Answer:
        """As :meth:`rollout`."""
        raise NotImplementedError


class MethodsAgent(Agent):
    """An object with those methods that is no :class:`LitAgent` of ours, such as Microsoft's."""

    def __init__(self, given: object) -> None:
        self._given = given
        trained = getattr(given, "trained_agents", None)
        self.track_only = f"re:{trained}" if isinstance(trained, str) else None

    @property
    def name(self) -> str:
        """Its class's."""
        return type(self._given).__name__

    def run(self, task: Any, resources: Resources, rollout: Rollout) -> Answer:
        """Call the method that is for the rollout's mode."""
        return _run_agent(self._given, task, resources, rollout)


def has_methods(given: object) -> bool:
    """Return whether an object or class has one of the methods."""
    return any(_find_method(given, name) is not None for name in _METHODS)


def _run_agent(agent: object, task: Any, resources: Resources, rollout: Rollout) -> Answer:
    names = _TRAIN if rollout.mode == "train" else _OTHERWISE
    for name in (f"{each}{ending}" for each in names for ending in ("_async", "")):
        method = _find_method(agent, name)
        if method is not None:
            return finished(method(task, resources, rollout))
    raise ConfigError(
        f"{type(agent).__name__} has none of {', '.join(_METHODS)}; write rollout(self, task, "
        "resources, rollout)"
    )


def _find_method(agent: object, name: str) -> "Callable[..., Any] | None":
    """A method that a user wrote; those of a base called LitAgent only say what there may be."""
    cls = agent if isinstance(agent, type) else type(agent)
    for base in cls.__mro__:
        if base.__name__ == "LitAgent":
            return None
        if name in vars(base):
            found = getattr(agent, name)
            return found if callable(found) else None
    return None
