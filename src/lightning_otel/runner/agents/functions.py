"""User code as agents: functions, ``@rollout``, classes with a method for each mode.

Source: Agent Lightning 0.3, ``agentlightning/litagent/litagent.py``, whose names the methods have.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from inspect import Parameter
from typing import Any, Final, Generic, TypeVar, overload

from lightning_otel.errors import ConfigError
from lightning_otel.runner.agents.agent import Agent, Answer, Resources, await_result
from lightning_otel.types import Endpoint, Prompt, ResourceKind, Rollout

_is_by_value: ContextVar[bool] = ContextVar("is_by_value", default=False)
_BY_PLACE: Final = ("resources", "rollout")
_BY_KIND: Final[Mapping[str, ResourceKind]] = {"llm": "endpoint", "prompt_template": "prompt"}
"""Names by which functions of Agent Lightning ask for the one resource of a kind."""
_BY_NAME: Final = (*_BY_PLACE, *_BY_KIND)
_TRAIN: Final = ("training_rollout", "rollout", "validation_rollout")
_OTHERWISE: Final = ("validation_rollout", "rollout", "training_rollout")
_METHODS: Final = tuple(f"{name}{ending}" for name in _TRAIN for ending in ("", "_async"))
_POSITIONAL: Final = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


T = TypeVar("T")


class FunctionAgent(Agent):
    """A function that acts; called, it is the function."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        track_only: str | None = None,
    ) -> None:
        self.function = function
        self._name = name or str(getattr(function, "__name__", type(function).__name__))
        self.track_only = track_only
        self._rest, self._named = _find_parameters(function)
        self.takes_resources = bool({"resources", *_BY_KIND} & {*self._rest, *self._named})
        functools.update_wrapper(self, function, updated=())

    @property
    def name(self) -> str:
        """The function's name."""
        return self._name

    def __repr__(self) -> str:
        return f"<agent {self.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)

    def __reduce__(self) -> Any:
        module = sys.modules.get(getattr(self, "__module__", ""))
        name = str(getattr(self, "__qualname__", ""))
        # A decorated function stands under its name as this object; pickle finds it there.
        if name and getattr(module, name, None) is self and not _is_by_value.get():
            return name
        remake = functools.partial(FunctionAgent, name=self._name, track_only=self.track_only)
        return remake, (self.function,)

    def run(self, task: Any, resources: Resources, rollout: Rollout) -> Answer:
        """Call the function with what it takes."""
        values: dict[str, Any] = {"resources": resources, "rollout": rollout}
        for name in (*self._rest, *self._named):
            if name in _BY_KIND:
                values[name] = self._pick_only(name, resources)
        arguments = [values[name] for name in self._rest]
        return await_result(
            self.function(task, *arguments, **{name: values[name] for name in self._named})
        )

    def _pick_only(self, parameter: str, resources: Resources) -> Prompt | Endpoint:
        kind = _BY_KIND[parameter]
        # What is named agent/name is another's, or there by its plain name as well.
        shared = {name: resource for name, resource in resources.items() if "/" not in name}
        names = [name for name, resource in shared.items() if resource.kind == kind]
        if len(names) != 1:
            raise ConfigError(
                f"{self.name} takes {parameter}, and of its resources {', '.join(names) or 'none'} "
                f"{'are' if names else 'is'} of kind {kind}; give it one, or write it as "
                "(task, resources)"
            )
        resource = shared[names[0]]
        return resource.prompt if kind == "prompt" else resource.endpoint


@contextlib.contextmanager
def by_value() -> Iterator[None]:
    """Pickle agents with their functions, for where these cannot be imported."""
    token = _is_by_value.set(True)
    try:
        yield
    finally:
        _is_by_value.reset(token)


def _find_parameters(function: Callable[..., Any]) -> tuple[list[str], list[str]]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # such as of a builtin: nobody says what it takes
        return [], []
    first = next((item for item in parameters if item.kind in _POSITIONAL), None)
    takes_any = any(item.kind is Parameter.VAR_POSITIONAL for item in parameters)
    if first is None and not takes_any:
        raise ConfigError(
            f"the agent {_word_name(function)} takes no task; write it as (task) or "
            "(task, resources)"
        )
    further = [item for item in parameters if item.kind in _POSITIONAL][1:]
    needed = [item for item in further if item.default is Parameter.empty]
    names = _in_order([item.name for item in further], len(needed))
    if names is None:
        raise ConfigError(
            f"the agent {_word_name(function)} takes more than (task, resources, rollout); bind "
            "the rest, as with functools.partial"
        )
    words = [item.name for item in parameters if item.kind is Parameter.KEYWORD_ONLY]
    return names, [name for name in words if name in _BY_NAME]


def _in_order(names: list[str], needed: int) -> list[str] | None:
    """Match parameters after the task: by name where known, others by position."""
    ordered: list[str] = []
    for index, name in enumerate(names):
        if name in _BY_NAME:
            ordered.append(name)
        elif index < needed and index < len(_BY_PLACE) and _BY_PLACE[index] not in ordered:
            ordered.append(_BY_PLACE[index])
        elif index < needed:
            return None
        else:
            break  # a default of the user's own
    return ordered


def _word_name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


@overload
def rollout(
    function: Callable[..., Any], /, *, name: str | None = None, track_only: str | None = None
) -> FunctionAgent: ...


@overload
def rollout(
    function: None = None, /, *, name: str | None = None, track_only: str | None = None
) -> Callable[[Callable[..., Any]], FunctionAgent]: ...


def rollout(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    track_only: str | None = None,
) -> FunctionAgent | Callable[[Callable[..., Any]], FunctionAgent]:
    """Make an agent of a function, as a decorator, bare or with arguments.

    Args:
        function: ``(task)``, ``(task, resources)`` or ``(task, resources, rollout)``, sync or
            async, that returns a reward, named rewards, or None. In place of resources ``llm`` is
            the endpoint among them, ``prompt_template`` the prompt.
        name: The agent's name; by default the function's.
        track_only: The agents within whose calls become training data, by name, glob or ``re:…``.
    """
    if function is not None:
        return FunctionAgent(function, name=name, track_only=track_only)
    return functools.partial(FunctionAgent, name=name, track_only=track_only)


def _make_decorator(parameter: str) -> Callable[..., Any]:
    def decorate(
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        track_only: str | None = None,
    ) -> Any:
        """Make an agent of a function with one prompt or endpoint as its resource."""
        if function is None:
            return functools.partial(decorate, name=name, track_only=track_only)
        if parameter not in inspect.signature(function).parameters:
            raise ConfigError(
                f"the agent {_word_name(function)} takes no {parameter}; write it as "
                f"(task, {parameter}), or decorate it with @rollout"
            )
        return FunctionAgent(function, name=name, track_only=track_only)

    decorate.__name__ = decorate.__qualname__ = f"{parameter.partition('_')[0]}_rollout"
    return decorate


llm_rollout: Final = _make_decorator("llm")
"""Agents of functions ``(task, llm)``: the endpoint among the resources."""
prompt_rollout: Final = _make_decorator("prompt_template")
"""Agents of functions ``(task, prompt_template)``: the prompt among the resources."""


class LitAgent(Agent, Generic[T]):
    """An agent as a class; write ``rollout``, or ``training_rollout`` and ``validation_rollout``.

    Each may be a coroutine function, also with ``_async`` at the end of its name. A missing mode
    falls back to ``rollout``, then to the other mode.
    """

    def __init__(self, *, trained_agents: str | None = None) -> None:
        """Args:
        trained_agents: A regular expression of the agents within whose calls are trained on.
        """
        self.track_only = None if trained_agents is None else f"re:{trained_agents}"

    def run(self, task: Any, resources: Resources, rollout: Rollout) -> Answer:
        """Call the method that is for the rollout's mode."""
        return _call_method(self, task, resources, rollout)

    def training_rollout(self, task: T, resources: Resources, rollout: Rollout) -> Answer:
        """Act on a task to learn from."""
        raise NotImplementedError

    def validation_rollout(self, task: T, resources: Resources, rollout: Rollout) -> Answer:
        """Act on a task to be judged by."""
        raise NotImplementedError

    def rollout(self, task: T, resources: Resources, rollout: Rollout) -> Answer:
        """Act on a task of any mode."""
        raise NotImplementedError

    async def rollout_async(self, task: T, resources: Resources, rollout: Rollout) -> Answer:
        """As the method without ``_async``."""
        raise NotImplementedError

    training_rollout_async = validation_rollout_async = rollout_async


class MethodsAgent(Agent):
    """An object with those methods that is none of ours, such as Microsoft's."""

    def __init__(self, instance: object) -> None:
        self._given = instance
        trained = getattr(instance, "trained_agents", None)
        self.track_only = f"re:{trained}" if isinstance(trained, str) else None

    @property
    def name(self) -> str:
        """Its class's."""
        return type(self._given).__name__

    def run(self, task: Any, resources: Resources, rollout: Rollout) -> Answer:
        """Call the method that is for the rollout's mode."""
        return _call_method(self._given, task, resources, rollout)


def _has_methods(instance: object) -> bool:
    return any(_find_method(instance, name) is not None for name in _METHODS)


def _call_method(agent: object, task: Any, resources: Resources, rollout: Rollout) -> Answer:
    names = _TRAIN if rollout.mode == "train" else _OTHERWISE
    for name in (f"{stem}{ending}" for stem in names for ending in ("_async", "")):
        method = _find_method(agent, name)
        if method is not None:
            return await_result(method(task, resources, rollout))
    raise ConfigError(
        f"{type(agent).__name__} has none of {', '.join(_METHODS)}; write rollout(self, task, "
        "resources, rollout)"
    )


def _find_method(agent: object, name: str) -> "Callable[..., Any] | None":
    """A user's method; those of a base called LitAgent are only declared."""
    cls = agent if isinstance(agent, type) else type(agent)
    for base in cls.__mro__:
        if base.__name__ == "LitAgent":
            return None
        if name in vars(base):
            method = getattr(agent, name)
            return method if callable(method) else None
    return None


def agent_of(agent: object) -> Agent:
    """Return an agent of whatever can act on a task.

    Args:
        agent: An :class:`Agent`; a function ``(task)``, ``(task, resources)`` or
            ``(task, resources, rollout)``, sync or async; an object with such a ``__call__``; or
            one with the methods of Agent Lightning's ``LitAgent``.

    Raises:
        ConfigError: It is none of these.
    """
    if isinstance(agent, Agent):
        return agent
    if isinstance(agent, type) and (issubclass(agent, Agent) or _has_methods(agent)):
        raise ConfigError(f"the agent is the class {agent.__name__}; give {agent.__name__}()")
    if _has_methods(agent):
        return MethodsAgent(agent)
    if callable(agent):
        return FunctionAgent(agent)
    raise ConfigError(
        f"{type(agent).__name__} is no agent; give a function (task, resources), a LitAgent or a "
        "Router"
    )
