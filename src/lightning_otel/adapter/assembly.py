"""One attempt on its way from a tree to trajectories, with a reason for all that is left behind."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from lightning_otel.adapter import (
    advantages,
    branches,
    credit,
    duplicates,
    histories,
    trajectories,
)
from lightning_otel.adapter.advantages import AttemptOutcome
from lightning_otel.adapter.attempts import AttemptKey
from lightning_otel.adapter.awards import Awards
from lightning_otel.adapter.calls import (
    ABANDONED,
    CUT,
    EMBEDDING,
    INCOMPLETE,
    NO_CONTENT,
    NOT_TRACKED,
    UNANSWERED,
    UNKNOWN,
    UNREADABLE,
    HistoryParser,
    is_call,
    is_mark,
    read_call,
    read_marks,
    seems_call,
)
from lightning_otel.adapter.histories import History, KnownHistory
from lightning_otel.adapter.linear import Adaptation, count_steps
from lightning_otel.adapter.rewards import NO_CALL_BEFORE, NO_STEP_BEFORE, read_reward
from lightning_otel.adapter.tree import REPEATED, Tree, rebuild_tree
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
from lightning_otel.types import conventions as c
from lightning_otel.types.transitions import distinct_steps

if TYPE_CHECKING:
    from lightning_otel.adapter.continuations import Answers
    from lightning_otel.adapter.triplet import TripletAdapter


class Assembly:
    """Puts the trajectories of one attempt together.

    Attributes:
        _recorded: How many calls and actions were recorded, whatever became of them.
        _steps: Those that can be read, by position, in order.
        _others: For each further record of a call the one that stands for all.
        _failed: Positions of calls that failed, were abandoned or never ended.
        _lost: Positions of calls that made no step although a reward may judge them.
    """

    def __init__(
        self, key: AttemptKey, tree: Tree, adapter: "TripletAdapter", repeated: Sequence[Span],
        answers: "Answers | None",
    ) -> None:  # fmt: skip
        """Take an attempt's tree, and spans left out of it for their ids, which others have.

        Answers are what calls go on from, also of other attempts; None if no call does.
        """
        self._answers = answers
        self._key = key
        self._tree = tree
        self._adapter = adapter
        self._dropped: list[Dropped] = []
        self._steps: dict[int, Call] = {}
        self._histories: dict[int, History] = {}
        self._others: dict[int, int] = {}
        self._failed: list[int] = []
        self._lost: list[int] = []
        self._recorded = 0
        others = [Repair(span.span_id, span.trace_id, REPEATED) for span in repeated]
        self._repairs = (*tree.repairs, *others)
        for span in repeated:
            if is_call(span):
                self._recorded += 1
                self._drop_span(span, "call", REPEATED)
            if read_reward(span) is not None:
                self._drop_span(span, "reward", REPEATED)
            if is_mark(span):
                self._drop_span(span, "mark", REPEATED)

    def adapt(self) -> Adaptation:
        """Its trajectories, and its part of the report."""
        calls = [i for i, span in enumerate(self._tree.spans) if is_call(span)]
        self._drop_unknown(calls)
        self._read_calls(calls)
        actions, dropped = read_marks(self._tree, {call.agent for call in self._steps.values()})
        for span, reason in dropped:
            self._drop_span(span, "mark", reason)
        self._recorded += len(calls) + len(actions)
        self._steps = dict(sorted({**self._steps, **actions}.items()))
        self._hash_histories()
        self._follow_messages()
        rewards, adapter = self._find_rewards(), self._adapter
        links = trajectories.link_calls(self._tree, self._steps, self._histories)
        conversations = {
            position: (*asker, first)
            for asker, group in links.items()
            for position, first in zip(group.positions, group.conversations, strict=True)
        }
        placement = credit.place_rewards(
            self._tree, self._steps, self._others, rewards, adapter.credit, conversations
        )
        for reward, reason in placement.unplaced:
            is_lost = reason == NO_CALL_BEFORE and self._is_after_lost(reward)
            self._drop_span(reward.span, "reward", NO_STEP_BEFORE if is_lost else reason)
        outcome = self._make_outcome(placement)
        results = trajectories.make_trajectories(
            self._key,
            self._tree,
            self._steps,
            links,
            self._failed,
            rewards=placement.rewards,
            values=self._compose_rewards(placement),
            gamma=adapter.gamma if adapter.credit == "discounted" else None,
            earned=outcome.value,
        )
        credited = [
            Credited(
                rewards[position].span.span_id,
                rewards[position].span.trace_id,
                tuple([self._steps[call].span.span_id for call in members]),
                by,
            )
            for position, members, by in sorted(placement.placed)
        ]
        return Adaptation(results, self._make_report(placement, results), credited, (outcome,))

    def leave_out(self, reason: str) -> Adaptation:
        """No trajectory, and the reason for every call and reward."""
        for span in filter(is_call, self._tree.spans):
            self._recorded += 1
            self._drop_span(span, "call", reason)
        for reward in self._find_rewards().values():
            self._drop_span(reward.span, "reward", reason)
        placement = Awards()
        return Adaptation(
            [], self._make_report(placement, ()), (), (self._make_outcome(placement),)
        )

    def _drop_unknown(self, calls: Sequence[int]) -> None:
        tree = self._tree
        records = [
            i for i, span in enumerate(tree.spans) if span.scope != c.SCOPE and seems_call(span)
        ]
        for position in tree.apart(records, calls) if records else ():
            self._recorded += 1
            self._drop_call(position, UNKNOWN, tree.spans[position])

    def _read_calls(self, calls: Sequence[int]) -> None:
        tree = self._tree
        requests = duplicates.find_requests(tree, calls)
        repeated = {i for records in requests for i in records}
        untold = duplicates.find_untold(tree, calls)
        parsers: defaultdict[str, HistoryParser] = defaultdict(HistoryParser)
        for position in calls:
            if position not in repeated:
                span, agent = tree.spans[position], tree.agents[position]
                call = read_call(span, agent, parsers[agent])
                if call == NO_CONTENT and position in untold:
                    self._recorded -= 1
                    self._drop_span(span, "record", call)
                    continue
                self._add_call(position, call, span)
        for records in requests:
            place = duplicates.place_of(tree, records)
            agent = next((name for i in records if (name := tree.agents[i])), "")
            first = call = read_call(duplicates.merge_records(tree, records), agent)
            # What is wrong with one record may not be with another.
            for position in records[1:] if call in (CUT, INCOMPLETE, UNREADABLE) else ():
                order = [position, *(other for other in records if other != position)]
                call = read_call(duplicates.merge_records(tree, order), agent)
                if isinstance(call, Call):
                    records = order
                    break
            scope = tree.spans[records[0]].scope
            reason = duplicates.DUPLICATE_OF.format(scope) if scope else duplicates.DUPLICATE
            for position in records[1:]:
                self._drop_span(tree.spans[position], "record", reason)
            self._recorded -= len(records) - 1
            call = call if isinstance(call, Call) else first
            self._add_call(place, call, tree.spans[records[0]])
            if place in self._steps:
                self._others |= {i: place for i in records if i != place}
        if self._answers:
            self._steps = self._answers.join_histories(self._steps)

    def _add_call(self, position: int, call: Call | str, span: Span) -> None:
        if isinstance(call, Call):
            self._steps[position] = call
        else:
            self._drop_call(position, call, span)

    def _drop_call(self, position: int, reason: str, span: Span) -> None:
        self._drop_span(span, "call", reason)
        if reason in (ABANDONED, INCOMPLETE, UNANSWERED) or reason.startswith("failed:"):
            self._failed.append(position)
        if reason not in (EMBEDDING, NOT_TRACKED):
            self._lost.append(position)

    def _drop_span(
        self,
        span: Span,
        noun: Literal["call", "record", "reward", "mark", "composition"],
        reason: str,
    ) -> None:
        self._dropped.append(Dropped(span.span_id, span.trace_id, noun, reason))

    def _hash_histories(self) -> None:
        latest: dict[str, KnownHistory] = {}
        for position, call in self._steps.items():
            prefix = latest.get(call.agent, histories.NO_HISTORY)
            history = histories.hash_history(call.observation, call.action, prefix)
            latest[call.agent] = call.observation, history.prefixes
            self._histories[position] = history

    def _follow_messages(self) -> None:
        tree = self._tree
        pairs = (
            []
            if tree.is_counted
            else branches.order_by_messages(tree, self._steps, self._histories)
        )
        if pairs:
            self._tree, moved = rebuild_tree(tree, pairs)
            self._steps = dict(sorted((moved[i], call) for i, call in self._steps.items()))
            self._histories = {moved[i]: history for i, history in self._histories.items()}
            self._others = {moved[i]: moved[original] for i, original in self._others.items()}
            self._failed = [moved[i] for i in self._failed]
            self._lost = [moved[i] for i in self._lost]

    def _is_after_lost(self, reward: Reward) -> bool:
        tree = self._tree
        position = next(i for i, span in enumerate(tree.spans) if span is reward.span)
        return any(
            tree.starts[call] < tree.starts[position]
            and tree.agents[position] in ("", tree.agents[call])
            for call in self._lost
        )

    def _find_rewards(self) -> dict[int, Reward]:
        rewards = {}
        for position, span in enumerate(self._tree.spans):
            reward = read_reward(span)
            if isinstance(reward, Reward):
                rewards[position] = reward
            elif reward is not None:
                self._drop_span(span, "reward", reward)
        return rewards

    def _compose_rewards(self, placement: Awards) -> dict[int, float]:
        values: dict[int, float] = {}
        for position, numbers in placement.rewards.items():
            value, reason = advantages.compose_rewards(self._adapter.compose, numbers)
            if value is None:
                self._drop_span(self._steps[position].span, "composition", reason)
            else:
                values[position] = value
        return values

    def _make_outcome(self, placement: Awards) -> AttemptOutcome:
        """Sum the attempt's reward over its steps, before any discount.

        Of each step the first reward counts, or what is composed of all of them by name.
        """
        how, spans, compose = self._adapter.comparison(), self._tree.spans, self._adapter.compose
        totals, value, reason = placement.totals, placement.value, ""
        if totals and compose is not advantages.primary:
            value, reason = advantages.compose_rewards(compose, totals)
        return AttemptOutcome(
            self._key,
            "" if how is None else advantages.group_of(spans, how.group_by),
            min(span.start_ns for span in spans),
            totals,
            value,
            reason or advantages.NO_REWARD,
            bool(self._steps),
        )

    def _make_report(self, placement: Awards, results: Iterable[Trajectory]) -> Report:
        passed = credit.count_passed_over(self._tree, placement.placed, self._lost)
        return count_steps(
            distinct_steps(results),
            spans=len(self._tree.spans),
            calls=self._recorded,
            rewards=len(placement.placed) + sum(drop.noun == "reward" for drop in self._dropped),
            rewards_placed=len(placement.placed),
            dropped=tuple(self._dropped),
            repairs=self._repairs,
            notes={credit.PASSED_OVER: passed} if passed else {},
            is_composed=self._adapter.compose is not advantages.primary,
        )
