"""Adapters of spans, and the one that turns them into trajectories of transitions."""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

from lightning_otel.adapter import advantages, readers
from lightning_otel.adapter.advantages import Advantage, AttemptOutcome, Composition, Estimate
from lightning_otel.adapter.attempts import AttemptKey, sort_attempts
from lightning_otel.adapter.continuations import Answers, complete_calls, goes_on, is_source
from lightning_otel.adapter.histories import state_key
from lightning_otel.adapter.linear import Adaptation, adapt_linear
from lightning_otel.adapter.rewards import read_reward
from lightning_otel.errors import ConfigError
from lightning_otel.types import (
    Compose,
    Credit,
    CreditRule,
    Dropped,
    Estimator,
    Event,
    Link,
    Report,
    Span,
    Trajectory,
)
from lightning_otel.types import conventions as c
from lightning_otel.types.values import check_types

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


def span_of(given: "Span | ReadableSpan") -> Span:
    """Convert a span of the SDK; return one of ours unchanged."""
    if isinstance(given, Span):
        return given
    source: Any = given
    context, parent, status = source.context, source.parent, source.status
    return Span(
        trace_id=format(context.trace_id, "032x"),
        span_id=format(context.span_id, "016x"),
        parent_span_id=format(parent.span_id, "016x") if parent is not None else None,
        name=source.name,
        start_ns=source.start_time or 0,
        end_ns=source.end_time,
        kind=source.kind.name,
        status=status.status_code.name,
        status_message=status.description or "",
        attributes=_read_attributes(source.attributes),
        events=tuple(
            Event(event.name, event.timestamp, _read_attributes(event.attributes))
            for event in source.events
        ),
        links=tuple(
            Link(
                format(link.context.trace_id, "032x"),
                format(link.context.span_id, "016x"),
                _read_attributes(link.attributes),
            )
            for link in source.links
        ),
        otel_resource=_read_attributes(source.resource.attributes),
        scope=source.instrumentation_scope.name if source.instrumentation_scope else "",
    )


def _read_attributes(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    # The SDK keeps lists as tuples; ours, which were JSON once, are lists.
    return {k: list(v) if isinstance(v, tuple) else v for k, v in (attributes or {}).items()}


WAITING: Final = (
    "it waits: no call of its rollout, and nothing that its link names, is in the store"
)
INCOMPLETE_ROLLOUT: Final = "incomplete: the rollout broke off before its end"

T = TypeVar("T")
Matcher: TypeAlias = Callable[[Span], bool | None]
"""Says of a span that it is one, or is none; None leaves that to the usual rules."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection for acyclic work: a fifth of the time at 5,000 calls."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class TraceAdapter(ABC, Generic[T]):
    """Makes anything of spans: ``MyAdapter().adapt(store.spans())``; write ``adapt``."""

    @abstractmethod
    def adapt(self, spans: Iterable[Span]) -> T:
        """Turn the spans of whole rollouts into something else."""


def _describe_states(outcome: AttemptOutcome, paths: Sequence[Trajectory]) -> AttemptOutcome:
    """Return an attempt's outcome with its steps by their states; the first may be its group."""
    steps = {(step.trace_id, step.span_id): step for path in paths for step in path.transitions}
    estimates = {
        ids: AttemptOutcome(outcome.key, state_key(step), step.start_ns, step.rewards, step.reward)
        for ids, step in steps.items()
    }
    first = next(iter(estimates.values()), outcome).group_id
    group_id = outcome.group_id or (f"prompt-{first}" if estimates else "")
    return outcome._replace(steps=estimates, group_id=group_id)


@dataclass(frozen=True, slots=True)
class TripletAdapter:
    """Turns spans into trajectories of transitions.

    Attributes:
        credit: How a reward reaches a call, if it has no link and was not given inside a call; it
            never goes to another agent's. ``previous``: to the latest call that ended before it, in
            the smallest part of the tree around it that has one; of two for one call the first
            counts. One that judges the rollout goes to the last step of its main conversation.
            ``step``: to every call of that part since its last reward. ``agents``: as
            ``previous``, but one given outside any agent to each agent's latest call. ``last``: the
            rollout's final reward goes to that last step. ``discounted``: placed like
            ``previous``, then each step gets its discounted return. Or a function of a reward and
            the calls it may judge.
        gamma: Discount per step under ``discounted``, 0 to 1.
        reward: Name of the reward that counts, and no other; by default the first one of a step.
        compose: Makes the reward of several named ones, such as a :class:`Composition`.
        advantage: How steps get an advantage and a weight; by default they get none.
        is_call: Says of a span whether it is a call of a model; None leaves that to the rules.
        is_reward: Likewise whether it is a reward.
    """

    credit: Credit | CreditRule = "previous"
    gamma: float = 0.99
    compose: Compose = advantages.primary
    advantage: Advantage | Estimator | None = None
    is_call: Matcher | None = None
    is_reward: Matcher | None = None
    reward: str | None = None

    def __post_init__(self) -> None:
        names = ("credit", "gamma", "is_call", "is_reward", "reward")
        kinds = {**TripletAdapter.__annotations__, "credit": Credit | Callable}
        check_types({name: getattr(self, name) for name in names}, kinds)
        if not 0.0 <= self.gamma <= 1.0:
            raise ConfigError(f"gamma is {self.gamma!r}; it must lie between 0 and 1")
        if not callable(self.compose):
            raise ConfigError(
                f"compose is {self.compose!r}; give Composition({{name: weight}}) or a function"
            )
        if self.reward is not None:
            self._compose_one(self.reward)
        self.comparison()

    def _compose_one(self, name: str) -> None:
        composition = Composition({name: 1.0})
        if not name or self.compose not in (advantages.primary, composition):
            raise ConfigError(
                f"reward is {name!r} beside compose={self.compose!r}; give one of them: the name "
                "of a reward, or a composition of several"
                if name
                else "reward is empty; give the name of a reward, or leave it out"
            )
        object.__setattr__(self, "compose", composition)

    def comparison(self) -> Advantage | None:
        """Return how rollouts are compared, if at all; ConfigError for an unknown one."""
        if self.advantage is None or isinstance(self.advantage, Advantage):
            return self.advantage
        return Advantage(self.advantage)

    def adapt(self, spans: "Iterable[Span | ReadableSpan]") -> list[Trajectory]:
        """Return the trajectories of spans, ours or the SDK's, in order of their start."""
        return self.explain(spans).trajectories

    @gc_paused()
    def explain(
        self,
        spans: "Iterable[Span | ReadableSpan]",
        *,
        incomplete: Collection[tuple[str, str]] = (),
        estimates: Mapping[AttemptKey, Estimate] | None = None,
        origins: Iterable[Span] = (),
    ) -> Adaptation:
        """Return trajectories, with a reason for every call, reward and mark that is not in them.

        Args:
            spans: As :meth:`adapt` takes them.
            incomplete: Rollout and attempt ids of attempts that are only counted: they broke off.
            estimates: Advantages of attempts, where these spans are not all there are to compare.
            origins: Calls of other attempts that some of these go on from, by a response's id.
        """
        result = self._adapt_attempts(spans, incomplete, origins)
        how = self.comparison()
        if how is None:
            return result
        if estimates is None:
            estimates = advantages.estimate_advantages(result.outcomes, how, self.compose)
        paths, dropped = advantages.stamp_steps(result.trajectories, estimates)
        report = replace(result.report, dropped=(*result.report.dropped, *dropped))
        return result._replace(trajectories=paths, report=report)

    def outcomes(
        self,
        spans: "Iterable[Span | ReadableSpan]",
        *,
        incomplete: Collection[tuple[str, str]] = (),
    ) -> Sequence[AttemptOutcome]:
        """Return each attempt's outcome, a first pass for advantages; see :meth:`explain`."""
        return self._adapt_attempts(spans, incomplete).outcomes

    def estimate(self, outcomes: Iterable[AttemptOutcome]) -> dict[AttemptKey, Estimate]:
        """Return the advantage of each attempt by all outcomes; empty if none is asked for."""
        how = self.comparison()
        return {} if how is None else advantages.estimate_advantages(outcomes, how, self.compose)

    def _adapt_attempts(
        self,
        spans: "Iterable[Span | ReadableSpan]",
        incomplete: Collection[tuple[str, str]],
        origins: Iterable[Span] = (),
    ) -> Adaptation:
        read = readers.read(map(span_of, spans))
        if self.is_call is not None or self.is_reward is not None:
            read = map(self._match_span, read)
        attempts, repeated, strays = sort_attempts(read)
        records = [*readers.read(origins), *(span for group in attempts.values() for span in group)]
        sources = complete_calls(records, records)
        answers = Answers(filter(is_source, sources)) if any(map(goes_on, sources)) else None
        parts = [
            self._adapt_attempt(
                key, complete_calls(members, records), repeated.get(key, ()), answers,
                is_complete=key not in incomplete,
            )
            for key, members in attempts.items()
        ]  # fmt: skip
        reasons = [(span, read_reward(span)) for span in strays]
        dropped = [
            Dropped(span.span_id, span.trace_id, "reward", why if isinstance(why, str) else WAITING)
            for span, why in reasons
        ]
        remainder = Report(
            spans=len(strays),
            rollouts=len({key.rollout_id for key in attempts}),
            rewards=len(strays),
            dropped=tuple(dropped),
        )
        outcomes = [outcome for part in parts for outcome in part.outcomes]
        how = self.comparison()
        if how is not None and how.group_by in (advantages.STATE, advantages.PROMPT):
            outcomes = [
                _describe_states(outcome, part.trajectories)
                for part in parts
                for outcome in part.outcomes
            ]
        return Adaptation(
            [path for part in parts for path in part.trajectories],
            Report.total([remainder, *(part.report for part in parts)]),
            [credited for part in parts for credited in part.credited],
            outcomes,
            [(*attempt, part) for attempt, part in zip(attempts.items(), parts, strict=True)],
        )

    def _match_span(self, span: Span) -> Span:
        values = dict(span.attributes)
        says_call = None if self.is_call is None else self.is_call(span)
        says_reward = None if self.is_reward is None else self.is_reward(span)
        is_one = values.get(c.OPERATION) in tuple(c.CALL_OPERATIONS)
        if says_call and not is_one:
            values[c.OPERATION] = c.CHAT
        elif says_call is False and is_one:
            del values[c.OPERATION]
        if says_reward:
            values.setdefault(c.REWARD_VALUE, None)  # it is reported as one without a number
        elif says_reward is False:
            values = {k: v for k, v in values.items() if not k.startswith(f"{c.REWARD_PREFIX}.")}
        return replace(span, attributes=values)

    def _adapt_attempt(
        self, key: AttemptKey, members: Sequence[Span], repeated: Sequence[Span],
        answers: Answers | None, *, is_complete: bool,
    ) -> Adaptation:  # fmt: skip
        is_usual = self.compose is advantages.primary and not repeated
        if is_complete and is_usual and isinstance(self.credit, str):
            result = adapt_linear(key, members, self.comparison(), self.credit, self.gamma)
            if result is not None:
                return result
        from lightning_otel.adapter.assembly import Assembly
        from lightning_otel.adapter.tree import build_tree

        assembly = Assembly(key, build_tree(members), self, repeated, answers)
        return assembly.adapt() if is_complete else assembly.leave_out(INCOMPLETE_ROLLOUT)
