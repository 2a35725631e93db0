"""The forest of one attempt: parents, order and agents, however damaged the spans."""

from dataclasses import replace

from tests.adapter.forest import SECOND, Forest, paths

from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter, tree
from lightning_otel.adapter.tree import NO_PARENT
from lightning_otel.types import Span


def span(span_id: str, parent: str | None = None, start: int = 0, end: int | None = 1) -> Span:
    """A span without a process that counts, at seconds of the wall clock."""
    end_ns = None if end is None else end * SECOND
    return Span("t", span_id, parent, span_id, start * SECOND, end_ns)


def parents(built: tree.Tree) -> dict[str, str | None]:
    """The parent of each span, by ids."""
    return {
        each.span_id: None if parent == NO_PARENT else built.spans[parent].span_id
        for each, parent in zip(built.spans, built.parents, strict=True)
    }


def names(built: tree.Tree) -> list[str]:
    """Span ids in order."""
    return [each.span_id for each in built.spans]


def test_build_makes_an_orphan_a_root() -> None:
    """A span whose parent was never recorded stands at the top, with its own children."""
    built = tree.build([span("child", "orphan", 2), span("orphan", "gone", 1)])

    assert parents(built) == {"orphan": None, "child": "orphan"}


def test_build_makes_a_span_that_is_its_own_parent_a_root() -> None:
    """A self-parent is cut off from itself and nothing is lost."""
    built = tree.build([span("self", "self"), span("child", "self", 1)])

    assert parents(built) == {"self": None, "child": "self"}


def test_build_cuts_a_cycle_at_its_earliest_span() -> None:
    """Of spans that are each other's parents the first becomes a root, the others stay below."""
    built = tree.build([span("c", "b", 3), span("a", "c", 1), span("b", "a", 2)])

    assert parents(built) == {"a": None, "b": "a", "c": "b"}


def test_build_prefers_the_parent_in_the_spans_own_trace() -> None:
    """A span id that occurs in two traces names the parent in the child's own."""
    other, child = (
        replace(span("root"), trace_id="u"),
        replace(span("child", "root", 1), trace_id="u"),
    )

    built = tree.build([span("root"), other, child])

    assert built.spans[built.parents[2]].trace_id == "u"
    assert built.repairs == ()


def test_build_orders_one_process_by_its_own_count() -> None:
    """Where one process counted its spans, its wall clock says nothing about their order."""
    early = replace(span("counted-second", start=1), process="p", sequence=3, end_sequence=4)
    late = replace(span("counted-first", start=9, end=9), process="p", sequence=1, end_sequence=2)

    built = tree.build([early, late])

    assert names(built) == ["counted-first", "counted-second"]
    assert built.ends[0] < built.starts[1]


def test_build_keeps_the_order_of_a_clock_that_steps_back() -> None:
    """Calls of one process follow one another though its clock jumped an hour back between them."""
    forest = Forest()
    forest.call("first")
    forest.call("second", start_ns=-3600 * SECOND, end_ns=-3599 * SECOND)
    forest.call("third", start_ns=-3500 * SECOND, end_ns=-3499 * SECOND)

    found = TripletAdapter().adapt(reversed(forest.spans))

    assert paths(found) == [["first", "second", "third"]]


def test_build_orders_spans_without_a_count_by_the_clock() -> None:
    """Spans of a process that did not count are ordered by their start."""
    built = tree.build([span("late", start=5, end=6), span("early", start=1, end=2)])

    assert names(built) == ["early", "late"]


def test_build_merges_processes_by_clock_and_each_by_its_count() -> None:
    """Between processes the clock decides; within each its own count, whatever its clock does."""
    one = Forest(process="p1", trace_id="1" * 32)
    one.call("a1")
    one.call("a2", start_ns=0, end_ns=1)  # the clock of p1 stepped back
    two = Forest(process="p2", trace_id="2" * 32, tick=10)
    two.call("b1")

    built = tree.build([*two.spans, *one.spans])

    assert [each.process for each in built.spans] == ["p1", "p1", "p2"]
    assert [each.sequence for each in built.spans] == [1, 3, 11]


def test_build_lets_an_end_come_before_a_start_at_the_same_instant() -> None:
    """On a coarse clock a span that ends when another starts came before it."""
    built = tree.build([span("second", start=5, end=9), span("first", start=1, end=5)])

    assert names(built) == ["first", "second"]
    assert built.ends[0] < built.starts[1]


def test_build_ends_no_span_before_its_start() -> None:
    """A span whose clock ran backwards lasts no time, rather than less than none."""
    built = tree.build([span("backwards", start=9, end=1), span("other", start=3, end=4)])

    assert all(end >= start for start, end in zip(built.starts, built.ends, strict=True))


def test_build_lets_an_incomplete_span_end_after_everything() -> None:
    """A span that never ended is open for good, on either kind of clock."""
    counted = Forest()
    counted.open("never")
    counted.call("done")
    by_clock = [span("never", end=None), span("done", start=1, end=2)]

    clocks = [tree.build(counted.spans), tree.build(by_clock)]

    assert all(max(built.ends) == built.ends[0] > 1 << 60 for built in clocks)


def test_build_keeps_a_child_that_outlives_its_parent() -> None:
    """Time does not make parents: a stream read after its operation closed stays inside it."""
    forest = Forest()
    with forest.inside("operation") as operation:
        stream = forest.open_call("late")
    forest.close(stream)

    built = tree.build(forest.spans)

    assert parents(built) == {operation: None, stream: operation}
    assert paths(TripletAdapter().adapt(forest.spans)) == [["late"]]


def test_agents_are_the_nearest_named_ancestors() -> None:
    """A span belongs to the nearest agent above it, and to none where none is named."""
    forest = Forest()
    forest.make("outside")
    with forest.agent("outer"):
        forest.make("plain")
        with forest.agent("inner"), forest.inside("operation"):
            forest.make("deep")
        forest.make("again")

    built = tree.build(forest.spans)

    found = {each.name: agent for each, agent in zip(built.spans, built.agents, strict=True)}
    assert found["outside"] == ""
    assert (found["plain"], found["deep"], found["again"]) == ("outer", "inner", "outer")


def test_agents_ignore_a_name_that_is_no_text() -> None:
    """An agent name of another type is as good as none."""
    forest = Forest()
    with forest.agent("named"):
        forest.make("odd", {c.AGENT_NAME: ["a", "list"]})

    built = tree.build(forest.spans)

    assert set(built.agents) == {"named"}


def test_contains_knows_the_whole_subtree() -> None:
    """A span contains itself and all below, and nothing beside."""
    forest = Forest()
    with forest.inside("left"), forest.inside("below"):
        forest.make("deep")
    forest.make("right")

    built = tree.build(forest.spans)

    left, below, deep, right = range(4)
    assert all(built.contains(left, other) for other in (left, below, deep))
    assert not built.contains(left, right)
    assert not built.contains(deep, below)


def test_climb_finds_the_nearest_ancestor_in_a_deep_chain() -> None:
    """From any depth the nearest span for which something holds is found, or none."""
    forest = Forest()
    parent = None
    for _ in range(1000):
        parent = forest.open(parent=parent)

    built = tree.build(forest.spans)

    for target in (0, 1, 499, 998, 999):
        assert built.climb(999, lambda node, target=target: node <= target) == target  # type: ignore[misc]  # bound for the loop
    assert built.climb(999, lambda node: False) == NO_PARENT


def test_meet_finds_the_lowest_common_ancestor() -> None:
    """Two spans meet in the lowest one that contains both, or nowhere."""
    forest = Forest()
    with forest.inside("root"):
        with forest.inside("left"):
            forest.make("a")
        forest.make("b")
    forest.make("elsewhere")

    built = tree.build(forest.spans)

    root, left, a, b, elsewhere = range(5)
    assert built.meet(a, b) == root
    assert built.meet(a, left) == left
    assert built.meet(a, elsewhere) == NO_PARENT
    assert built.below(root, a) == left
    assert built.below(NO_PARENT, a) == root


def test_build_walks_a_chain_of_a_hundred_thousand_spans() -> None:
    """Depth costs no recursion: a chain far beyond the interpreter's limit becomes a tree."""
    deepest = 100_000
    chain = [
        Span("t", str(i), str(i - 1) if i else None, "link", i, 3 * deepest - i)
        for i in range(deepest)
    ]

    built = tree.build(chain)

    assert built.depths[deepest - 1] == deepest - 1
    assert built.last[0] == deepest - 1
