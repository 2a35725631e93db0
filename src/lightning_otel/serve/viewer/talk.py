"""A trace as a conversation: what each model call was told that it had not been told, and answered.

Of a growing history every message stands once. Where a call was given another history than the one
before it, that is said, and what is new in it stands below.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from lightning_otel.adapter.conversations import is_same
from lightning_otel.adapter.outline import Outline
from lightning_otel.serve.viewer.said import LONGEST, Said, said
from lightning_otel.types import Message, Trajectory, Transition


class Limits(NamedTuple):
    """Limits of a step's messages.

    Attributes:
        messages: The last so many of those that it was given and that were new to it.
        characters: Of a part of a message.
    """

    messages: int
    characters: int


_WHOLE: Final = Limits(1 << 30, LONGEST)


class LeftOut(NamedTuple):
    """A call that is no step, and why."""

    span_id: str
    name: str
    reason: str


class Talk(NamedTuple):
    """The messages of one agent on one branch.

    Attributes:
        agent: Its name; empty where none is named.
        branch: Its number.
        cause: Why the branch begins there; ``start`` for the first one.
        messages: In the order in which the model got to see them.
    """

    agent: str
    branch: int
    cause: str
    messages: list[Said]


def talks(found: Outline) -> list[Talk]:
    """The conversations of a trace, each branch without what it shares with an earlier one."""
    labels = {
        (node.span.trace_id, node.span.span_id): label
        for node, label in zip(found.nodes, found.labels(), strict=True)
        if label
    }
    return along(found.trajectories, labels)


def along(
    paths: Iterable[Trajectory],
    labels: Mapping[tuple[str, str], str],
    before: Transition | None = None,
    limits: Limits = _WHOLE,
) -> list[Talk]:
    """The conversations of trajectories, each branch without what it shares with an earlier one.

    Args:
        paths: Those of one rollout, in order.
        labels: The name of each step, by its trace and span id; steps without one are left out.
        before: An earlier step, which the first of these may go on from.
        limits: How much is shown of each step.
    """
    seen: set[tuple[str, str]] = set()
    told = []
    for path in paths:
        messages = list(_path_messages(path, seen, labels, before, limits))
        before = None
        if messages:
            told.append(Talk(path.agent, path.branch, path.cause, messages))
    return told


def left_out(found: Outline) -> list[LeftOut]:
    """Calls that are no step, each with its reason."""
    return [
        LeftOut(node.span.span_id, node.span.name, node.left_out)
        for node in found.nodes
        if node.kind == "call" and node.step is None
    ]


def _path_messages(
    path: Trajectory,
    seen: set[tuple[str, str]],
    labels: Mapping[tuple[str, str], str],
    before: Transition | None,
    limits: Limits,
) -> Iterator[Said]:
    held: list[Message] = [] if before is None else list(before.observation)
    answers: Sequence[Message] = () if before is None else before.action
    for step in path.transitions:
        name = (step.trace_id, step.span_id)
        label = labels.get(name)
        given = step.observation
        same = _count_repeated(held, answers, given)
        if name not in seen and label is not None:
            yield from _input_messages(step, same, limits, is_anew=bool(held) and same < len(held))
            yield from _output_messages(step, label, limits.characters)
        seen.add(name)
        held, answers = list(given), step.action


def _count_repeated(
    held: Sequence[Message], answers: Iterable[Message], given: Sequence[Message]
) -> int:
    """Count the messages that repeat earlier ones, the last answer among them."""
    count = 0
    for one, other in zip(held, given, strict=False):
        if not is_same(one, other):
            return count
        count += 1
    is_repeated = count == len(held) < len(given)
    if is_repeated and any(is_same(answer, given[count]) for answer in answers):
        count += 1
    return count


def _input_messages(
    step: Transition, same: int, limits: Limits, *, is_anew: bool
) -> Iterator[Said]:
    """Yield the messages of a call's input that are new."""
    notes = []
    count = len(step.observation)
    if is_anew:
        kept = f"the first {same} messages as before" if same else "nothing of it as before"
        notes.append(f"another history from here on: {kept}, {count - same} others")
    first = max(same, count - limits.messages)
    if first > same:
        notes.append(f"{first - same} messages before this one are not shown; its call has them")
    note = "; ".join(notes)
    for index in range(first, count):
        message = step.observation[index]
        yield said(message, step.span_id, "input", index, note=note, longest=limits.characters)
        note = ""


def _output_messages(step: Transition, label: str, longest: int) -> Iterator[Said]:
    for index, message in enumerate(step.action):
        note = f"choice {index + 1} of {len(step.action)}" if index else ""
        reward = step.reward if index == 0 else None
        yield said(
            message, step.span_id, "output", index,
            reward=reward, label=label, note=note, longest=longest,
        )  # fmt: skip
