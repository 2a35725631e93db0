"""A router: one of several agents for each request, by name, glob, rule or weights."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from random import Random
from secrets import token_hex
from typing import Any

from lightning_otel.errors import ConfigError
from lightning_otel.runner.agents.agent import Agent, Answer, Resources
from lightning_otel.runner.agents.functions import agent_of
from lightning_otel.tracing import context
from lightning_otel.types import Rollout


class Router(Agent):
    """Hands each rollout to one of several agents, and each request when it is called itself.

    The rollout's named agent has precedence, then the rule, then weighted chance, which is fixed
    for each rollout.
    """

    def __init__(
        self,
        agents: Mapping[str, object] | Iterable[object],
        *,
        rule: Callable[[Any], str | None] | None = None,
        weights: Mapping[str, float] | None = None,
        name: str = "router",
    ) -> None:
        """Args:
            agents: By name, or under their own names, whatever :func:`agent_of` takes.
            rule: Returns a name or a glob of names for a task; None leaves it to weights.
            weights: Relative frequency by name; by default equal. Others are not taken by chance.
            name: The router's own name.

        Raises:
            ConfigError: There is no agent, two have one name, or weights make no sense.
        """
        self._name = name
        self._rule = rule
        self.agents: dict[str, Agent] = {}
        pairs = agents.items() if isinstance(agents, Mapping) else ((None, item) for item in agents)
        for key, item in pairs:
            agent = agent_of(item)
            label = agent.name if key is None else key
            if label in self.agents:
                raise ConfigError(f"two agents are called {label!r}; give {{name: agent, …}}")
            self.agents[label] = _Named(agent, label) if label != agent.name else agent
        if not self.agents:
            raise ConfigError("the router has no agents; give it one or more")
        self._weights = _check_weights(weights, self.agents)

    @property
    def name(self) -> str:
        """The router's name."""
        return self._name

    @property
    def names(self) -> tuple[str, ...]:
        """Its own name, and those of its agents."""
        return (self._name, *self.agents)

    def choose(self, rollout: Rollout) -> Agent:
        """Return the agent for a rollout.

        Raises:
            ConfigError: The named agent does not exist, or no candidate has a weight.
        """
        pattern = rollout.agent
        if pattern in (None, self._name) and self._rule is not None:
            pattern = self._rule(rollout.task)
        if pattern in (None, self._name):
            pattern = "*"
        assert pattern is not None
        if pattern in self.agents:
            return self.agents[pattern].choose(rollout)
        among = [name for name in self.agents if fnmatchcase(name, pattern)]
        return self.agents[self._draw_name(among, pattern, rollout.rollout_id)].choose(rollout)

    def run(self, task: Any, resources: Resources, rollout: Rollout) -> Answer:
        """Have the agent that is chosen act, recorded under its name."""
        agent = self.choose(rollout)
        with context(agent=agent.name, track_only=agent.track_only):
            return agent.run(task, resources, rollout)

    def __call__(self, task: Any, resources: Resources | None = None) -> Answer:
        """Call the chosen agent with a request that no queue holds."""
        rollout = Rollout(rollout_id=f"rollout-{token_hex(8)}", task=task, mode="test")
        return self.run(task, resources or {}, rollout)

    def _draw_name(self, among: Sequence[str], pattern: str, rollout_id: str) -> str:
        possible = [name for name in among if self._weights[name] > 0]
        if not possible:
            raise ConfigError(
                f"the router {self._name!r} has no agent for {pattern!r}; there are "
                f"{', '.join(self.agents)}"
            )
        weights = [self._weights[name] for name in possible]
        return Random(f"{self._name}:{rollout_id}").choices(possible, weights)[0]


class _Named(Agent):
    def __init__(self, agent: Agent, name: str) -> None:
        self._agent, self._name = agent, name
        self.track_only, self.takes_resources = agent.track_only, agent.takes_resources

    @property
    def name(self) -> str:
        return self._name

    def run(self, task: Any, resources: Resources, rollout: Rollout) -> Answer:
        # Another router under this name chooses among its own.
        return self._agent.run(task, resources, replace(rollout, agent=None))


def _check_weights(weights: Mapping[str, float] | None, agents: Iterable[str]) -> dict[str, float]:
    names = list(agents)
    if weights is None:
        return dict.fromkeys(names, 1.0)
    for name, weight in weights.items():
        if name not in names:
            raise ConfigError(f"weights name {name!r}; the agents are {', '.join(names)}")
        if not 0 <= weight < float("inf"):
            raise ConfigError(f"the weight of {name!r} is {weight!r}; it must be 0 or more")
    return {name: float(weights.get(name, 0)) for name in names}
