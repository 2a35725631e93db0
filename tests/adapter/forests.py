"""Strategies for span forests of every shape, as several broken tracers might leave them."""

from typing import Any

from hypothesis import strategies as st
from tests.adapter.forest import (
    SECOND,
    call_attributes,
    reward_attributes,
    said,
    token_attributes,
)

from lightning_otel.types import Span
from lightning_otel.types import conventions as c

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


def span_id(index: int) -> str:
    return f"{index & 0xFFFF:016x}"


_NAMES = {
    "reward": c.SPAN_ANNOTATION,
    "damaged": c.SPAN_ANNOTATION,
    "action": c.SPAN_ACTION,
    "seen": c.SPAN_OBSERVATION,
}


@st.composite
def _draw_forest(draw: st.DrawFn) -> list[Span]:
    def choose(least: int, most: int) -> int:
        return draw(st.integers(least, most))

    def may_choose(least: int, most: int) -> int | None:
        return draw(st.one_of(st.none(), st.integers(least, most)))

    spans = []
    for index in range(choose(0, 14)):
        kind, number = draw(st.sampled_from(KINDS)), choose(0, 3)
        response, target = may_choose(0, 3), may_choose(-3, 12)
        response_id = None if response is None else f"response-{response}"
        # A conversation of as many turns as its number, so that some continue others.
        turns = [said("user" if turn % 2 == 0 else "assistant", "x") for turn in range(number + 1)]
        call = {**call_attributes(turns, "x", response_id), **token_attributes([1, 2], [3])}
        reward = reward_attributes(
            (f"name {number % 2}", float(index)),
            span_id=span_id(target) if target is not None and response is None else None,
            response_id=response_id if target is not None else None,
        )
        attributes: dict[str, Any] = {
            "work": {},
            "agent": {c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: f"agent {number}"},
            "call": call,
            "failed": call,
            "embedding": {c.OPERATION: c.EMBEDDINGS},
            "reward": reward,
            "damaged": {**reward, c.REWARD_VALUE: "NaN"},
            "action": {c.OBJECT_LITERAL: f"act {number}"},
            "seen": {c.OBJECT_LITERAL: f"see {number}"},
        }[kind]
        rollout, attempt = may_choose(0, 2), may_choose(1, 2)
        attributes |= {} if rollout is None else {c.ROLLOUT_ID: f"rollout-{rollout}"}
        attributes |= {} if attempt is None else {c.ATTEMPT_ID: str(attempt)}
        parent, start, length = choose(-3, 12), 10 + choose(0, 9), may_choose(-2, 6)
        is_counted = draw(st.booleans())
        is_over = is_counted and length is not None
        spans.append(
            Span(
                trace_id=f"{choose(0, 2):032x}",
                span_id=span_id(index),
                parent_span_id=None if parent == -1 else span_id(parent),
                name=_NAMES.get(kind, kind),
                start_ns=start * SECOND,
                end_ns=None if length is None else (start + length) * SECOND,
                status="ERROR" if kind == "failed" else "UNSET",
                attributes=attributes,
                process=f"process-{choose(0, 1)}",
                sequence=2 * index if is_counted else -1,
                end_sequence=2 * index + 1 + (length or 0) if is_over else -1,
            )
        )
    return spans


forests = _draw_forest()
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
