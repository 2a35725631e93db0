"""ATIF documents as spans: a call for each step that asked a model, with all that was said before.

What a step says beyond its span lies under ``atif.KEY`` of its message, for ``export atif``.

Source: Harbor's RFC 0001, ATIF v1.0 to v1.8.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, TypeAlias

import orjson

from lightning_otel.adapter.tokens import encode_ids, encode_logprobs, read_tokens
from lightning_otel.dataset.formats import atif
from lightning_otel.messages import (
    content_parts,
    flatten_tools,
    message,
    reasoning_part,
    text_part,
    tool_call_part,
    tool_response_part,
)  # fmt: skip
from lightning_otel.messages.media import to_text
from lightning_otel.receivers.builder import MOST_BYTES, Builder, parse_time
from lightning_otel.receivers.otlp import TIMES, InvalidSpanError, Object
from lightning_otel.types import Span, Trajectory, Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.values import json_text, write_json

Place: TypeAlias = tuple[int, ...]
_VERSION: Final = re.compile(r"ATIF-v1\.\d+")
_TICK_NS: Final = 1000
_TYPES: Final[Mapping[str, Any]] = {
    "text": str, "list": list, "object": dict, "integer": int, "number": (int, float),
    "truth": bool, "content": (str, list), "effort": (str, int, float),
}  # fmt: skip
_TOKENS: Final = (
    (c.PROMPT_TOKEN_IDS, "prompt_token_ids", encode_ids),
    (c.RESPONSE_TOKEN_IDS, "completion_token_ids", encode_ids),
    (c.RESPONSE_LOGPROBS, "logprobs", encode_logprobs),
)
_FIELDS: Final = {
    "trajectory": "schema_version:text! agent:object! steps:list! session_id:text "
    "trajectory_id:text notes:text final_metrics:object continued_trajectory_ref:text "
    "extra:object subagent_trajectories:list",
    "agent": "name:text! version:text model_name:text tool_definitions:list extra:object",
    "step": "step_id:integer! source:text! message:content! timestamp:text model_name:text "
    "reasoning_effort:effort reasoning_content:text tool_calls:list observation:object "
    "metrics:object extra:object llm_call_count:integer is_copied_context:truth",
    "call": "tool_call_id:text! function_name:text! arguments:object! extra:object",
    "observation": "results:list!",
    "result": "source_call_id:text content:content extra:object",
    "metrics": "prompt_tokens:integer completion_tokens:integer cached_tokens:integer "
    "cost_usd:number prompt_token_ids:list completion_token_ids:list logprobs:list extra:object",
}
"""Fields of each object, their types, and a mark behind those that must be there."""


def read_trajectory(document: Object) -> Iterator[Span]:
    """Return the spans of a document and its subagents, one by one.

    Raises:
        InvalidSpanError: It cannot be kept whole.
    """
    if not _VERSION.fullmatch(str(document.get("schema_version"))):
        raise InvalidSpanError(f"schema_version is {document['schema_version']!r}, none of ATIF v1")
    parts = dict(_walk(document, (), "trajectory"))
    main, silent = parts[()], [at for at, part in parts.items() if not atif.list_calls(part)]
    if len(silent) == len(parts):
        raise InvalidSpanError("no step of the trajectory asked a model: there is no call to keep")
    session, trajectory_id = main.get("session_id"), main.get("trajectory_id") or ""
    try:
        digest = sha256(orjson.dumps(document)).hexdigest()[:12]
    except TypeError as exc:
        raise InvalidSpanError(f"the trajectory has a value that no store holds: {exc}") from exc
    rollout_id, attempt_id = trajectory_id or f"{session or 'atif'}-{digest}", "1"
    if session and trajectory_id.startswith(f"{session}/"):
        rollout_id, attempt_id = session, trajectory_id[len(session) + 1 :]
    common = {c.ROLLOUT_ID: rollout_id, c.ATTEMPT_ID: attempt_id, c.CONVERSATION_ID: session}
    builder = Builder(f"atif\n{rollout_id}\n{attempt_id}", None, common)
    extra: dict[str, Any] = {"others": [[list(place), parts[place]] for place in silent]}
    if nulls := [list(at) for at in _find_nulls(document)]:
        extra["nulls"] = nulls
    is_judged = any(_rewards_of(step) for part in parts.values() for step in part["steps"])
    readings, names = [], {""}
    for place, part in parts.items():
        name = part["agent"]["name"] or "agent"
        name = next(name for name in (name, f"{name} {place}") if name not in names)
        names.add(name)
        if place not in silent:
            readings.append(_AtifDocument(builder, part, place, name, extra, is_judged=is_judged))
            extra = {"others": []}
    return (span for reading in readings for span in reading.spans())


def _walk(value: object, place: Place, where: str) -> Iterator[tuple[Place, dict[str, Any]]]:
    whole = _check("trajectory", value, where)
    whole["agent"] = _check("agent", whole["agent"], f"{where}.agent")
    steps = enumerate(whole["steps"])
    whole["steps"] = [_check_step(step, at, f"{where}.steps[{at}]") for at, step in steps]
    below = whole.pop("subagent_trajectories") if whole.get("subagent_trajectories") else ()
    yield place, whole
    for index, child in enumerate(below):
        yield from _walk(child, (*place, index), f"{where}.subagent_trajectories[{index}]")


def _check_step(content: object, index: int, where: str) -> dict[str, Any]:
    step = _check("step", content, where)
    if step["step_id"] != index + 1:
        raise InvalidSpanError(f"{where}.step_id is {step['step_id']}, not {index + 1}")
    if step["source"] not in ("system", "user", "agent"):
        raise InvalidSpanError(f"{where}.source is {step['source']}")
    if "tool_calls" in step:
        step["tool_calls"] = [_check("call", e, f"{where}.tool_calls") for e in step["tool_calls"]]
    if "metrics" in step:
        step["metrics"] = _check("metrics", step["metrics"], f"{where}.metrics")
    if "observation" in step:
        observed = _check("observation", step["observation"], f"{where}.observation")
        results = [_check("result", e, f"{where}.observation.results") for e in observed["results"]]
        step["observation"] = {**observed, "results": results}
    return step


def _check(kind: str, content: object, where: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise InvalidSpanError(f"{where} is no object")
    for field in _FIELDS[kind].split():
        name, _, kind_name = field.partition(":")
        value, types = content.get(name), _TYPES[kind_name.rstrip("!")]
        if value is None and field.endswith("!"):
            raise InvalidSpanError(f"{where}.{name} is missing")
        is_wrong = not isinstance(value, types) or (isinstance(value, bool) and types is not bool)
        if value is not None and is_wrong:
            raise InvalidSpanError(f"{where}.{name} is no {kind_name.rstrip('!')}")
    return {name: value for name, value in content.items() if value is not None}


class _AtifDocument:
    def __init__(
        self, builder: Builder, whole: Object, place: Place, name: str, extra: Object, *,
        is_judged: bool,
    ) -> None:  # fmt: skip
        """Read a document; the last call's message holds what the document says beside steps."""
        self._builder, self._whole, self._place, self._name = builder, whole, place, name
        self._is_judged = is_judged  # a step has a reward: the document's is no further one
        self._calls = atif.list_calls(whole)
        self._steps: list[Object] = whole["steps"][: self._calls[-1] + 1]
        self._times_ns = list(_read_times(whole["steps"]))
        self._attributes: dict[int, dict[str, Any]] = {}
        self._messages: list[list[str]] = []
        self._rewards = {at: _rewards_of(self._steps[at]) for at in self._calls}
        drafts: list[Transition] = []
        size = 0
        for index, step in enumerate(self._steps):
            answer, is_last = _message_of(step), index == self._calls[-1]
            answers = _answers_of(step) if not is_last else []
            if index in self._rewards:
                drafts.append(self._draft(index, answer))
                natural = atif.call_step(drafts[-1], _ignore)
            else:
                natural = atif.message_step(answer, _ignore)
            if answers:
                results = step["observation"]["results"]
                natural["observation"] = {"results": results}
            remainder = _find_rest(step, {**natural, "step_id": index + 1})
            record: dict[str, Any] = {"step": remainder} if remainder else {}
            if is_last:
                record |= self._read_document(drafts, extra)
            answer = {**answer, **({atif.KEY: record} if record else {})}
            answered = [message("tool", answers)] if answers else []
            self._messages.append([json_text(item) for item in (answer, *answered)])
            size += sum(len(write_json(text)) for text in self._messages[-1])
            own_size = sum(map(len, map(str, self._attributes.get(index, {}).values())))
            if size + own_size > MOST_BYTES:
                raise InvalidSpanError(
                    f"the messages up to step {index + 1} take more than {MOST_BYTES} bytes, "
                    "which one span cannot hold"
                )

    def _draft(self, index: int, answer: Object) -> Transition:
        step, agent = self._steps[index], self._whole["agent"]
        metrics, effort = step.get("metrics", {}), step.get("reasoning_effort")
        tools = flatten_tools(agent.get("tool_definitions"))
        model = step.get("model_name") or agent.get("model_name") or None
        values: dict[str, Any] = {
            c.REQUEST_MODEL: model,
            c.REQUEST_REASONING_LEVEL: None if effort is None else str(effort),
            c.TOOL_DEFINITIONS: json_text(tools) if tools else None,
            c.INPUT_TOKENS: metrics.get("prompt_tokens"),
            c.OUTPUT_TOKENS: metrics.get("completion_tokens"),
            c.CACHED_TOKENS: metrics.get("cached_tokens"),
        }
        try:
            for key, name, encode in _TOKENS:
                values[key] = encode([metrics[name]]) if metrics.get(name) else None
        except (TypeError, OverflowError) as exc:
            raise InvalidSpanError(f"step {index + 1}: metrics.{name} are no such numbers") from exc
        attributes = {key: value for key, value in values.items() if value is not None}
        self._attributes[index] = attributes
        prompt_ids, response_ids, logprobs, _ = read_tokens(attributes)
        return Transition(
            "", "", self._name, 0, (), (answer,), None, None, False, tools=tuple(tools),
            model=model,
            prompt_ids=prompt_ids, response_ids=response_ids, logprobs=logprobs,
            start_ns=self._times_ns[index], input_tokens=metrics.get("prompt_tokens"),
            output_tokens=metrics.get("completion_tokens"),
        )  # fmt: skip

    def _read_document(self, drafts: Sequence[Transition], extra: Object) -> dict[str, Any]:
        ids = self._builder.common[c.ROLLOUT_ID], self._builder.common[c.ATTEMPT_ID]
        trajectory = Trajectory(*ids, self._name, 0, tuple(drafts))
        natural = atif.describe(trajectory, self._whole["steps"], is_main=not self._place)
        remainder = _find_rest(self._whole, {**natural, "steps": self._whole["steps"]})
        record = {"after": self._whole["steps"][len(self._steps) :], **extra}
        rewards = _rewards_of(self._whole)
        if rewards and not self._is_judged:
            self._rewards[self._calls[-1]] = rewards
            record["reward"] = next(iter(rewards.values()))
        return {**record, "place": list(self._place), "document": remainder}

    def spans(self) -> Iterator[Span]:
        make, place = self._builder.make_span, ("agent", *self._place)
        above = place[:-1] if self._place else None
        task = next((step["message"] for step in self._steps if step["source"] == "user"), None)
        agent = {c.AGENT_NAME: self._name}
        about = {**agent, c.OPERATION: c.INVOKE_AGENT, c.TASK: json_text(task) if task else None}
        times_ns = self._times_ns[0] - _TICK_NS, self._times_ns[-1]
        yield make(place, above, f"invoke_agent {self._name}", *times_ns, attributes=about)
        history: list[str] = []
        for index, (step, texts) in enumerate(zip(self._steps, self._messages, strict=True)):
            key, time_ns = (*place, "step", index), self._times_ns[index]
            if index in self._attributes:
                attributes = {
                    **agent, **self._attributes[index], c.OPERATION: c.CHAT,
                    c.INPUT_MESSAGES: f"[{','.join(history)}]",
                    c.OUTPUT_MESSAGES: f"[{texts[0]}]",
                }  # fmt: skip
                name = f"chat {attributes.get(c.REQUEST_MODEL, '')}".strip()
                yield make(key, place, name, time_ns, time_ns, attributes=attributes, kind="CLIENT")
                if self._rewards[index]:
                    yield self._builder.make_reward(
                        (key, "reward"), key, self._rewards[index], time_ns
                    )
            history += texts
            if step.get("is_copied_context"):
                continue
            results = {
                result.get("source_call_id"): result.get("content")
                for result in step.get("observation", {}).get("results", ())
            }
            for number, call in enumerate(step.get("tool_calls", ())):
                tool = {
                    **agent, c.OPERATION: c.EXECUTE_TOOL, c.TOOL_NAME: call["function_name"],
                    c.TOOL_CALL_ID: call["tool_call_id"],
                    c.TOOL_ARGUMENTS: json_text(call["arguments"]),
                    c.TOOL_RESULT: to_text(results.get(call["tool_call_id"])),
                }  # fmt: skip
                name = f"execute_tool {call['function_name']}"
                began_ns = time_ns + 1 + number  # after the call
                yield make((*key, number), place, name, began_ns, began_ns, attributes=tool)


def _ignore(_: str) -> None:
    """Pass over what has no place: the rest of the step holds it."""


def _message_of(step: Object) -> dict[str, Any]:
    content, thought = step["message"], step.get("reasoning_content")
    items = list(map(_part_of, content)) if isinstance(content, list) else content_parts(content)
    if step["source"] != "agent":
        return message(step["source"], items)
    parts = [reasoning_part(thought)] if thought else []
    parts += items
    for index, call in enumerate(step.get("tool_calls", ())):
        part = tool_call_part(call["tool_call_id"], call["function_name"], call["arguments"])
        remainder = _find_rest(call, atif.tool_call_of(part, index))
        parts.append({**part, **({atif.KEY: remainder} if remainder else {})})
    return message("assistant", parts or [text_part("")])


def _answers_of(step: Object) -> list[dict[str, Any]]:
    if step["source"] != "agent":
        return []
    called, parts = [call["tool_call_id"] for call in step.get("tool_calls", ())], []
    for result in step.get("observation", {}).get("results", ()):
        content = result.get("content")
        answer = list(map(_part_of, content)) if isinstance(content, list) else content
        part = tool_response_part(result.get("source_call_id"), answer)
        remainder = _find_rest(result, atif.result_of(part, called, _ignore))
        parts.append({**part, **({atif.KEY: remainder} if remainder else {})})
    return parts


def _part_of(part: Any) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise InvalidSpanError("a part of a message is no object")
    source = part.get("source")
    if not isinstance(source, dict):
        return text_part(part["text"]) if isinstance(part.get("text"), str) else dict(part)
    fields = {"mime_type": source.get("media_type"), "uri": source.get("path")}
    return {"type": "uri", "modality": part.get("type"), **fields}


def _read_times(steps: Sequence[Object]) -> Iterator[int]:
    latest = _TICK_NS
    for step in steps:
        time_ns = parse_time(step.get("timestamp"))
        latest = max(latest + _TICK_NS, time_ns if time_ns in TIMES else 0)
        yield latest


def _rewards_of(record: Object) -> Mapping[str, float]:
    extra = record.get("extra", {})
    first, rewards = extra.get("reward"), extra.get("rewards")
    if not _is_reward(first):
        return {}
    if isinstance(rewards, dict) and rewards and all(map(_is_reward, rewards.values())):
        return rewards if next(iter(rewards.values())) == first else {c.PRIMARY_REWARD: first}
    return {c.PRIMARY_REWARD: first}


def _is_reward(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)


def _find_nulls(value: object, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the place of each field that is null rather than absent."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _find_nulls(item, (*at, index))
    elif isinstance(value, dict):
        for name, item in value.items():
            if item is None:
                yield (*at, name)
            else:
                yield from _find_nulls(item, (*at, name))


def _find_rest(whole: Mapping[str, Any], natural: Mapping[str, Any]) -> dict[str, Any]:
    """Return what :func:`atif.restore` needs to make an object whole; None is absence."""
    extras: dict[str, Any] = {}
    for name in {**natural, **whole}:
        ours, theirs = natural.get(name), whole.get(name)
        if name in atif.NESTED and isinstance(ours, dict) and isinstance(theirs, dict):
            ours, theirs = {}, _find_rest(theirs, ours)
        if ours != theirs:
            extras[name] = theirs
    return extras
