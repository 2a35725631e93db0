"""Trajectories as conversations of chat messages: what supervised training and prompt search read.

Every message stands once; where the history was cut or begun anew, another conversation begins.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lightning_otel.adapter.histories import find_choice
from lightning_otel.messages import chat
from lightning_otel.types import Conversation, Message, Trajectory, Transition


class _ConversationSteps(NamedTuple):
    """Steps that are one conversation, with all its messages but for the answer of the last step.

    ``places`` are of each step's answer in ``messages``; ``chosen`` is the choice gone on with.
    """

    messages: list[Message]
    steps: list[Transition]
    places: list[int]
    chosen: list[int]


def make_conversations(trajectories: Iterable[Trajectory]) -> Iterator[Conversation]:
    """Yield the conversations of one attempt's trajectories, in order.

    A step that several trajectories share is an answer in the first of its conversations, and a
    message of the others. A step of which only token ids were kept is in none.
    """
    shared: set[tuple[str, str]] = set()
    for trajectory in trajectories:
        for run in _split_steps(step for step in trajectory.transitions if step.action):
            indices = [i for i, step in enumerate(run.steps) if _step_id(step) not in shared]
            shared.update(_step_id(step) for step in run.steps if step.is_shared)
            if indices:
                yield _make_conversation(trajectory, run, indices)


def _split_steps(steps: Iterable[Transition]) -> list[_ConversationSteps]:
    runs: list[_ConversationSteps] = []
    for step in steps:
        prompt = step.observation
        if runs:
            messages, members, places, chosen = runs[-1]
            before = members[-1]
            choice = find_choice(before.observation, before.action, prompt)
            if choice is not None:
                chosen.append(choice)
                # As it was answered, for in a request its reasoning is often left out.
                messages += [_as_answer(before.action[choice]), *prompt[len(messages) + 1 :]]
                members.append(step)
                places.append(len(messages))
                continue
        runs.append(_ConversationSteps(list(prompt), [step], [len(prompt)], []))
    return runs


def _make_conversation(
    trajectory: Trajectory, run: _ConversationSteps, indices: Sequence[int]
) -> Conversation:
    """Make the conversation of a run; ``indices`` are of the steps that no earlier one answers."""
    steps, last = run.steps, run.steps[-1]
    turns = chat.turns_of([*run.messages, _as_answer(last.action[0])])
    starts = [0]
    for turn in turns:
        starts.append(starts[-1] + len(turn))
    rewards = [step.reward for step in steps]
    chosen = [*run.chosen, 0]
    alternatives = [
        (starts[run.places[index]], spoken)
        for index in indices
        for choice, answer in enumerate(steps[index].action)
        if choice != chosen[index]
        for spoken in chat.messages_of([_as_answer(answer)])[:1]
    ]
    return Conversation(
        rollout_id=trajectory.rollout_id,
        attempt_id=trajectory.attempt_id,
        agent=trajectory.agent,
        branch=trajectory.branch,
        step=steps[0].step,
        messages=tuple(spoken for turn in turns for spoken in turn),
        tools=tuple(chat.tools_of(tool for step in steps for tool in step.tools)),
        answers=tuple(starts[run.places[index]] for index in indices),
        rewards=tuple(rewards[index] for index in indices),
        reward=next((value for value in reversed(rewards) if value is not None), None),
        alternatives=tuple(alternatives),
        span_ids=tuple(steps[index].span_id for index in indices),
        model=last.model,
        resource_version=last.resource_version,
    )


def _step_id(step: Transition) -> tuple[str, str]:
    return step.trace_id, step.span_id


def _as_answer(item: Message) -> Message:
    """Return a choice, which is the assistant's whatever its tracer left out."""
    return item if item.get("role") else {**item, "role": "assistant"}
