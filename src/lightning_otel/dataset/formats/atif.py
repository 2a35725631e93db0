"""``atif``: the Agent Trajectory Interchange Format, one document an attempt.

Each message that a prompt adds is a step, each call an agent's step with its metrics, and a tool's
answer an observation of the step that asked for it. Rewards, finish reasons, response ids and
refusals stand in ``extra``. What an imported document says beyond that lies under :data:`KEY` of
its messages, and is restored.

Source: Harbor's RFC 0001, ATIF v1.8, and the models of ``harbor.models.trajectories`` 0.25.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, takewhile
from mimetypes import guess_type
from typing import Any, Final, TypeAlias

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
from lightning_otel.messages import object_of, objects, read_message
from lightning_otel.messages.chat import tools_of
from lightning_otel.messages.media import to_text
from lightning_otel.messages.parts import part_of
from lightning_otel.store.prices import add_costs, add_usage
from lightning_otel.types import Message, Trajectory, Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.instants import utc_text
from lightning_otel.types.transitions import distinct
from lightning_otel.types.values import json_text

VERSION: Final = "ATIF-v1.8"
KEY: Final = "atif"
"""Key of a message or part for what its step, call or result says beyond it."""
NESTED: Final = frozenset({"agent", "metrics", "observation", "final_metrics"})
_SOURCES: Final = {"assistant": "agent", "user": "user"}
_MEDIA: Final = frozenset({
    "image/jpeg", "image/png", "image/gif", "image/webp", "audio/wav", "audio/mpeg", "audio/mp4",
    "audio/aac", "audio/ogg", "audio/flac", "audio/webm", "audio/aiff",
})  # fmt: skip
_MICROSECONDS: Final = len("2026-11-24T12:00:00.000000")
Note: TypeAlias = Callable[[str], None]
"""Takes the reason why something has no place in the format."""


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
        held = _held(last)
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
        raise UnheldError("an imported document with other calls than these; export triplets")
    cost = add_costs(_held(step).get("cost") for step, _ in distinct(paths))
    if cost is not None:
        document["final_metrics"]["total_cost_usd"] = cost  # subagents' too
    return [*notes, document]


def _divide(path: Trajectory) -> Iterator[tuple[Trajectory, int]]:
    """Yield the parts whose prompts go on from each other, with their numbers."""
    first, index = 0, 0
    for place in range(1, len(path.transitions) + 1):
        steps = path.transitions[place - 1 : place + 1]
        if len(steps) < 2 or not is_continued(*steps):
            yield replace(path, transitions=path.transitions[first:place]), index
            first, index = place, index + 1


def _mark_copies(before: Iterable[Row], steps: Iterable[Row]) -> bool:
    """Mark what repeats the part before; return whether it is more than instructions."""
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
    last, reward = trajectory.transitions[-1], trajectory.reward
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
    return {
        "schema_version": VERSION,
        "session_id": trajectory.rollout_id,
        "trajectory_id": key if is_main else f"{part}/{index}" if index else part,
        "agent": restore(agent, {}),
        "steps": [{"step_id": index, **step} for index, step in enumerate(steps, 1)],
        "final_metrics": {**totals, "total_steps": len(steps)},
        "extra": {"reward": reward} if is_main and reward is not None else None,
    }


def _read_steps(
    trajectory: Trajectory, written: set[tuple[str, str]], note: Callable[[LeftOut], None]
) -> list[Row]:
    """Return steps; those of a branch written before are copied context."""
    steps: list[Row] = []
    before: Transition | None = None
    for each in trajectory.transitions:

        def leave_out(reason: str, each: Transition = each) -> None:
            note(LeftOut(each, reason, is_row_written=True))

        for choice in other_choices(each):
            leave_out(choice.reason)
        seen = len(before.observation) + 1 if before else 0
        _add_messages(steps, each.observation[seen:], leave_out)
        made = restore(call_step(each, leave_out), _held(each).get("step", {}))
        if _key_of(each) in written:
            made["is_copied_context"] = True
        written.add(_key_of(each))
        steps.append(made)
        before = each
    return steps


def _add_messages(steps: list[Row], messages: Iterable[Message], note: Note) -> None:
    """Add steps; a tool's answer is an observation of the step before."""
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
                restore(message_step(message, note), object_of(message.get(KEY)).get("step", {}))
            )


def call_step(step: Transition, note: Note) -> Row:
    """Return the agent's step, with what the server counted and sampled."""
    made = message_step(step.action[0] if step.action else {"role": "assistant"}, note)
    made.pop("is_copied_context", None)
    metrics = {
        "prompt_tokens": step.input_tokens,
        "completion_tokens": step.output_tokens,
        "prompt_token_ids": list(step.prompt_ids) or None,
        "completion_token_ids": list(step.response_ids) or None,
        "logprobs": list(step.logprobs) or None,
    }
    parts = [part for message in step.action[:1] for part in parts_of(message)]
    refusals = [to_text(part.get("content")) for part in parts if part.get("type") == "refusal"]
    if any(part.get("type") == "reasoning" and not part.get("content") for part in parts):
        note("encrypted reasoning; export triplets, which hold every part")
    reward = None if step.reward == _held(step).get("reward") else step.reward
    is_named = reward is not None and list(step.rewards) != [c.PRIMARY_REWARD]
    extra = {
        "finish_reason": step.finish_reason,
        "response_id": step.response_id,
        "refusal": "\n".join(refusals) or None,
        "reward": reward,
        "rewards": dict(step.rewards) if is_named else None,
    }
    return restore(
        {**made, "timestamp": f"{utc_text(step.start_ns)[:_MICROSECONDS]}Z"},
        {
            "source": "agent",
            "model_name": step.model,
            "metrics": restore(metrics, {}) or None,
            "llm_call_count": 1,
            "extra": restore(extra, {}) or None,
        },
    )


def message_step(message: Message, note: Note) -> Row:
    """Return the step of a message; an answer in a prompt is copied context."""
    source = _SOURCES.get(str(message.get("role")), "system")
    parts = [part for part in parts_of(message) if part.get("type") != "tool_call_response"]
    if source != "agent":
        return {"source": source, "message": content_of(parts, note)}
    thought = [part for part in parts if part.get("type") == "reasoning"]
    calls = [part for part in parts if part.get("type") == "tool_call"]
    said = [part for part in parts if part.get("type") not in ("reasoning", "tool_call")]
    found: Row = {"source": source, "message": content_of(said, note), "is_copied_context": True}
    if thought:
        found["reasoning_content"] = "\n".join(str(part.get("content", "")) for part in thought)
    if calls:
        found["tool_calls"] = [
            restore(tool_call_of(part, index), part.get(KEY) or {})
            for index, part in enumerate(calls)
        ]
    return found


def tool_call_of(part: Mapping[str, Any], index: int) -> Row:
    """Return a tool's call; arguments that are no object go to ``extra``."""
    arguments, name = part.get("arguments"), part.get("name")
    found: Row = {
        "tool_call_id": str(part.get("id") or f"call_{index}"),
        "function_name": str(name or ""),
        "arguments": arguments if isinstance(arguments, dict) else {},
    }
    if not isinstance(arguments, dict | None):
        found["extra"] = {"arguments": arguments}
    return found


def result_of(part: Mapping[str, Any], called: Sequence[str], note: Note) -> Row:
    """Return what a tool answered; only a call of the same step can be named."""
    call_id, response = part.get("id"), part.get("response")
    found: Row = {"source_call_id": call_id} if call_id in called else {}
    if not found and len(called) == 1 and call_id is None:
        found = {"source_call_id": called[0]}
    if isinstance(response, list) and response and all(isinstance(each, dict) for each in response):
        return {**found, "content": content_of(response, note)}
    return found if response is None else {**found, "content": to_text(response)}


def content_of(parts: Iterable[Mapping[str, Any]], note: Note) -> str | list[Row]:
    """Return parts as the format writes content: one text, or a list of parts."""
    found: list[Row] = []
    for part in map(part_of, parts):
        media = _media_of(part)
        if part.get("type") in ("text", "refusal"):
            found.append({"type": "text", "text": to_text(part.get("content"))})
        elif media:
            found.append(media)
        else:
            note(f"a part of type {part.get('type')!r}; export triplets, which hold every part")
    if len(found) == 1 and "text" in found[0]:
        return str(found[0]["text"])
    return found or ""


def _media_of(part: Mapping[str, Any]) -> Row | None:
    """Return a reference to an image or sound; None where there is no place for it."""
    path = part.get("uri")
    mime_type = part.get("mime_type") or guess_type(str(path))[0]
    if part.get("type") == "blob":
        path = f"data:{mime_type};base64,{part.get('content')}"
    if str(mime_type) not in _MEDIA or not isinstance(path, str):
        return None
    source = {"media_type": mime_type, "path": path}
    return {"type": str(mime_type).partition("/")[0], "source": source}


def parts_of(message: Message) -> list[Mapping[str, Any]]:
    """Return the parts of a message of the conventions or of the chat API."""
    parts = message.get("parts")
    return objects(parts if isinstance(parts, list) else read_message(message)["parts"])


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


def _held(step: Transition) -> Mapping[str, Any]:
    return object_of(step.action[0].get(KEY)) if step.action else {}


def restore(natural: Row, rest: Mapping[str, Any]) -> Row:
    """Return an object of the format with the rest of it; a reward given since stays."""
    found = {**natural, **rest}
    for name in NESTED & natural.keys() & rest.keys():
        if natural[name] is not None and rest[name] is not None:
            found[name] = restore(natural[name], rest[name])
    if natural.get("extra") and "extra" in rest:
        found["extra"] = {**(rest["extra"] or {}), **natural["extra"]}
    return {name: value for name, value in found.items() if value is not None}


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
    trajectories_of=lambda part: add_usage(part, KEY),
)
