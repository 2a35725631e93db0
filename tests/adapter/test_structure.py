"""What holds of every tree and of every trajectory in it, whatever clocks and tracers did."""

from collections import Counter
from dataclasses import replace
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st
from tests.adapter.forest import SECOND, call_attributes
from tests.adapter.forests import forests, odd_spans
from tests.pages import DOCS

from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter, attempts, repair, tree
from lightning_otel.adapter.tree import NO_PARENT, Tree
from lightning_otel.types import BranchCause, Span, Trajectory


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


def trees(spans: list[Span]) -> list[Tree]:
    """The tree of each attempt."""
    return [tree.build(members) for members in attempts.group(spans).values()]


@given(st.one_of(forests, odd_spans, lone_calls()))
def test_no_span_is_lost(spans: list[Span]) -> None:
    """Each span is in one tree once, waits, or has the ids of one that is, named as repeated."""
    sorted_out = attempts.sort_out(spans)

    kept = [span for members in sorted_out.members.values() for span in members]
    repeated = [span for others in sorted_out.repeated.values() for span in others]
    built = [span for found in trees(spans) for span in found.spans]
    starts = {(span.trace_id, span.span_id, span.start_ns) for span in spans}
    all_ = [*kept, *repeated, *sorted_out.waiting]
    assert Counter(map(id, built)) == Counter(map(id, kept))
    assert {(span.trace_id, span.span_id, span.start_ns) for span in all_} == starts
    assert sorted_out.repeated.keys() <= sorted_out.members.keys()


@given(st.one_of(forests, odd_spans, lone_calls()), st.randoms(use_true_random=False))
def test_the_order_of_the_input_changes_no_tree(spans: list[Span], random: st.DataObject) -> None:
    """Shuffled spans give the same trees, causes, guesses and repairs."""
    shuffled = sorted(spans, key=lambda span: random.random())  # type: ignore[attr-defined]  # a random.Random

    found, again = TripletAdapter().explain(spans), TripletAdapter().explain(shuffled)

    assert [(list(map(_place, built.spans)), built.parents) for built in trees(spans)] == [
        (list(map(_place, built.spans)), built.parents) for built in trees(shuffled)
    ]
    assert Counter(found.report.repairs) == Counter(again.report.repairs)
    assert [(path.agent, path.cause, path.is_guess) for path in found.trajectories] == [
        (path.agent, path.cause, path.is_guess) for path in again.trajectories
    ]


def _place(span: Span) -> tuple[object, ...]:
    return span.trace_id, span.span_id, span.name, span.start_ns, span.process, span.sequence


@given(st.one_of(forests, lone_calls()))
def test_repair_is_idempotent(spans: list[Span]) -> None:
    """Spans that name the parents they were given are a tree that needs no more repair.

    What no id can say stays to be repaired: a parent in another trace, or none at all.
    """
    for built in trees(spans):
        named = [_named(built, position) for position in range(len(built.spans))]

        again = tree.build(named)

        parents = {id(span): position for position, span in enumerate(again.spans)}
        places = [parents[id(span)] for span in named]
        assert [again.parents[place] for place in places] == [
            NO_PARENT if parent == NO_PARENT else places[parent] for parent in built.parents
        ]
        assert {each.rule for each in again.repairs} <= {
            repair.OTHER_TRACE,
            repair.OTHER_TRACES,
            repair.NEVER_CAME,
            repair.NO_ID,
        }


def _named(built: Tree, position: int) -> Span:
    """A span that names the parent it has; one without keeps the name of a parent not there."""
    span, parent = built.spans[position], built.parents[position]
    rules = {each.rule for each in built.repairs if each.span_id == span.span_id}
    if parent != NO_PARENT:
        return replace(span, parent_span_id=built.spans[parent].span_id)
    if rules & {repair.OTHER_TRACES, repair.NEVER_CAME} or span.parent_span_id is None:
        return replace(span)
    is_rootless = rules & {repair.ITSELF, repair.CIRCLE}
    return replace(span, parent_span_id=None if is_rootless else span.parent_span_id)


@given(st.one_of(forests, lone_calls()))
def test_each_call_is_in_exactly_one_trajectory_per_branch(spans: list[Span]) -> None:
    """No two trajectories are one, none is part of another, and what they share is one step."""
    found = TripletAdapter().explain(spans)

    by_agent: dict[tuple[str, str, str], list[Trajectory]] = {}
    for path in found.trajectories:
        by_agent.setdefault((path.rollout_id, path.attempt_id, path.agent), []).append(path)
        assert path.cause in get_args(BranchCause)
    for paths in by_agent.values():
        assert [path.branch for path in paths] == list(range(len(paths)))
        ends = Counter(id(path.transitions[-1]) for path in paths)
        uses = Counter(id(step) for path in paths for step in path.transitions)
        assert max(ends.values()) == 1
        for path in paths:
            assert not path.transitions[-1].is_shared
            assert all(step.is_shared == (uses[id(step)] > 1) for step in path.transitions)
    assert found.report.transitions == len(
        {id(step) for path in found.trajectories for step in path.transitions}
    )


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
        (replace(span, parent_span_id=None), *times)
        if span.parent_span_id not in known
        else (span, *times)
        for span, *times in found
    ]


@given(executions())
def test_causality_holds_on_clocks_that_disagree(told: list[tuple[Span, int, int]]) -> None:
    """On hosts minutes and hours apart parents come first, and each host's spans as it counted."""
    built = tree.build([span for span, _, _ in told])

    place = {span.span_id: position for position, span in enumerate(built.spans)}
    for child, parent in enumerate(built.parents):
        assert parent < child
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
    spans = [
        replace(span, start_ns=begun * SECOND, end_ns=ended * SECOND) for span, begun, ended in told
    ]

    built = tree.build(spans)

    true = {span.span_id: begun for span, begun, _ in told}
    order = [true[span.span_id] for span in built.spans]
    assert order == sorted(order)


def test_the_page_names_every_rule_and_cause() -> None:
    """docs/transitions.md lists them in its tables."""
    page = (DOCS / "transitions.md").read_text(encoding="utf-8")

    known = {name: value for name, value in vars(repair).items() if name.isupper()}
    rules = [text for name, text in known.items() if isinstance(text, str) and name[0] != "_"]
    assert len(rules) == 8
    assert all(f"`{rule.partition(':')[0]}`" in page for rule in rules)
    assert all(f"| `{cause}` |" in page for cause in get_args(BranchCause))
