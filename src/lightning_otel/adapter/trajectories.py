"""Calls and their rewards put together: transitions, and the trajectories that run through them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from lightning_otel import conventions as c
from lightning_otel.adapter import branches, credit, exactness, tracking
from lightning_otel.adapter.attempts import AttemptKey
from lightning_otel.adapter.attributes import finish_reason, integer, text
from lightning_otel.adapter.branches import NONE, Links
from lightning_otel.adapter.calls import is_call
from lightning_otel.adapter.causes import Causes
from lightning_otel.adapter.conversations import Conversation
from lightning_otel.adapter.quick import maker
from lightning_otel.adapter.tree import Tree
from lightning_otel.types import Call, Trajectory, Transition


def assemble_trajectories(
    key: AttemptKey,
    tree: Tree,
    calls: Mapping[int, Call],
    talks: Mapping[int, Conversation],
    failed: Sequence[int],
    *,
    rewards: Mapping[int, Mapping[str, float]],
    values: Mapping[int, float],
    gamma: float | None = None,
    earned: float | None = None,
) -> list[Trajectory]:
    """Return the trajectories of an attempt: one for each agent and path.

    Args:
        key: The attempt.
        tree: Its spans.
        calls: What makes transitions, by position, in order.
        talks: Their conversations.
        failed: Positions of calls that failed, were abandoned or never ended.
        rewards: Named rewards of the calls that have some, the primary one first.
        values: The reward of each call that has one.
        gamma: Discount per step, where each step's reward is to be its return; by default it is
            what it was given.
        earned: The reward of the attempt.
    """
    by_agent: dict[str, list[int]] = {}
    for position, call in calls.items():
        by_agent.setdefault(call.agent, []).append(position)
    tools = branches.find_tools(tree, calls)
    causes = Causes(tree, calls, failed)
    found: list[Trajectory] = []
    for agent, positions in by_agent.items():
        own = [calls[position] for position in positions]
        has_calls = is_call(own[0].span)  # marks made inside tools are one episode
        tool_of = [tools[position] if has_calls else NONE for position in positions]
        links = Links(tree, positions, own, [talks[position] for position in positions], tool_of)
        worth = [values.get(position) for position in positions]
        if gamma is not None:
            worth = credit.discount_rewards(worth, links.before, gamma)
        paths = links.paths()
        made = _make_transitions(key, links, paths, rewards, worth)
        for branch, (path, cause) in enumerate(
            zip(paths, causes.name_each(links, paths), strict=True)
        ):
            found.append(
                Trajectory(
                    key.rollout_id,
                    key.attempt_id,
                    agent,
                    branch,
                    tuple([made[node] for node in path]),
                    is_guess=_is_guess(tree, links, path),
                    cause=cause,
                    reward=earned,
                )
            )
    return found


def _is_guess(tree: Tree, own: Links, path: Sequence[int]) -> bool:
    """Return whether only clocks order some of the steps."""
    return not tree.is_counted and not all(
        own.is_continued[step]
        or branches.is_known(tree, own.positions[earlier], own.positions[step])
        for earlier, step in pairwise(path)
    )


def _make_transitions(
    key: AttemptKey,
    own: Links,
    paths: Sequence[Sequence[int]],
    rewards: Mapping[int, Mapping[str, float]],
    values: Sequence[float | None],
) -> dict[int, Transition]:
    """Return one agent's transitions by index; a shared one is followed as in its first path.

    One whose path ends where its conversation was shortened is followed by what went on with it.
    """
    uses = Counter(node for path in paths for node in path)
    after = {previous: call for call, previous in enumerate(own.before) if own.is_compacted[call]}
    make: Callable[..., Transition] = maker(Transition)
    made: dict[int, Transition] = {}
    for path in paths:
        for step, node in enumerate(path):
            if node in made:
                continue
            call = own.calls[node]
            span, attributes = call.span, call.span.attributes
            following = path[step + 1] if step + 1 < len(path) else after.get(node)
            ending = call.ending if following is None else own.calls[following].observation
            resources = tracking.resources_of(call.agent, attributes.get(c.RESOURCES))
            made[node] = make(
                rollout_id=key.rollout_id,
                attempt_id=key.attempt_id,
                agent=call.agent,
                step=step,
                observation=call.observation,
                action=call.action,
                reward=values[node],
                next_observation=ending,
                done=step + 1 == len(path),
                rewards=rewards.get(own.positions[node], {}),
                is_shared=uses[node] > 1,
                tools=call.tools,
                prompt_ids=call.prompt_ids,
                response_ids=call.response_ids,
                logprobs=call.logprobs,
                capture=call.capture,
                resource_version=text(attributes, c.RESOURCE_VERSION)
                or tracking.one_version(resources),
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
    return made
