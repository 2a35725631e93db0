"""``sft``: whole conversations with their tools, for TRL's ``SFTTrainer``.

With ``assistant_only_loss=True`` every assistant turn of a row is trained.

Source: TRL's conversational language-modeling type (``messages``, ``tools``).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from lightning_otel.formats.chat import UnheldError, for_templates, has_messages, tools_of
from lightning_otel.formats.format import (
    FURTHER_CHOICES,
    NO_MESSAGES,
    NO_REWARD,
    ORIGIN,
    Format,
    LeftOut,
    Made,
    origin,
    outcome,
)
from lightning_otel.types import Trajectory, Transition

BELOW: Final = "reward below the threshold; lower it to keep more"


def make(trajectories: Iterable[Trajectory], *, threshold: float | None = None) -> Made:
    """One row a conversation; where a trajectory's next prompt does not go on from it, a new one.

    Args:
        trajectories: What is made into rows.
        threshold: Only trajectories whose last reward is no less.
    """
    for trajectory in trajectories:
        reward = outcome(trajectory)
        if threshold is not None and (reward is None or reward < threshold):
            for step in trajectory.transitions:
                yield LeftOut(step, NO_REWARD if reward is None else BELOW)
            continue
        for steps, messages, left in _conversations(trajectory.transitions):
            yield from left
            if steps:
                last = steps[-1]
                row: dict[str, Any] = {"messages": messages}
                if last.tools:
                    row["tools"] = tools_of(last.tools)
                yield {**row, "steps": len(steps), **origin(last, reward)}


def _conversations(
    steps: Sequence[Transition],
) -> Iterator[tuple[list[Transition], list[dict[str, Any]], list[LeftOut]]]:
    """Steps that go on from each other, what was said in them, and what could not be held."""
    held: list[Transition] = []
    said: list[dict[str, Any]] = []
    for step in steps:
        if not has_messages(step):
            yield [], [], [LeftOut(step, NO_MESSAGES)]
            continue
        try:
            given = for_templates(step.observation)
            whole = [*given, *for_templates(step.action[:1])]
        except UnheldError as exc:
            yield [], [], [LeftOut(step, str(exc))]
            continue
        if len(step.action) > 1:
            yield [], [], [LeftOut(step, FURTHER_CHOICES, is_row_written=True)]
        if held and not _goes_on(said, given):
            yield held, said, []
            held = []
        held, said = [*held, step], whole
    if held:
        yield held, said, []


def _goes_on(said: Sequence[dict[str, Any]], given: Sequence[dict[str, Any]]) -> bool:
    """Whether a prompt begins with all that was said; reasoning is sent back by few agents."""
    if len(given) < len(said):
        return False
    return all(_plain(one) == _plain(two) for one, two in zip(said, given, strict=False))


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "reasoning_content"}


FORMAT: Final = Format(
    make,
    {"messages": "JSON", "tools": "JSON", "steps": "INTEGER", **ORIGIN},
    consumer="TRL SFTTrainer, assistant_only_loss=True",
    needs="messages",
)
