"""Calls and their rewards put together: transitions, and the trajectories that run through them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from lightning_otel import conventions as c
from lightning_otel.adapter import branches, causes, credit, exactness, siblings, tracking
from lightning_otel.adapter.attempts import AttemptKey
from lightning_otel.adapter.attributes import integer, text
from lightning_otel.adapter.branches import Links
from lightning_otel.adapter.calls import is_call
from lightning_otel.adapter.conversations import Conversation
from lightning_otel.adapter.quick import maker
from lightning_otel.adapter.tree import Tree
from lightning_otel.types import Call, Trajectory, Transition

Named = Mapping[str, float]
_make = maker(Transition)


class Steps(NamedTuple):
    """The parts of an attempt's transitions, by position in its tree.

    Attributes:
        calls: The calls, in order.
        talks: Their conversations.
        rewards: Named rewards of those that have some, the primary one first.
        failed: Positions of calls that failed, were abandoned or never ended.
    """

    calls: Mapping[int, Call]
    talks: Mapping[int, Conversation]
    rewards: Mapping[int, Named]
    failed: Sequence[int]


def assemble(
    key: AttemptKey,
    tree: Tree,
    steps: Steps,
    *,
    values: Mapping[int, float],
    gamma: float | None = None,
    earned: float | None = None,
) -> list[Trajectory]:
    """The trajectories of an attempt: one for each agent and path.

    Args:
        key: The attempt.
        tree: Its spans.
        steps: What makes transitions.
        values: The reward of each call that has one.
        gamma: Discount per step, where each step's reward is to be its return; by default it is
            what it was given.
        earned: The reward of the attempt.
    """
    by_agent: dict[str, list[int]] = {}
    for position, call in steps.calls.items():
        by_agent.setdefault(call.agent, []).append(position)
    tools = siblings.tools_with_work(tree)
    names = causes.Causes(tree, steps.calls, steps.failed)
    found: list[Trajectory] = []
    for agent, positions in by_agent.items():
        own = _link_calls(tree, positions, steps, [at for at in tools if tree.agents[at] == agent])
        named = [steps.rewards.get(position, {}) for position in positions]
        worth = [values.get(position) for position in positions]
        if gamma is not None:
            worth = credit.discount_rewards(worth, own.before, gamma)
        paths = own.paths()
        made = _make_transitions(key, own, paths, named, worth)
        for branch, (path, cause) in enumerate(
            zip(paths, names.name_each(own, paths), strict=True)
        ):
            found.append(
                Trajectory(
                    key.rollout_id,
                    key.attempt_id,
                    agent,
                    branch,
                    tuple([made[node] for node in path]),
                    is_guess=_is_guess(tree, own, path),
                    cause=cause,
                    reward=earned,
                )
            )
    return found


def _link_calls(tree: Tree, positions: Sequence[int], steps: Steps, tools: Sequence[int]) -> Links:
    """One agent's calls and how they hang together."""
    calls, talks = [steps.calls[i] for i in positions], [steps.talks[i] for i in positions]
    parting = tools if is_call(calls[0].span) else ()  # marks made inside tools are one episode
    return branches.link_calls(tree, positions, calls, talks, parting)


def _is_guess(tree: Tree, own: Links, path: Sequence[int]) -> bool:
    """Return whether only clocks order some of the steps."""
    if tree.is_counted:
        return False
    return not all(
        own.is_continued[step]
        or branches.is_known(tree, own.positions[earlier], own.positions[step])
        for earlier, step in pairwise(path)
    )


def _make_transitions(
    key: AttemptKey,
    own: Links,
    paths: Sequence[Sequence[int]],
    named: Sequence[Named],
    values: Sequence[float | None],
) -> dict[int, Transition]:
    """One agent's transitions by index; a shared one is followed as in the first of its paths.

    One whose path ends where its conversation was shortened is followed by what went on with it.
    """
    calls = own.calls
    uses = Counter(node for path in paths for node in path)
    after = {previous: call for call, previous in enumerate(own.before) if own.is_compacted[call]}
    made: dict[int, Transition] = {}
    for path in paths:
        for step, node in enumerate(path):
            if node not in made:
                following = path[step + 1] if step + 1 < len(path) else after.get(node)
                made[node] = transition(
                    key,
                    calls[node],
                    calls[following] if following is not None else None,
                    step=step,
                    done=step + 1 == len(path),
                    reward=values[node],
                    rewards=named[node],
                    is_shared=uses[node] > 1,
                )
    return made


def transition(
    key: AttemptKey,
    call: Call,
    following: Call | None,
    *,
    step: int,
    done: bool,
    reward: float | None,
    rewards: Named,
    is_shared: bool,
) -> Transition:
    """The step that a call is, with what followed it."""
    span = call.span
    attributes = span.attributes
    resources = tracking.resources_of(call.agent, attributes.get(c.RESOURCES))
    return _make(
        rollout_id=key.rollout_id,
        attempt_id=key.attempt_id,
        agent=call.agent,
        step=step,
        observation=call.observation,
        action=call.action,
        reward=reward,
        next_observation=following.observation if following is not None else call.ending,
        done=done,
        rewards=rewards,
        is_shared=is_shared,
        tools=call.tools,
        prompt_ids=call.prompt_ids,
        response_ids=call.response_ids,
        logprobs=call.logprobs,
        capture=call.capture,
        resource_version=text(attributes, c.RESOURCE_VERSION) or tracking.one_version(resources),
        resources=resources,
        mode=text(attributes, c.MODE),
        model=text(attributes, c.RESPONSE_MODEL) or text(attributes, c.REQUEST_MODEL),
        response_id=text(attributes, c.RESPONSE_ID),
        finish_reason=finish_reason(attributes.get(c.FINISH_REASONS)),
        trace_id=span.trace_id,
        span_id=span.span_id,
        start_ns=span.start_ns,
        end_ns=span.end_ns if span.end_ns is not None else span.start_ns,
        input_tokens=integer(attributes, c.INPUT_TOKENS),
        output_tokens=integer(attributes, c.OUTPUT_TOKENS),
        sampling=exactness.sampling_of(attributes, span.otel_resource),
        inexact=call.inexact,
    )


def finish_reason(reasons: object) -> str | None:
    """The first choice's reason, of what was recorded; None if that is no text."""
    first = reasons[0] if isinstance(reasons, (list, tuple)) and reasons else reasons
    return first if isinstance(first, str) else None
