"""Strategies for span forests of every shape, as several broken tracers might leave them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from tests.adapter.forest import (
    SECOND,
    call_attributes,
    reward_attributes,
    said,
    token_attributes,
)

from lightning_otel import conventions as c
from lightning_otel.types import Span

KINDS = ("work", "agent", "call", "failed", "embedding", "reward", "damaged", "action", "seen")
ODD: list[Any] = [
    None,
    "",
    "text",
    "[",
    "[]",
    "{}",
    "null",
    "[null]",
    "[1]",
    "\ud800",
    '["\\ud800"]',
    "[" * 400 + "]" * 400,
    "[" * 100_000,
    '[{"role":"user"}]',
    '[{"parts":[1]}]',
    0,
    -1,
    2**63,
    2**64,
    10**400,
    10**5000,
    1.5,
    float("nan"),
    float("-inf"),
    True,
    b"x",
    [],
    ["a"],
    [None],
    [[]],
    [{}],
    {"a": {}},
]
"""Values of every type that no attribute should have."""
KEYS = (
    c.OPERATION,
    c.AGENT_NAME,
    c.ROLLOUT_ID,
    c.ATTEMPT_ID,
    c.RESPONSE_ID,
    c.FINISH_REASONS,
    c.INPUT_TOKENS,
    c.TRACK_ONLY,
    c.CUT,
    c.OBJECT_LITERAL,
    c.REWARD_VALUE,
    c.REWARD_NAME,
    f"{c.REWARD_PREFIX}.1.value",
    f"{c.LINK_PREFIX}.0.key_match",
    f"{c.LINK_PREFIX}.0.value_match",
    *c.BODY_KEYS,
)


@dataclass(frozen=True)
class Shape:
    """What one span of a forest is drawn from."""

    kind: str
    parent: int
    start: int
    length: int | None
    trace: int
    rollout: int | None
    attempt: int | None
    process: int
    is_counted: bool
    text: int
    response: int | None
    target: int | None


_shapes = st.builds(
    Shape,
    kind=st.sampled_from(KINDS),
    parent=st.integers(-3, 12),
    start=st.integers(0, 9),
    length=st.one_of(st.none(), st.integers(-2, 6)),
    trace=st.integers(0, 2),
    rollout=st.one_of(st.none(), st.integers(0, 2)),
    attempt=st.one_of(st.none(), st.integers(1, 2)),
    process=st.integers(0, 1),
    is_counted=st.booleans(),
    text=st.integers(0, 3),
    response=st.one_of(st.none(), st.integers(0, 3)),
    target=st.one_of(st.none(), st.integers(-3, 12)),
)


def span_id(index: int) -> str:
    """The id of the span at an index of a forest, or of one that is not there."""
    return f"{index & 0xFFFF:016x}"


def _attributes(index: int, shape: Shape) -> dict[str, Any]:
    response_id = None if shape.response is None else f"response-{shape.response}"
    target = None if shape.target is None else span_id(shape.target)
    # A conversation of as many turns as its number, so that some continue others.
    turns = [said("user" if turn % 2 == 0 else "assistant", "x") for turn in range(shape.text + 1)]
    call = {**call_attributes(turns, "x", response_id), **token_attributes([1, 2], [3])}
    reward = reward_attributes(
        (f"name {shape.text % 2}", float(index)),
        span_id=target if shape.response is None else None,
        response_id=response_id if target else None,
    )
    return {
        "work": {},
        "agent": {c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: f"agent {shape.text}"},
        "call": call,
        "failed": call,
        "embedding": {c.OPERATION: c.EMBEDDINGS},
        "reward": reward,
        "damaged": {**reward, c.REWARD_VALUE: "NaN"},
        "action": {c.OBJECT_LITERAL: f"act {shape.text}"},
        "seen": {c.OBJECT_LITERAL: f"see {shape.text}"},
    }[shape.kind]


_NAMES = {
    "reward": c.SPAN_ANNOTATION,
    "damaged": c.SPAN_ANNOTATION,
    "action": c.SPAN_ACTION,
    "seen": c.SPAN_OBSERVATION,
}


def _span(index: int, shape: Shape) -> Span:
    attributes = _attributes(index, shape)
    if shape.rollout is not None:
        attributes[c.ROLLOUT_ID] = f"rollout-{shape.rollout}"
    if shape.attempt is not None:
        attributes[c.ATTEMPT_ID] = str(shape.attempt)
    is_ended = shape.length is not None
    return Span(
        trace_id=f"{shape.trace:032x}",
        span_id=span_id(index),
        parent_span_id=None if shape.parent == -1 else span_id(shape.parent),
        name=_NAMES.get(shape.kind, shape.kind),
        start_ns=(shape.start + 10) * SECOND,
        end_ns=None if shape.length is None else (shape.start + 10 + shape.length) * SECOND,
        status="ERROR" if shape.kind == "failed" else "UNSET",
        attributes=attributes,
        process=f"process-{shape.process}",
        sequence=2 * index if shape.is_counted else -1,
        end_sequence=2 * index + 1 + (shape.length or 0) if shape.is_counted and is_ended else -1,
    )


def _spans(shapes: Sequence[Shape]) -> list[Span]:
    return [_span(index, shape) for index, shape in enumerate(shapes)]


forests = st.lists(_shapes, max_size=14).map(_spans)
"""Spans with ids of their own: any parents, clocks, processes, rollouts and links."""

odd_spans = st.lists(
    st.builds(
        Span,
        trace_id=st.sampled_from(["", "0" * 32, "t"]),
        span_id=st.sampled_from(["", "0" * 16, "a", "b", "c"]),
        parent_span_id=st.sampled_from([None, "", "a", "b", "c"]),
        name=st.sampled_from(["", c.SPAN_ANNOTATION, c.SPAN_ACTION, c.SPAN_OBSERVATION]),
        start_ns=st.integers(-5, 5),
        end_ns=st.one_of(st.none(), st.integers(-5, 5)),
        status=st.sampled_from(["UNSET", "OK", "ERROR", "?"]),
        attributes=st.dictionaries(
            st.sampled_from(KEYS),
            st.one_of(st.sampled_from(ODD), st.sampled_from([c.CHAT, c.LINK_SPAN_ID, "a"])),
        ),
        process=st.sampled_from(["", "p"]),
        sequence=st.integers(-1, 3),
        end_sequence=st.integers(-1, 3),
    ),
    max_size=8,
)
"""Spans with ids that repeat and attributes of every wrong type."""
