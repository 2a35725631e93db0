"""``sft``, ``prompt-completion``, ``kto`` and ``dpo``: chat messages for TRL's trainers.

Source: TRL's conversational types: language modeling (``messages``), prompt-completion, unpaired
preference (``label``) and preference (``chosen``, ``rejected``), each with ``tools``.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from lightning_otel.dataset.formats.chat import (
    for_templates,
    has_messages,
    is_continued,
    note_parts,
)
from lightning_otel.dataset.formats.format import (
    NO_MESSAGES,
    NO_REWARD,
    ORIGIN,
    SPAN_IDS,
    Format,
    LeftOut,
    Made,
    Row,
    UnheldError,
    attempt,
    origin,
    reward_fault,
    step_rows,
    with_rewards,
)
from lightning_otel.dataset.formats.groups import Pair, pair_rows
from lightning_otel.messages.chat import tools_of
from lightning_otel.types import Message, Trajectory, Transition


class _Conversation(NamedTuple):
    """Steps that go on from each other, and all that was said in them."""

    steps: list[Transition]
    said: list[Message]


def make_sft(trajectories: Iterable[Trajectory], *, threshold: float | None = None) -> Made:
    """Yield one row a conversation; a prompt that does not go on from it begins a new one.

    With ``assistant_only_loss=True`` every assistant turn of a row is trained. Trajectories whose
    last reward is below the threshold are left out.
    """
    key, seen = ("", ""), set[str]()  # the steps of earlier branches of an attempt
    for trajectory, reward in with_rewards(trajectories):
        if key != (trajectory.rollout_id, trajectory.attempt_id):
            key, seen = (trajectory.rollout_id, trajectory.attempt_id), set()
        new = {step.span_id for step in trajectory.transitions} - seen
        seen |= new
        if fault := reward_fault(reward, threshold):
            steps = (step for step in trajectory.transitions if step.span_id in new)
            yield from (LeftOut(step, fault) for step in steps)
            continue
        for each in _find_conversations(trajectory.transitions):
            if isinstance(each, LeftOut):
                yield from (each,) if each.step.span_id in new else ()
                continue
            last, span_ids = each.steps[-1], [step.span_id for step in each.steps]
            if not new.isdisjoint(span_ids):  # else it was a row of an earlier branch
                row = {**_make_columns(each.said, last), "steps": len(each.steps)}
                ids = [span_id for span_id in span_ids if span_id in new]
                yield {**row, **origin(last, reward), "span_ids": ids}


def make_prompt_completion(trajectories: Iterable[Trajectory]) -> Made:
    """Return one row a step that has messages; only the completion is trained.

    Where the server gave token ids they are there too, with the mask of what was sampled;
    ``tokens`` holds these alone, ready to be trained as they are.
    """

    def row_of(step: Transition) -> Row:
        row = _answer_row(step)
        if step.capture == "exact":
            row["prompt_ids"] = list(step.prompt_ids)
            row["completion_ids"] = list(step.response_ids)
            row["completion_mask"] = [0] * len(step.prompt_ids) + [1] * len(step.response_ids)
        return row

    return step_rows(trajectories, row_of, note_parts)


def make_kto(trajectories: Iterable[Trajectory], *, threshold: float = 0.5) -> Made:
    """Return one row a step with messages and a reward, good where that reaches the threshold."""

    def row_of(step: Transition) -> Row:
        if step.reward is None:
            raise UnheldError(NO_REWARD)
        return {**_answer_row(step), "label": step.reward >= threshold}

    return step_rows(trajectories, row_of, note_parts)


def make_dpo(trajectories: Iterable[Trajectory], *, gap: float = 0.0) -> Made:
    """Return one row a pair of answers to a prompt whose rewards differ by the gap at least."""
    return pair_rows(trajectories, gap, _pair_row, note_parts)


def _pair_row(pair: Pair) -> Row:
    row, rejected = map(_answer_row, pair)
    row["chosen"] = row.pop("completion")
    names = {"completion": "rejected", **{name: f"rejected_{name}" for name in _REJECTED}}
    return {**row, **{column: rejected[name] for name, column in names.items()}}


def _answer_row(step: Transition) -> Row:
    """Return prompt, completion and tools as chat templates take them, and the origin."""
    if not has_messages(step):
        raise UnheldError(NO_MESSAGES)
    row: Row = {
        "prompt": for_templates(step.observation),
        "completion": for_templates(step.action[:1]),
    }
    return {**row, **_tools_column(step), **origin(step, step.reward)}


def _make_columns(said: Iterable[Message], step: Transition) -> Row:
    return {"messages": for_templates(said), **_tools_column(step)}


def _tools_column(step: Transition) -> Row:
    return {"tools": tools_of(step.tools)} if step.tools else {}


def _find_conversations(steps: Iterable[Transition]) -> Iterator[_Conversation | LeftOut]:
    held = _Conversation([], [])
    for step in steps:
        if not has_messages(step):
            yield LeftOut(step, NO_MESSAGES)
            continue
        goes_on = bool(held.steps) and is_continued(held.steps[-1], step)
        seen = len(held.steps[-1].observation) + 1 if goes_on else 0
        said = [*step.observation[seen:], *step.action[:1]]
        made = attempt(_make_columns, said, step)
        if isinstance(made, str):
            yield LeftOut(step, made)
            continue
        yield from note_parts(step)
        if held.steps and not goes_on:
            yield held
            held = _Conversation([], [])
        held.steps.append(step)
        held.said.extend(said)
    if held.steps:
        yield held


_REJECTED: Final = ("rollout_id", "span_id", "reward")

SFT: Final = Format(
    make_sft,
    {"messages": "JSON", "tools": "JSON", "steps": "INTEGER", **ORIGIN, **SPAN_IDS},
    used_by="TRL SFTTrainer, assistant_only_loss=True",
    needs="messages",
)
PROMPT_COMPLETION: Final = Format(
    make_prompt_completion,
    {
        **dict.fromkeys(("prompt", "completion", "tools"), "JSON"),
        **dict.fromkeys(("prompt_ids", "completion_ids", "completion_mask"), "INTEGER[]"),
        **ORIGIN,
    },
    used_by="TRL SFTTrainer",
    needs="messages",
)
KTO: Final = Format(
    make_kto,
    {"prompt": "JSON", "completion": "JSON", "label": "BOOLEAN", "tools": "JSON", **ORIGIN},
    used_by="TRL KTOTrainer",
    needs="messages and a reward",
)
DPO: Final = Format(
    make_dpo,
    {
        **dict.fromkeys(("prompt", "chosen", "rejected", "tools"), "JSON"),
        **ORIGIN,
        **{f"rejected_{name}": ORIGIN[name] for name in _REJECTED},
    },
    used_by="TRL DPOTrainer",
    needs="messages, and several rewarded answers to one prompt",
    is_grouped=True,
)
