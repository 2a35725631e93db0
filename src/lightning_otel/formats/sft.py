"""``sft``: whole conversations with their tools, for TRL's ``SFTTrainer``.

With ``assistant_only_loss=True`` every assistant turn of a row is trained.

Source: TRL's conversational language-modeling type (``messages``, ``tools``).
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from lightning_otel.formats.chat import for_templates, has_messages, tools_of
from lightning_otel.formats.format import (
    NO_MESSAGES,
    ORIGIN,
    Format,
    LeftOut,
    Made,
    Row,
    UnheldError,
    origin,
    other_choices,
    reward_fault,
)
from lightning_otel.types import Message, Trajectory, Transition


def make(trajectories: Iterable[Trajectory], *, threshold: float | None = None) -> Made:
    """Yield one row a conversation; a prompt that does not go on from it begins a new one.

    Args:
        trajectories: What is made into rows.
        threshold: Only trajectories of rollouts whose reward is no less.
    """
    for trajectory in trajectories:
        reward = trajectory.reward
        if fault := reward_fault(reward, threshold):
            yield from (LeftOut(step, fault) for step in trajectory.transitions)
            continue
        for each in _find_conversations(trajectory.transitions):
            yield each if isinstance(each, LeftOut) else _make_row(each, reward)


class _Conversation(NamedTuple):
    """Steps that go on from each other, and all that was said in them."""

    steps: list[Transition]
    said: list[Message]


def _make_row(found: _Conversation, reward: float | None) -> Row:
    last = found.steps[-1]
    row: Row = {"messages": for_templates(found.said)}
    if last.tools:
        row["tools"] = tools_of(last.tools)
    return {**row, "steps": len(found.steps), **origin(last, reward)}


def _find_conversations(steps: Iterable[Transition]) -> Iterator[_Conversation | LeftOut]:
    held = _Conversation([], [])
    for step in steps:
        if not has_messages(step):
            yield LeftOut(step, NO_MESSAGES)
            continue
        goes_on = bool(held.steps) and _goes_on(held.steps[-1], step)
        seen = len(held.steps[-1].observation) + 1 if goes_on else 0
        said = [*step.observation[seen:], *step.action[:1]]
        try:
            for_templates(said)
        except UnheldError as exc:
            yield LeftOut(step, str(exc))
            continue
        yield from other_choices(step)
        if held.steps and not goes_on:
            yield held
            held = _Conversation([], [])
        held.steps.append(step)
        held.said.extend(said)
    if held.steps:
        yield held


def _goes_on(before: Transition, step: Transition) -> bool:
    """Return whether a prompt begins with the one before and its answer.

    Only the last answer is looked at closely: so a long conversation is not compared over and over.
    """
    size = len(before.observation)
    if len(step.observation) <= size or step.observation[:size] != before.observation:
        return False
    return _drop_reasoning(step.observation[size]) == _drop_reasoning(before.action[0])


def _drop_reasoning(message: Message) -> list[Row]:
    """Return a message without its reasoning, which few agents send back."""
    try:
        found = for_templates([message])
    except UnheldError:
        return []
    return [
        {name: value for name, value in each.items() if name != "reasoning_content"}
        for each in found
    ]


FORMAT: Final = Format(
    make,
    {"messages": "JSON", "tools": "JSON", "steps": "INTEGER", **ORIGIN},
    used_by="TRL SFTTrainer, assistant_only_loss=True",
    needs="messages",
)
