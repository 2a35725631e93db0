"""Trajectories as conversations of chat messages: what supervised training and prompt search read.

A conversation grows while each step was given all that was said before, so that every message
stands once; where the history was cut, compacted or begun anew, another one begins.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_otel.adapter.conversations import is_same
from lightning_otel.messages import chat
from lightning_otel.types import Conversation, Message, Trajectory, Transition


def conversations(trajectories: Iterable[Trajectory]) -> Iterator[Conversation]:
    """The conversations of trajectories, in order.

    A step that several trajectories share is an answer in the first of its conversations, and a
    message of the others. A step of which only token ids were kept said nothing, and is in none.

    Args:
        trajectories: Those of one attempt together, so that what they share is known.
    """
    shared: set[tuple[str, str]] = set()
    for trajectory in trajectories:
        draft: _Draft | None = None
        for step in trajectory.transitions:
            if not step.action:
                continue
            if draft is not None and draft.is_continued_by(step):
                draft.add(step)
                continue
            if draft is not None:
                yield from draft.finished(trajectory, shared)
            draft = _Draft()
            draft.add(step)
        if draft is not None:
            yield from draft.finished(trajectory, shared)


@dataclass(slots=True)
class _Draft:
    """A conversation while it grows.

    Attributes:
        said: Its messages but for the answer of its last step.
        steps: Its steps.
        places: Position in ``said`` of the answer of each step.
        chosen: Which of its choices each step but the last went on with.
    """

    said: list[Message] = field(default_factory=list)
    steps: list[Transition] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)

    def is_continued_by(self, step: Transition) -> bool:
        """Return whether a step was given all of it, with one of the last step's choices."""
        given, end = step.observation, len(self.said)
        return (
            len(given) > end
            and self._find_choice(given[end]) is not None
            and all(map(is_same, self.said, given))
        )

    def _find_choice(self, answer: Message) -> int | None:
        """Return the choice of the last step that a message repeats."""
        choices = enumerate(self.steps[-1].action)
        return next((index for index, each in choices if is_same(each, answer)), None)

    def add(self, step: Transition) -> None:
        """Take a step that continues it, or its first."""
        if self.steps:
            end = len(self.said)
            choice = self._find_choice(step.observation[end]) or 0
            self.chosen.append(choice)
            # As it was answered, for in a request its reasoning is often left out.
            self.said.append(_as_answer(self.steps[-1].action[choice]))
            self.said += step.observation[end + 1 :]
        else:
            self.said += step.observation
        self.steps.append(step)
        self.places.append(len(self.said))

    def finished(
        self, trajectory: Trajectory, shared: set[tuple[str, str]]
    ) -> Iterator[Conversation]:
        """The conversation, unless all of its answers were given in others; notes those shared."""
        own = [index for index, step in enumerate(self.steps) if _step_id(step) not in shared]
        shared.update(_step_id(step) for step in self.steps if step.is_shared)
        if not own:
            return
        last = self.steps[-1]
        turns = chat.turns_of([*self.said, _as_answer(last.action[0])])
        starts = [0]
        for turn in turns:
            starts.append(starts[-1] + len(turn))
        answers = [starts[place] for place in self.places]
        rewards = [step.reward for step in self.steps]
        yield Conversation(
            rollout_id=trajectory.rollout_id,
            attempt_id=trajectory.attempt_id,
            agent=trajectory.agent,
            branch=trajectory.branch,
            step=self.steps[0].step,
            messages=tuple(spoken for turn in turns for spoken in turn),
            tools=tuple(chat.tools_of(tool for step in self.steps for tool in step.tools)),
            answers=tuple(answers[index] for index in own),
            rewards=tuple(rewards[index] for index in own),
            reward=next((value for value in reversed(rewards) if value is not None), None),
            alternatives=tuple(self._list_alternatives(own, answers)),
            span_ids=tuple(self.steps[index].span_id for index in own),
            model=last.model,
            resource_version=last.resource_version,
        )

    def _list_alternatives(
        self, own: Sequence[int], answers: Sequence[int]
    ) -> Iterator[tuple[int, Mapping[str, Any]]]:
        chosen = [*self.chosen, 0]
        for index in own:
            for choice, said in enumerate(self.steps[index].action):
                if choice != chosen[index]:
                    for spoken in chat.messages_of([_as_answer(said)])[:1]:
                        yield answers[index], spoken


def _step_id(step: Transition) -> tuple[str, str]:
    return step.trace_id, step.span_id


def _as_answer(item: Message) -> Message:
    """A choice, which is the assistant's whatever its tracer left out."""
    return item if item.get("role") else {**item, "role": "assistant"}
