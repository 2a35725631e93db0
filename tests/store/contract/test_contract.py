"""Whatever engine holds the spans, a store gives the same rows for them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from tests.store.conftest import Rollout
from tests.store.contract.conftest import Held

from lightning_otel import Store
from lightning_otel.errors import NotFoundError
from lightning_otel.store.selection import INDEX_COLUMNS, Selection
from lightning_otel.tracing.emitters import reward_span
from lightning_otel.types import Event, Link, Report, Span
from lightning_otel.types import conventions as c

START_NS = 1_790_000_000_000_000_000


BAD: dict[str, Any] = {
    "int": 1,
    "digits": "1",
    "float": 1.0,
    "tiny": 1e-300,
    "minus zero": -0.0,
    "largest": 2**63 - 1,
    "beyond int64": 2**64 - 1,
    "beyond all": "340282366920938463463374607431768211456",
    "true": True,
    "text true": "true",
    "null": None,
    "text null": "null",
    "empty": "",
    "": "no name",
    "list": [1, 2.5, "x", None, {"deep": [[]]}],
    "text list": "[1, 2]",
    "object": {"a": {"b": "c"}},
    "empty list": [],
    "a.b/c~d$'\"\\`": "key of signs",
    "$.path": "like a path",
    "/pointer": "like another",
    "nul": "before\x00after",
    "lines": "one\ntwo\r\n\ttab\x1b",
    "unicode": "ünï 😀 \u202e \ufeff \U0010ffff",
    "NaN": "NaN",
    "injection": "'; DROP TABLE spans; --",
    "lightning.unknown": "ours, but not known",
}


def bad_spans() -> list[Span]:
    """Spans with every value that an engine could trip over."""
    base = Span("ab" * 16, "cd" * 8, None, "n", START_NS, START_NS + 1)
    return [
        replace(base, attributes=BAD, name="nämé \x00 '\"\\"),
        replace(base, span_id="01" * 8, parent_span_id="cd" * 8, otel_resource=BAD, name=""),
        replace(
            base,
            span_id="02" * 8,
            events=(Event("e", START_NS, BAD), Event("", 0), Event("exception", 17, {"n": [1]})),
            links=(Link("ab" * 16, "cd" * 8, BAD), Link("0" * 32, "0" * 16)),
        ),
        replace(base, span_id="03" * 8, end_ns=None, sequence=3, process="p"),
        replace(base, span_id="04" * 8, end_ns=START_NS - 5, status="ERROR", status_message="ß'"),
        replace(base, span_id="05" * 8, start_ns=0, end_ns=2**62 - 1, kind="PRODUCER"),
        replace(base, span_id="06" * 8, kind="CONSUMER", status="OK", scope="some.library"),
        replace(
            base,
            span_id="07" * 8,
            # Bodies that are no text stay attributes; one that is empty is there all the same.
            attributes={c.INPUT_MESSAGES: [{"role": "user"}], c.OUTPUT_MESSAGES: ""},
        ),
        replace(base, span_id="08" * 8, attributes={c.REWARD_VALUE: "no number"}, scope=c.SCOPE),
    ]


def by_id(spans: Any) -> dict[tuple[str, str], Span]:
    return {(span.trace_id, span.span_id): span for span in spans}


def test_spans_come_back_as_they_were(held: Held, rollout: Rollout) -> None:
    """Whatever stands in them: text that looks like a number stays text, numbers stay numbers."""
    spans = bad_spans() + rollout(1)

    held.write(spans)

    found = held.store.spans().rows()
    assert len(found) == len(spans)
    assert by_id(found) == by_id(spans)
    assert [span.start_ns for span in found] == sorted(span.start_ns for span in spans)


def test_an_empty_store_has_no_rows(held: Held) -> None:
    """Nothing is found in it, and nothing fails."""
    store = held.store

    assert store.spans().rows() == []
    assert store.rollouts().rows() == []
    assert store.transitions().rows() == []
    assert store.report().spans == 0
    with pytest.raises(NotFoundError):
        store.find("@last")


def test_a_span_written_again_is_there_once(held: Held, rollout: Rollout) -> None:
    """Of two with one id the first wins, whether the second is the same or another."""
    spans = rollout(1)
    held.write(spans)

    held.write([*spans, replace(spans[1], name="another", start_ns=spans[1].start_ns + 5)])

    assert by_id(held.store.spans()) == by_id(spans)
    assert [row["n"] for row in held.store.sql("SELECT count(*) AS n FROM spans")] == [len(spans)]


def test_a_selection_fetches_what_it_names(held: Held, rollout: Rollout) -> None:
    """By rollout, trace, time and name, with what is asked for beside it, and nothing else."""
    spans = [span for number in range(3) for span in rollout(number)]
    held.write(spans)
    first, second, third = spans[0], spans[10], spans[20]

    def fetched(**selection: Any) -> set[tuple[str, str]]:
        rows = held.store.source.fetch(Selection(**selection)).dicts()
        return {(row["trace_id"], row["span_id"]) for row in rows}

    def expected(condition: Callable[[Span], bool]) -> set[tuple[str, str]]:
        return {(span.trace_id, span.span_id) for span in spans if condition(span)}

    ids = [(span.trace_id, span.span_id) for span in (first, third)]
    assert fetched() == expected(lambda span: True)
    assert fetched(rollout_ids=["rollout-1"]) == expected(lambda s: s.rollout_id == "rollout-1")
    assert fetched(trace_ids=[first.trace_id, third.trace_id]) == expected(
        lambda span: span.trace_id != second.trace_id
    )
    assert fetched(since_ns=second.start_ns) == expected(lambda s: s.start_ns >= second.start_ns)
    assert fetched(until_ns=second.start_ns) == expected(lambda s: s.start_ns <= second.start_ns)
    assert fetched(only=ids) == set(ids)
    assert fetched(without=ids) == expected(lambda span: True) - set(ids)
    assert fetched(rollout_ids=["rollout-1"], trace_ids=[first.trace_id]) == set()
    assert fetched(rollout_ids=["x'; DROP TABLE spans; --", "\\"]) == set()
    assert fetched(rollout_ids=["rollout-0"], also=Selection(only=ids[1:])) == (
        expected(lambda span: span.rollout_id == "rollout-0") | {ids[1]}
    )


def test_a_selection_names_its_columns(held: Held, rollout: Rollout) -> None:
    """Those come and no others; attributes of rewards alone where only they are asked for."""
    spans = rollout(1)
    held.write(spans)

    narrow = list(held.store.source.fetch(Selection(columns=("name", "trace_id"))).dicts())
    index = list(held.store.source.fetch(Selection(columns=INDEX_COLUMNS)).dicts())

    assert {tuple(row) for row in narrow} == {("trace_id", "name")}
    assert "input_messages" not in index[0]
    assert {row["name"] for row in index if row["attributes"] is not None} == {c.SPAN_ANNOTATION}


def test_a_rollout_comes_with_the_rewards_given_to_it_later(held: Held, rollout: Rollout) -> None:
    """Also where the reward names its response and lies in a trace and rollout of its own."""
    held.write([*rollout(1), *rollout(2)])

    held.write([reward_span({"late": 0.5}, response_id="response-1-2")])

    assert len(held.store.spans(rollout_id="rollout-1").rows()) == len(rollout(1)) + 1
    assert len(held.store.spans(rollout_id="rollout-2").rows()) == len(rollout(2))
    counts = {row["rollout_id"]: row["rewards"] for row in held.store.rollouts()}
    assert counts == {"rollout-1": 4, "rollout-2": 3}


def test_ids_are_found_by_their_beginning(held: Held, rollout: Rollout) -> None:
    """Of rollouts, traces, spans and responses, and the last rollout by its name."""
    held.write([*rollout(1), *rollout(2)])

    assert held.store.find("rollout-1") == ("rollout", "rollout-1")
    assert held.store.find("@last") == ("rollout", "rollout-2")
    assert held.store.find("response-2-0") == ("response", "response-2-0")
    assert held.store.rollout_of("response", "response-2-0") == "rollout-2"


QUERIES = (
    "SELECT * FROM rollouts ORDER BY rollout_id",
    "SELECT * FROM calls ORDER BY trace_id, span_id",
    "SELECT * FROM rewards ORDER BY trace_id, span_id",
    "SELECT * EXCLUDE (attributes, events, links, otel_resource) FROM spans ORDER BY 1, 2",
    "SELECT length(input_messages) AS n FROM spans WHERE operation = 'chat' ORDER BY start_ns",
    "FROM spans SELECT attributes->>'$.int' AS i WHERE starts_with(name, 'n') ORDER BY span_id",
    "DESCRIBE spans",
)


class Expected(NamedTuple):
    """Spans, and what a store in memory makes of them."""

    spans: list[Span]
    rows: dict[str, list[dict[str, Any]]]
    steps: list[dict[str, Any]]
    report: Report


@pytest.fixture(scope="module")
def expected(rollout: Rollout) -> Expected:
    """Rollouts, bad spans, and a reward that came late."""
    spans = [span for number in range(4) for span in rollout(number)]
    spans += [*bad_spans(), reward_span({"late": 0.5}, response_id="response-3-1")]
    store = Store(":memory:")
    store.add(spans)
    table = store.transitions()
    steps = list(table.dicts())
    return Expected(
        spans, {query: list(store.sql(query)) for query in QUERIES}, steps, table.report()
    )


def test_views_and_transitions_are_those_of_every_engine(held: Held, expected: Expected) -> None:
    """Row for row what a store in memory gives for the same spans."""
    held.write(expected.spans)

    for query, rows in expected.rows.items():
        assert list(held.store.sql(query)) == rows, query
    table = held.store.transitions()
    assert list(table.dicts()) == expected.steps
    assert table.report() == expected.report
    assert len(expected.steps) == 12


def test_connect_gives_all_views_with_all_columns(held: Held, rollout: Rollout) -> None:
    """In a database of one's own, that nothing done in it leaves."""
    held.write(rollout(1))

    with held.store.connect() as con:
        rows = con.execute("SELECT input_messages FROM calls ORDER BY start_ns").fetchall()
        con.execute("DROP VIEW rollouts")

    assert "turn 2" in rows[-1][0]
    assert len(held.store.rollouts().rows()) == 1
