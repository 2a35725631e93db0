"""Spans of a rollout are those its transitions and views are made of, late rewards included."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_otel import Store, auto_trace, emit_action, emit_reward
from lightning_otel import conventions as c
from lightning_otel.emitters import reward_span
from lightning_otel.store.layout import Layout
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import Span

RunPython = Callable[..., str]
TARGETS = ("rollout_id", "span_id", "response_id")


@pytest.fixture
def call(store: Store, make_span: Callable[..., Span]) -> Span:
    """A stored model call of rollout ``r1`` with a response id."""
    span = make_span(
        name="chat m",
        attributes={
            c.OPERATION: "chat",
            c.ROLLOUT_ID: "r1",
            c.ATTEMPT_ID: "1",
            c.RESPONSE_ID: "chatcmpl-1",
        },
    )
    store.add([span])
    return span


def _target(call: Span, key: str) -> dict[str, str]:
    values = {"rollout_id": "r1", "span_id": call.span_id, "response_id": "chatcmpl-1"}
    return {key: values[key]}


def _names(store: Store, rollout_id: str) -> list[str]:
    return [span.name for span in store.spans(rollout_id=rollout_id)]


@pytest.mark.parametrize("key", TARGETS)
def test_spans_hold_a_reward_given_later(store: Store, call: Span, key: str) -> None:
    """A reward in a trace of its own is listed with the rollout it judges, whatever names it."""
    store.add([reward_span({"good": 1.0}, **_target(call, key))])

    assert _names(store, "r1") == ["chat m", c.SPAN_ANNOTATION]


@pytest.mark.parametrize("key", TARGETS)
def test_spans_hold_a_reward_of_another_process(
    store: Store, call: Span, run_python: RunPython, key: str
) -> None:
    """So is one that another process gave."""
    run_python(
        "import sys; from lightning_otel import auto_trace, emit_reward, Store\n"
        "with auto_trace(store=Store(sys.argv[1]), rollout_id='judge'):\n"
        "    emit_reward(1.0, **{sys.argv[2]: sys.argv[3]})",
        store.name,
        key,
        _target(call, key)[key],
    )

    assert _names(store, "r1") == ["chat m", c.SPAN_ANNOTATION]
    assert _names(store, "judge") == [c.SPAN_ROLLOUT]


def test_spans_are_those_the_views_count(store: Store, call: Span) -> None:
    """For every rollout there are as many spans as its row says, and all of them once in all.

    But a reward whose target is not there, which is of no rollout.
    """
    with auto_trace(store=store, rollout_id="r2"):
        emit_action("think", "aloud")
        emit_reward(0.5)
        emit_reward(0.1, span_id=call.span_id)
    store.add([reward_span({"late": 0.2}, rollout_id="r2"), reward_span({"lost": 1.0})])

    rows = store.rollouts().rows()

    listed = {row["rollout_id"]: store.spans(rollout_id=row["rollout_id"]).rows() for row in rows}
    assert {name: len(spans) for name, spans in listed.items()} == {
        row["rollout_id"]: row["spans"] for row in rows
    }
    assert sum(map(len, listed.values())) == len(store.spans().rows()) - 1
    assert {len(spans) for spans in listed.values()} == {2, 4}


def test_spans_with_late_rewards_keep_their_order(store: Store, call: Span) -> None:
    """They are sorted by their start, in every form they are handed out."""
    store.add(
        [
            reward_span({"b": 1.0}, rollout_id="r1"),
            reward_span({"a": 1.0}, response_id="chatcmpl-1"),
        ]
    )

    table = store.spans(rollout_id="r1")

    starts = [span.start_ns for span in table]
    assert starts == sorted(starts)
    assert table.df()["start_ns"].tolist() == starts
    assert len(starts) == 3


def test_spans_of_a_rollout_and_a_trace_are_of_both(store: Store, call: Span) -> None:
    """A reward in a trace of its own is not among those of the call's trace."""
    store.add([reward_span({"late": 1.0}, rollout_id="r1")])

    found = store.spans(rollout_id="r1", trace_id=call.trace_id).rows()

    assert [span.name for span in found] == ["chat m"]


def test_spans_in_memory_hold_late_rewards(call: Span) -> None:
    """A store in memory says the same."""
    store = Store(":memory:")
    store.add([call, reward_span({"late": 1.0}, response_id="chatcmpl-1")])

    assert _names(store, "r1") == ["chat m", c.SPAN_ANNOTATION]


def test_records_step_over_a_torn_line(tmp_path: Path, make_span: Callable[..., Span]) -> None:
    """A line that another thread has half written is not there yet, and hides no other one."""
    writer = SpanWriter(Layout(tmp_path / "t.duckdb"))
    assert writer.layout is not None
    writer.layout.create()
    since = writer.position()
    writer.add(make_span(attributes={c.ROLLOUT_ID: "r1"}))
    with writer.paths[0].open("ab") as file:
        file.write(b'{"record":"span","rollout_id":"r1","span_id":"ab')

    records = writer.records(since, "r1")

    assert records is not None
    assert [record["rollout_id"] for record in records] == ["r1"]
