"""Spans for the adapter's tests, built by hand on a clock that counts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_otel import conventions as c
from lightning_otel.adapter.tokens import encode_ids, encode_logprobs
from lightning_otel.types import Message, Span, Trajectory

SECOND = 1_000_000_000


def said(role: str, text: str) -> dict[str, Any]:
    """A message of plain text."""
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def text_of(messages: Sequence[Message] | None) -> str:
    """The texts of messages, with a space between."""
    return " ".join(part["content"] for item in messages or () for part in item["parts"])


def answers(trajectory: Trajectory) -> list[str]:
    """What the steps of a trajectory answered, in order."""
    return [text_of(step.action) for step in trajectory.transitions]


def paths(trajectories: Sequence[Trajectory]) -> list[list[str]]:
    """The answers of each trajectory."""
    return [answers(trajectory) for trajectory in trajectories]


def rewards(trajectories: Sequence[Trajectory]) -> dict[str, float | None]:
    """The reward of each step by its answer."""
    return {
        text_of(step.action): step.reward
        for trajectory in trajectories
        for step in trajectory.transitions
    }


def call_attributes(
    asked: str | Sequence[Message], answered: str, response_id: str | None = None
) -> dict[str, Any]:
    """Attributes of a chat call; asked one text, or a whole conversation."""
    given = [said("user", asked)] if isinstance(asked, str) else list(asked)
    found: dict[str, Any] = {
        c.OPERATION: c.CHAT,
        c.INPUT_MESSAGES: _written(given),
        c.OUTPUT_MESSAGES: _written([{**said("assistant", answered), "finish_reason": "stop"}]),
    }
    if response_id is not None:
        found[c.RESPONSE_ID] = response_id
    return found


def _written(messages: Sequence[Message]) -> str:
    """Messages as this package writes them."""
    return json.dumps(messages, separators=(",", ":"))


def token_attributes(
    prompt_ids: Sequence[int], response_ids: Sequence[int], logprobs: Sequence[float] = ()
) -> dict[str, str]:
    """Attributes that hold token ids and logprobs."""
    return {
        c.PROMPT_TOKEN_IDS: encode_ids([prompt_ids]),
        c.RESPONSE_TOKEN_IDS: encode_ids([response_ids]),
        c.RESPONSE_LOGPROBS: encode_logprobs([logprobs]),
    }


def reward_attributes(
    *values: float | tuple[str, float],
    span_id: str | None = None,
    response_id: str | None = None,
    match: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Attributes of a reward: numbers, or names and numbers, the primary one first."""
    found: dict[str, Any] = {}
    for index, value in enumerate(values):
        name, number = value if isinstance(value, tuple) else (c.PRIMARY_REWARD, value)
        found[f"{c.REWARD_PREFIX}.{index}.name"] = name
        found[f"{c.REWARD_PREFIX}.{index}.value"] = number
    links = [(k, v) for k, v in ((c.LINK_SPAN_ID, span_id), (c.RESPONSE_ID, response_id)) if v]
    for index, (key, target) in enumerate([*links, *(match or {}).items()]):
        found[f"{c.LINK_PREFIX}.{index}.key_match"] = key
        found[f"{c.LINK_PREFIX}.{index}.value_match"] = target
    return found


@dataclass
class _Open:
    span_id: str
    parent: str | None
    name: str
    start: int
    attributes: dict[str, Any]
    end: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Forest:
    """Spans of one attempt in one process; each start and each end takes one tick.

    A tick is the process's sequence number and, times a second, its wall clock.
    """

    def __init__(
        self,
        *,
        rollout_id: str | None = "r1",
        attempt_id: str | None = "1",
        trace_id: str = "a" * 32,
        process: str = "p1",
        tick: int = 0,
        is_counted: bool = True,
    ) -> None:
        self.trace_id = trace_id
        self.tick = tick
        self._process = process
        self._is_counted = is_counted
        self._stamps: dict[str, Any] = {}
        if rollout_id is not None:
            self._stamps[c.ROLLOUT_ID] = rollout_id
        if attempt_id is not None:
            self._stamps[c.ATTEMPT_ID] = attempt_id
        self._made: dict[str, _Open] = {}
        self._around: list[str] = []

    @property
    def spans(self) -> list[Span]:
        """The spans so far; those that are not closed are incomplete."""
        return [self._span(each) for each in self._made.values()]

    def _span(self, made: _Open) -> Span:
        end_sequence = made.end if made.end is not None and self._is_counted else -1
        fields: dict[str, Any] = {
            "trace_id": self.trace_id,
            "span_id": made.span_id,
            "parent_span_id": made.parent,
            "name": made.name,
            "start_ns": made.start * SECOND,
            "end_ns": None if made.end is None else made.end * SECOND,
            "attributes": {**self._stamps, **made.attributes},
            "process": self._process,
            "sequence": made.start if self._is_counted else -1,
            "end_sequence": end_sequence,
            **made.extra,
        }
        return Span(**fields)

    def _next(self) -> int:
        self.tick += 1
        return self.tick

    def open(
        self,
        name: str = "work",
        attributes: Mapping[str, Any] | None = None,
        *,
        parent: str | None = None,
        **extra: Any,
    ) -> str:
        """Start a span in the innermost block, or in a named parent; gives its id."""
        if parent is None and self._around:
            parent = self._around[-1]
        span_id = f"{self._process}{len(self._made):014x}"
        made = _Open(span_id, parent, name, self._next(), dict(attributes or {}), extra=extra)
        self._made[span_id] = made
        return span_id

    def tag(self, span_id: str, **attributes: Any) -> None:
        """Give a span further attributes."""
        self._made[span_id].attributes.update(attributes)

    def close(self, *span_ids: str) -> None:
        """End spans."""
        for span_id in span_ids:
            self._made[span_id].end = self._next()

    @contextmanager
    def inside(self, name: str = "work", **attributes: Any) -> Iterator[str]:
        """A span that is open, and the parent of what is made, within the block."""
        span_id = self.open(name, attributes)
        self._around.append(span_id)
        yield span_id
        self._around.pop()
        self.close(span_id)

    @contextmanager
    def agent(self, name: str) -> Iterator[str]:
        """The span of an agent at work."""
        with self.inside("invoke_agent", **{c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: name}) as it:
            yield it

    def make(
        self, name: str = "work", attributes: Mapping[str, Any] | None = None, **extra: Any
    ) -> str:
        """A span that starts and ends at once; gives its id."""
        span_id = self.open(name, attributes, **extra)
        self.close(span_id)
        return span_id

    def open_call(
        self,
        answered: str,
        asked: str | Sequence[Message] = "go on",
        *,
        response_id: str | None = None,
        parent: str | None = None,
        **extra: Any,
    ) -> str:
        """Start a call; gives its id."""
        attributes = call_attributes(asked, answered, response_id)
        return self.open("chat", attributes, parent=parent, **extra)

    def call(
        self,
        answered: str,
        asked: str | Sequence[Message] = "go on",
        *,
        response_id: str | None = None,
        parent: str | None = None,
        **extra: Any,
    ) -> str:
        """A call; gives its id."""
        span_id = self.open_call(answered, asked, response_id=response_id, parent=parent, **extra)
        self.close(span_id)
        return span_id

    def reward(
        self,
        *values: float | tuple[str, float],
        span_id: str | None = None,
        response_id: str | None = None,
        match: Mapping[str, str] | None = None,
        steps: Sequence[float | None] = (),
        parent: str | None = None,
    ) -> str:
        """A reward, or a sequence of them; gives its id."""
        given = values or (sum(step for step in steps if step is not None),)
        links = {"span_id": span_id, "response_id": response_id, "match": match}
        attributes = reward_attributes(*given, **links)  # type: ignore[arg-type]  # of each its own type
        if steps:
            attributes[c.REWARD_STEPS] = json.dumps(list(steps))
        return self.make(c.SPAN_ANNOTATION, attributes, parent=parent)
