"""Spans in, transitions out: pure, near-linear, without I/O, clock or randomness.

The spans of each attempt become a tree; its model calls (or, where there are none, the actions and
observations marked by hand) become transitions; rewards are credited to them; and each agent's
calls become one trajectory per branch. Everything left behind is in the report, with its reason.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from lightning_otel import conventions as c
from lightning_otel.adapter import credit, duplicates, exactness, marks, readers, trajectories
from lightning_otel.adapter.attempts import AttemptKey, group
from lightning_otel.adapter.calls import (
    CUT,
    INCOMPLETE,
    NOT_TRACKED,
    UNREADABLE,
    is_call,
    read_call,
)
from lightning_otel.adapter.duplicates import DUPLICATE
from lightning_otel.adapter.readable import ReadableSpan, span_of
from lightning_otel.adapter.rewards import read_reward
from lightning_otel.adapter.tracking import is_tracked
from lightning_otel.adapter.tree import Tree, build
from lightning_otel.errors import ConfigError
from lightning_otel.types import Call, Credit, Dropped, Report, Reward, Span, Trajectory

MARKED_BESIDE_CALLS = "marked by hand beside model calls: the calls make the transitions"
INCOMPLETE_MARK = "incomplete: the mark never ended"
INCOMPLETE_ROLLOUT = "incomplete: the rollout broke off before its end"
IDLE_MARK = "idle: its agent saw something and never acted"
_MENDED = (CUT, INCOMPLETE, UNREADABLE)
"""Reasons against one record of a request that do not speak against another."""

__all__ = ["DUPLICATE", "Adaptation", "TripletAdapter"]


class Adaptation(NamedTuple):
    """Trajectories, and the funnel that led to them."""

    trajectories: list[Trajectory]
    report: Report


@dataclass(frozen=True, slots=True)
class TripletAdapter:
    """Turns spans into trajectories of transitions.

    Attributes:
        credit: How a reward reaches a call, if it has no link and was not given inside a call; it
            never goes to another agent's. ``next``: to the latest call that ended before it, in the
            smallest part of the tree around it that has one; of two for one call the first counts.
            ``last``: the rollout's final reward goes to its last call. ``sibling``: to the latest
            call that ended before it and has the same parent. ``discounted``: placed like ``next``,
            then each step gets its discounted return.
        gamma: Discount per step under ``discounted``, 0 to 1.
    """

    credit: Credit = "next"
    gamma: float = 0.99

    def __post_init__(self) -> None:
        if self.credit not in get_args(Credit):
            raise ConfigError(
                f"credit is {self.credit!r}; it must be one of {', '.join(get_args(Credit))}"
            )
        if not 0.0 <= self.gamma <= 1.0:
            raise ConfigError(f"gamma is {self.gamma!r}; it must lie between 0 and 1")

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
    ) -> Adaptation:
        """The trajectories, with a reason for every call, reward and mark that is not in them.

        A reward whose link names a span or response of another attempt counts there.

        Args:
            spans: As :meth:`adapt` takes them.
            incomplete: Rollout and attempt ids of attempts that are only counted: they broke off.
        """
        attempts = group(readers.read(map(span_of, spans)))
        found = [
            each.leave_out(INCOMPLETE_ROLLOUT) if key in incomplete else each.adapt()
            for key, own in attempts.items()
            for each in [_Attempt(key, build(own), self)]
        ]
        rollouts = Report(rollouts=len({key.rollout_id for key in attempts}))
        return Adaptation(
            [trajectory for each in found for trajectory in each.trajectories],
            Report.total([rollouts, *(each.report for each in found)]),
        )


class _Attempt:
    """One attempt on its way from a tree to trajectories."""

    def __init__(self, key: AttemptKey, tree: Tree, adapter: TripletAdapter) -> None:
        self._key = key
        self._tree = tree
        self._adapter = adapter
        self._dropped: list[Dropped] = []

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
        rewards = self._rewards()
        others = {i: kept for i, kept in stand_in.items() if i != kept and kept in calls}
        placement = credit.place(tree, list(steps), others, rewards, adapter.credit)
        for reward, reason in placement.unplaced:
            self._drop(reward.span, "reward", reason)
        found = trajectories.assemble(
            self._key, tree, steps, placement.rewards, rule=adapter.credit, gamma=adapter.gamma
        )
        distinct = {id(step): step for path in found for step in path.transitions}.values()
        tally = exactness.tally(distinct)
        report = Report(
            spans=len(tree.spans),
            calls=len(positions) + len(actions),
            transitions=len(distinct),
            exact=tally.exact,
            rewards=placement.placed + sum(each.noun == "reward" for each in self._dropped),
            rewards_placed=placement.placed,
            rewarded=sum(step.reward is not None for step in distinct),
            dropped=tuple(self._dropped),
            inexact=tally.inexact,
            notes=tally.notes,
        )
        return Adaptation(found, report)

    def leave_out(self, reason: str) -> Adaptation:
        """No trajectory, and the reason for every call and reward."""
        spans = self._tree.spans
        calls = [span for span in spans if is_call(span)]
        for span in calls:
            self._drop(span, "call", reason)
        for position, _ in self._rewards():
            self._drop(spans[position], "reward", reason)
        rewards = sum(each.noun == "reward" for each in self._dropped)
        dropped = tuple(self._dropped)
        return Adaptation(
            [], Report(spans=len(spans), calls=len(calls), rewards=rewards, dropped=dropped)
        )

    def _drop(self, span: Span, noun: Literal["call", "reward", "mark"], reason: str) -> None:
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
