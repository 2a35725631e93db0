"""Calls and their rewards put together: transitions, and the trajectories that run through them."""

from collections.abc import Mapping, Sequence

from lightning_otel import conventions as c
from lightning_otel.adapter import branches, credit, exactness, tracking
from lightning_otel.adapter.attempts import AttemptKey
from lightning_otel.adapter.attributes import integer, text
from lightning_otel.adapter.tree import Tree
from lightning_otel.types import Call, Credit, Trajectory, Transition

Named = Mapping[str, float]


def assemble(
    key: AttemptKey,
    tree: Tree,
    calls: Mapping[int, Call],
    rewards: Mapping[int, Named],
    *,
    rule: Credit,
    gamma: float,
) -> list[Trajectory]:
    """The trajectories of an attempt: one for each agent and path.

    Args:
        key: The attempt.
        tree: Its spans.
        calls: What makes transitions, by position, in order.
        rewards: Named rewards of the calls that have some, the primary one first.
        rule: ``discounted`` makes each step's reward its return; others leave it.
        gamma: Discount per step.
    """
    by_agent: dict[str, list[int]] = {}
    for position, call in calls.items():
        by_agent.setdefault(call.agent, []).append(position)
    found: list[Trajectory] = []
    for agent, positions in by_agent.items():
        own = [calls[position] for position in positions]
        before = branches.predecessors(tree, positions, own)
        named = [rewards.get(position, {}) for position in positions]
        values = [next(iter(each.values()), None) for each in named]
        if rule == "discounted":
            values = credit.discounted(values, before, gamma)
        paths = branches.paths(before)
        steps = _transitions(key, own, paths, named, values)
        for branch, path in enumerate(paths):
            found.append(
                Trajectory(
                    key.rollout_id,
                    key.attempt_id,
                    agent,
                    branch,
                    tuple([steps[node] for node in path]),
                    is_guess=len({own[node].span.process for node in path}) > 1,
                )
            )
    return found


def _transitions(
    key: AttemptKey,
    calls: Sequence[Call],
    paths: Sequence[Sequence[int]],
    named: Sequence[Named],
    values: Sequence[float | None],
) -> dict[int, Transition]:
    """One agent's transitions by index; a shared one is followed as in the first of its paths."""
    uses = [0] * len(calls)
    for path in paths:
        for node in path:
            uses[node] += 1
    made: dict[int, Transition] = {}
    for path in paths:
        for step, node in enumerate(path):
            if node not in made:
                following = calls[path[step + 1]] if step + 1 < len(path) else None
                made[node] = _transition(
                    key,
                    calls[node],
                    following,
                    step=step,
                    reward=values[node],
                    rewards=named[node],
                    is_shared=uses[node] > 1,
                )
    return made


def _transition(
    key: AttemptKey,
    call: Call,
    following: Call | None,
    *,
    step: int,
    reward: float | None,
    rewards: Named,
    is_shared: bool,
) -> Transition:
    span = call.span
    attributes = span.attributes
    resources = tracking.resources_of(call.agent, attributes.get(c.RESOURCES))
    return Transition(
        rollout_id=key.rollout_id,
        attempt_id=key.attempt_id,
        agent=call.agent,
        step=step,
        observation=call.observation,
        action=call.action,
        reward=reward,
        next_observation=following.observation if following is not None else call.ending,
        done=following is None,
        rewards=rewards,
        is_shared=is_shared,
        tools=call.tools,
        prompt_ids=call.prompt_ids,
        response_ids=call.response_ids,
        logprobs=call.logprobs,
        capture=call.capture,
        resource_version=text(attributes, c.RESOURCE_VERSION) or tracking.one_version(resources),
        resources=resources,
        model=text(attributes, c.RESPONSE_MODEL) or text(attributes, c.REQUEST_MODEL),
        response_id=text(attributes, c.RESPONSE_ID),
        finish_reason=_finish_reason(attributes.get(c.FINISH_REASONS)),
        trace_id=span.trace_id,
        span_id=span.span_id,
        start_ns=span.start_ns,
        end_ns=span.end_ns if span.end_ns is not None else span.start_ns,
        input_tokens=integer(attributes, c.INPUT_TOKENS),
        output_tokens=integer(attributes, c.OUTPUT_TOKENS),
        sampling=exactness.sampling_of(attributes, span.otel_resource),
        inexact=call.inexact,
    )


def _finish_reason(reasons: object) -> str | None:
    """The first choice's reason."""
    first = reasons[0] if isinstance(reasons, (list, tuple)) and reasons else reasons
    return first if isinstance(first, str) else None
