"""A span becomes a record and comes back the same."""

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_otel import conventions as c
from lightning_otel.store.lines import line_of
from lightning_otel.store.schema import (
    BODY_COLUMNS,
    COLUMNS,
    NARROW_COLUMNS,
    record_of_span,
    span_of,
)
from lightning_otel.types import Event, Link, Span

TIMES = st.integers(0, (1 << 62) - 1)
TRACE_IDS = st.text("0123456789abcdef", min_size=32, max_size=32)
SPAN_IDS = st.text("0123456789abcdef", min_size=16, max_size=16)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.text(min_size=1) | st.sampled_from(
    [*BODY_COLUMNS.values(), c.OPERATION, c.AGENT_NAME, c.INPUT_TOKENS, c.REWARD_VALUE, c.CUT]
)
ATTRIBUTES = st.dictionaries(KEYS, JSON, max_size=6)
SPANS = st.builds(
    Span,
    trace_id=TRACE_IDS,
    span_id=SPAN_IDS,
    parent_span_id=st.none() | SPAN_IDS,
    name=st.text(),
    start_ns=TIMES,
    end_ns=st.none() | TIMES,
    kind=st.sampled_from(["INTERNAL", "CLIENT", "SERVER", "PRODUCER", "CONSUMER"]),
    status=st.sampled_from(["UNSET", "OK", "ERROR"]),
    status_message=st.text(),
    attributes=ATTRIBUTES,
    events=st.lists(st.builds(Event, st.text(), TIMES, ATTRIBUTES), max_size=2).map(tuple),
    links=st.lists(st.builds(Link, TRACE_IDS, SPAN_IDS, ATTRIBUTES), max_size=2).map(tuple),
    otel_resource=ATTRIBUTES,
    scope=st.text(),
    process=st.text(),
    sequence=st.integers(-1, 1 << 40),
    end_sequence=st.integers(-1, 1 << 40),
)


@given(SPANS)
def test_span_comes_back_from_its_line(span: Span) -> None:
    """Span to record to line to span is the identity for all that JSON knows."""
    line = line_of(record_of_span(span))

    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert span_of(orjson.loads(line)) == span


@given(SPANS)
def test_span_comes_back_from_a_row_of_json_texts(span: Span) -> None:
    """A row of the view, whose wide columns are JSON text, gives the same span."""
    record = orjson.loads(line_of(record_of_span(span)))
    row = {column: record.get(column) for column in COLUMNS}
    for column in ("attributes", "events", "links", "otel_resource"):
        row[column] = orjson.dumps(row[column]).decode()

    assert span_of(row) == span


@pytest.mark.parametrize(
    ("column", "key", "value", "kept"),
    [
        ("operation", c.OPERATION, "chat", "chat"),
        ("operation", c.OPERATION, 5, None),
        ("agent", c.AGENT_NAME, ["planner"], None),
        ("agent", c.AGENT_NAME, MagicMock(spec=str), None),
        ("response_id", c.RESPONSE_ID, b"id", None),
        ("rollout_id", c.ROLLOUT_ID, {"a": 1}, None),
        ("input_tokens", c.INPUT_TOKENS, 7, 7),
        ("input_tokens", c.INPUT_TOKENS, "7", None),
        ("input_tokens", c.INPUT_TOKENS, 7.5, None),
        ("input_tokens", c.INPUT_TOKENS, True, None),
        ("output_tokens", c.OUTPUT_TOKENS, 1 << 63, None),
        ("reward", c.REWARD_VALUE, 0.5, 0.5),
        ("reward", c.REWARD_VALUE, 1, 1.0),
        ("reward", c.REWARD_VALUE, True, None),
        ("reward", c.REWARD_VALUE, "0.5", None),
        ("reward", c.REWARD_VALUE, math.nan, None),
        ("reward", c.REWARD_VALUE, 10**400, None),
        ("model", c.REQUEST_MODEL, "asked", "asked"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_record_leaves_a_hot_column_of_the_wrong_type_empty(
    make_span: Callable[..., Span], column: str, key: str, value: object, kept: object
) -> None:
    """A hot column holds its type or nothing; the attribute keeps its value in any case."""
    record = record_of_span(make_span(attributes={key: value}))

    assert record[column] == kept
    assert record["attributes"][key] is value


def test_record_prefers_the_model_that_answered(make_span: Callable[..., Span]) -> None:
    """The model column is the response's, else the request's."""
    both = make_span(attributes={c.REQUEST_MODEL: "asked", c.RESPONSE_MODEL: "answered"})

    assert record_of_span(both)["model"] == "answered"


def test_record_takes_message_bodies_out_of_the_attributes(make_span: Callable[..., Span]) -> None:
    """A body of text stands in its own column only; one of another shape stays an attribute."""
    record = record_of_span(
        make_span(
            attributes={c.INPUT_MESSAGES: "[]", c.OUTPUT_MESSAGES: [1], c.TOOL_DEFINITIONS: None}
        )
    )

    assert record["input_messages"] == "[]"
    assert record["attributes"] == {c.OUTPUT_MESSAGES: [1], c.TOOL_DEFINITIONS: None}
    assert "output_messages" not in record


def test_record_of_an_added_span_counts_even_without_an_end(make_span: Callable[..., Span]) -> None:
    """A span copied from elsewhere without an end is kept as it is, not as the start of one."""
    record = record_of_span(make_span(end_ns=None))

    assert record["record"] == "span"
    assert record["end_ns"] is None


def test_record_of_nonsense_has_the_right_types(make_span: Callable[..., Span]) -> None:
    """Names and times that are none do not lose the line."""
    odd: dict[str, Any] = {"name": 5, "status_message": b"x", "scope": None, "start_ns": 1 << 80}

    record = record_of_span(make_span(**odd))

    assert (record["name"], record["status_message"], record["scope"]) == ("5", "eA==", "")
    assert record["start_ns"] == 0


def test_columns_are_narrow_ones_first() -> None:
    """What every reader scans stands before what few read."""
    assert list(COLUMNS)[: len(NARROW_COLUMNS)] == list(NARROW_COLUMNS)
    assert set(BODY_COLUMNS) < set(COLUMNS)
