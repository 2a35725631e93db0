"""What holds of every forest of spans: nothing is lost, doubled or guessed, however it is read.

``LIGHTNING_TEST_EXAMPLES`` is how many forests each property is tried on.
"""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, get_args

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.adapter.forest import SECOND, call_attributes, steps_of
from tests.adapter.forests import forests, odd_spans
from tests.adapter.programs import judged_programs, programs
from tests.pages import DOCS

from lightning_otel import Store
from lightning_otel.adapter import (
    Adaptation,
    Advantage,
    Composition,
    TripletAdapter,
    calls,
    tree,
)
from lightning_otel.adapter.attributes import has_id
from lightning_otel.adapter.calls import is_mark
from lightning_otel.receivers import Rejected, protobuf
from lightning_otel.store.engines.otlp import encode_request
from lightning_otel.store.schema import build_span
from lightning_otel.types import (
    BranchCause,
    Call,
    Credit,
    CreditRule,
    Estimator,
    Report,
    Reward,
    Span,
    Transition,
)
from lightning_otel.types import conventions as c
from lightning_otel.views.trace import make_trace

EXAMPLES = int(os.environ.get("LIGHTNING_TEST_EXAMPLES", "60"))
_checks = list(HealthCheck)
tried = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=_checks)
tried_on_disk = settings(tried, max_examples=max(3, EXAMPLES // 20))


@st.composite
def judged_forests(draw: st.DrawFn) -> list[Span]:
    """Forests in which spans have tickets and tasks, and rewards links by them and sequences."""
    found = []
    for span in draw(forests):
        attributes: dict[str, Any] = dict(span.attributes)
        if draw(st.booleans()):
            attributes["ticket"] = draw(st.sampled_from(["T0", "T1"]))
        if draw(st.booleans()):
            attributes[c.TASK] = draw(st.sampled_from(['"sum"', '{"a": 1}', "3"]))
        if c.REWARD_VALUE in attributes and draw(st.booleans()):
            for index, ticket in enumerate(draw(st.lists(st.sampled_from(["T0", "T2", ""])))[:2]):
                attributes[f"{c.LINK_PREFIX}.{index}.key_match"] = (c.OPERATION, "ticket")[
                    not index
                ]
                attributes[f"{c.LINK_PREFIX}.{index}.value_match"] = (c.CHAT, ticket)[not index]
        elif c.REWARD_VALUE in attributes:
            numbers = st.one_of(st.none(), st.integers(0, 9), st.just(float("nan")))
            attributes[c.REWARD_STEPS] = json.dumps(draw(st.lists(numbers, max_size=3)))
        if c.REWARD_VALUE in attributes:
            marks = [{}, {}, {c.FEEDBACK_RATING: 1}, {c.RECEIVED: "otlp"}, {c.REWARD_PRIMARY: True}]
            attributes |= draw(st.sampled_from(marks))
        found.append(replace(span, attributes=attributes))
    return found


@st.composite
def lone_calls(draw: st.DrawFn) -> list[Span]:
    """Agents, tools and calls of several tracers, some calls without a parent or an id."""
    spans: list[Span] = []
    for index in range(draw(st.integers(0, 12))):
        operation = draw(st.sampled_from([c.INVOKE_AGENT, c.EXECUTE_TOOL, c.CHAT, c.CHAT]))
        start = draw(st.integers(0, 20))
        attributes = call_attributes("x", f"{index}") if operation == c.CHAT else {}
        parent = draw(st.one_of(st.none(), st.integers(0, 13)))
        spans.append(
            Span(
                trace_id=draw(st.sampled_from(["t", "u"])),
                span_id=draw(st.sampled_from([f"s{index}", f"s{index}", "0" * 16])),
                parent_span_id=None if parent is None else f"s{parent}",
                name=f"{index}",
                start_ns=start,
                end_ns=start + draw(st.integers(0, 20)),
                attributes={**attributes, c.OPERATION: operation, c.ROLLOUT_ID: "r"},
                process=draw(st.sampled_from(["p", "p", ""])),
                scope=draw(st.sampled_from(["one", "two"])),
                sequence=2 * start if draw(st.booleans()) else -1,
            )
        )
    return spans


def choose_newest(reward: Reward, calls: Sequence[Call]) -> Call | None:
    """The call that ended last."""
    return calls[-1] if calls else None


def choose_all(reward: Reward, calls: Sequence[Call]) -> Sequence[Call] | str:
    """Every call so far, but none for a reward below three."""
    return calls if reward.value >= 3 else "too low"


rules: st.SearchStrategy[Credit | CreditRule] = st.sampled_from(
    [*get_args(Credit), choose_newest, choose_all]
)
compositions = [
    {},
    {"compose": Composition({"name 0": 1.0})},
    {"compose": Composition({"name0": 1.0, "name1": 0.5}, gates={"name1": 4.0}, floor=-1.0)},
    {"compose": Composition({"name1": 1.0}, gates={"name0": 6.0}, is_normalised=True)},
]
advantages = [None, *get_args(Estimator), Advantage(size=3), Advantage("rloo", group_by="ticket")]
adapters = st.builds(
    lambda credit, compose, advantage: TripletAdapter(credit, 0.5, **compose, advantage=advantage),
    rules,
    st.sampled_from(compositions),
    st.sampled_from(advantages),
)
anything = st.one_of(programs, judged_programs, judged_programs, forests, judged_forests())


def sort_out(found: Adaptation) -> tuple[object, Report]:
    """A result whose order does not rest on the order in which parts were read."""
    paths = sorted(
        found.trajectories, key=lambda p: (p.rollout_id, p.attempt_id, p.agent, p.branch)
    )
    report = replace(
        found.report,
        dropped=tuple(sorted(found.report.dropped, key=lambda d: (d.trace_id, d.span_id, d.noun))),
        repairs=tuple(sorted(found.report.repairs, key=lambda r: (r.trace_id, r.span_id, r.rule))),
    )
    return paths, report


# --- nothing is lost or doubled ------------------------------------------------------------------


@tried
@given(anything, adapters)
def test_every_call_and_mark_is_a_transition_or_has_one_reason(
    spans: list[Span], adapter: TripletAdapter
) -> None:
    """Each is in exactly one transition or dropped once, and the report counts them so."""
    found = adapter.explain(spans)

    dropped = {
        noun: Counter(each.span_id for each in found.report.dropped if each.noun == noun)
        for noun in ("call", "record", "mark")
    }
    told = dropped["call"] + dropped["record"]
    wanted = Counter(span.span_id for span in spans if calls.is_call(span))
    marked = Counter(span.span_id for span in spans if is_mark(span))
    actions = Counter(span.span_id for span in spans if span.name == c.SPAN_ACTION)
    used = Counter(step.span_id for step in steps_of(found))
    assert {k: n for k, n in used.items() if k not in marked} == wanted - told
    assert not told - wanted
    assert {k: n for k, n in used.items() if k in marked} == actions - dropped["mark"]
    assert not dropped["mark"] - marked
    assert found.report.transitions == len(steps_of(found))
    assert found.report.calls == found.report.transitions + dropped["call"].total()
    assert found.report.exact + sum(found.report.inexact.values()) == found.report.transitions
    for step in steps_of(found):
        assert (step.capture == "exact") is (not step.inexact)
        assert len(step.logprobs) in (0, len(step.response_ids)) or not len(step.response_ids)


@tried
@given(anything)
def test_every_path_is_a_sequence_of_its_own(spans: list[Span]) -> None:
    """Paths of an agent are numbered, none is part of another, and what they share is one step."""
    found = TripletAdapter().adapt(spans)

    uses = Counter(id(step) for path in found for step in path.transitions)
    ends = Counter(id(path.transitions[-1]) for path in found)
    numbers: dict[object, list[int]] = {}
    assert max(ends.values(), default=1) == 1
    for path in found:
        steps, owner = path.transitions, (path.rollout_id, path.attempt_id, path.agent)
        numbers.setdefault(owner, []).append(path.branch)
        assert path.cause in get_args(BranchCause)
        assert {(s.rollout_id, s.attempt_id, s.agent) for s in steps} == {owner}
        assert [step.step for step in steps] == list(range(len(steps)))
        assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
        assert [step.is_shared for step in steps] == [uses[id(step)] > 1 for step in steps]
        assert not steps[-1].is_shared
        for step, following in pairwise(steps):
            assert step.is_shared or step.next_observation == following.observation
    assert all(each == list(range(len(each))) for each in numbers.values())


@tried
@given(programs)
def test_no_step_begins_before_the_one_it_follows_ended(spans: list[Span]) -> None:
    """A program that counts its spans never has a step follow one that still ran."""
    for path in TripletAdapter().adapt(spans):
        for step, following in pairwise(path.transitions):
            assert step.end_ns is not None
            assert step.end_ns <= following.start_ns


@tried
@given(anything, rules)
def test_attempts_walked_and_put_together_are_the_same(
    spans: list[Span], rule: Credit | CreditRule
) -> None:
    """A composition of one's own, which takes the longer way, changes nothing if it is the rule."""
    walked = TripletAdapter(credit=rule).explain(spans)
    assembled = TripletAdapter(credit=rule, compose=lambda named: next(iter(named.values())))

    found = assembled.explain(spans)
    assert found.credited == walked.credited
    assert steps_of(found) == steps_of(walked)


@tried
@given(anything, adapters)
def test_every_reward_went_somewhere_or_has_a_reason(
    spans: list[Span], adapter: TripletAdapter
) -> None:
    """Each is credited once or reported once, and steps carry what was credited, nothing else."""
    found = adapter.explain(spans)

    by_id = {span.span_id: span for span in spans if c.REWARD_VALUE in span.attributes}
    dropped = Counter(each.span_id for each in found.report.dropped if each.noun == "reward")
    credited = Counter(each.span_id for each in found.credited)
    assert credited + dropped == Counter(by_id.keys())
    assert (found.report.rewards, found.report.rewards_placed) == (len(by_id), len(credited))
    expected: dict[str, dict[str, float]] = {}
    for each in found.credited:
        assert each.calls
        for index, call in enumerate(each.calls):
            held = expected.setdefault(call, {})
            given_here = given_by(by_id[each.span_id], index)
            assert not held.keys() & given_here.keys()
            held |= given_here
    assert {s.span_id: s.rewards for s in steps_of(found) if s.rewards} == expected
    assert found.report.rewarded == sum(step.reward is not None for step in steps_of(found))


def given_by(span: Span, index: int) -> dict[str, float]:
    """The named numbers that a reward gives to one of the calls it went to."""
    attributes = span.attributes
    if c.REWARD_STEPS in attributes:
        steps = [step for step in json.loads(attributes[c.REWARD_STEPS]) if step is not None]
        return {attributes[c.REWARD_NAME]: steps[index]}
    rows = [f"{c.REWARD_PREFIX}.{row}" for row in range(2)]
    return {
        attributes[f"{row}.name"]: attributes[f"{row}.value"]
        for row in rows
        if f"{row}.value" in attributes
    }


@tried
@given(anything, rules)
def test_a_rollout_earns_the_sum_of_its_steps(spans: list[Span], rule: Credit | CreditRule) -> None:
    """Whatever the credit: of each step the first reward, and each of these once."""
    found = TripletAdapter(rule, 0.5).explain(spans)

    by_id = {span.span_id: span for span in spans if c.REWARD_VALUE in span.attributes}
    steps = {step.span_id: step for step in steps_of(found)}
    numbers: dict[tuple[str, str], dict[tuple[str, int], float]] = {}
    for each in found.credited:
        span = by_id[each.span_id]
        for index, step in enumerate(steps[call] for call in each.calls):
            values, first = given_by(span, index), next(iter(step.rewards))
            if first in values:
                attempt = numbers.setdefault((step.rollout_id, step.attempt_id), {})
                place = index if c.REWARD_STEPS in span.attributes else 0
                attempt[each.span_id, place] = values[first]
    sums = {key: pytest.approx(sum(attempt.values())) for key, attempt in numbers.items()}
    assert {each.key: each.value for each in found.outcomes if each.has_steps} == {
        each.key: sums.get(each.key) for each in found.outcomes if each.has_steps
    }


@tried
@given(anything, adapters)
def test_a_reward_is_composed_or_its_absence_reported(
    spans: list[Span], adapter: TripletAdapter
) -> None:
    """A step's number is what its named rewards compose; where that is missing, the report says."""
    found = adapter.explain(spans)

    missing = Counter(each.span_id for each in found.report.dropped if each.noun == "composition")
    for step in steps_of(found):
        worth = adapter.compose(step.rewards) if step.rewards else None
        assert missing[step.span_id] == (bool(step.rewards) and worth is None)
        if adapter.credit != "discounted":
            assert step.reward == worth


@tried
@given(anything, adapters)
def test_every_attempt_has_an_advantage_or_a_reason(
    spans: list[Span], adapter: TripletAdapter
) -> None:
    """All steps of an attempt have one advantage; where they have none, there is one reason."""
    found = adapter.explain(spans)

    reasons = Counter(each.span_id for each in found.report.dropped if each.noun == "advantage")
    attempts: dict[tuple[str, str], list[Transition]] = {}
    for step in steps_of(found):
        attempts.setdefault((step.rollout_id, step.attempt_id), []).append(step)
    is_missing = [
        adapter.advantage is not None and own[0].advantage is None for own in attempts.values()
    ]
    for own, is_reported in zip(attempts.values(), is_missing, strict=True):
        assert len({(step.group_id, step.advantage) for step in own}) == 1
        assert sum(reasons[step.span_id] for step in own) == is_reported
    assert reasons.total() == sum(is_missing)


@tried
@given(anything, adapters)
def test_no_link_is_guessed_away(spans: list[Span], adapter: TripletAdapter) -> None:
    """A reward with a link goes to what has the attributes it names, or nowhere."""
    found = adapter.explain(spans)

    by_id = {span.span_id: span for span in spans}
    for each in found.credited:
        link = by_id[each.span_id].attributes.get(f"{c.LINK_PREFIX}.0.key_match")
        assert (link is None) or each.by in ("link", "sequence")
        wanted = by_id[each.span_id].attributes.get(f"{c.LINK_PREFIX}.0.value_match")
        if link == "ticket":
            assert any(span.attributes.get("ticket") == wanted for span in spans)


@tried
@given(anything, st.sampled_from(get_args(Credit)))
def test_no_reward_without_a_link_changes_its_agent(spans: list[Span], rule: Credit) -> None:
    """A reward given inside an agent, and not inside a call, stays with that agent's calls."""
    found = make_trace(spans, TripletAdapter(rule))

    for node in found.rows:
        is_linked = f"{c.LINK_PREFIX}.0.key_match" in node.span.attributes
        is_inside = node.parent >= 0 and found.rows[node.parent].kind == "call"
        if node.agent and not is_linked and not is_inside:
            assert {found.rows[target].agent for target in node.credited} <= {node.agent}


@tried
@given(odd_spans, rules)
def test_odd_spans_never_raise(spans: list[Span], rule: Credit) -> None:
    """Repeated ids and attributes of every wrong type cost their spans a reason at most."""
    report = TripletAdapter(rule).explain(spans).report

    nouns = Counter(each.noun for each in report.dropped)
    assert report.calls == report.transitions + nouns["call"]
    assert report.rewards == report.rewards_placed + nouns["reward"]
    assert report.exact + sum(report.inexact.values()) == report.transitions
    named = {(span.trace_id, span.span_id) for span in spans if has_id(span.span_id)}
    nameless = [span for span in spans if not has_id(span.span_id)]
    assert len(named) + bool(nameless) <= report.spans <= len(named) + len(nameless)


# --- however it is read --------------------------------------------------------------------------


@tried
@given(st.one_of(anything, lone_calls()), adapters, st.randoms(use_true_random=False))
def test_the_order_of_the_spans_changes_nothing(
    spans: list[Span], adapter: TripletAdapter, random: Random
) -> None:
    """Shuffled, the same comes out, in the same order."""
    shuffled = list(spans)
    random.shuffle(shuffled)

    # The spans of an attempt are handed back in the order in which they came.
    one, other = adapter.explain(shuffled), adapter.explain(spans)
    assert one._replace(parts=()) == other._replace(parts=())
    assert [key for key, *_ in one.parts] == [key for key, *_ in other.parts]


@tried
@given(anything, adapters)
def test_spans_given_again_change_nothing(spans: list[Span], adapter: TripletAdapter) -> None:
    """All of them twice, and once more as they began, are the spans they are."""
    # Without an id of its own a start is no other's.
    named = [s for s in spans if s.span_id.strip("0")]
    begun = [replace(s, end_ns=None, end_sequence=-1) for s in named]

    assert adapter.explain([*spans, *begun, *spans]) == adapter.explain(spans)


@tried
@given(anything, rules)
def test_rollouts_by_themselves_are_as_among_others(
    spans: list[Span], rule: Credit | CreditRule
) -> None:
    """What no link joins may be adapted apart."""
    apart: dict[str, list[Span]] = {}
    for span in spans:
        if any(key.startswith(c.LINK_PREFIX) for key in span.attributes):
            return
        if c.REWARD_VALUE in span.attributes and c.ATTEMPT_ID not in span.attributes:
            return
        apart.setdefault(span.rollout_id, []).append(span)

    parts = [TripletAdapter(rule).explain(own) for own in apart.values()]

    paths = [path for each in parts for path in each.trajectories]
    joined = Adaptation(paths, Report.total(each.report for each in parts))
    assert sort_out(joined) == sort_out(TripletAdapter(rule).explain(spans))


# --- parents and clocks --------------------------------------------------------------------------


@tried
@given(st.one_of(anything, lone_calls()))
def test_repair_is_idempotent(spans: list[Span]) -> None:
    """Spans that name the parents they were given are a tree that needs no more repair."""
    nodes = make_trace(spans).rows
    named = []
    for node in nodes:
        above = nodes[node.parent].span.span_id if node.parent >= 0 else node.span.parent_span_id
        is_rootless = node.repair in (tree.ITSELF, tree.CIRCLE) and node.parent < 0
        named.append(replace(node.span, parent_span_id=None if is_rootless else above))

    again = make_trace(named).rows

    def parents(found: Sequence[Any]) -> Counter[tuple[object, object]]:
        names = [(node.span.trace_id, node.span.span_id, node.span.name) for node in found]
        return Counter(
            (name, names[node.parent] if node.parent >= 0 else None)
            for name, node in zip(names, found, strict=True)
        )

    assert parents(again) == parents(nodes)
    assert {node.repair for node in again} <= {
        *("", tree.OTHER_TRACE, tree.OTHER_TRACES, tree.NEVER_CAME, tree.NO_ID),
    }


@st.composite
def executions(draw: st.DrawFn) -> list[tuple[Span, int, int]]:
    """Spans of a program on three hosts, each with its true start and end."""
    offsets = [draw(st.sampled_from([0, 300, -300, 3600])) * SECOND for _ in range(3)]
    counts = [0, 0, 0]
    opened: list[tuple[str, int, str | None, int, int]] = []
    found: list[tuple[Span, int, int]] = []
    for now in range(draw(st.integers(1, 30))):
        if opened and draw(st.booleans()):
            name, host, parent, begun, sequence = opened.pop(draw(st.integers(0, len(opened) - 1)))
            times = [moment * SECOND + offsets[host] + 10**13 for moment in (begun, now)]
            span = Span("t", name, parent, name, *times, process=f"host {host}")
            counted = replace(span, sequence=sequence, end_sequence=counts[host])
            found.append((counted, begun, now))
        else:
            host = draw(st.integers(0, 2))
            above = draw(st.integers(0, len(opened) - 1)) if opened else None
            parent = None if above is None else opened[above][0]
            opened.append((f"s{now}", host, parent, now, counts[host]))
        counts[host] += 1
    known = {span.span_id for span, _, _ in found}
    return [
        (span if span.parent_span_id in known else replace(span, parent_span_id=None), *times)
        for span, *times in found
    ]


@given(executions())
def test_causality_holds_on_clocks_that_disagree(told: list[tuple[Span, int, int]]) -> None:
    """On hosts minutes and hours apart parents come first, and each host's spans as it counted."""
    built = tree.build_tree([span for span, _, _ in told])

    place = {span.span_id: position for position, span in enumerate(built.spans)}
    assert all(parent < child for child, parent in enumerate(built.parents))
    for one, _, _ in told:
        for other, _, _ in told:
            if one.process == other.process and one.sequence < other.sequence:
                assert place[one.span_id] < place[other.span_id]
                is_over = one.end_sequence < other.sequence
                ends = built.ends[place[one.span_id]]
                assert is_over == (ends < built.starts[place[other.span_id]])


@given(executions())
def test_clocks_that_agree_are_the_order(told: list[tuple[Span, int, int]]) -> None:
    """Where all hosts have the same time the order is the true one."""
    true = {span.span_id: begun for span, begun, _ in told}

    built = tree.build_tree(
        [replace(s, start_ns=begun * SECOND, end_ns=ended * SECOND) for s, begun, ended in told]
    )

    order = [true[span.span_id] for span in built.spans]
    assert order == sorted(order)


def test_the_page_names_every_rule_and_cause() -> None:
    """docs/transitions.md lists them in its tables."""
    page = (DOCS / "transitions.md").read_text(encoding="utf-8")

    known = {name: value for name, value in vars(tree).items() if name.isupper()}
    rules = [text for name, text in known.items() if isinstance(text, str) and name[0] != "_"]
    assert len(rules) == 8
    assert all(f"`{rule.partition(':')[0]}`" in page for rule in rules)
    assert all(f"| `{cause}` |" in page for cause in get_args(BranchCause))


# --- through stores and doors --------------------------------------------------------------------


def read_back(store: Store, rule: Credit) -> tuple[object, Report]:
    paths = list(store.trajectories(credit=rule, include_incomplete=True))
    return sort_out(Adaptation(paths, store.report(credit=rule, include_incomplete=True)))


stored_rules: st.SearchStrategy[Credit] = st.sampled_from(get_args(Credit))


@tried_on_disk
@given(anything, stored_rules, st.lists(st.integers(0, 3), min_size=60, max_size=60))
def test_stores_and_segments_joined_are_as_one(
    spans: list[Span], rule: Credit, parts: list[int]
) -> None:
    """Spans in two stores, settled and live, read into a third: the same comes out."""
    expected = sort_out(TripletAdapter(rule).explain(spans))
    with tempfile.TemporaryDirectory() as folder:
        stores = [Store(Path(folder) / name / "traces.duckdb") for name in ("a", "b", "joined")]
        for part in range(4):
            own = stores[part % 2]
            own.add(span for index, span in enumerate(spans) if parts[index % 60] == part)
            own.writer().seal()
            if part < 2 and own.layout is not None and own.layout.exists():
                own.settle()
        for each in stores[:2]:
            if each.layout is not None and each.layout.exists():
                stores[2].add(each.spans())
                stores[2].add(each.spans())  # what is there already is not there twice
        stores[2].writer().seal()

        if spans:
            assert read_back(stores[2], rule) == expected


@tried_on_disk
@given(anything.filter(bool), stored_rules)
def test_spans_exported_are_the_spans_imported(spans: list[Span], rule: Credit) -> None:
    """From ``export spans`` to Parquet, and from a packed database, adapt gives the same."""
    expected = sort_out(TripletAdapter(rule).explain(spans))
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "traces.duckdb")
        store.add(spans)
        store.writer().seal()
        store.spans().to_parquet(Path(folder) / "spans.parquet")
        store.pack(Path(folder) / "packed.duckdb")
        with duckdb.connect() as con:
            exported = read_rows(con, f"SELECT * FROM '{folder}/spans.parquet'")
            con.execute(f"ATTACH '{folder}/packed.duckdb' AS packed (READ_ONLY)")
            packed = read_rows(con, "SELECT * FROM packed.spans")

        again = Store(Path(folder) / "again" / "traces.duckdb")
        again.add(exported)
        again.writer().seal()

        assert sort_out(TripletAdapter(rule).explain(exported)) == expected
        assert sort_out(TripletAdapter(rule).explain(packed)) == expected
        assert read_back(again, rule) == expected


def read_rows(con: duckdb.DuckDBPyConnection, query: str) -> list[Span]:
    """Spans out of the rows of a query."""
    found = con.execute(query)
    names = [column[0] for column in found.description or ()]
    return [build_span(dict(zip(names, row, strict=True))) for row in found.fetchall()]


@tried
@given(programs, rules)
def test_spans_sent_by_otlp_adapt_to_the_same(spans: list[Span], rule: Credit | CreditRule) -> None:
    """What is forwarded with content and received elsewhere has the same calls and rewards."""
    ended = [with_hex_ids(s) for s in spans if s.end_ns is not None]
    # OTLP does not carry the count of a process.
    uncounted = [replace(s, process="", sequence=-1, end_sequence=-1) for s in ended]

    received = list(protobuf.decode_spans(encode_request(ended, with_content=True), "otlp:test"))

    assert not [each for each in received if isinstance(each, Rejected)]
    sound = [each for each in received if isinstance(each, Span)]
    assert list_steps(sound, rule) == list_steps(uncounted, rule)


def with_hex_ids(span: Span) -> Span:
    """The span with ids as OTLP knows them."""
    link = f"{c.LINK_PREFIX}.0.value_match"
    target = span.attributes.get(link, "")
    attributes = {**span.attributes, link: _hex(target)} if target[:1] == "p" else span.attributes
    parent = span.parent_span_id and _hex(span.parent_span_id)
    return replace(span, span_id=_hex(span.span_id), parent_span_id=parent, attributes=attributes)


def _hex(span_id: str) -> str:
    return f"f{span_id[1:]:0>15}"


def list_steps(spans: list[Span], rule: Credit | CreditRule) -> object:
    """Paths with their steps, rewards and messages, and the report."""
    found = TripletAdapter(rule).explain(spans)
    return found.report, [
        [
            (s.span_id, s.observation, s.action, s.reward, dict(s.rewards), tuple(s.response_ids))
            for s in path.transitions
        ]
        for path in found.trajectories
    ]
