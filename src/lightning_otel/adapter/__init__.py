"""Spans in, transitions out: pure, linear, without I/O, clock or randomness.

The spans of each attempt become a tree; its model calls (or, where there are none, the actions and
observations marked by hand) become transitions; rewards are credited to them; and each agent's
calls become one trajectory per branch. Everything left behind is in the report, with its reason.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

from lightning_otel import conventions as c
from lightning_otel.adapter import branches, credit, marks
from lightning_otel.adapter.calls import is_call, read_call, read_reward
from lightning_otel.adapter.tree import Tree, build
from lightning_otel.errors import ConfigError
from lightning_otel.types import Call, Credit, Dropped, Report, Reward, Span, Trajectory, Transition

MARKED_BESIDE_CALLS = "marked by hand beside model calls: the calls make the transitions"
DUPLICATE = "a duplicate of span {}: the same response, recorded twice"


class Adaptation(NamedTuple):
    """Trajectories, and the funnel that led to them."""

    trajectories: list[Trajectory]
    report: Report


@dataclass(frozen=True, slots=True)
class TripletAdapter:
    """Turns spans into trajectories of transitions.

    Attributes:
        credit: How a reward without a link reaches a call. ``next``: a call gets the first reward
            after it, within its agent and branch. ``last``: the rollout's final reward goes to its
            last call. ``sibling``: a reward goes to the latest call beside it in the tree.
            ``discounted``: placed like ``next``, then each step gets its discounted return.
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

    def adapt(self, spans: Iterable[Span]) -> list[Trajectory]:
        """The trajectories in the spans, of any number of rollouts, in order of their start."""
        return self.explain(spans).trajectories

    def explain(self, spans: Iterable[Span]) -> Adaptation:
        """The trajectories, with a reason for every call, reward and mark that is not in them."""
        trajectories: list[Trajectory] = []
        report = Report()
        for (rollout_id, attempt_id), group in _attempts(spans).items():
            found = _Attempt(rollout_id, attempt_id, build(group), self).adapt()
            trajectories += found.trajectories
            report += found.report
        return Adaptation(trajectories, report)


def adapt_stream(
    adapter: TripletAdapter, rollouts: Iterable[Iterable[Span]]
) -> Iterator[Adaptation]:
    """Adapt one group of whole rollouts after the other, in memory that does not grow."""
    for spans in rollouts:
        yield adapter.explain(spans)


def _attempts(spans: Iterable[Span]) -> Mapping[tuple[str, str], list[Span]]:
    groups: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.rollout_id, span.attempt_id), []).append(span)
    ordered = sorted(groups.items(), key=lambda item: min(span.start_ns for span in item[1]))
    return dict(ordered)


class _Attempt:
    """One attempt on its way from a tree to trajectories."""

    def __init__(
        self, rollout_id: str, attempt_id: str, tree: Tree, adapter: TripletAdapter
    ) -> None:
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self.tree = tree
        self.adapter = adapter
        self.dropped: list[Dropped] = []

    def adapt(self) -> Adaptation:
        spans = self.tree.spans
        calls = self._calls()
        positions = list(calls)
        rewards = self._rewards()
        placement = credit.place(self.tree, positions, rewards, self.adapter.credit)
        for reward, reason in placement.unplaced:
            self._drop(reward.span, "reward", reason)
        trajectories = self._trajectories(calls, placement.rewards)
        distinct = {id(t): t for path in trajectories for t in path.transitions}.values()
        report = Report(
            spans=len(spans),
            rollouts=1,
            calls=sum(map(is_call, spans)),
            transitions=len(distinct),
            exact=sum(t.capture == "exact" for t in distinct),
            rewards=placement.placed + len(placement.unplaced),
            rewards_placed=placement.placed,
            rewarded=sum(t.reward is not None for t in distinct),
            dropped=tuple(self.dropped),
        )
        return Adaptation(trajectories, report)

    def _drop(self, span: Span, noun: str, reason: str) -> None:
        self.dropped.append(Dropped(span.span_id, span.trace_id, noun, reason))  # type: ignore[arg-type]  # one of three literals

    def _calls(self) -> dict[int, Call]:
        """What makes transitions, by position: model calls, else what was marked by hand."""
        found: dict[int, Call] = {}
        for position, span in enumerate(self.tree.spans):
            if is_call(span):
                call = read_call(span, self.tree.agents[position])
                if isinstance(call, Call):
                    found[position] = call
                else:
                    self._drop(span, "call", call)
        self._drop_duplicates(found)
        callers = {call.agent for call in found.values()}
        marked = [i for i, span in enumerate(self.tree.spans) if marks.is_mark(span)]
        for position in marked:
            if self.tree.agents[position] in callers:
                self._drop(self.tree.spans[position], "mark", MARKED_BESIDE_CALLS)
        free = [i for i in marked if self.tree.agents[i] not in callers]
        found.update(marks.read(self.tree, free))
        return dict(sorted(found.items()))

    def _drop_duplicates(self, calls: dict[int, Call]) -> None:
        """Of two calls with one response id that overlap in time, keep the one that holds more.

        Several instrumentors may record one request; a server that repeats its ids is no such case,
        for its calls come one after the other.
        """
        kept: dict[str, int] = {}
        for position, call in list(calls.items()):
            response_id = call.span.attributes.get(c.RESPONSE_ID)
            if not response_id:
                continue
            other = kept.get(response_id)
            if other is None or self.tree.ends[other] <= self.tree.starts[position]:
                kept[response_id] = position
                continue
            better, worse = (
                (position, other)
                if len(call.response_ids) > len(calls[other].response_ids)
                else (other, position)
            )
            kept[response_id] = better
            dropped = calls.pop(worse)
            self._drop(dropped.span, "call", DUPLICATE.format(calls[better].span.span_id))

    def _rewards(self) -> list[tuple[int, Reward]]:
        found = []
        for position, span in enumerate(self.tree.spans):
            reward = read_reward(span)
            if isinstance(reward, Reward):
                found.append((position, reward))
            elif reward is not None:
                self._drop(span, "reward", reward)
        return found

    def _trajectories(
        self, calls: Mapping[int, Call], rewards: Mapping[int, Mapping[str, float]]
    ) -> list[Trajectory]:
        by_agent: dict[str, list[int]] = {}
        for position, call in calls.items():
            by_agent.setdefault(call.agent, []).append(position)
        found = []
        for agent, positions in by_agent.items():
            own = [calls[position] for position in positions]
            starts = [self.tree.starts[position] for position in positions]
            ends = [self.tree.ends[position] for position in positions]
            made: dict[int, Transition] = {}
            paths = branches.paths(own, starts, ends)
            uses = [0] * len(own)
            for path in paths:
                for node in path:
                    uses[node] += 1
            for branch, path in enumerate(paths):
                for step, node in enumerate(path):
                    if node not in made:
                        following = own[path[step + 1]] if step + 1 < len(path) else None
                        named = rewards.get(positions[node], {})
                        made[node] = self._transition(
                            own[node], named, step, following, is_shared=uses[node] > 1
                        )
                steps = tuple(made[node] for node in path)
                found.append(Trajectory(self.rollout_id, self.attempt_id, agent, branch, steps))
        return (
            [self._discounted(t) for t in found] if self.adapter.credit == "discounted" else found
        )

    def _transition(
        self,
        call: Call,
        rewards: Mapping[str, float],
        step: int,
        following: Call | None,
        *,
        is_shared: bool,
    ) -> Transition:
        span = call.span
        get = span.attributes.get
        reasons = get(c.FINISH_REASONS) or (None,)
        return Transition(
            rollout_id=self.rollout_id,
            attempt_id=self.attempt_id,
            agent=call.agent,
            step=step,
            observation=call.observation,
            action=call.action,
            reward=next(iter(rewards.values()), None),
            next_observation=following.observation if following is not None else call.ending,
            done=following is None,
            rewards=rewards,
            is_shared=is_shared,
            tools=call.tools,
            prompt_ids=call.prompt_ids,
            response_ids=call.response_ids,
            logprobs=call.logprobs,
            capture=call.capture,
            resource_version=get(c.RESOURCE_VERSION),
            model=get(c.RESPONSE_MODEL) or get(c.REQUEST_MODEL),
            response_id=get(c.RESPONSE_ID),
            finish_reason=reasons[0],
            trace_id=span.trace_id,
            span_id=span.span_id,
            start_ns=span.start_ns,
            end_ns=span.end_ns or span.start_ns,
            input_tokens=get(c.INPUT_TOKENS),
            output_tokens=get(c.OUTPUT_TOKENS),
        )

    def _discounted(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with each step's reward replaced by its discounted return."""
        steps: Sequence[Transition] = trajectory.transitions
        returns = credit.discounted([step.reward for step in steps], self.adapter.gamma)
        return replace(
            trajectory,
            transitions=tuple(
                replace(step, reward=value) for step, value in zip(steps, returns, strict=True)
            ),
        )
