"""Spans for the adapter's tests, built by hand on a clock that counts."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_otel.adapter import Adaptation
from lightning_otel.adapter.tokens import encode_ids, encode_logprobs
from lightning_otel.types import Event, Message, Span, Trajectory, Transition
from lightning_otel.types import conventions as c

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
    return [answers(trajectory) for trajectory in trajectories]


def steps_of(found: Adaptation) -> list[Transition]:
    """Each transition once, in order of time."""
    every = {id(step): step for path in found.trajectories for step in path.transitions}
    return sorted(every.values(), key=lambda step: step.start_ns)


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
    stamps: dict[str, Any]
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
        self._now: dict[str, Any] = {}
        self.named: dict[str, str] = {}

    def turn(self, *, tick: str = "", trace: str = "", process: str = "", **others: str) -> None:
        """Have the spans that follow be of another time, process, trace or attempt."""
        self.tick = int(tick or self.tick)
        self._is_counted = self._is_counted and not others.pop("counted", "")
        self._now["clock"] = int(others.pop("clock", self._now.get("clock", 0)))
        if trace:
            self._now["trace_id"] = trace * 32
        if process:
            self._now["process"] = process
        keys = {"rollout": c.ROLLOUT_ID, "attempt": c.ATTEMPT_ID}
        stamps = {**self._stamps, **{keys[name]: value for name, value in others.items()}}
        self._stamps = {key: value for key, value in stamps.items() if value}

    @property
    def spans(self) -> list[Span]:
        """The spans so far; those that are not closed are incomplete."""
        return [self._span(each) for each in self._made.values()]

    def _span(self, made: _Open) -> Span:
        end_sequence = made.end if made.end is not None and self._is_counted else -1
        extra = dict(made.extra)
        ahead = extra.pop("clock", 0)
        fields: dict[str, Any] = {
            "trace_id": self.trace_id,
            "span_id": made.span_id,
            "parent_span_id": self.named.get(made.parent or "", made.parent),
            "name": made.name,
            "start_ns": (made.start + ahead) * SECOND,
            "end_ns": None if made.end is None else (made.end + ahead) * SECOND,
            "attributes": {**made.stamps, **made.attributes},
            "process": self._process,
            "sequence": made.start if self._is_counted else -1,
            "end_sequence": end_sequence,
            **extra,
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
        made = _Open(span_id, parent, name, self._next(), dict(attributes or {}), self._stamps)
        made.extra = {**self._now, **extra}
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

    def call(self, *words: Any, **extra: Any) -> str:
        """A call that starts and ends at once; gives its id."""
        span_id = self.open_call(*words, **extra)
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


# --- forests as text -----------------------------------------------------------------------------

_WORD = re.compile(r"(\+?)(?:([^/!@<]+)/)?([^@<(\[]+)((?:@[^@<(\[]+)*)(?:<([^(\[]*))?([(\[]?)")
_KEYS = {"id": c.RESPONSE_ID, "model": c.REQUEST_MODEL, "tokens": c.INPUT_TOKENS}
_LINKS = {"id": c.RESPONSE_ID, "span": c.LINK_SPAN_ID, "trace": c.LINK_TRACE_ID}
_FIELDS = ("scope", "kind", "status", "process", "parent", "span_id")
_FLAGS: dict[str, dict[str, Any]] = {
    "abandoned": {c.ABANDONED: True},
    "exact": token_attributes([1], [2]),
    "whole": {c.FINISH_REASONS: ["stop"]},
}
_MARKS = {"do": c.SPAN_ACTION, "see": c.SPAN_OBSERVATION}


_ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def conversation(*turns: str) -> list[dict[str, Any]]:
    """Messages of a user and an assistant in turn; ``s:``, ``u:``, ``a:``, ``t:`` name the role."""
    found = []
    for index, turn in enumerate(turns):
        role, _, text = turn.rpartition(":")
        found.append(said(_ROLES.get(role, ("user", "assistant")[index % 2]), text))
    return found


def draw(text: str, **options: Any) -> Forest:
    """Spans drawn as words, in order of time: ``A[ work( plan !.5 ) ] look<plan|done``.

    - ``work(`` begins an operation, ``A[`` an agent, ``tool(`` a tool; ``)`` and ``]`` end it.
    - ``plan`` is a call that answers so; ``look<a|b|c`` was asked a, answered b, asked c.
    - ``+look`` and ``+work(`` stay open until ``-look``; ``work/look`` lies in that one.
    - ``!.5`` and ``!ok=1,tone=.5`` are rewards, ``!:1,-,.5`` has a number for each step;
      ``!undo@span=given`` retracts one.
    - ``!0.5@on=a`` is an evaluation as others note it, an event of what it judges.
    - ``do:left`` and ``see:wall`` are marks.
    - ``@key=value`` is an attribute, a field of the span, or a link of a reward; ``@error``,
      ``@abandoned``, ``@exact`` and ``@whole`` are flags.
    - ``@as=name`` is what others call it by, ``@at=3-5`` its seconds on the clock.
    - ``#rollout=r2,attempt=2,trace=b,process=p2,tick=9`` holds for all that follows, as does
      ``clock=-60`` of clocks that are wrong; with ``#counted=no`` no process counted its spans.
    """
    forest = Forest(**options)
    for word in text.split():
        if word in (")", "]"):
            forest.close(forest._around.pop())
        elif word[0] == "#":
            forest.turn(**dict(pair.split("=") for pair in word[1:].split(",")))
        elif word[0] == "-":
            forest.close(forest.named[word[1:]])
        elif "@on=" in word:
            _evaluate(forest, *word[1:].split("@on="))
        else:
            _draw(forest, word)
    return forest


def _draw(forest: Forest, word: str) -> None:
    match = _WORD.fullmatch(word)
    assert match, word
    opened, parent, name, options, talk, bracket = match.groups()
    attributes: dict[str, Any] = {}
    extra: dict[str, Any] = {"parent": forest.named.get(parent, parent)}
    links: list[tuple[str, str]] = []
    title = name
    for key, is_pair, value in (option.partition("=") for option in options.split("@")[1:]):
        if key == "error":
            extra["status"] = "ERROR"
        elif not is_pair:
            attributes |= _FLAGS[key]
        elif key == "as":
            title = value
        elif key == "at":
            start, _, end = value.partition("-")
            extra |= {"start_ns": int(start) * SECOND, "end_ns": int(end or start) * SECOND}
        elif name[0] == "!" and key[0] != ".":
            target = {"trace": value * 32, "span": forest.named.get(value, value)}
            links.append((_LINKS.get(key, key), target.get(key, value)))
        elif key in _FIELDS:
            extra[key] = value
        else:
            attributes[_KEYS.get(key, key.removeprefix("."))] = _value(value)
    mark, _, content = name.partition(":")
    if mark == "!":
        steps = [None if each == "-" else float(each) for each in content.split(",")]
        attributes |= reward_attributes(sum(step or 0.0 for step in steps))
        attributes[c.REWARD_STEPS] = json.dumps(steps)
        name = c.SPAN_ANNOTATION
    elif name == "!undo":
        attributes[c.REWARD_RETRACTED] = True
        name = c.SPAN_ANNOTATION
    elif name[0] == "!":
        attributes |= reward_attributes(*map(_number, name[1:].split(",")))
        name = c.SPAN_ANNOTATION
    elif mark in _MARKS and content:
        attributes[c.OBJECT_LITERAL] = content
        name = _MARKS[mark]
    elif bracket == "[":
        attributes = {c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: name, **attributes}
        name = "invoke_agent"
    elif bracket and name.startswith("tool"):
        attributes[c.OPERATION] = c.EXECUTE_TOOL
    elif not bracket:
        asked = conversation(*talk.split("|")) if talk else "go on"
        attributes = {**call_attributes(asked, name), **attributes}
        name = "chat"
    for index, (key, value) in enumerate(links):
        attributes[f"{c.LINK_PREFIX}.{index}.key_match"] = key
        attributes[f"{c.LINK_PREFIX}.{index}.value_match"] = value
    span_id = forest.named[title] = forest.open(name, {**attributes, "drawn": title}, **extra)
    if not opened and bracket:
        forest._around.append(span_id)
    elif not opened:
        forest.close(span_id)


def _evaluate(forest: Forest, values: str, target: str) -> None:
    """Note evaluations as events of a span."""
    extra = forest._made[forest.named[target]].extra
    for name, _, value in (each.rpartition("=") for each in values.split(",")):
        said = {c.EVALUATION_NAME: name or c.PRIMARY_REWARD, c.EVALUATION_SCORE: _value(value)}
        event = Event(c.EVENT_EVALUATION, forest._next() * SECOND, said)
        extra["events"] = (*extra.get("events", ()), event)


def _number(text: str) -> float | tuple[str, float]:
    name, _, number = text.rpartition("=")
    return (name, float(number)) if name else float(number)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
