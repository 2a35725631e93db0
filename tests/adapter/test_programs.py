"""What holds of whatever agents do: nothing is lost, doubled, or depends on how it was read.

``LIGHTNING_TEST_EXAMPLES`` is how many programs each property is tried on.
"""

import dataclasses
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random

import duckdb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.adapter.forests import forests
from tests.adapter.programs import programs

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.adapter import Adaptation, TripletAdapter, calls, marks
from lightning_otel.receivers import Rejected, protobuf
from lightning_otel.store.engines.otlp import request_of
from lightning_otel.store.schema import span_of
from lightning_otel.types import Credit, Report, Span, Transition

EXAMPLES = int(os.environ.get("LIGHTNING_TEST_EXAMPLES", "60"))
tried = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
tried_on_disk = settings(
    max_examples=max(3, EXAMPLES // 20), deadline=None, suppress_health_check=list(HealthCheck)
)
rules = st.sampled_from(["next", "last", "sibling", "discounted"])
anything = st.one_of(programs, programs, forests)


def transitions(found: Adaptation) -> list[Transition]:
    """Each transition once."""
    steps = (step for path in found.trajectories for step in path.transitions)
    return list({id(step): step for step in steps}.values())


def told(found: Adaptation) -> tuple[object, Report]:
    """A result whose order does not rest on the order in which parts were read."""
    paths = sorted(
        found.trajectories, key=lambda p: (p.rollout_id, p.attempt_id, p.agent, p.branch)
    )
    report = dataclasses.replace(
        found.report,
        dropped=tuple(sorted(found.report.dropped, key=lambda d: (d.trace_id, d.span_id, d.noun))),
        repairs=tuple(sorted(found.report.repairs, key=lambda r: (r.trace_id, r.span_id, r.rule))),
    )
    return paths, report


# --- nothing is lost or doubled ------------------------------------------------------------------


@tried
@given(anything, rules)
def test_every_call_is_a_transition_or_has_one_reason(spans: list[Span], rule: Credit) -> None:
    """Each call is in exactly one transition or dropped once, and the report counts them so."""
    found = TripletAdapter(rule).explain(spans)

    wanted = Counter(s.span_id for s in spans if calls.is_call(s))
    marked = {s.span_id for s in spans if marks.is_mark(s)}
    used = Counter(s.span_id for s in transitions(found) if s.span_id not in marked)
    dropped = Counter(d.span_id for d in found.report.dropped if d.noun == "call")
    assert used + dropped == wanted
    assert found.report.transitions == len(transitions(found))
    assert found.report.calls == found.report.transitions + dropped.total()


@tried
@given(anything)
def test_every_step_is_once_on_each_of_its_branches(spans: list[Span]) -> None:
    """A path holds no step twice, no path is told twice, and what is shared says so."""
    found = TripletAdapter().adapt(spans)

    on = Counter((s.trace_id, s.span_id) for path in found for s in path.transitions)
    paths = [tuple((s.trace_id, s.span_id) for s in path.transitions) for path in found]
    assert all(len(set(path)) == len(path) for path in paths)
    assert len(set(paths)) == len(paths)
    for path in found:
        assert len({(s.rollout_id, s.attempt_id, s.agent) for s in path.transitions}) == 1
        for step in path.transitions:
            assert step.is_shared == (on[step.trace_id, step.span_id] > 1)


@tried
@given(anything, rules)
def test_every_reward_is_placed_or_reported_once(spans: list[Span], rule: Credit) -> None:
    """A reward's values are whole on one transition, or it has one reason."""
    found = TripletAdapter(rule).explain(spans)

    values = {
        s.span_id: [
            v
            for k, v in s.attributes.items()
            if k.startswith(c.REWARD_PREFIX + ".") and k.endswith(".value")
        ]
        for s in spans
        if c.REWARD_VALUE in s.attributes
    }
    dropped = Counter(d.span_id for d in found.report.dropped if d.noun == "reward")
    placed = Counter(v for s in transitions(found) for v in s.rewards.values())
    assert set(dropped.values()) <= {1}
    assert placed == Counter(v for k, held in values.items() if k not in dropped for v in held)
    assert found.report.rewards == len(values)
    assert found.report.rewards_placed == len(values) - dropped.total()
    assert found.report.rewarded == sum(s.reward is not None for s in transitions(found))


# --- however it is read --------------------------------------------------------------------------


@tried
@given(anything, rules, st.randoms(use_true_random=False))
def test_the_order_of_the_spans_changes_nothing(
    spans: list[Span], rule: Credit, random: Random
) -> None:
    """Shuffled, the same comes out, in the same order."""
    expected = TripletAdapter(rule).explain(spans)
    shuffled = list(spans)
    random.shuffle(shuffled)

    assert TripletAdapter(rule).explain(shuffled) == expected


@tried
@given(anything, rules)
def test_spans_given_again_change_nothing(spans: list[Span], rule: Credit) -> None:
    """All of them twice, and once more as they began, are the spans they are."""
    expected = TripletAdapter(rule).explain(spans)
    # Without an id of its own a start is no other's.
    named = [s for s in spans if s.span_id.strip("0")]
    begun = [dataclasses.replace(s, end_ns=None, end_sequence=-1) for s in named]

    assert TripletAdapter(rule).explain([*spans, *begun, *spans]) == expected


@tried
@given(anything, rules)
def test_rollouts_by_themselves_are_as_among_others(spans: list[Span], rule: Credit) -> None:
    """What no link joins may be adapted apart."""
    apart: dict[str, list[Span]] = {}
    for span in spans:
        if any(key.startswith(c.LINK_PREFIX) for key in span.attributes):
            return
        if c.REWARD_VALUE in span.attributes and c.ATTEMPT_ID not in span.attributes:
            return
        apart.setdefault(span.rollout_id, []).append(span)

    parts = [TripletAdapter(rule).explain(own) for own in apart.values()]

    whole = told(TripletAdapter(rule).explain(spans))
    paths = [path for each in parts for path in each.trajectories]
    assert told(Adaptation(paths, Report.total(each.report for each in parts))) == whole


# --- through stores and doors --------------------------------------------------------------------


def stored(store: Store, rule: Credit) -> tuple[object, Report]:
    """What a store gives of its spans."""
    paths = list(store.trajectories(credit=rule, include_incomplete=True))
    return told(Adaptation(paths, store.report(credit=rule, include_incomplete=True)))


@tried_on_disk
@given(anything, rules, st.lists(st.integers(0, 3), min_size=60, max_size=60))
def test_stores_and_segments_joined_are_as_one(
    spans: list[Span], rule: Credit, parts: list[int]
) -> None:
    """Spans in two stores, settled and live, read into a third: the same comes out."""
    expected = told(TripletAdapter(rule).explain(spans))
    with tempfile.TemporaryDirectory() as folder:
        stores = [Store(Path(folder) / name / "traces.duckdb") for name in ("a", "b", "joined")]
        for part in range(4):
            own = stores[part % 2]
            own.add(s for s, at in zip(spans, parts, strict=False) if at == part)
            own.writer().seal()
            if part < 2 and own.layout is not None and own.layout.exists():
                own.settle()
        for each in stores[:2]:
            if each.layout is not None and each.layout.exists():
                stores[2].add(each.spans())
                stores[2].add(each.spans())  # what is there already is not there twice
        stores[2].writer().seal()

        if spans:
            assert stored(stores[2], rule) == expected


@tried_on_disk
@given(anything, rules)
def test_spans_exported_are_the_spans_imported(spans: list[Span], rule: Credit) -> None:
    """From ``export spans`` to Parquet, and from a packed database, adapt gives the same."""
    if not spans:
        return
    expected = told(TripletAdapter(rule).explain(spans))
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "traces.duckdb")
        store.add(spans)
        store.writer().seal()
        store.spans().to_parquet(Path(folder) / "spans.parquet")
        store.pack(Path(folder) / "packed.duckdb")
        with duckdb.connect() as con:
            exported = rows(con, f"SELECT * FROM '{folder}/spans.parquet'")
            con.execute(f"ATTACH '{folder}/packed.duckdb' AS packed (READ_ONLY)")
            packed = rows(con, "SELECT * FROM packed.spans")

        again = Store(Path(folder) / "again" / "traces.duckdb")
        again.add(exported)
        again.writer().seal()

        assert told(TripletAdapter(rule).explain(exported)) == expected
        assert told(TripletAdapter(rule).explain(packed)) == expected
        assert stored(again, rule) == expected


def rows(con: duckdb.DuckDBPyConnection, query: str) -> list[Span]:
    """Spans out of the rows of a query."""
    found = con.execute(query)
    names = [column[0] for column in found.description or ()]
    return [span_of(dict(zip(names, row, strict=True))) for row in found.fetchall()]


@tried
@given(programs, rules)
def test_spans_sent_by_otlp_adapt_to_the_same(spans: list[Span], rule: Credit) -> None:
    """What is forwarded with content and received elsewhere has the same calls and rewards."""
    ended = [hexed(s) for s in spans if s.end_ns is not None]

    received = list(protobuf.spans_in(request_of(ended, with_content=True), "otlp:test"))

    expected = TripletAdapter(rule).explain(uncounted(ended))
    assert not [each for each in received if isinstance(each, Rejected)]
    assert outline(TripletAdapter(rule).explain(s for s in received if isinstance(s, Span))) == (
        outline(expected)
    )


def hexed(span: Span) -> Span:
    """The span with ids as OTLP knows them."""
    parent = span.parent_span_id
    return dataclasses.replace(
        span,
        span_id=_hex(span.span_id),
        parent_span_id=None if parent is None else _hex(parent),
        attributes={
            key: _hex(value)
            if key == f"{c.LINK_PREFIX}.0.value_match" and value[:1] == "p"
            else value
            for key, value in span.attributes.items()
        },
    )


def _hex(span_id: str) -> str:
    return f"f{span_id[1:]:0>15}"


def uncounted(spans: Iterable[Span]) -> list[Span]:
    """The spans without their process's count, which OTLP does not carry."""
    return [dataclasses.replace(s, process="", sequence=-1, end_sequence=-1) for s in spans]


def outline(found: Adaptation) -> object:
    """Paths with their steps, rewards and messages, and the report."""
    paths = [
        [
            (s.span_id, s.observation, s.action, s.reward, dict(s.rewards), tuple(s.response_ids))
            for s in p.transitions
        ]
        for p in found.trajectories
    ]
    return paths, found.report


def test_tools_told_apart_are_joined_once() -> None:
    """Spans that stand for parts of an answer make each part once, in order of their start."""
    call = Span(
        "1" * 32,
        "1" * 16,
        None,
        "openai.chat.completion",
        1,
        5,
        attributes={"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "hi"},
    )
    tools = [
        Span(
            call.trace_id,
            f"{number:016x}",
            call.span_id,
            "tool_call",
            number,
            number,
            attributes={"tool.call.type": "function", "tool.name": f"tool {number}"},
        )
        for number in (2, 3)
    ]

    (once,) = TripletAdapter().adapt([call, *tools])

    assert TripletAdapter().adapt([*reversed(tools), call, *tools, call]) == [once]
    assert [part["name"] for part in once.transitions[0].action[0]["parts"]] == ["tool 2", "tool 3"]
