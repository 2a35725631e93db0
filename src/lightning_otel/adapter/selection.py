"""Selection of transitions: agent, rollout, time, mode, resource, reward, capture, origin.

Spans that do not count are left out before an adapter sees them; all else is looked at on the
transitions it made, so that a step keeps its reward, its neighbours and its place whichever others
are asked for.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final, TypeAlias, TypedDict

from lightning_otel.adapter.agent_patterns import REGEX, check_patterns, matches
from lightning_otel.errors import ConfigError
from lightning_otel.types import CaptureLevel, Span, Trajectory, Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.instants import FORMS, Instant, instant_ns
from lightning_otel.types.values import check_types

Matcher: TypeAlias = Callable[[Span], bool | None]
"""Says of a span that it is one, or is none; None leaves that to the usual rules."""

NOT: Final = "!"
"""What comes before a pattern of agents that are not wanted."""


_LEAST_NS: Final = 2 * 10**12
"""Half an hour of 1970; a number below is one of seconds, or of milliseconds until 2033."""


class SelectionKeywords(TypedDict, total=False):
    """The keywords that select transitions; :class:`Selection` says what they mean."""

    agents: str | Iterable[str] | None
    rollout_id: str | Iterable[str] | None
    since: Instant | None
    until: Instant | None
    mode: str | None
    resource_version: str | None
    rewarded: bool | None
    min_reward: float | None
    max_reward: float | None
    capture: CaptureLevel | None
    received: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of transitions; by default all.

    Attributes:
        agents: Names, globs or ``re:…`` of agents. The first that matches a name decides; one that
            begins with ``!`` leaves the agent out, as do all where none matches. If all of them
            leave out, every other agent is wanted.
        rollout_id: Only these rollouts, by their whole ids.
        since: Only rollouts that began at this time or later, as
            :func:`~lightning_otel.types.instants.instant_ns` reads it.
        until: Only rollouts that began before this time.
        mode: Only steps taken in this mode, such as ``train``, ``val`` or ``test``.
        resource_version: Only steps of this version (a name or glob), of all resources together or,
            as ``name@version``, of one.
        rewarded: Whether to take only steps with a reward, or only those without.
        min_reward: Only steps with at least this reward.
        max_reward: Only steps with at most this reward.
        capture: Only steps captured like this.
        received: Whether spans that came over the network or were imported count. If not, it is as
            if they had never come: a reward that somebody else sent is given to nothing.
    """

    agents: tuple[str, ...] = ()
    rollout_ids: tuple[str, ...] | None = None
    since_ns: int | None = None
    until_ns: int | None = None
    mode: str | None = None
    resource_version: str | None = None
    rewarded: bool | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    capture: CaptureLevel | None = None
    received: bool = True

    @classmethod
    def of(cls, wanted: SelectionKeywords) -> "Selection":
        """The selection that keywords describe.

        Raises:
            ConfigError: One of them is unknown, or cannot be understood.
        """
        unknown = sorted(wanted.keys() - SelectionKeywords.__annotations__.keys())
        if unknown:
            known = ", ".join(SelectionKeywords.__annotations__)
            raise ConfigError(f"transitions cannot be selected by {', '.join(unknown)}; by {known}")
        check_types(wanted, SelectionKeywords.__annotations__)
        for name in ("since", "until"):
            if isinstance(number := wanted.get(name), int) and 0 < abs(number) < _LEAST_NS:
                raise ConfigError(f"{name} is {number}, too small for nanoseconds; {FORMS}")
        given: dict[str, Any] = dict(wanted)
        agents, rollouts = given.pop("agents", None), given.pop("rollout_id", None)
        since, until = given.pop("since", None), given.pop("until", None)
        return cls(
            agents=() if agents is None else _parse_agents(agents),
            rollout_ids=None
            if rollouts is None
            else tuple([rollouts] if isinstance(rollouts, str) else rollouts),
            since_ns=None if since is None else instant_ns(since, "since"),
            until_ns=None if until is None else instant_ns(until, "until"),
            **given,
        )

    def spans(self, spans: Iterable[Span]) -> Iterable[Span]:
        """The spans that count."""
        if self.received:
            return spans
        return (span for span in spans if c.RECEIVED not in span.attributes)

    def wants_agent(self, name: str) -> bool:
        """Return whether the steps of an agent are wanted."""
        for pattern in self.agents:
            if matches(name, pattern.removeprefix(NOT)):
                return not pattern.startswith(NOT)
        return all(pattern.startswith(NOT) for pattern in self.agents)

    @property
    def wants_all(self) -> bool:
        """True if every step of its rollouts is wanted."""
        kept = {name: getattr(self, name) for name in _WHOLE}
        return Selection(**kept) == self

    def wants(self, step: Transition) -> bool:
        """Return whether a transition is wanted, as far as it shows."""
        reward = step.reward
        return (
            (not self.agents or self.wants_agent(step.agent))
            and (self.mode is None or step.mode == self.mode)
            and (
                self.resource_version is None
                or self.wants_version(step.resource_version, step.resources)
            )
            and (self.rewarded is None or (reward is not None) == self.rewarded)
            and (self.min_reward is None or (reward is not None and reward >= self.min_reward))
            and (self.max_reward is None or (reward is not None and reward <= self.max_reward))
            and (self.capture is None or step.capture == self.capture)
        )

    def part_of(self, trajectory: Trajectory) -> Trajectory | None:
        """A trajectory with the wanted steps alone; None where there is none."""
        steps = tuple(filter(self.wants, trajectory.transitions))
        if len(steps) == len(trajectory.transitions):
            return trajectory
        return replace(trajectory, transitions=steps) if steps else None

    def wants_version(self, version: str | None, resources: Mapping[str, str]) -> bool:
        """Return whether the steps of a version, of all resources or of one, are wanted."""
        wanted = self.resource_version or ""
        named = [version, *(f"{k}@{v}" for k, v in resources.items())]
        texts = filter(None, named)
        return any(each == wanted or fnmatchcase(each, wanted) for each in texts)


_WHOLE: Final = ("rollout_ids", "since_ns", "until_ns", "received")
"""What tells of rollouts and spans, and not of steps."""


def _parse_agents(given: str | Iterable[str]) -> tuple[str, ...]:
    patterns = tuple(check_patterns(given, "agents"))
    check_patterns([pattern.removeprefix(NOT) for pattern in patterns], "agents")
    if any(pattern.removeprefix(NOT) in ("", REGEX) for pattern in patterns):
        raise ConfigError(f"agents names {patterns!r}; an empty pattern means nobody")
    return patterns


def apply_matchers(
    spans: Iterable[Span], is_call: Matcher | None, is_reward: Matcher | None
) -> Iterable[Span]:
    """Return the spans, those changed that matchers say are, or are no, calls and rewards.

    Args:
        spans: Spans in today's conventions.
        is_call: Asked of each span; None asks nobody.
        is_reward: Likewise. One that is said to be a reward and holds no number is reported.
    """
    if is_call is None and is_reward is None:
        return spans
    return (_match_span(span, is_call, is_reward) for span in spans)


def _match_span(span: Span, is_call: Matcher | None, is_reward: Matcher | None) -> Span:
    found = dict(span.attributes)
    says_call = None if is_call is None else is_call(span)
    says_reward = None if is_reward is None else is_reward(span)
    is_one = found.get(c.OPERATION) in tuple(c.CALL_OPERATIONS)
    if says_call and not is_one:
        found[c.OPERATION] = c.CHAT
    elif says_call is False and is_one:
        del found[c.OPERATION]
    if says_reward:
        found.setdefault(c.REWARD_VALUE, None)  # it is reported as one without a number
    elif says_reward is False:
        found = {k: v for k, v in found.items() if not k.startswith(f"{c.REWARD_PREFIX}.")}
    return replace(span, attributes=found)
