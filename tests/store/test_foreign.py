"""Spans of other conventions in the store: the hot columns and views know them as they do ours."""

from collections.abc import Callable
from pathlib import Path

import pytest
import requests
from opentelemetry import trace
from tests.adapter.fixtures import recorded
from tests.adapter.forest import call_attributes
from tests.viewer.browsing import KEY

from lightning_otel import Store, auto_trace, emit_action, emit_reward
from lightning_otel.adapter.interop import to_conventions
from lightning_otel.receivers import protobuf
from lightning_otel.store.engines.otlp import encode_request
from lightning_otel.store.schema import build_record, build_span
from lightning_otel.types import Event, Span
from lightning_otel.types import conventions as c

SOURCES = (
    "lightning",
    "current",
    "legacy",
    "flattened",
    "openinference",
    "openllmetry",
    "agentops",
    "agentlightning",
    "litellm",
)


@pytest.mark.parametrize("source", SOURCES)
def test_calls_view_knows_the_calls(store: Store, source: str) -> None:
    """Each request is one call with its model, id and usage."""
    store.add(recorded(source))
    # The old OpenLLMetry does not count the tokens of a stream.
    streamed = ((None, None),) * 2 if source == "flattened" else ((58, 3), (66, 4))

    calls = store.sql(
        "SELECT operation, model, response_id, input_tokens, output_tokens FROM calls "
        "ORDER BY start_ns"
    ).rows()

    assert [tuple(row.values()) for row in calls] == [
        ("chat", "toy-policy", f"chatcmpl-{number:024d}", *usage)
        for number, usage in enumerate(((38, 3), (46, 4), *streamed), 1)
    ]


@pytest.mark.parametrize("source", ["current", "openinference", "openllmetry", "agentops"])
def test_rollouts_view_knows_agents_and_tools(store: Store, source: str) -> None:
    """A rollout counts its calls and names its agents; tools that ran are operations."""
    store.add(recorded(source))

    (rollout,) = store.sql("SELECT calls, agents, input_tokens FROM rollouts").rows()
    tools = store.sql(f"SELECT count(*) AS n FROM spans WHERE operation = '{c.EXECUTE_TOOL}'")

    assert tuple(rollout.values()) == (4, "calc", 208)
    assert tools.rows() == [{"n": 2}]


def test_rewards_view_and_rollout_of_agentlightning(store: Store) -> None:
    """Ids that stand on the resource are the rollout's, and its reward is found there."""
    spans = recorded("agentlightning")
    store.add(spans)

    (reward,) = store.sql("SELECT rollout_id, attempt_id, value FROM rewards").rows()

    resource = spans[0].otel_resource
    assert reward == {
        "rollout_id": resource[c.ROLLOUT_ID],
        "attempt_id": resource[c.ATTEMPT_ID],
        "value": 1.0,
    }


@pytest.mark.parametrize("source", SOURCES)
def test_a_foreign_span_is_kept_as_it_was(source: str) -> None:
    """Readers fill columns; what is stored is the span as it came."""
    for span in recorded(source):
        assert build_span(build_record(span)) == span


@pytest.mark.parametrize("missing", ["", None])
def test_an_empty_rollout_id_is_none(store: Store, missing: str | None) -> None:
    """An empty id names no rollout, in Python as in SQL: the span belongs to its trace's."""
    attributes = {c.ROLLOUT_ID: missing, c.ATTEMPT_ID: missing, c.OPERATION: c.CHAT}
    store.add([Span("a" * 32, "b" * 16, None, "chat", 1, 2, attributes=attributes)])

    found = store.sql("SELECT rollout_id, attempt_id FROM rollouts").rows()

    assert found == [{"rollout_id": "a" * 32, "attempt_id": "1"}]


GOOD = {c.EVALUATION_NAME: "relevance", c.EVALUATION_SCORE: 0.75, c.EVALUATION_EXPLANATION: "so"}


def earned(store: Store) -> list[tuple[object, ...]]:
    """Each reward by the views, and what the steps earned by the adapter."""
    told = store.sql("SELECT name, value FROM rewards ORDER BY start_ns").rows()
    steps = store.trajectories()
    whole = store.sql("SELECT reward FROM rollouts").rows()
    return [
        *(tuple(row.values()) for row in told),
        tuple(step.reward for path in steps for step in path.transitions),
        tuple(row["reward"] for row in whole),
    ]


def test_an_evaluation_of_others_is_a_reward(store: Store, served: Callable[..., str]) -> None:
    """Received as an event of a call or as a span beside it, and sent twice: each counts once."""
    call = Span(
        "a" * 32, "b" * 16, None, "chat", 1, 9, kind="CLIENT", scope="theirs",
        attributes=call_attributes("why?", "so"), events=(Event(c.EVENT_EVALUATION, 5, GOOD),),
    )  # fmt: skip
    judged = Span(
        "c" * 32, "d" * 16, None, "chat", 11, 12, scope="theirs",
        attributes=call_attributes("and?", "that"),
    )  # fmt: skip
    beside = Span(
        "c" * 32, "e" * 16, "d" * 16, c.EVENT_EVALUATION, 13, 13, scope="theirs",
        attributes={**GOOD, c.EVALUATION_SCORE: 1},
    )  # fmt: skip
    url = served(store, "", key=KEY) + "/v1/traces"
    for spans in ([call, judged, beside], [call]):
        body = encode_request(spans, with_content=True)
        kind = {"Content-Type": "application/x-protobuf"}
        assert requests.post(url, body, headers=kind, timeout=9).ok

    assert earned(store) == [
        ("relevance", 0.75), ("relevance", 1.0), (0.75, 1.0), (0.75, 1.0)
    ]  # fmt: skip
    (kept,) = (each for each in store.spans(trace_id=call.trace_id) if each.span_id == call.span_id)
    assert kept.events == call.events


def test_an_evaluation_noted_in_process_is_a_reward_once(store: Store, tmp_path: Path) -> None:
    """On the span at work; and where it goes on to another store, as ours do in both forms."""
    with auto_trace(store=store, rollout_id="r1"):
        emit_action("first")
        emit_reward(0.5)
        emit_action("second")
        trace.get_current_span().add_event(c.EVENT_EVALUATION, GOOD)
        trace.get_current_span().add_event(c.EVENT_EVALUATION, {c.EVALUATION_NAME: "no number"})
    other = Store(tmp_path / "other.duckdb")
    sent = [to_conventions(span, with_content=True) for span in store.spans()]
    body = encode_request(sent, with_content=True)
    other.add([each for each in protobuf.decode_spans(body, "") if isinstance(each, Span)])

    assert earned(store) == earned(other) == [
        ("primary", 0.5), ("relevance", 0.75), (0.5, 0.75), (1.25,)
    ]  # fmt: skip
