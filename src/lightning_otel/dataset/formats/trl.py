"""``sft``, ``prompt-completion``, ``kto`` and ``dpo``: chat messages for TRL's trainers.

Source: TRL's conversational types: language modeling (``messages``), prompt-completion, unpaired
preference (``label``) and preference (``chosen``, ``rejected``), each with ``tools``.
"""

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from lightning_otel.dataset.formats.chat import (
    Arguments,
    answer_of,
    check_numbers,
    for_templates,
    has_messages,
    is_continued,
    note_parts,
)
from lightning_otel.dataset.formats.format import (
    NO_MESSAGES,
    NO_REWARD,
    ORIGIN,
    ORIGINS,
    Format,
    LeftOut,
    Made,
    Row,
    UnheldError,
    attempt,
    make_row,
    origin,
    origins,
    reward_fault,
    step_rows,
    with_rewards,
)
from lightning_otel.dataset.formats.groups import PreferencePair, pair_rows
from lightning_otel.dataset.tokenizers import ChatTemplate, load_template
from lightning_otel.messages import RULES, objects
from lightning_otel.messages.chat import messages_of, tools_of
from lightning_otel.types import Message, Trajectory, Transition

Form: TypeAlias = Literal["prompt", "messages"]
"""Columns of ``sft``: ``prompt`` and ``completion``, or ``messages`` with weights."""
_OTHERS: Final = frozenset({"assistant", *RULES})
"""Roles that end a row: other answers would be trained, other instructions misplaced."""
_IN_ROW: Final = "in the row of another trajectory"


class _ChatOptions(NamedTuple):
    """Chat as the options of an export want it written."""

    arguments: Arguments
    template: ChatTemplate | None

    @classmethod
    def of(cls, arguments: Arguments, template: str) -> "_ChatOptions":
        return cls(arguments, load_template(template) if template else None)

    def make_row(self, steps: Sequence[Transition], between: Iterable[Sequence[Message]]) -> Row:
        """Return prompt, completion and tools of steps."""
        first, *further = steps
        turns = [answer_of(first)]
        for messages, step in zip(between, further, strict=True):
            turns += [*messages, answer_of(step)]
        row: Row = {
            "prompt": for_templates(first.observation, self.arguments),
            "completion": for_templates(turns, self.arguments),
            "tools": tools_of(tool for step in steps for tool in step.tools),
        }
        if self.template and (fault := self.template.find_fault(row)):
            raise UnheldError(fault)
        if not row["tools"]:
            del row["tools"]
        elif self.arguments == "object":
            check_numbers(row["tools"])
        else:
            row["tools"] = json.dumps(row["tools"])
        return row

    def make_answer(self, step: Transition) -> Row:
        if not has_messages(step):
            raise UnheldError(NO_MESSAGES)
        return {**self.make_row((step,), ()), **origin(step, step.reward)}


class _StepSequence(NamedTuple):
    """Steps that go on from each other unedited, and what came between."""

    steps: list[Transition]
    between: list[Sequence[Message]]


def make_sft(
    trajectories: Iterable[Trajectory],
    *,
    threshold: float | None = None,
    form: Form = "prompt",
    arguments: Arguments = "object",
    template: str = "",
) -> Made:
    """Yield rows that train each answer once; what came before the first of a row is its prompt.

    A row begins where the history was edited, holds words of others or further instructions, or a
    tool was changed. Trajectories whose last reward is below the threshold are left out.
    """
    chat = _ChatOptions.of(arguments, template)
    attempts = groupby(
        with_rewards(trajectories), lambda item: (item[0].rollout_id, item[0].attempt_id)
    )
    for _, paths in attempts:
        written: set[object] = set()
        out: dict[object, LeftOut] = {}
        for trajectory, reward in paths:
            rows: Iterable[Row | LeftOut] = _make_rows(trajectory, reward, chat, form, written)
            if fault := reward_fault(reward, threshold):
                rows = [LeftOut(step, fault) for step in trajectory.transitions]
            for part in rows:
                if isinstance(part, LeftOut) and not part.is_row_written:
                    out.setdefault(_key_of(part.step), part)
                else:
                    yield part
        # A step that several trajectories share may be in a row of another one.
        yield from (part for key, part in out.items() if key not in written)


def _key_of(step: Transition) -> object:
    return (step.trace_id, step.span_id) if step.is_shared else id(step)


def _make_rows(
    trajectory: Trajectory,
    reward: float | None,
    chat: _ChatOptions,
    form: Form,
    written: set[object],
) -> Made:
    """Yield a trajectory's rows, and add its shared steps to ``written``."""

    def row_of(run: _StepSequence) -> Row:
        row = chat.make_row(*run)
        if form == "messages":
            turns = [
                {**turn, "weight": weight} if turn["role"] == "assistant" else turn
                for weight, name in enumerate(("prompt", "completion"))
                for turn in row.pop(name)
            ]
            row = {"messages": turns, **row}
        return {**row, **origins(run.steps, reward)}

    for run in _find_runs(trajectory.transitions, chat, written):
        if isinstance(run, LeftOut):
            yield run
            continue
        for part in make_row(row_of, run, run.steps, note_parts):
            if not isinstance(part, LeftOut):
                written.update(_key_of(step) for step in run.steps if step.is_shared)
            yield part


def _find_runs(
    steps: Iterable[Transition], chat: _ChatOptions, written: Container[object]
) -> Iterator[_StepSequence | LeftOut]:
    run = _StepSequence([], [])
    for step in steps:
        addition: Sequence[Message] | str | None = None
        if step.is_shared and _key_of(step) in written:
            addition = _IN_ROW
        elif not has_messages(step):
            addition = NO_MESSAGES
        elif run.steps:
            addition = attempt(_read_rest, run.steps[-1], step, chat)
        if run.steps and (addition is None or isinstance(addition, str)):
            yield run
            run = _StepSequence([], [])
        if addition is None and isinstance(row := attempt(chat.make_row, (step,), ()), str):
            addition = row
        if not isinstance(addition, str):
            run.between.extend([addition] if addition is not None else [])
            run.steps.append(step)
        elif addition != _IN_ROW:
            yield LeftOut(step, addition)
    if run.steps:
        yield run


def _read_rest(
    before: Transition, step: Transition, chat: _ChatOptions
) -> Sequence[Message] | None:
    """Return what a prompt adds to the answer before; None where a row begins.

    Raises:
        UnheldError: That, or the answer, has no place in a row.
    """
    if not is_continued(before, step):
        return None
    size = len(before.observation)
    addition = step.observation[size + 1 :]
    if _list_call_ids(before.action[0]) != _list_call_ids(step.observation[size]):
        return None
    if any(turn["role"] in _OTHERS for turn in messages_of(addition)):
        return None
    for_templates([*addition, answer_of(step)], chat.arguments)
    both = tools_of([*before.tools, *step.tools])
    return addition if all(tool in both for tool in tools_of(before.tools)) else None


def _list_call_ids(message: Message) -> list[Any]:
    parts = objects(message.get("parts"))
    return [part.get("id") for part in parts if part.get("type") == "tool_call"]


def make_prompt_completion(
    trajectories: Iterable[Trajectory], *, arguments: Arguments = "object", template: str = ""
) -> Made:
    """Return one row a step that has messages; only the completion is trained.

    The trainer makes its own tokens of it; ``tokens`` holds those that the server sampled.
    """
    return step_rows(trajectories, _ChatOptions.of(arguments, template).make_answer, note_parts)


def make_kto(
    trajectories: Iterable[Trajectory],
    *,
    threshold: float = 0.5,
    arguments: Arguments = "object",
    template: str = "",
) -> Made:
    """Return one row a step with messages and a reward, good where that reaches the threshold."""
    chat = _ChatOptions.of(arguments, template)

    def row_of(step: Transition) -> Row:
        if step.reward is None:
            raise UnheldError(NO_REWARD)
        return {**chat.make_answer(step), "label": step.reward >= threshold}

    return step_rows(trajectories, row_of, note_parts)


def make_dpo(
    trajectories: Iterable[Trajectory],
    *,
    gap: float = 0.0,
    arguments: Arguments = "object",
    template: str = "",
) -> Made:
    """Return one row a pair of answers to a prompt whose rewards differ by the gap at least."""
    chat = _ChatOptions.of(arguments, template)

    def row_of(pair: PreferencePair) -> Row:
        row, rejected = map(chat.make_answer, pair)
        row["chosen"] = row.pop("completion")
        names = {"completion": "rejected", **{name: f"rejected_{name}" for name in _REJECTED}}
        return {**row, **{column: rejected[name] for name, column in names.items()}}

    return pair_rows(trajectories, gap, row_of, note_parts)


_REJECTED: Final = ("rollout_id", "span_id", "reward")
_TURNS: Final = (
    'STRUCT("role" VARCHAR, content VARCHAR, "name" VARCHAR, reasoning_content VARCHAR, '
    'tool_calls STRUCT(id VARCHAR, "type" VARCHAR, "function" STRUCT("name" VARCHAR, '
    "arguments VARCHAR))[], tool_call_id VARCHAR, weight INTEGER)[]"
)
_TEXTS: Final = {
    **dict.fromkeys(("messages", "prompt", "completion", "chosen", "rejected"), _TURNS),
    "tools": "VARCHAR",
}
"""Types with ``arguments`` as text: those that every release of datasets reads."""


def _choose_columns(columns: Mapping[str, str], options: Mapping[str, Any]) -> Mapping[str, str]:
    if options.get("form") == "messages":
        names = columns.keys() - {"prompt", "completion"}
        columns = {"messages": "JSON", **{name: columns[name] for name in columns if name in names}}
    texts = _TEXTS if options.get("arguments") == "text" else {}
    return {name: texts.get(name, kind) for name, kind in columns.items()}


SFT: Final = Format(
    make_sft,
    {**dict.fromkeys(("prompt", "completion", "tools"), "JSON"), **ORIGINS},
    used_by="TRL SFTTrainer, assistant_only_loss=True",
    needs="messages",
    choose_columns=_choose_columns,
)
PROMPT_COMPLETION: Final = Format(
    make_prompt_completion,
    {**dict.fromkeys(("prompt", "completion", "tools"), "JSON"), **ORIGIN},
    used_by="TRL SFTTrainer",
    needs="messages",
    choose_columns=_choose_columns,
)
KTO: Final = Format(
    make_kto,
    {"prompt": "JSON", "completion": "JSON", "label": "BOOLEAN", "tools": "JSON", **ORIGIN},
    used_by="TRL KTOTrainer",
    needs="messages and a reward",
    choose_columns=_choose_columns,
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
    choose_columns=_choose_columns,
)
