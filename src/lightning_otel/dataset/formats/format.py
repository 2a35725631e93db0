"""Formats: functions from trajectories to rows, and descriptions of the rows."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, Final, TypeAlias, TypeVar

from lightning_otel.adapter import Adaptation
from lightning_otel.types import Trajectory, Transition
from lightning_otel.types.transitions import JudgedTrajectory, distinct
from lightning_otel.types.values import check_names, check_types

T = TypeVar("T")
Row: TypeAlias = dict[str, Any]
"""Values that JSON knows, by column; a column without a value may be missing."""

NO_REWARD: Final = (
    "no reward; give one with emit_reward(), or let a later one count for every step before it: "
    "credit 'discounted'"
)
NO_TOKENS: Final = (
    "no token ids; ask the server for them: extra_body={'return_token_ids': True} with vLLM"
)
NO_LOGPROBS: Final = "no logprobs; ask the server for them: logprobs=True, top_logprobs=0"
NO_MESSAGES: Final = "no messages; capture their content, which is on unless it was switched off"
BELOW: Final = "reward below the threshold; lower it to keep more"
FURTHER_CHOICES: Final = "further choices of one call; a row holds the first alone"


class UnheldError(ValueError):
    """A step, or a part of it, has no place in the format; says why and what to do."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something of a step that a format cannot hold, and why.

    Attributes:
        reason: Why; after its first ``"; "`` what to do.
        is_row_written: Whether a row stands for the step, without what is left out.
    """

    step: Transition
    reason: str
    is_row_written: bool = False


Made: TypeAlias = Iterator[Row | LeftOut]


def list_steps(row: Mapping[str, Any]) -> Sequence[str] | int | None:
    """Return the spans of the steps in a row: their ids, or only their number; None if unknown."""
    first, second = row.get("span_id"), row.get("rejected_span_id")
    return row.get("span_ids") or ([first, second] if second else [first] if first else None)


@dataclass(frozen=True, slots=True)
class Format:
    """A format of rows made of trajectories.

    Attributes:
        make: Gives rows and what was left out, taking trajectories first and its options by name.
        columns: DuckDB type of each column, JSON for what is nested; where it is empty, the type is
            what the rows show.
        used_by: Who reads it, in a few words.
        needs: What a step must have to become part of a row, in a few words.
        is_grouped: Whether the trajectories are to come group by group.
        is_by_task: Whether a group is always the rollouts of one task, where there is one.
        choose_columns: Returns the columns under some options, where these change them.
        steps_of: Tells the steps in a row, as :func:`list_steps` does.
        trajectories_of: Returns the trajectories of what a store adapted, with what the format
            reads from spans.
    """

    make: Callable[..., Made]
    columns: Mapping[str, str] = field(default_factory=dict)
    used_by: str = ""
    needs: str = ""
    is_grouped: bool = False
    is_by_task: bool = False
    choose_columns: Callable[[Mapping[str, str], Mapping[str, Any]], Mapping[str, str]] = (
        lambda columns, _: columns
    )
    steps_of: Callable[[Mapping[str, Any]], Sequence[str] | int | None] = list_steps
    trajectories_of: Callable[[Adaptation], Iterable[Trajectory]] = attrgetter("trajectories")

    def options(self) -> dict[str, Any]:
        """Return the defaults of what can be set, by name."""
        items = inspect.signature(self.make).parameters.values()
        return {item.name: item.default for item in items if item.kind is item.KEYWORD_ONLY}

    def check(self, options: Mapping[str, Any]) -> None:
        """Check that the format has the options given, and their types."""
        check_types(options, self.make.__annotations__)
        check_names("the format", options, self.options())


def attempt(make: Callable[..., T], *args: object) -> T | str:
    """Return what a function makes of steps, or why it cannot."""
    try:
        return make(*args)
    except UnheldError as exc:
        return str(exc)
    except Exception as exc:  # noqa: BLE001  # messages, of any adapter, may hold anything
        return f"unreadable messages ({type(exc).__name__}); export triplets, or show the span"


def step_rows(
    trajectories: Iterable[Trajectory],
    row_of: Callable[[Transition], Row],
    notes: "Callable[[Transition], Iterator[LeftOut]] | None" = None,
) -> Made:
    """Yield a row a step, after notes of what it does not hold."""
    for step, _ in distinct(trajectories):
        yield from make_row(row_of, step, (step,), notes or other_choices)


def make_row(
    row_of: Callable[[T], Row],
    source: T,
    steps: Iterable[Transition],
    notes: Callable[[Transition], Iterator[LeftOut]],
) -> Made:
    """Yield a row after notes of its steps; where it cannot be made, why each of them is left out.

    ``source`` is what the row is made of: a step, or several.
    """

    def make() -> list[Row | LeftOut]:
        row = row_of(source)
        return [*chain.from_iterable(map(notes, steps)), row]

    rows = attempt(make)
    yield from (LeftOut(step, rows) for step in steps) if isinstance(rows, str) else rows


def other_choices(step: Transition) -> Iterator[LeftOut]:
    """Yield a note where a call has further choices."""
    if len(step.action) > 1:
        yield LeftOut(step, FURTHER_CHOICES, is_row_written=True)


def reward_fault(reward: float | None, threshold: float | None) -> str:
    """Return why a reward does not pass a threshold; empty where it does."""
    if threshold is None or (reward is not None and reward >= threshold):
        return ""
    return NO_REWARD if reward is None else BELOW


def with_rewards(
    trajectories: Iterable[Trajectory],
) -> Iterator[tuple[Trajectory, float | None]]:
    """Yield each trajectory with the last reward along it: what a row of all its steps earned.

    One that was shortened goes on in the trajectory of what followed. Of one that an adapter of the
    user's own judged as a whole it is that judgement.
    """
    for _, attempt_paths in groupby(trajectories, lambda path: (path.rollout_id, path.attempt_id)):
        is_rewarded = False
        paths: list[Trajectory] = []  # those from the first on that has no reward itself
        last: list[float | None] = []
        for path in attempt_paths:
            rewards = (step.reward for step in path.transitions[::-1])
            reward = next((value for value in rewards if value is not None), None)
            if isinstance(path, JudgedTrajectory):
                reward = path.reward
            is_rewarded |= reward is not None
            if reward is not None and not paths:
                yield path, reward
            else:
                paths.append(path)
                last.append(reward)
        if not is_rewarded:
            last = [path.reward for path in paths]
        ends = {id(path.transitions[-1].next_observation): i for i, path in enumerate(paths)}
        for index in range(len(paths) - 1, 0, -1):
            observation = paths[index].transitions[0].observation
            source = ends.get(id(observation)) if paths[index].cause == "compaction" else None
            if observation and source is not None and last[source] is None:
                last[source] = last[index]
        yield from zip(paths, last, strict=True)


ORIGIN: Final[Mapping[str, str]] = {
    **dict.fromkeys(("rollout_id", "attempt_id", "agent", "span_id"), "VARCHAR"),
    "reward": "DOUBLE",
}
"""Columns that say where a row comes from; trainers pass over them."""
ORIGINS: Final[Mapping[str, str]] = {"steps": "INTEGER", **ORIGIN, "span_ids": "VARCHAR[]"}
"""The same of a row of several steps: their number, the last one, and the span of each."""


def origin(step: Transition, reward: float | None) -> Row:
    """Return where a row comes from."""
    return {name: getattr(step, name) for name in ORIGIN} | {"reward": reward}


def origins(steps: Sequence[Transition], reward: float | None) -> Row:
    """Return where a row of several steps comes from."""
    ids = [step.span_id for step in steps]
    return {"steps": len(ids), **origin(steps[-1], reward), "span_ids": ids}
