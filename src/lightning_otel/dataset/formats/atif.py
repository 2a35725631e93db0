"""``atif``: the Agent Trajectory Interchange Format, one document an attempt.

Each message that a prompt adds is a step, each call an agent's step with its metrics, and a tool's
answer an observation of the step that asked for it. Rewards, finish reasons, response ids and
refusals stand in ``extra``.

Source: Harbor's RFC 0001, ATIF v1.8, and the models of ``harbor.models.trajectories`` 0.25.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, takewhile
from typing import Any, Final

from lightning_otel.adapter import Adaptation
from lightning_otel.adapter.attributes import get_integer
from lightning_otel.dataset.formats.atif_steps import (
    KEY,
    Note,
    call_record,
    call_step,
    message_record,
    message_step,
    parts_of,
    restore,
    result_of,
)
from lightning_otel.dataset.formats.chat import is_continued
from lightning_otel.dataset.formats.format import (
    Format,
    LeftOut,
    Made,
    Row,
    UnheldError,
    attempt,
    other_choices,
)
from lightning_otel.messages.chat import tools_of
from lightning_otel.store.prices import Prices, add_costs, read_prices, read_usage
from lightning_otel.types import Message, Span, Trajectory, Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.transitions import distinct
from lightning_otel.types.values import json_text

VERSION: Final = "ATIF-v1.8"
_OTHER_CALLS: Final = "an imported document with other calls than these; export triplets"


def make(trajectories: Iterable[Trajectory]) -> Made:
    """Yield one document an attempt: its first conversation, with the others as subagents of it.

    A prompt that does not go on from the answer before begins another document. What it repeats
    of the one before is copied context, and that one names it as its continuation.
    """
    for _, group in groupby(trajectories, lambda each: (each.rollout_id, each.attempt_id)):
        paths = list(group)
        made = attempt(_make_document, paths)
        if isinstance(made, str):
            yield from (LeftOut(step, made) for step, _ in distinct(paths))
        else:
            yield from made


def add_usage(part: Adaptation) -> Iterator[Trajectory]:
    """Yield trajectories whose answers hold cached tokens and cost of their calls.

    They stand under :data:`KEY`; an imported document has its own there.
    """
    prices = read_prices()
    calls = {(span.trace_id, span.span_id): span for _, spans, _ in part.parts for span in spans}
    imported = {
        (path.rollout_id, path.attempt_id)
        for path in part.trajectories
        if any(map(call_record, path.transitions))
    }
    for path in part.trajectories:
        if (path.rollout_id, path.attempt_id) in imported:
            yield path
        else:
            steps = (
                _add_usage(step, calls.get(_key_of(step)), prices) for step in path.transitions
            )
            yield replace(path, transitions=tuple(steps))


def _add_usage(step: Transition, span: Span | None, prices: Prices) -> Transition:
    if span is None or not step.action:
        return step
    cost = prices.cost_of(*read_usage(span, step))
    cached = get_integer(span.attributes, c.CACHED_TOKENS)
    metrics = restore({"cached_tokens": cached, "cost_usd": cost}, {})
    if not metrics:
        return step
    answer = {**step.action[0], KEY: {"cost": cost, "step": {"metrics": metrics}}}
    return replace(step, action=(answer, *step.action[1:]))


def _make_document(paths: Sequence[Trajectory]) -> list[Row | LeftOut]:
    """Return the document of an attempt, after notes of what has no place in it."""
    documents: dict[tuple[int, ...], Row] = {}
    written: set[tuple[str, str]] = set()
    nulls: list[Sequence[str | int]] = []
    notes: list[Row | LeftOut] = []
    parts = [part for path in paths for part in _divide(path)]
    starts = {id(part.transitions[0].observation) for part, _ in parts}
    ends: dict[int, Row] = {}
    before: Row = {}
    for trajectory, index in parts:
        if written.issuperset(map(_key_of, trajectory.transitions)):
            before = {}  # an earlier branch has all of it
            continue
        steps = _read_steps(trajectory, written, notes.append)
        last = trajectory.transitions[-1]
        if last.done and id(last.next_observation) not in starts:
            _add_messages(steps, last.next_observation or (), lambda _: None)
        held = call_record(last)
        steps += [dict(step) for step in held.get("after", ())]
        place = tuple(held.get("place") or ())
        if "place" not in held or place in documents:
            place = (len(documents) - 1,) if documents else ()
        natural = describe(trajectory, steps, is_main=not place, index=index)
        earlier = ends.get(id(trajectory.transitions[0].observation), before if index else None)
        if earlier and _mark_copies(earlier["steps"], natural["steps"]):
            earlier["continued_trajectory_ref"] = natural["trajectory_id"]
        if "document" in held:
            natural["extra"] = None  # it says itself what it earned, or did not
        documents[place] = before = restore(natural, held.get("document", {}))
        if last.next_observation:
            ends[id(last.next_observation)] = before
        documents |= {tuple(at): whole for at, whole in held.get("others", ())}
        nulls += held.get("nulls", ())
    document = _nest(documents)
    for at in nulls:
        _restore_null(document, at)
    if count_calls(document) != len(written):
        raise UnheldError(_OTHER_CALLS)
    cost = add_costs(call_record(step).get("cost") for step, _ in distinct(paths))
    if cost is not None:
        document["final_metrics"]["total_cost_usd"] = cost  # subagents' too
    return [*notes, document]


def _divide(path: Trajectory) -> Iterator[tuple[Trajectory, int]]:
    """Yield the parts of a trajectory whose prompts go on from each other, with their numbers."""
    first, index = 0, 0
    for place in range(1, len(path.transitions) + 1):
        steps = path.transitions[place - 1 : place + 1]
        if len(steps) < 2 or not is_continued(*steps):
            yield replace(path, transitions=path.transitions[first:place]), index
            first, index = place, index + 1


def _mark_copies(before: Iterable[Row], steps: Iterable[Row]) -> bool:
    """Mark what a part repeats of the one before; return whether that is more than instructions."""
    seen = {(step["source"], json_text(step["message"])) for step in before}
    copies = [
        step
        for step in takewhile(lambda step: "llm_call_count" not in step, steps)
        if (step["source"], json_text(step["message"])) in seen
    ]
    for step in copies:
        step["is_copied_context"] = True
    return any(step["source"] != "system" for step in copies)


def _nest(documents: Mapping[tuple[int, ...], Row]) -> Row:
    """Return the first document with the others where they belong."""
    first = min(documents)
    for place in sorted(documents)[1:]:
        parent = documents.get(place[:-1], documents[first])
        parent.setdefault("subagent_trajectories", []).append(documents[place])
    return documents[first]


def _restore_null(document: Any, at: Sequence[str | int]) -> None:
    """Make a field null again, unless it was given a value since, or what held it is gone."""
    *above, name = at
    with suppress(LookupError, TypeError, AttributeError):
        for key in above:
            document = document[key]
        document.setdefault(name, None)


def describe(trajectory: Trajectory, steps: list[Row], *, is_main: bool, index: int = 0) -> Row:
    """Return the document of a trajectory, without what an imported one says beyond it.

    ``index`` is the number of a part of one; the document of an attempt says what it earned.
    """
    last = trajectory.transitions[-1]
    key = f"{trajectory.rollout_id}/{trajectory.attempt_id}"
    part = f"{key}/{trajectory.agent}/{trajectory.branch}"
    models = {step.model for step in trajectory.transitions}
    tools = [tool for step in trajectory.transitions for tool in step.tools]
    agent = {
        "name": trajectory.agent or "agent",
        "version": last.resource_version or "unknown",
        "model_name": last.model if len(models) == 1 else None,
        "tool_definitions": tools_of(tools) or None,
    }
    totals = {
        f"total_{name}": sum(step["metrics"][name] for step in counted)
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
        if (counted := [step for step in steps if name in step.get("metrics", ())])
    }
    is_rewarded = trajectory.reward is not None
    return {
        "schema_version": VERSION,
        "session_id": trajectory.rollout_id,
        "trajectory_id": key if is_main else f"{part}/{index}" if index else part,
        "agent": {name: value for name, value in agent.items() if value is not None},
        "steps": [{"step_id": index, **step} for index, step in enumerate(steps, 1)],
        "final_metrics": {**totals, "total_steps": len(steps)},
        "extra": {"reward": trajectory.reward} if is_main and is_rewarded else None,
    }


def _read_steps(
    trajectory: Trajectory, written: set[tuple[str, str]], note: Callable[[LeftOut], None]
) -> list[Row]:
    """Return the steps of a trajectory; those of a branch written before are copied context."""
    steps: list[Row] = []
    before: Transition | None = None
    for each in trajectory.transitions:

        def leave_out(reason: str, each: Transition = each) -> None:
            note(LeftOut(each, reason, is_row_written=True))

        for choice in other_choices(each):
            leave_out(choice.reason)
        seen = len(before.observation) + 1 if before else 0
        _add_messages(steps, each.observation[seen:], leave_out)
        made = restore(call_step(each, leave_out), call_record(each).get("step", {}))
        if _key_of(each) in written:
            made["is_copied_context"] = True
        written.add(_key_of(each))
        steps.append(made)
        before = each
    return steps


def _add_messages(steps: list[Row], messages: Iterable[Message], note: Note) -> None:
    """Add a step for each message; a tool's answer is an observation of the step before."""
    for message in messages:
        parts = parts_of(message)
        answers = [part for part in parts if part.get("type") == "tool_call_response"]
        if answers:
            if not steps or steps[-1]["source"] != "agent":
                steps.append({"source": "system", "message": ""})
            called = [call["tool_call_id"] for call in steps[-1].get("tool_calls", ())]
            made = [restore(result_of(each, called, note), each.get(KEY) or {}) for each in answers]
            observed = steps[-1].get("observation", {})
            results = [*observed.get("results", ()), *made]
            steps[-1]["observation"] = {**observed, "results": results}
        if not answers or len(answers) < len(parts):
            steps.append(
                restore(message_step(message, note), message_record(message).get("step", {}))
            )


def list_calls(document: Mapping[str, Any]) -> list[int]:
    """Return the indexes of the steps of a document that asked a model."""
    return [
        index
        for index, step in enumerate(_list_objects(document, "steps"))
        if step.get("source") == "agent"
        and step.get("llm_call_count") != 0
        and not step.get("is_copied_context")
    ]


def count_calls(document: Mapping[str, Any]) -> int:
    """Return how many steps of a document and its subagents asked a model."""
    below = _list_objects(document, "subagent_trajectories")
    return len(list_calls(document)) + sum(map(count_calls, below))


def _list_objects(document: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    values = document.get(name)  # a message may have brought anything under this name
    items = values if isinstance(values, list | tuple) else ()
    return [item if isinstance(item, Mapping) else {} for item in items]


def _key_of(step: Transition) -> tuple[str, str]:
    return step.trace_id, step.span_id


FORMAT: Final = Format(
    make,
    {
        **dict.fromkeys(("schema_version", "session_id", "trajectory_id"), "VARCHAR"),
        **dict.fromkeys(("agent", "steps", "final_metrics", "extra"), "JSON"),
        "subagent_trajectories": "JSON",
        **dict.fromkeys(("notes", "continued_trajectory_ref"), "VARCHAR"),
    },
    used_by="Harbor and other readers of ATIF 1.8",
    needs="nothing",
    steps_of=count_calls,
    trajectories_of=add_usage,
)
