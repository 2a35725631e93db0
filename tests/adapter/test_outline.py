"""Outlines: each span once, at its place, with what became of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.adapter.forest import SECOND, draw
from tests.adapter.forests import forests, odd_spans

from lightning_otel.adapter import TripletAdapter, readers
from lightning_otel.adapter.attempts import sort_attempts
from lightning_otel.adapter.outline import Gap, Outline, children_of, outline, select_nodes
from lightning_otel.types import Credit, Span
from lightning_otel.types import conventions as c

rules_of_credit = st.sampled_from(["next", "last", "sibling", "discounted"])


def label_by_name(found: Outline) -> dict[str, str]:
    """The label of each step by its drawn name."""
    pairs = zip(found.nodes, found.labels(), strict=True)
    return {node.span.attributes["drawn"]: label for node, label in pairs if label}


@given(forests, rules_of_credit)
def test_each_span_is_one_node(spans: list[Span], rule: Credit) -> None:
    """No span is lost or doubled, parents come first, and depths are those of the tree."""
    found = outline(spans, TripletAdapter(rule))

    waiting = sort_attempts(readers.read(spans)).waiting  # in no tree yet
    shown = [*(node.span for node in found.nodes), *waiting]
    assert sorted(s.span_id for s in shown) == sorted(s.span_id for s in spans)
    for position, node in enumerate(found.nodes):
        assert node.parent < position
        assert node.depth == (0 if node.parent < 0 else found.nodes[node.parent].depth + 1)


@given(forests, rules_of_credit)
def test_each_reward_leads_to_its_steps_or_says_why_not(spans: list[Span], rule: Credit) -> None:
    """What a reward was given to is what the adapter says; any other one has a reason."""
    found = outline(spans, TripletAdapter(rule))

    for node in found.nodes:
        targets = [found.nodes[target] for target in node.credited]
        for target in targets:
            assert target.step is not None
            assert target.step.rewards
        assert bool(targets) == bool(node.by)
        if node.kind == "reward":
            assert bool(targets) != bool(node.left_out)
    placed = sum(len(node.credited) > 0 for node in found.nodes)
    assert placed == found.report.rewards_placed


@given(odd_spans)
def test_odd_spans_are_drawn(spans: list[Span]) -> None:
    """Whatever a tracer left behind has an outline."""
    found = outline(spans)

    waiting = sort_attempts(readers.read(spans)).waiting  # in no tree yet
    assert len(found.nodes) + len(waiting) == found.report.spans


@given(forests, st.integers(1, 12))
def test_what_is_shown_is_a_tree_and_the_rest_is_counted(spans: list[Span], limit: int) -> None:
    """Each shown node's parent is shown, no more are than may be, and none is forgotten."""
    nodes = outline(spans).nodes

    is_shown = select_nodes(nodes, limit)
    below = children_of(nodes, is_shown)

    assert sum(is_shown) == min(limit, len(nodes))
    for position, node in enumerate(nodes):
        assert not is_shown[position] or node.parent < 0 or is_shown[node.parent]
    items = [item for row in below.values() for item in row]
    hidden = sum(len(item.nodes) for item in items if isinstance(item, Gap))
    assert sum(isinstance(item, int) for item in items) + hidden == len(nodes)


def test_labels_tell_steps_apart_as_far_as_needed() -> None:
    """One agent's steps are numbers; several agents and branches are named."""
    alone = outline(draw("planner[ a<one ]").spans)
    several = outline(
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
    found = outline(draw("one( a ) other( b ) !1@span=a").spans)

    part = found.below(0)

    assert [node.span.attributes["drawn"] for node in part.nodes] == ["one", "a", "!1"]
    assert part.nodes[2].credited == (1,)


@pytest.mark.parametrize("count", [1, 100_000])
def test_a_deep_chain_has_an_outline(count: int) -> None:
    """A hundred thousand spans, each inside the one before, are no deeper than memory."""
    ids = [f"{index + 1:016x}" for index in range(count)]
    chain = [
        Span("t", name, parent, "deep", SECOND, 2 * SECOND)
        for name, parent in zip(ids, [None, *ids], strict=False)
    ]

    found = outline(chain)

    assert found.nodes[-1].depth == count - 1
    assert sum(select_nodes(found.nodes, 50)) == min(count, 50)


def test_incomplete_attempts_say_so_of_each_call() -> None:
    """What broke off makes no step, and its calls and rewards say why."""
    found = outline(draw("a !1").spans, incomplete={("r1", "1")})

    assert {node.left_out for node in found.nodes} == {
        "incomplete: the rollout broke off before its end"
    }
    assert found.nodes[0].span.attributes[c.OPERATION] == c.CHAT
