"""Selection of transitions: agent, rollout, time, mode, resource, reward, capture, origin.

Spans that do not count are left out before an adapter sees them; all else is looked at on the
transitions it made, so that a step keeps its reward, its neighbours and its place whichever others
are asked for.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final, TypedDict

from lightning_otel.adapter.agent_patterns import REGEX, check_patterns, matches
from lightning_otel.adapter.tokens import CUTS
from lightning_otel.errors import ConfigError
from lightning_otel.types import CaptureLevel, Span, Trajectory, Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.instants import FORMS, SINCE_HELP, UNTIL_HELP, Instant, instant_ns
from lightning_otel.types.values import check_names, check_types

NOT: Final = "!"
"""What comes before a pattern of agents that are not wanted."""


_LEAST_NS: Final = 2 * 10**12
"""Half an hour of 1970; a number below is one of seconds, or of milliseconds until 2033."""


class SelectionKeywords(TypedDict, total=False):
    """The keywords that select transitions: type, help and an example or the usual choice.

    Python, the command line, the HTTP API, the pages and MCP take them from here.
    """

    agents: Annotated[
        str | Iterable[str] | None,
        "Only these agents: names, globs or re:…; the first match decides, !… excludes.",
        "plan*, !draft",
    ]
    rollout_id: Annotated[str | Iterable[str] | None, "Only these rollouts.", "id or @last"]
    since: Annotated[Instant | None, SINCE_HELP, "2h"]
    until: Annotated[Instant | None, UNTIL_HELP, "2026-12-01"]
    mode: Annotated[str | None, "Only steps of this mode, such as train.", "train"]
    resource_version: Annotated[
        str | None, "Only steps of this version, or name@version; globs too.", "prompt@*"
    ]
    rewarded: Annotated[bool | None, "Only steps with a reward, or only those without."]
    min_reward: Annotated[float | None, "Only steps with at least this reward."]
    max_reward: Annotated[float | None, "Only steps with at most this reward."]
    capture: Annotated[CaptureLevel | None, "Only steps of this capture level."]
    truncated: Annotated[bool, "Include answers that a limit or a filter cut off.", "included"]
    received: Annotated[
        bool,
        "Include spans received from elsewhere; without, it is as if they had never come.",
        "included",
    ]


@dataclass(frozen=True, slots=True)
class StepSelection:
    """A selection of transitions, by default all: :class:`SelectionKeywords`, parsed."""

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
    truncated: bool = True
    received: bool = True
    span_ids: frozenset[str] | None = None
    as_of_ns: int | None = None

    @classmethod
    def of(cls, keywords: SelectionKeywords) -> "StepSelection":
        """The selection that keywords describe.

        Raises:
            ConfigError: One of them is unknown, or cannot be understood.
        """
        check_names("a selection of transitions", keywords, SelectionKeywords.__annotations__)
        check_types(keywords, SelectionKeywords.__annotations__)
        for name in ("since", "until"):
            if isinstance(number := keywords.get(name), int) and 0 < abs(number) < _LEAST_NS:
                raise ConfigError(f"{name} is {number}, too small for nanoseconds; {FORMS}")
        options: dict[str, Any] = dict(keywords)
        agents, rollouts = options.pop("agents", None), options.pop("rollout_id", None)
        since, until = options.pop("since", None), options.pop("until", None)
        return cls(
            agents=() if agents is None else _parse_agents(agents),
            rollout_ids=None
            if rollouts is None
            else tuple([rollouts] if isinstance(rollouts, str) else rollouts),
            since_ns=None if since is None else instant_ns(since, "since"),
            until_ns=None if until is None else instant_ns(until, "until"),
            **options,
        )

    def spans(self, spans: Iterable[Span]) -> Iterable[Span]:
        """The spans that count."""
        as_of_ns = self.as_of_ns
        if not self.received:
            spans = (span for span in spans if c.RECEIVED not in span.attributes)
        return spans if as_of_ns is None else (s for s in spans if s.start_ns <= as_of_ns)

    def wants_agent(self, name: str) -> bool:
        """Return whether the steps of an agent are wanted."""
        for pattern in self.agents:
            if matches(name, pattern.removeprefix(NOT)):
                return not pattern.startswith(NOT)
        return all(pattern.startswith(NOT) for pattern in self.agents)

    @property
    def wants_all(self) -> bool:
        """True if every step of its rollouts is wanted."""
        values = {name: getattr(self, name) for name in _WHOLE}
        return StepSelection(**values) == self

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
            and (self.span_ids is None or step.span_id in self.span_ids)
            and (self.truncated or step.finish_reason not in CUTS)
        )

    def part_of(self, trajectory: Trajectory) -> Trajectory | None:
        """A trajectory with the wanted steps alone; None where there is none."""
        steps = tuple(filter(self.wants, trajectory.transitions))
        if len(steps) == len(trajectory.transitions):
            return trajectory
        return replace(trajectory, transitions=steps) if steps else None

    def wants_version(self, version: str | None, resources: Mapping[str, str]) -> bool:
        """Return whether the steps of a version, of all resources or of one, are wanted."""
        pattern = self.resource_version or ""
        names = [version, *(f"{k}@{v}" for k, v in resources.items())]
        texts = filter(None, names)
        return any(text == pattern or fnmatchcase(text, pattern) for text in texts)


_WHOLE: Final = ("rollout_ids", "since_ns", "until_ns", "received", "as_of_ns")
"""What tells of rollouts and spans, and not of steps."""


def _parse_agents(value: str | Iterable[str]) -> tuple[str, ...]:
    patterns = tuple(check_patterns(value, "agents"))
    check_patterns([pattern.removeprefix(NOT) for pattern in patterns], "agents")
    if any(pattern.removeprefix(NOT) in ("", REGEX) for pattern in patterns):
        raise ConfigError(f"agents names {patterns!r}; an empty pattern means nobody")
    return patterns
