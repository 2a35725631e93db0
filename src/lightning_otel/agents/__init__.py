"""Agents as they are run: functions, classes with ``training_rollout``, and a router over several.

Whatever a user has becomes an :class:`Agent` by :func:`agent_of`. Nothing here records or queues.
"""

from lightning_otel.agents.agent import Agent, Answer, Resources
from lightning_otel.agents.functions import FunctionAgent, llm_rollout, prompt_rollout, rollout
from lightning_otel.agents.litagent import LitAgent, MethodsAgent, has_methods
from lightning_otel.agents.router import Router
from lightning_otel.errors import ConfigError

__all__ = [
    "Agent",
    "Answer",
    "FunctionAgent",
    "LitAgent",
    "Resources",
    "Router",
    "agent_of",
    "llm_rollout",
    "prompt_rollout",
    "rollout",
]


def agent_of(given: object) -> Agent:
    """An agent of whatever can act on a task.

    Args:
        given: An :class:`Agent`, such as what ``@rollout`` makes, a :class:`LitAgent` or a
            :class:`Router`; a function ``(task)``, ``(task, resources)`` or
            ``(task, resources, rollout)``, sync or async; an object with such a ``__call__``; or
            one with the methods of Agent Lightning's ``LitAgent``.

    Raises:
        ConfigError: It is none of these.
    """
    if isinstance(given, Agent):
        return given
    if isinstance(given, type) and (issubclass(given, Agent) or has_methods(given)):
        raise ConfigError(f"the agent is the class {given.__name__}; give {given.__name__}()")
    if has_methods(given):
        return MethodsAgent(given)
    if callable(given):
        return FunctionAgent(given)
    raise ConfigError(
        f"{type(given).__name__} is no agent; give a function (task, resources), a LitAgent or a "
        "Router"
    )
