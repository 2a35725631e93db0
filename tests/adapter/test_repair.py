"""Parents that tracers left broken, and outlines: the tree that is made, and what is said of it.

A tree is written as it is drawn; after ``!`` stand the spans that were moved, with the rule.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.adapter.forest import SECOND, Forest, draw, paths
from tests.adapter.forests import forests, odd_spans

from lightning_otel import TripletAdapter
from lightning_otel.types import Credit, Span
from lightning_otel.types import conventions as c
from lightning_otel.views.folding import Gap, children_of, select_rows
from lightning_otel.views.trace import Trace, make_trace

ZEROS = "0" * 16
ROLLOUT = c.SPAN_ROLLOUT

CASES = {
    "a sound tree": ("root( x( +late ) y( ) ) -late", "root( x( late ) y )"),
    "a parent of zeros is none": (f"root@parent={ZEROS}( a )", "root( a )"),
    "nothing lies below a span without an id": (
        f"a@span_id={ZEROS}( ) b@parent={ZEROS}( )",
        "a b ! a no id",
    ),
    "a parent that never came": ("a@parent=gone( b )", "a( b ) ! a never came"),
    "a rollout's parent may lie elsewhere": (f"{ROLLOUT}@parent=web( )", ROLLOUT),
    "a moved reward leaves its parent": (
        "root( a@id=r1 ) #rollout=r2,trace=b,process=p2 w( !.5@id=r1@as=reward )",
        "root( a ) reward w",
    ),
    "its own parent": ("a@parent=a( b )", "a( b ) ! a self-parent"),
    "a circle is cut at its earliest span": (
        "#counted=no d@parent=b@at=3( ) a@parent=d@at=1( ) b@parent=a@at=2( ) t@parent=d@at=9( )",
        "a( b( d( t ) ) ) ! a circle",
    ),
    "a circle that one comes into first": (
        "#counted=no d@parent=b@at=3( ) a@parent=d@at=1( ) b@parent=a@at=2( ) t@parent=d@at=0( )",
        "a( b( d( t ) ) ) ! a circle",
    ),
    "a parent in another trace": ("a( #trace=b b #trace=a )", "a( b ) ! b other trace"),
    "a parent in several other traces": (
        "p@span_id=p@as=x( ) #trace=b p@span_id=p@as=y( ) #trace=d a@parent=p( )",
        "x y a ! a other traces",
    ),
    "the parent in its own trace first": (
        "p@span_id=p@as=x( ) #trace=b p@span_id=p@as=y( ) a@parent=p( )",
        "x y( a )",
    ),
    "a call a trace": (
        "A[ #trace=b a #trace=d b #trace=a ]",
        "A( a b ) ! a other trace, b other trace",
    ),
    "two rollouts in one trace": (
        "root( a #rollout=r2 b #rollout=r1 )",
        "root( a ) b ! b never came",
    ),
    "an agent's name that is no text": (f"A[ a@{c.AGENT_NAME}=7 ]", "A( a )"),
    # --- a call without a parent, beside an agent of another tracer
    "a lone call at an agent's work": (
        "+A@scope=f[ #trace=b a@scope=o #trace=a -A b@scope=o",
        "A( a ) b ! a enclosed",
    ),
    "the innermost of agents in one another": (
        "+A@scope=f[ +tool@scope=f@parent=A( +B@scope=g@parent=tool[ a@scope=o -B -tool"
        " b@scope=o -A",
        "A( tool( B( a ) ) b ) ! a enclosed, b enclosed",
    ),
    "between two agents": (
        "root( +A@scope=f[ +B@scope=f[ ) a@scope=o -B -A",
        "root( A B ) a",
    ),
    "another agent was at work as it began": (
        "+A@scope=f[ +B@scope=f[ +a@scope=o -B -a -A",
        "A B a",
    ),
    "a call that outlives the agent": ("+A@scope=f[ +a@scope=o -A -a", "A a"),
    "its own tracer knew of the agent": ("+A@scope=o[ a@scope=o -A", "A a"),
    "in another process": ("#counted=no +A@scope=f[ a@scope=o@process=p2 -A", "A a"),
    "in no process known": ("#counted=no +A@scope=f[ a@scope=o@process= -A", "A a"),
    "without a count": ("#counted=no +A@scope=f[ a@scope=o -A", "A( a ) ! a enclosed"),
    "a call from outside": (
        "+A@scope=f[ a@scope=o@kind=SERVER b@scope=o@parent=gone -A",
        "A a b ! b never came",
    ),
}


def written(forest: Forest) -> str:
    """The forest's trees as they would be drawn, and what was moved."""
    nodes = make_trace(forest.spans).rows
    words: list[str] = []
    for node, after in zip(nodes, [*nodes[1:], None], strict=True):
        depth = 0 if after is None else after.depth
        opening = "(" * (depth > node.depth)
        words += [f"{node.span.attributes['drawn']}{opening}", *[")"] * (node.depth - depth)]
    moved = [
        f"{n.span.attributes['drawn']} {n.repair.partition(':')[0]}" for n in nodes if n.repair
    ]
    return " ".join([*words, *(["! " + ", ".join(moved)] if moved else [])])


@pytest.mark.parametrize(("drawing", "expected"), CASES.values(), ids=CASES)
def test_broken_parents_are_mended(drawing: str, expected: str) -> None:
    """Every span stays; the one that moved is reported once."""
    assert written(draw(drawing)) == expected


def test_spans_without_an_id_are_all_kept() -> None:
    """Two calls whose tracer gave them no ids are two calls; one that came twice is one."""
    spans = draw(f"a@span_id={ZEROS} b@span_id={ZEROS}").spans

    found = TripletAdapter().explain([*spans, spans[0]])

    assert paths(found.trajectories) == [["a", "b"]]
    assert [each.rule.partition(":")[0] for each in found.report.repairs] == ["no id"] * 2


def test_a_repeated_id_is_reported_for_the_one_left_out() -> None:
    """Of two spans with one id the first counts; the other has a reason, and so has its call."""
    late = draw(f"late@{c.REWARD_VALUE}=1", tick=5).spans

    found = TripletAdapter().explain([*late, *draw("early").spans])

    report = found.report
    assert paths(found.trajectories) == [["early"]]
    repeated = "repeated id: another span has its ids, and this one was left out"
    assert [(each.noun, each.reason) for each in report.dropped] == [
        ("call", repeated),
        ("reward", repeated),
    ]
    assert (report.calls, report.transitions, report.rewards) == (2, 1, 1)
    assert [each.rule for each in report.repairs] == [repeated]


def test_a_thousand_agents_at_once_cost_no_more_than_their_number() -> None:
    """Lone calls among many agents stay alone, in linear time."""
    forest = Forest()
    parent = None
    for _ in range(1000):
        agent = {c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: "A"}
        parent = forest.open("invoke_agent", agent, parent=parent, scope="framework")
    for index in range(1000):
        forest.call(f"{index}", scope="openai")

    assert TripletAdapter().explain(forest.spans).report.repairs == ()


rules_of_credit = st.sampled_from(["previous", "last", "discounted"])


def label_by_name(found: Trace) -> dict[str, str]:
    """The label of each step by its drawn name."""
    return {row.span.attributes["drawn"]: row.label for row in found.rows if row.label}


@given(forests, rules_of_credit)
def test_each_span_is_one_node(spans: list[Span], rule: Credit) -> None:
    """No span is lost or doubled, parents come first, and depths are those of the tree."""
    found = make_trace(spans, TripletAdapter(rule))

    assert sorted(row.span.span_id for row in found.rows) == sorted(s.span_id for s in spans)
    for position, node in enumerate(found.rows):
        assert node.parent < position
        assert node.depth == (0 if node.parent < 0 else found.rows[node.parent].depth + 1)


@given(forests, rules_of_credit)
def test_each_reward_leads_to_its_steps_or_says_why_not(spans: list[Span], rule: Credit) -> None:
    """What a reward was given to is what the adapter says; any other one has a reason."""
    found = make_trace(spans, TripletAdapter(rule))

    for node in found.rows:
        targets = [found.rows[target] for target in node.credited]
        for target in targets:
            assert target.step is not None
            assert target.step.rewards
        assert bool(targets) == bool(node.by)
        if node.kind == "reward":
            assert bool(targets) != bool(node.left_out)
    placed = sum(len(node.credited) > 0 for node in found.rows)
    assert placed == found.report.rewards_placed


@given(odd_spans)
def test_odd_spans_are_drawn(spans: list[Span]) -> None:
    """Whatever a tracer left behind has an outline."""
    found = make_trace(spans)

    assert len(found.rows) == found.report.spans


@given(forests, st.integers(1, 12))
def test_what_is_shown_is_a_tree_and_the_rest_is_counted(spans: list[Span], limit: int) -> None:
    """Each shown node's parent is shown, no more are than may be, and none is forgotten."""
    nodes = make_trace(spans).rows

    is_shown = select_rows(nodes, limit)
    below = children_of(nodes, is_shown)

    assert sum(is_shown) == min(limit, len(nodes))
    for position, node in enumerate(nodes):
        assert not is_shown[position] or node.parent < 0 or is_shown[node.parent]
    items = [item for row in below.values() for item in row]
    hidden = sum(len(item.rows) for item in items if isinstance(item, Gap))
    assert sum(isinstance(item, int) for item in items) + hidden == len(nodes)


def test_labels_tell_steps_apart_as_far_as_needed() -> None:
    """One agent's steps are numbers; several agents and branches are named."""
    alone = make_trace(draw("planner[ a<one ]").spans)
    several = make_trace(
        draw("planner[ a<one ] planner[ +l<one|a|and? +r<one|a|and? -l -r ] writer[ b ]").spans
    )

    assert label_by_name(alone) == {"a": "#0"}
    assert label_by_name(several) == {
        "a": "planner #0",
        "l": "planner #1",
        "r": "planner #1 branch 1",
        "b": "writer #0",
    }


def test_a_part_keeps_the_rewards_that_were_given_to_it() -> None:
    """Below a span stand its descendants, and the rewards that judge them from elsewhere."""
    found = make_trace(draw("one( a ) other( b ) !1@span=a").spans)

    part = found.below(0)

    assert [node.span.attributes["drawn"] for node in part.rows] == ["one", "a", "!1"]
    assert part.rows[2].credited == (1,)


@pytest.mark.parametrize("count", [1, 100_000])
def test_a_deep_chain_has_an_outline(count: int) -> None:
    """A hundred thousand spans, each inside the one before, are no deeper than memory."""
    ids = [f"{index + 1:016x}" for index in range(count)]
    chain = [
        Span("t", name, parent, "deep", SECOND, 2 * SECOND)
        for name, parent in zip(ids, [None, *ids], strict=False)
    ]

    found = make_trace(chain)

    assert found.rows[-1].depth == count - 1
    assert sum(select_rows(found.rows, 50)) == min(count, 50)


def test_incomplete_attempts_say_so_of_each_call() -> None:
    """What broke off makes no step, and its calls and rewards say why."""
    found = make_trace(draw("a !1").spans, incomplete={("r1", "1")})

    assert {node.left_out for node in found.rows} == {
        "incomplete: the rollout broke off before its end"
    }
    assert found.rows[0].span.attributes[c.OPERATION] == c.CHAT
