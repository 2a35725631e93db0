"""Spans in, transitions out: pure, near-linear, without I/O, clock or randomness.

The spans of each attempt become a tree; its model calls (or, where there are none, the actions and
observations marked by hand) become transitions; rewards are credited to them; and each agent's
calls become one trajectory per branch. Everything left behind is in the report, with its reason.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from lightning_otel import conventions as c
from lightning_otel.adapter import (
    advantages,
    branches,
    composition,
    conversations,
    credit,
    duplicates,
    exactness,
    marks,
    readers,
    trajectories,
)
from lightning_otel.adapter.advantages import Advantage, Estimate, Outcome
from lightning_otel.adapter.attempts import AttemptKey, sort_out
from lightning_otel.adapter.calls import (
    CUT,
    INCOMPLETE,
    NOT_TRACKED,
    UNREADABLE,
    is_call,
    is_failure,
    read_call,
)
from lightning_otel.adapter.composition import Composition
from lightning_otel.adapter.duplicates import DUPLICATE
from lightning_otel.adapter.placement import Placement
from lightning_otel.adapter.readable import ReadableSpan, span_of
from lightning_otel.adapter.repair import REPEATED
from lightning_otel.adapter.rewards import read_reward
from lightning_otel.adapter.tracking import is_tracked
from lightning_otel.adapter.tree import Tree, build
from lightning_otel.errors import ConfigError
from lightning_otel.types import (
    Call,
    Compose,
    Credit,
    Credited,
    CreditRule,
    Dropped,
    Estimator,
    Repair,
    Report,
    Reward,
    Span,
    Trajectory,
)

MARKED_BESIDE_CALLS = "marked by hand beside model calls: the calls make the transitions"
INCOMPLETE_MARK = "incomplete: the mark never ended"
INCOMPLETE_ROLLOUT = "incomplete: the rollout broke off before its end"
IDLE_MARK = "idle: its agent saw something and never acted"
_MENDED = (CUT, INCOMPLETE, UNREADABLE)
"""Reasons against one record of a request that do not speak against another."""

__all__ = ["DUPLICATE", "Adaptation", "Advantage", "Composition", "TripletAdapter"]


class Adaptation(NamedTuple):
    """Trajectories, and the funnel that led to them.

    Attributes:
        credited: Where each reward went that is not reported as left out.
        outcomes: What each attempt came to, where advantages are asked for.
    """

    trajectories: list[Trajectory]
    report: Report
    credited: Sequence[Credited] = ()
    outcomes: Sequence[Outcome] = ()


@dataclass(frozen=True, slots=True)
class TripletAdapter:
    """Turns spans into trajectories of transitions.

    Attributes:
        credit: How a reward reaches a call, if it has no link and was not given inside a call; it
            never goes to another agent's. ``next``: to the latest call that ended before it, in the
            smallest part of the tree around it that has one; of two for one call the first counts.
            ``step``: to every call of that part since its last reward. ``agents``: as ``next``, but
            one given outside any agent to each agent's latest call. ``last``: the rollout's final
            reward goes to its last call. ``sibling``: to the latest call that ended before it and
            has the same parent. ``discounted``: placed like ``next``, then each step gets its
            discounted return. Or a function of a reward and the calls it may judge.
        gamma: Discount per step under ``discounted``, 0 to 1.
        compose: Makes the reward of several named ones, such as a :class:`Composition`; by default
            the primary one is the reward.
        advantage: How steps get an advantage and a weight; by default they get none.
    """

    credit: Credit | CreditRule = "next"
    gamma: float = 0.99
    compose: Compose = composition.primary
    advantage: Advantage | Estimator | None = None

    def __post_init__(self) -> None:
        if not callable(self.credit) and self.credit not in get_args(Credit):
            raise ConfigError(
                f"credit is {self.credit!r}; it must be one of {', '.join(get_args(Credit))}, "
                "or a function"
            )
        if not 0.0 <= self.gamma <= 1.0:
            raise ConfigError(f"gamma is {self.gamma!r}; it must lie between 0 and 1")
        if not callable(self.compose):
            raise ConfigError(
                f"compose is {self.compose!r}; give Composition({{name: weight}}) or a function"
            )
        self.comparison()

    def comparison(self) -> Advantage | None:
        """How rollouts are compared; None if no advantages are asked for.

        Raises:
            ConfigError: There is no such estimator.
        """
        if self.advantage is None or isinstance(self.advantage, Advantage):
            return self.advantage
        return Advantage(self.advantage)

    def adapt(self, spans: Iterable[Span | ReadableSpan]) -> list[Trajectory]:
        """The trajectories in the spans, of any number of rollouts, in order of their start.

        Args:
            spans: Spans of ours or of OpenTelemetry's SDK, in any convention that has a reader.
        """
        return self.explain(spans).trajectories

    def explain(
        self,
        spans: Iterable[Span | ReadableSpan],
        *,
        incomplete: Collection[tuple[str, str]] = (),
        estimates: Mapping[AttemptKey, Estimate] | None = None,
    ) -> Adaptation:
        """The trajectories, with a reason for every call, reward and mark that is not in them.

        A reward whose link names a span or response of another attempt counts there.

        Args:
            spans: As :meth:`adapt` takes them.
            incomplete: Rollout and attempt ids of attempts that are only counted: they broke off.
            estimates: Advantages of attempts, where these spans are not all there are to compare.
        """
        found = self._adapted(spans, incomplete)
        how = self.comparison()
        if how is None:
            return found
        if estimates is None:
            estimates = advantages.estimate(found.outcomes, how, self.compose)
        paths, dropped = advantages.stamped(found.trajectories, estimates)
        report = replace(found.report, dropped=(*found.report.dropped, *dropped))
        return found._replace(trajectories=paths, report=report)

    def outcomes(
        self,
        spans: Iterable[Span | ReadableSpan],
        *,
        incomplete: Collection[tuple[str, str]] = (),
    ) -> Sequence[Outcome]:
        """What each attempt came to, where advantages are asked for; a first pass over many spans.

        Args:
            spans: As :meth:`adapt` takes them; whole rollouts.
            incomplete: As :meth:`explain` takes them.
        """
        return self._adapted(spans, incomplete).outcomes

    def estimate(self, outcomes: Iterable[Outcome]) -> dict[AttemptKey, Estimate]:
        """The advantage of each attempt; empty if none is asked for.

        Args:
            outcomes: Of all the spans there are, however they were divided.
        """
        how = self.comparison()
        return {} if how is None else advantages.estimate(outcomes, how, self.compose)

    def _adapted(
        self, spans: Iterable[Span | ReadableSpan], incomplete: Collection[tuple[str, str]]
    ) -> Adaptation:
        attempts, repeated = sort_out(readers.read(map(span_of, spans)))
        found = [
            each.leave_out(INCOMPLETE_ROLLOUT) if key in incomplete else each.adapt()
            for key, own in attempts.items()
            for each in [_Attempt(key, build(own), self, repeated.get(key, ()))]
        ]
        rollouts = Report(rollouts=len({key.rollout_id for key in attempts}))
        return Adaptation(
            [trajectory for each in found for trajectory in each.trajectories],
            Report.total([rollouts, *(each.report for each in found)]),
            [credited for each in found for credited in each.credited],
            [outcome for each in found for outcome in each.outcomes],
        )


class _Attempt:
    """One attempt on its way from a tree to trajectories."""

    def __init__(
        self, key: AttemptKey, tree: Tree, adapter: TripletAdapter, repeated: Iterable[Span]
    ) -> None:
        self._key = key
        self._tree = tree
        self._adapter = adapter
        self._dropped: list[Dropped] = []
        self._failed: list[int] = []
        self._repeated = tuple(repeated)
        for span in self._repeated:
            if is_call(span):
                self._drop(span, "call", REPEATED)
            if read_reward(span) is not None:
                self._drop(span, "reward", REPEATED)
            if marks.is_mark(span):
                self._drop(span, "mark", REPEATED)

    def adapt(self) -> Adaptation:
        tree, adapter = self._tree, self._adapter
        positions = [i for i, span in enumerate(tree.spans) if is_call(span)]
        found_twice = duplicates.find(tree, positions)
        repeated = [duplicates.ranked(tree, each) for each in found_twice]
        stand_in = {i: duplicates.place_of(tree, each) for each in repeated for i in each}
        calls = self._calls(i for i in positions if i not in stand_in)
        for each in repeated:
            self._merge(each, calls)
        actions = self._actions({call.agent for call in calls.values()})
        steps = dict(sorted({**calls, **actions}.items()))
        talks = {position: conversations.read(call) for position, call in steps.items()}
        others = {i: kept for i, kept in stand_in.items() if i != kept and kept in calls}
        told = [] if tree.is_counted else branches.told_by_messages(tree, steps, talks)
        if told:
            moved = self._reorder(told)
            tree = self._tree
            steps = dict(sorted((moved[i], call) for i, call in steps.items()))
            talks = {moved[i]: talk for i, talk in talks.items()}
            others = {moved[i]: moved[kept] for i, kept in others.items()}
        rewards = self._rewards()
        placement = credit.place(tree, steps, others, rewards, adapter.credit)
        for reward, reason in placement.unplaced:
            self._drop(reward.span, "reward", reason)
        parts = trajectories.Steps(steps, talks, placement.rewards, self._failed)
        found = trajectories.assemble(
            self._key,
            tree,
            parts,
            values=self._composed(placement, steps),
            gamma=adapter.gamma if adapter.credit == "discounted" else None,
        )
        distinct = {id(step): step for path in found for step in path.transitions}.values()
        tally = exactness.tally(distinct)
        report = Report(
            spans=len(tree.spans),
            calls=len(positions) + len(actions) + sum(map(is_call, self._repeated)),
            transitions=len(distinct),
            exact=tally.exact,
            rewards=len(placement.placed) + sum(each.noun == "reward" for each in self._dropped),
            rewards_placed=len(placement.placed),
            rewarded=sum(step.reward is not None for step in distinct),
            dropped=tuple(self._dropped),
            repairs=self._repairs(),
            inexact=tally.inexact,
            notes=tally.notes,
        )
        return Adaptation(
            found, report, _credited(placement, rewards, steps), self._outcomes(placement, steps)
        )

    def _composed(self, placement: Placement, steps: Mapping[int, Call]) -> dict[int, float]:
        """The reward of each call that has one."""
        compose = self._adapter.compose
        found: dict[int, float] = {}
        for position, named in placement.rewards.items():
            value = composition.composed(compose, named)
            if value is None:
                reason = composition.missing_part(compose, named)
                self._drop(steps[position].span, "composition", reason)
            else:
                found[position] = value
        return found

    def _outcomes(self, placement: Placement, steps: Mapping[int, Call]) -> list[Outcome]:
        """What the attempt came to, where advantages are asked for and it has steps."""
        how = self._adapter.comparison()
        if how is None or not steps:
            return []
        return [
            advantages.outcome(
                self._key,
                advantages.group_of(self._tree.spans, how.group_by),
                min(call.span.start_ns for call in steps.values()),
                placement.totals,
                placement.value,
                self._adapter.compose,
            )
        ]

    def leave_out(self, reason: str) -> Adaptation:
        """No trajectory, and the reason for every call and reward."""
        spans = self._tree.spans
        calls = [span for span in spans if is_call(span)]
        for span in calls:
            self._drop(span, "call", reason)
        for position, _ in self._rewards():
            self._drop(spans[position], "reward", reason)
        report = Report(
            spans=len(spans),
            calls=len(calls) + sum(map(is_call, self._repeated)),
            rewards=sum(each.noun == "reward" for each in self._dropped),
            dropped=tuple(self._dropped),
            repairs=self._repairs(),
        )
        return Adaptation([], report)

    def _repairs(self) -> tuple[Repair, ...]:
        others = (Repair(span.span_id, span.trace_id, REPEATED) for span in self._repeated)
        return (*self._tree.repairs, *others)

    def _reorder(self, told: Iterable[tuple[int, int]]) -> list[int]:
        """Build the tree anew, knowing of calls that ended before others; the new positions."""
        spans = self._tree.spans
        self._tree = build(spans, [(spans[one], spans[other]) for one, other in told])
        places = {id(span): position for position, span in enumerate(self._tree.spans)}
        moved = [places[id(span)] for span in spans]
        self._failed = [moved[position] for position in self._failed]
        return moved

    def _drop(
        self, span: Span, noun: Literal["call", "reward", "mark", "composition"], reason: str
    ) -> None:
        self._dropped.append(Dropped(span.span_id, span.trace_id, noun, reason))

    def _calls(self, positions: Iterable[int]) -> dict[int, Call]:
        """The model calls that can be read, by position."""
        found: dict[int, Call] = {}
        for position in positions:
            span = self._tree.spans[position]
            call = read_call(span, self._tree.agents[position])
            if isinstance(call, Call):
                found[position] = call
            else:
                self._drop(span, "call", call)
                if is_failure(call):
                    self._failed.append(position)
        return found

    def _merge(self, order: list[int], calls: dict[int, Call]) -> None:
        """Make one call of several records of a request, given the richest first."""
        tree = self._tree
        place, agent = duplicates.place_of(tree, order), duplicates.agent_of(tree, order)
        call = read_call(duplicates.merged(tree, order), agent)
        for position in order[1:] if call in _MENDED else ():
            rest = [other for other in order if other != position]
            mended = read_call(duplicates.merged(tree, [position, *rest]), agent)
            if isinstance(mended, Call):
                call, order = mended, [position, *rest]
                break
        for position in order[1:]:
            span = tree.spans[position]
            self._drop(span, "call", duplicates.reason_of(span))
        if isinstance(call, Call):
            calls[place] = call
        else:
            self._drop(tree.spans[order[0]], "call", call)
            if is_failure(call):
                self._failed.append(place)

    def _actions(self, callers: set[str]) -> dict[int, Call]:
        """Actions marked by hand, read as calls, by position; agents with calls have none."""
        usable = []
        for position, span in enumerate(self._tree.spans):
            if not marks.is_mark(span):
                continue
            agent = self._tree.agents[position]
            if agent in callers:
                self._drop(span, "mark", MARKED_BESIDE_CALLS)
            elif span.is_incomplete:
                self._drop(span, "mark", INCOMPLETE_MARK)
            elif not is_tracked(agent, span.attributes.get(c.TRACK_ONLY)):
                self._drop(span, "mark", NOT_TRACKED)
            else:
                usable.append(position)
        found = marks.read(self._tree, usable)
        for position in found.idle:
            self._drop(self._tree.spans[position], "mark", IDLE_MARK)
        return found.actions

    def _rewards(self) -> list[tuple[int, Reward]]:
        found = []
        for position, span in enumerate(self._tree.spans):
            reward = read_reward(span)
            if isinstance(reward, Reward):
                found.append((position, reward))
            elif reward is not None:
                self._drop(span, "reward", reward)
        return found


def _credited(
    placement: Placement, rewards: Iterable[tuple[int, Reward]], steps: Mapping[int, Call]
) -> list[Credited]:
    """Where each reward went, in the order they were given."""
    order = {id(reward): position for position, reward in rewards}
    placement.placed.sort(key=lambda placed: order[id(placed.reward)])
    return [
        Credited(
            reward.span.span_id,
            reward.span.trace_id,
            tuple([steps[call].span.span_id for call in calls]),
            by,
        )
        for reward, calls, by in placement.placed
    ]
