"""One attempt on its way from a tree to trajectories, with a reason for all that is left behind."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

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
    trajectories,
)
from lightning_otel.adapter.advantages import Outcome
from lightning_otel.adapter.attempts import AttemptKey
from lightning_otel.adapter.calls import (
    CUT,
    EMBEDDING,
    INCOMPLETE,
    NOT_TRACKED,
    UNKNOWN,
    UNREADABLE,
    is_call,
    is_failure,
    read_call,
    seems_call,
)
from lightning_otel.adapter.conversations import Conversation
from lightning_otel.adapter.credit import Placement
from lightning_otel.adapter.repair import REPEATED
from lightning_otel.adapter.rewards import read_reward
from lightning_otel.adapter.tracking import is_tracked
from lightning_otel.adapter.tree import Tree, reordered
from lightning_otel.types import (
    Call,
    Credited,
    Dropped,
    Repair,
    Report,
    Reward,
    Span,
    Trajectory,
)

if TYPE_CHECKING:
    from lightning_otel.adapter import TripletAdapter

MARKED_BESIDE_CALLS = "marked by hand beside model calls: the calls make the transitions"
INCOMPLETE_MARK = "incomplete: the mark never ended"
INCOMPLETE_ROLLOUT = "incomplete: the rollout broke off before its end"
IDLE_MARK = "idle: its agent saw something and never acted"
_NO_STEP = (EMBEDDING, NOT_TRACKED)
"""Reasons of calls that nobody expects a reward to judge."""
_MENDED = (CUT, INCOMPLETE, UNREADABLE)
"""Reasons against one record of a request that do not speak against another."""


class Adaptation(NamedTuple):
    """Trajectories, and the funnel that led to them.

    Attributes:
        credited: Where each reward went that is not reported as left out.
        outcomes: The reward of each attempt.
    """

    trajectories: list[Trajectory]
    report: Report
    credited: Sequence[Credited] = ()
    outcomes: Sequence[Outcome] = ()


class _Read(NamedTuple):
    """The spans of an attempt that can become steps, by position.

    Attributes:
        calls: How many calls and actions were recorded, whatever became of them.
        steps: Those that can be read, in order.
        talks: The conversation of each step.
        others: For each further record of a call the one that stands for all.
    """

    calls: int
    steps: dict[int, Call]
    talks: dict[int, Conversation]
    others: dict[int, int]


class Assembly:
    """Puts the trajectories of one attempt together."""

    def __init__(
        self, key: AttemptKey, tree: Tree, adapter: "TripletAdapter", repeated: Iterable[Span]
    ) -> None:
        """Take an attempt.

        Args:
            key: Which one.
            tree: Its spans.
            adapter: Whose rules hold.
            repeated: Spans left out of the tree for their ids, which others have.
        """
        self._key = key
        self._tree = tree
        self._adapter = adapter
        self._dropped: list[Dropped] = []
        self._failed: list[int] = []
        self._lost: list[int] = []
        self._repeated = tuple(repeated)
        others = [Repair(span.span_id, span.trace_id, REPEATED) for span in self._repeated]
        self._repairs = (*tree.repairs, *others)
        for span in self._repeated:
            if is_call(span):
                self._drop_span(span, "call", REPEATED)
            if read_reward(span) is not None:
                self._drop_span(span, "reward", REPEATED)
            if marks.is_mark(span):
                self._drop_span(span, "mark", REPEATED)

    def adapt(self) -> Adaptation:
        """Its trajectories, and its part of the report."""
        read = self._in_told_order(self._read_steps())
        rewards = self._find_rewards()
        placement = credit.place(self._tree, read.steps, read.others, rewards, self._adapter.credit)
        for reward, reason in placement.unplaced:
            self._drop_span(reward.span, "reward", reason)
        outcome = self._make_outcome(placement, has_steps=bool(read.steps))
        found = trajectories.assemble(
            self._key,
            self._tree,
            trajectories.Steps(read.steps, read.talks, placement.rewards, self._failed),
            values=self._compose_rewards(placement, read.steps),
            gamma=self._adapter.gamma if self._adapter.credit == "discounted" else None,
            earned=outcome.value,
        )
        report = self._make_report(read, placement, rewards, found)
        return Adaptation(
            found,
            report,
            _list_credited(placement, rewards, read.steps),
            (outcome,),
        )

    def _read_steps(self) -> _Read:
        """Find the spans that can become steps: calls, each request once, and actions."""
        tree = self._tree
        positions = [i for i, span in enumerate(tree.spans) if is_call(span)]
        unknown = self._drop_unknown(positions)
        repeated = [duplicates.ranked(tree, each) for each in duplicates.find(tree, positions)]
        stand_in = {i: duplicates.place_of(tree, each) for each in repeated for i in each}
        calls = self._read_calls(i for i in positions if i not in stand_in)
        for each in repeated:
            self._merge_records(each, calls)
        actions = self._read_actions({call.agent for call in calls.values()})
        steps = dict(sorted({**calls, **actions}.items()))
        return _Read(
            len(positions) + unknown + len(actions),
            steps,
            {
                position: conversations.read_conversation(call.observation, call.action)
                for position, call in steps.items()
            },
            {i: kept for i, kept in stand_in.items() if i != kept and kept in calls},
        )

    def _drop_unknown(self, calls: Sequence[int]) -> int:
        """Drop what seems a call of a convention that nobody reads; how many they are."""
        tree = self._tree
        found = [
            position
            for position, span in enumerate(tree.spans)
            if span.scope != c.SCOPE and seems_call(span)
        ]
        apart = tree.apart(found, calls) if found else []
        for position in apart:
            self._drop_call(position, UNKNOWN, tree.spans[position])
        return len(apart)

    def _in_told_order(self, read: _Read) -> _Read:
        """The same where messages tell another order than the clock: the tree then follows it."""
        tree = self._tree
        told = [] if tree.is_counted else branches.told_by_messages(tree, read.steps, read.talks)
        if not told:
            return read
        self._tree, moved = reordered(tree, told)
        self._failed, self._lost = (
            [moved[position] for position in each] for each in (self._failed, self._lost)
        )
        return _Read(
            read.calls,
            dict(sorted((moved[i], call) for i, call in read.steps.items())),
            {moved[i]: talk for i, talk in read.talks.items()},
            {moved[i]: moved[kept] for i, kept in read.others.items()},
        )

    def _make_report(
        self,
        read: _Read,
        placement: Placement,
        rewards: Sequence[tuple[int, Reward]],
        found: Iterable[Trajectory],
    ) -> Report:
        distinct = {id(step): step for path in found for step in path.transitions}.values()
        tally = exactness.tally(distinct)
        return Report(
            spans=len(self._tree.spans),
            calls=read.calls + sum(map(is_call, self._repeated)),
            transitions=len(distinct),
            exact=tally.exact,
            rewards=len(placement.placed) + sum(each.noun == "reward" for each in self._dropped),
            rewards_placed=len(placement.placed),
            rewarded=sum(step.reward is not None for step in distinct),
            dropped=tuple(self._dropped),
            repairs=self._repairs,
            inexact=tally.inexact,
            notes={**tally.notes, **self._passed_over(placement, rewards)},
        )

    def _passed_over(
        self, placement: Placement, rewards: Sequence[tuple[int, Reward]]
    ) -> dict[str, int]:
        """Note how many calls have a reward that may belong to a lost call after them."""
        found = credit.passed_over(self._tree, placement, rewards, self._lost)
        return {credit.PASSED_OVER: len(found)} if found else {}

    def _compose_rewards(self, placement: Placement, steps: Mapping[int, Call]) -> dict[int, float]:
        """The reward of each call that has one."""
        compose = self._adapter.compose
        found: dict[int, float] = {}
        for position, named in placement.rewards.items():
            value = composition.composed(compose, named)
            if value is None:
                reason = composition.missing_part(compose, named)
                self._drop_span(steps[position].span, "composition", reason)
            else:
                found[position] = value
        return found

    def _make_outcome(self, placement: Placement, *, has_steps: bool) -> Outcome:
        how, spans = self._adapter.comparison(), self._tree.spans
        return advantages.outcome(
            self._key,
            "" if how is None else advantages.group_of(spans, how.group_by),
            min(span.start_ns for span in spans),
            placement.totals,
            placement.value,
            self._adapter.compose,
            has_steps=has_steps,
        )

    def leave_out(self, reason: str) -> Adaptation:
        """No trajectory, and the reason for every call and reward."""
        spans = self._tree.spans
        calls = [span for span in spans if is_call(span)]
        for span in calls:
            self._drop_span(span, "call", reason)
        for position, _ in self._find_rewards():
            self._drop_span(spans[position], "reward", reason)
        report = Report(
            spans=len(spans),
            calls=len(calls) + sum(map(is_call, self._repeated)),
            rewards=sum(each.noun == "reward" for each in self._dropped),
            dropped=tuple(self._dropped),
            repairs=self._repairs,
        )
        outcome = self._make_outcome(Placement(), has_steps=False)
        return Adaptation([], report, (), (outcome,))

    def _drop_span(
        self, span: Span, noun: Literal["call", "reward", "mark", "composition"], reason: str
    ) -> None:
        self._dropped.append(Dropped(span.span_id, span.trace_id, noun, reason))

    def _read_calls(self, positions: Iterable[int]) -> dict[int, Call]:
        """The model calls that can be read, by position."""
        found: dict[int, Call] = {}
        for position in positions:
            span = self._tree.spans[position]
            call = read_call(span, self._tree.agents[position])
            if isinstance(call, Call):
                found[position] = call
            else:
                self._drop_call(position, call, span)
        return found

    def _drop_call(self, position: int, reason: str, span: Span) -> None:
        """Drop a call that cannot be read, by the span it is known by."""
        self._drop_span(span, "call", reason)
        if is_failure(reason):
            self._failed.append(position)
        if reason not in _NO_STEP:
            self._lost.append(position)

    def _merge_records(self, order: list[int], calls: dict[int, Call]) -> None:
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
            self._drop_span(span, "call", duplicates.reason_of(span))
        if isinstance(call, Call):
            calls[place] = call
        else:
            self._drop_call(place, call, tree.spans[order[0]])

    def _read_actions(self, callers: set[str]) -> dict[int, Call]:
        """Actions marked by hand, read as calls, by position; agents with calls have none."""
        usable = []
        for position, span in enumerate(self._tree.spans):
            if not marks.is_mark(span):
                continue
            agent = self._tree.agents[position]
            if agent in callers:
                self._drop_span(span, "mark", MARKED_BESIDE_CALLS)
            elif span.is_incomplete:
                self._drop_span(span, "mark", INCOMPLETE_MARK)
            elif not is_tracked(agent, span.attributes.get(c.TRACK_ONLY)):
                self._drop_span(span, "mark", NOT_TRACKED)
            else:
                usable.append(position)
        actions, idle = marks.read_marks(self._tree, usable)
        for position in idle:
            self._drop_span(self._tree.spans[position], "mark", IDLE_MARK)
        return actions

    def _find_rewards(self) -> list[tuple[int, Reward]]:
        found = []
        for position, span in enumerate(self._tree.spans):
            reward = read_reward(span)
            if isinstance(reward, Reward):
                found.append((position, reward))
            elif reward is not None:
                self._drop_span(span, "reward", reward)
        return found


def _list_credited(
    placement: Placement, rewards: Iterable[tuple[int, Reward]], steps: Mapping[int, Call]
) -> list[Credited]:
    """Return the credited rewards in the order in which they were given."""
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
