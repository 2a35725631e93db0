"""Broken parents, rule by rule: what is mended, what is left alone, and what the report says."""

from dataclasses import replace
from typing import Any

import pytest
from tests.adapter.forest import SECOND, Forest, paths, reward_attributes

from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter, repair, tree
from lightning_otel.types import Span

AGENT = {c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: "A"}
TOOL = {c.OPERATION: c.EXECUTE_TOOL}


def span(span_id: str, parent: str | None = None, start: int = 0, **fields: Any) -> Span:
    """A span without a process that counts, at seconds of the wall clock."""
    end_ns = (start + 1) * SECOND
    return replace(Span("t", span_id, parent, span_id, start * SECOND, end_ns), **fields)


def mended(spans: list[Span]) -> tuple[dict[str, str | None], dict[str, str]]:
    """The parent of each span and the rule of each repair, by ids."""
    built = tree.build(spans)
    parents = {
        each.span_id: None if parent == tree.NO_PARENT else built.spans[parent].span_id
        for each, parent in zip(built.spans, built.parents, strict=True)
    }
    return parents, {each.span_id: each.rule for each in built.repairs}


def test_a_sound_tree_needs_no_repair() -> None:
    """Roots, children and a child that outlives its parent are as they were recorded."""
    forest = Forest()
    with forest.inside("root"), forest.inside("operation") as operation:
        stream = forest.open_call("stream")
    forest.close(stream)

    found = TripletAdapter().explain(forest.spans).report
    parents, _ = mended(forest.spans)

    assert parents[stream] == operation
    assert found.repairs == ()


@pytest.mark.parametrize("none", [None, "", "0" * 16])
def test_a_parent_of_zeros_is_none(none: str | None) -> None:
    """A root may say that it is one in three ways; a span without an id is nobody's parent."""
    nameless = span("0" * 16, None)

    parents, rules = mended([nameless, span("root", none, 1)])

    assert parents["root"] is None
    assert rules == {"0" * 16: repair.NO_ID}


def test_a_parent_that_never_came_makes_a_root() -> None:
    """An orphan stands at the top with its own children, and is reported once."""
    parents, rules = mended([span("child", "orphan", 2), span("orphan", "gone", 1)])

    assert parents == {"orphan": None, "child": "orphan"}
    assert rules == {"orphan": repair.NEVER_CAME}


def test_a_rollouts_span_may_have_its_parent_elsewhere() -> None:
    """What a rollout was started from lies outside of it: that is no damage."""
    forest = Forest()
    forest.make(c.SPAN_ROLLOUT, parent="of a web server")

    assert mended(forest.spans)[1] == {}


def test_a_moved_reward_leaves_its_parent_behind() -> None:
    """A reward that goes to the attempt it judges is no damage there."""
    judged, judge = Forest(), Forest(rollout_id="judge", trace_id="b" * 32, process="p2", tick=9)
    judged.call("answer", response_id="chatcmpl-1")
    with judge.inside(c.SPAN_ROLLOUT):
        judge.reward(0.5, response_id="chatcmpl-1")

    found = TripletAdapter().explain([*judged.spans, *judge.spans])

    assert found.trajectories[0].transitions[0].reward == 0.5
    assert found.report.repairs == ()


def test_a_self_parent_becomes_a_root() -> None:
    """A span that names itself is cut off from itself, and keeps its children."""
    parents, rules = mended([span("self", "self"), span("child", "self", 1)])

    assert parents == {"self": None, "child": "self"}
    assert rules == {"self": repair.ITSELF}


@pytest.mark.parametrize("tail", [0, 9])
def test_a_circle_is_cut_at_its_earliest_span(tail: int) -> None:
    """Of a circle the earliest becomes a root, wherever one comes into it."""
    circle = [span("c", "b", 3), span("a", "c", 1), span("b", "a", 2)]

    parents, rules = mended([*circle, span("tail", "c", tail)])

    assert parents == {"a": None, "b": "a", "c": "b", "tail": "c"}
    assert rules == {"a": repair.CIRCLE}


def test_a_parent_in_another_trace_of_the_attempt_is_found() -> None:
    """A child whose tracer began a trace of its own goes below its parent all the same."""
    child = span("child", "parent", 1, trace_id="u")

    parents, rules = mended([span("parent"), child])

    assert parents["child"] == "parent"
    assert rules == {"child": repair.OTHER_TRACE}


def test_a_parent_in_several_other_traces_is_nobodys_guess() -> None:
    """Where two traces have a span of that id nobody knows which is meant."""
    spans = [span("p", None, 0, trace_id=trace) for trace in "tu"]

    parents, rules = mended([*spans, span("child", "p", 1, trace_id="v")])

    assert parents["child"] is None
    assert rules == {"child": repair.OTHER_TRACES}


def test_a_rollout_in_ten_traces_is_one_tree() -> None:
    """Each call recorded in a trace of its own under one rollout's span makes one trajectory."""
    forest = Forest()
    with forest.inside(c.SPAN_ROLLOUT), forest.agent("A"):
        for index in range(10):
            forest.call(f"{index}")
    spans = [
        replace(each, trace_id=f"{index:032x}") if each.name == "chat" else each
        for index, each in enumerate(forest.spans)
    ]

    found = TripletAdapter().explain(spans)

    assert paths(found.trajectories) == [[f"{index}" for index in range(10)]]
    assert [path.agent for path in found.trajectories] == ["A"]
    assert {each.rule for each in found.report.repairs} == {repair.OTHER_TRACE}
    assert len(found.report.repairs) == 10


def test_two_rollouts_in_one_trace_are_two_trees() -> None:
    """Spans go by the rollout they name; one below another rollout's span is a root."""
    one, two = Forest(), Forest(rollout_id="r2", process="p2", tick=9)
    with one.inside("root") as root:
        one.call("one")
    call = two.call("two", parent=root)

    found = TripletAdapter().explain([*one.spans, *two.spans])

    assert [(path.rollout_id, path.cause) for path in found.trajectories] == [
        ("r1", "start"),
        ("r2", "start"),
    ]
    assert [(each.span_id, each.rule) for each in found.report.repairs] == [
        (call, repair.NEVER_CAME)
    ]


def test_spans_without_an_id_are_all_kept() -> None:
    """Two calls whose tracer gave them no ids are two calls; one that came twice is one."""
    forest = Forest()
    forest.call("one")
    forest.call("two")
    spans = [replace(each, span_id="0" * 16) for each in forest.spans]

    found = TripletAdapter().explain([*spans, spans[0]])

    assert paths(found.trajectories) == [["one", "two"]]
    assert [each.rule for each in found.report.repairs] == [repair.NO_ID] * 2


def test_a_repeated_id_is_reported_for_the_one_left_out() -> None:
    """Of two spans with one id the first counts; the other has a reason, and so has its call."""
    early, late = Forest(), Forest(tick=5)
    early.call("early")
    late.make("chat", {**late_call("late"), **reward_attributes(1.0)})

    found = TripletAdapter().explain([*late.spans, *early.spans])

    assert paths(found.trajectories) == [["early"]]
    assert [(each.noun, each.reason) for each in found.report.dropped] == [
        ("call", repair.REPEATED),
        ("reward", repair.REPEATED),
    ]
    assert (found.report.calls, found.report.transitions, found.report.rewards) == (2, 1, 1)
    assert [each.rule for each in found.report.repairs] == [repair.REPEATED]


def late_call(answer: str) -> dict[str, Any]:
    """The attributes of a call."""
    forest = Forest()
    forest.call(answer)
    return {k: v for k, v in forest.spans[0].attributes.items() if "lightning" not in k}


# --- a call without a parent, beside an agent of another tracer ----------------------------------


def agents(forest: Forest) -> dict[str, str]:
    """The agent of each trajectory, by its last answer."""
    found = TripletAdapter().adapt(forest.spans)
    return {path.transitions[-1].response_id or "": path.agent for path in found}


def lone(forest: Forest, name: str, **fields: Any) -> str:
    """A call that its tracer knew no parent of."""
    return forest.call(name, response_id=name, **{"scope": "openai", **fields})


def rules_of(forest: Forest) -> dict[str, str]:
    """The rule of each repair, by the span's id."""
    return {each.span_id: each.rule for each in tree.build(forest.spans).repairs}


def test_a_lone_call_goes_below_the_agent_at_work_around_it() -> None:
    """One tracer recorded the agent, another the call: its process says where it belongs."""
    forest = Forest()
    agent = forest.open("invoke_agent", AGENT, scope="framework")
    call = lone(forest, "x", trace_id="b" * 32)
    forest.close(agent)
    outside = lone(forest, "y")

    assert agents(forest) == {"x": "A", "y": ""}
    assert rules_of(forest) == {call: repair.ENCLOSED}
    assert mended(forest.spans)[0] == {agent: None, call: agent, outside: None}


def test_a_lone_call_goes_below_the_innermost_of_agents_in_one_another() -> None:
    """An agent waits for its tool, and the tool for its agent: the innermost one acted."""
    forest = Forest()
    outer = forest.open("invoke_agent", AGENT, scope="framework")
    tool = forest.open("execute_tool", TOOL, parent=outer, scope="framework")
    inner = forest.open("invoke_agent", {**AGENT, c.AGENT_NAME: "B"}, parent=tool, scope="other")
    lone(forest, "inside")
    forest.close(inner, tool)
    lone(forest, "after")
    forest.close(outer)

    assert agents(forest) == {"inside": "B", "after": "A"}


def test_a_lone_call_stays_alone_between_two_agents_at_work() -> None:
    """With two agents side by side either may have called, even if one is shorter."""
    forest = Forest()
    with forest.inside("root"):
        one = forest.open("invoke_agent", AGENT, scope="framework")
        two = forest.open("invoke_agent", {**AGENT, c.AGENT_NAME: "B"}, scope="framework")
    lone(forest, "x")
    forest.close(two, one)

    assert agents(forest) == {"x": ""}
    assert rules_of(forest) == {}


def test_a_lone_call_stays_alone_if_another_agent_was_at_work_as_it_began() -> None:
    """An agent that ended before the call did may have left it behind as a stream."""
    forest = Forest()
    one = forest.open("invoke_agent", AGENT, scope="framework")
    two = forest.open("invoke_agent", {**AGENT, c.AGENT_NAME: "B"}, scope="framework")
    call = forest.open_call("x", response_id="x", scope="openai")
    forest.close(two, call, one)

    assert agents(forest) == {"x": ""}


def test_a_lone_call_stays_alone_if_it_outlives_the_agent() -> None:
    """What goes on after the agent ended is not plainly inside of it."""
    forest = Forest()
    agent = forest.open("invoke_agent", AGENT, scope="framework")
    call = forest.open_call("x", response_id="x", scope="openai")
    forest.close(agent, call)

    assert agents(forest) == {"x": ""}


def test_a_lone_call_stays_alone_if_its_own_tracer_knew_of_the_agent() -> None:
    """A tracer that saw the agent and named no parent means that there is none."""
    forest = Forest()
    agent = forest.open("invoke_agent", AGENT, scope="openai")
    lone(forest, "x")
    forest.close(agent)

    assert agents(forest) == {"x": ""}


@pytest.mark.parametrize("process", ["p2", ""])
def test_a_lone_call_stays_alone_in_another_process(process: str) -> None:
    """Clocks of two processes do not say who called, and nor do those of unknown ones."""
    forest = Forest()
    agent = forest.open("invoke_agent", AGENT, scope="framework")
    lone(forest, "x", process=process, sequence=-1, end_sequence=-1)
    forest.close(agent)

    assert agents(forest) == {"x": ""}


def test_a_lone_call_without_a_count_goes_by_its_processs_clock() -> None:
    """Where a process did not count, its own clock says what enclosed what."""
    forest = Forest(is_counted=False)
    agent = forest.open("invoke_agent", AGENT, scope="framework")
    lone(forest, "x")
    forest.close(agent)

    assert agents(forest) == {"x": "A"}


def test_a_call_from_outside_stays_outside() -> None:
    """A served request, and a call whose parent never came, were called by somebody unseen."""
    forest = Forest()
    agent = forest.open("invoke_agent", AGENT, scope="framework")
    lone(forest, "served", kind="SERVER")
    lone(forest, "orphan", parent="gone")
    forest.close(agent)

    assert set(agents(forest).values()) == {""}


def test_a_thousand_agents_at_once_cost_no_more_than_their_number() -> None:
    """Lone calls among many agents stay alone, in linear time."""
    forest = Forest()
    parent = None
    for _ in range(1000):
        parent = forest.open("invoke_agent", AGENT, parent=parent, scope="framework")
    for index in range(1000):
        lone(forest, f"{index}")

    assert rules_of(forest) == {}
