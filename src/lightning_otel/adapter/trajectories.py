"""Calls and their rewards put together: transitions, the trajectories of them, and their causes.

A cause is why a trajectory's first step that no earlier one has stands where it does; the rules are
those of docs/transitions.md. Conversations are compared without instructions.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

from lightning_otel.adapter import branches, histories, timeline
from lightning_otel.adapter.attempts import AttemptKey
from lightning_otel.adapter.attributes import get_text
from lightning_otel.adapter.branches import Links
from lightning_otel.adapter.calls import is_call, make_transition, observation_of
from lightning_otel.adapter.histories import History
from lightning_otel.adapter.identities import NONE
from lightning_otel.adapter.ordering import NO_PARENT
from lightning_otel.adapter.rewards import discount_rewards
from lightning_otel.adapter.tree import Tree
from lightning_otel.types import BranchCause, Call, Span, Trajectory, Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.values import parse_json

Asker: TypeAlias = tuple[str, str]
"""An agent's name, and the id of the executed program that it ran in, if it did in one."""


def link_calls(
    tree: Tree, calls: Mapping[int, Call], hashes: Mapping[int, History]
) -> dict[Asker, Links]:
    """Return how the calls of each agent hang together; an executed program's are its own."""
    by_asker: dict[Asker, list[int]] = {}
    for position, call in calls.items():
        program = get_text(call.span.attributes, c.EXECUTED) or ""
        by_asker.setdefault((call.agent, program), []).append(position)
    tools = timeline.find_tools(tree, calls)
    links: dict[Asker, Links] = {}
    for asker, positions in by_asker.items():
        members = [calls[position] for position in positions]
        are_marks = not is_call(members[0].span)  # marks made inside tools are one episode
        tool_of = [NONE if are_marks else tools[position] for position in positions]
        hashed = [hashes[position] for position in positions]
        links[asker] = Links(tree, positions, members, hashed, tool_of, are_marks=are_marks)
    return links


def make_trajectories(
    key: AttemptKey,
    tree: Tree,
    calls: Mapping[int, Call],
    links: Mapping[Asker, Links],
    failed: Sequence[int],
    *,
    rewards: Mapping[int, Mapping[str, float]],
    values: Mapping[int, float],
    gamma: float | None = None,
    earned: float | None = None,
) -> list[Trajectory]:
    """Return the trajectories of an attempt: one for each agent and path.

    With a discount each step's reward is its return. ``earned`` is the reward of the attempt.
    """
    branches_of: Counter[str] = Counter()
    causes = Causes(tree, calls, failed)
    trajectories: list[Trajectory] = []
    for (agent, _), group in links.items():
        worth = [values.get(position) for position in group.positions]
        if gamma is not None:
            worth = discount_rewards(worth, group.before, gamma)
        paths = group.paths()
        steps = _make_transitions(key, group, paths, rewards, worth)
        for branch, (path, cause) in enumerate(
            zip(paths, causes.name_each(group, paths), strict=True), branches_of[agent]
        ):
            branches_of[agent] += 1
            trajectories.append(
                Trajectory(
                    key.rollout_id,
                    key.attempt_id,
                    agent,
                    branch,
                    tuple([steps[node] for node in path]),
                    is_guess=_is_guess(tree, group, path),
                    cause=cause,
                    reward=earned,
                )
            )
    return trajectories


def _is_guess(tree: Tree, links: Links, path: Sequence[int]) -> bool:
    """Return whether only clocks order some of the steps, or one may belong elsewhere."""
    return any(links.is_doubtful[step] for step in path) or (
        not tree.is_counted
        and not all(
            links.is_continued[step]
            or branches.is_known(tree, links.positions[previous], links.positions[step])
            for previous, step in pairwise(path)
        )
    )


def _make_transitions(
    key: AttemptKey,
    links: Links,
    paths: Sequence[Sequence[int]],
    rewards: Mapping[int, Mapping[str, float]],
    values: Sequence[float | None],
) -> dict[int, Transition]:
    """Return one agent's transitions by index; a shared one is followed as in its first path.

    One whose path ends where its conversation was shortened is followed by what went on with it.
    """
    uses = Counter(node for path in paths for node in path)
    after = {node: call for call, node in enumerate(links.before) if links.is_compacted[call]}
    steps: dict[int, Transition] = {}
    for path in paths:
        for step, node in enumerate(path):
            if node in steps:
                continue
            call, is_last = links.calls[node], step + 1 == len(path)
            following = after.get(node) if is_last else path[step + 1]
            steps[node] = make_transition(
                key,
                call,
                step,
                values[node],
                call.ending if following is None else links.calls[following].observation,
                rewards.get(links.positions[node], {}),
                is_last=is_last,
                is_shared=uses[node] > 1,
            )
    return steps


def _find_target(span: Span, agents: Mapping[str, str]) -> str | None:
    """Return the agent that a tool hands over to, if it does.

    Source: ADK's ``transfer_to_agent``, the swarms of Strands and Agent Framework.
    """
    tool = get_text(span.attributes, c.TOOL_NAME)
    match = _HANDS_OVER.fullmatch(tool) if tool else None
    if match is None or span.attributes.get(c.OPERATION) != c.EXECUTE_TOOL:
        return None
    if match[1].lower() != "agent":
        return agents.get(_slug_of(match[1]))
    arguments = parse_json(span.attributes.get(c.TOOL_ARGUMENTS))
    values = arguments if isinstance(arguments, dict) else {}
    target = values.get("agent_name", values.get("agent"))
    return agents.get(_slug_of(target)) if isinstance(target, str) else None


def _slug_of(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


_HANDS_OVER: Final = re.compile(r"(?:transfer|hand_?off)_(?:back_)?to_(.+)", re.IGNORECASE)
_MOST_ALIKE: Final = 16
"""How many calls that left the same conversation behind are looked at for one."""


class Causes:
    """Names causes in one attempt."""

    def __init__(self, tree: Tree, calls: Mapping[int, Call], failed: Iterable[int]) -> None:
        self._tree = tree
        self._calls = calls
        self._failed: dict[tuple[str, int], list[int]] = {}
        for position in sorted(failed):
            if observation := observation_of(tree.spans[position]):
                prompt = histories.hash_history(observation).given
                self._failed.setdefault((tree.agents[position], prompt), []).append(position)
        self._is_alone = len({*tree.agents, ""}) < 3
        self._has_caller = bytearray(len(tree.spans))  # another agent stands above its own
        self._handed: dict[str, int] = {}
        self._left: dict[int, list[int]] | None = None
        if self._is_alone:
            return
        for node in sorted(range(len(tree.spans)), key=tree.first.__getitem__):
            parent = tree.parents[node]
            if parent != NO_PARENT:
                is_inside = tree.agents[node] == tree.agents[parent]
                self._has_caller[node] = (
                    self._has_caller[parent] if is_inside else tree.agents[parent] != ""
                )
        agents = {_slug_of(agent): agent for agent in tree.agents}
        for position, span in enumerate(tree.spans):
            target = get_text(span.attributes, c.HANDOFF_TARGET) or _find_target(span, agents)
            if target is not None and tree.agents[position] != target:
                self._handed.setdefault(target, position)

    def name_each(self, links: Links, paths: Sequence[Sequence[int]]) -> list[BranchCause]:
        """Return the cause of each path of an agent, given in order."""
        prompts: Counter[tuple[int, int]] = Counter()
        continued: Counter[int] = Counter()
        for call, previous in enumerate(links.before if len(paths) > 1 else ()):
            if previous != NONE:
                prompts[previous, links.hashes[call].given] += 1
                continued[previous] += links.is_continued[call]
        nodes: set[int] = set()
        causes: list[BranchCause] = []
        for path in paths:
            first = next(step for step in path if step not in nodes)
            nodes.update(path)
            previous, hashed = links.before[first], links.hashes[first]
            if links.repeats[first] != NONE or self._asks_again(links, first):
                causes.append("retry")
            elif previous == NONE:
                causes.append(self._first_cause(links, first))
            elif links.is_compacted[first]:
                causes.append("compaction")
            elif links.is_beside[first]:
                causes.append("parallel")
            elif hashed.prefixes and prompts[previous, hashed.given] > 1:
                causes.append("retry")
            elif links.is_continued[first] and continued[previous] > 1:
                causes.append("rewind")
            else:
                causes.append("parallel")
        return causes

    def _first_cause(self, links: Links, first: int) -> BranchCause:
        position = links.positions[first]
        if not self._is_alone:
            handed = self._handed.get(links.calls[first].agent)
            if handed is not None and handed < position:
                return "hand_off"
            if self._has_caller[position]:
                return "sub_agent"
            if self._takes_on(position):
                return "hand_off"
        return "parallel" if links.is_beside[first] else "start"

    def _asks_again(self, links: Links, call: int) -> bool:
        """Return whether a call repeats a failed one, with a remark at most."""
        observation, position = links.calls[call].observation, links.positions[call]
        for length, prompt in enumerate(links.hashes[call].prefixes if self._failed else (), 1):
            if length < len(observation) and histories.is_from_agent(observation[length]):
                continue
            for first in self._failed.get((links.calls[call].agent, prompt), ()):
                if first < position and self._is_over(first, position):
                    return True
        return False

    def _is_over(self, first: int, second: int) -> bool:
        """Return whether a call had failed by then; one that never ended may have gone on."""
        one, other = self._tree.spans[first], self._tree.spans[second]
        if one.end_ns is None:
            return "" != one.process != other.process != ""
        return timeline.is_after(self._tree, first, second)

    def _takes_on(self, position: int) -> bool:
        """Return whether a call begins with another agent's history, answer included."""
        if self._left is None:
            self._left = {}
            for at, call in self._calls.items():
                for answer in histories.hash_spoken(call).left:
                    self._left.setdefault(answer, []).append(at)
        call, tree = self._calls[position], self._tree
        return any(
            self._calls[other].agent != call.agent and tree.ends[other] <= tree.starts[position]
            for prefix in reversed(histories.hash_spoken(call).prefixes)
            for other in self._left.get(prefix, ())[:_MOST_ALIKE]
        )
