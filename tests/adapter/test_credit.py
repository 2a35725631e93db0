"""Which call each reward belongs to, rule by rule."""

from dataclasses import replace
from typing import Any, get_args

import pytest
from tests.adapter.forest import Forest, paths, reward_attributes, rewards

from lightning_otel import conventions as c
from lightning_otel.adapter import Adaptation, TripletAdapter, credit
from lightning_otel.types import Credit, CreditRule

RULES: list[Credit] = list(get_args(Credit))


def explain(forest: Forest, rule: Credit | CreditRule = "next", **options: Any) -> Adaptation:
    """The adaptation of a forest under a rule."""
    return TripletAdapter(rule, **options).explain(forest.spans)


def placed(
    forest: Forest, rule: Credit | CreditRule = "next", **options: Any
) -> dict[str, float | None]:
    """The reward of each answer under a rule."""
    return rewards(explain(forest, rule, **options).trajectories)


def reasons(forest: Forest, rule: Credit | CreditRule = "next") -> dict[str, int]:
    """Why rewards were not placed."""
    return explain(forest, rule).report.reasons()


# --- next ----------------------------------------------------------------------------------------


def test_next_gives_each_call_the_reward_after_it() -> None:
    """A reward after every call goes to that call."""
    forest = Forest()
    with forest.inside("root"):
        for index in range(3):
            forest.call(f"call {index}")
            forest.reward(index / 2)

    assert placed(forest) == {"call 0": 0.0, "call 1": 0.5, "call 2": 1.0}


def test_next_leaves_calls_without_a_reward_at_none() -> None:
    """One reward at the end goes to the last call; the others have none, which is not 0."""
    forest = Forest()
    forest.call("first")
    forest.call("second")
    forest.reward(1.0)

    assert placed(forest) == {"first": None, "second": 1.0}


@pytest.mark.parametrize("rule", ["next", "sibling", "discounted"])
@pytest.mark.pain(21)
def test_a_second_reward_never_slides_to_the_previous_call(rule: Credit) -> None:
    """Of two rewards after the last call the first stays and the second is reported."""
    forest = Forest()
    with forest.inside("root"):
        forest.call("first")
        forest.call("second")
        forest.reward(0.1)
        forest.reward(0.9)

    assert placed(forest, rule, gamma=0.0) == {
        "first": None if rule != "discounted" else 0.0,
        "second": 0.1,
    }
    assert reasons(forest, rule) == {credit.ALREADY_REWARDED: 1}


def test_a_reward_that_shares_one_name_is_reported_whole() -> None:
    """A reward is placed as it was given or not at all: no name of it is dropped in silence."""
    forest = Forest()
    forest.call("first")
    forest.reward(("ok", 1.0), ("short", 0.5))
    forest.reward(("style", 0.7), ("ok", 0.0))

    ((step,),) = (path.transitions for path in explain(forest).trajectories)

    assert step.rewards == {"ok": 1.0, "short": 0.5}
    assert reasons(forest) == {credit.ALREADY_REWARDED: 1}


def test_next_reports_a_reward_before_any_call() -> None:
    """A reward does not wait for a call that comes after it."""
    forest = Forest()
    forest.reward(1.0)
    forest.call("first")

    assert placed(forest) == {"first": None}
    assert reasons(forest) == {credit.NO_CALL_BEFORE: 1}


def test_next_ignores_a_call_that_has_not_ended() -> None:
    """A reward given while a call runs judges the one before it."""
    forest = Forest()
    forest.call("first")
    running = forest.open_call("running")
    forest.reward(1.0)
    forest.close(running)

    assert placed(forest) == {"first": 1.0, "running": None}


@pytest.mark.parametrize("rule", ["next", "sibling"])
def test_a_call_comes_before_a_reward_at_the_same_instant(rule: Credit) -> None:
    """On a clock too coarse to tell them apart the reward judges the call, whatever their ids."""
    forest = Forest(is_counted=False)
    forest.make(c.SPAN_ANNOTATION, reward_attributes(1.0), start_ns=7, end_ns=7)
    forest.call("same instant", start_ns=7, end_ns=7)

    assert placed(forest, rule) == {"same instant": 1.0}


def test_next_prefers_a_call_inside_the_rewards_operation() -> None:
    """A reward inside an operation goes to a call inside it, though another ended later."""
    forest = Forest()
    with forest.inside("root"):
        operation = forest.open("operation")
        forest.call("inside", parent=operation)
        forest.call("beside, later")
        forest.reward(1.0, parent=operation)
        forest.close(operation)

    assert placed(forest) == {"inside": 1.0, "beside, later": None}


def test_next_looks_further_out_where_an_operation_has_no_call() -> None:
    """A reward in an operation without calls goes to the latest call of the part around it."""
    forest = Forest()
    with forest.inside("root"):
        with forest.inside("work"):
            forest.call("worked")
        with forest.inside("judging"), forest.inside("scoring"):
            forest.reward(1.0)
    with forest.inside("another root"):
        forest.call("elsewhere")

    assert placed(forest) == {"worked": 1.0, "elsewhere": None}


def test_next_reaches_a_call_deep_inside_the_operation_beside() -> None:
    """The call may lie any depth below the part of the tree that it shares with the reward."""
    forest = Forest()
    with forest.inside("root"):
        with forest.inside("a"), forest.inside("b"), forest.inside("c"):
            forest.call("deep")
        forest.reward(1.0)

    assert placed(forest) == {"deep": 1.0}


def test_next_goes_by_time_alone_between_trees() -> None:
    """A reward without any span around it goes to the latest call of the rollout."""
    forest = Forest()
    with forest.inside("root"):
        forest.call("first")
        forest.call("second")
    forest.reward(1.0)

    assert placed(forest) == {"first": None, "second": 1.0}


@pytest.mark.parametrize("rule", RULES)
def test_a_reward_of_one_agent_never_goes_to_another(rule: Credit) -> None:
    """Where agent A called first and B after it, A's reward goes to A's call."""
    forest = Forest()
    a = forest.open("agent", {c.AGENT_NAME: "A"})
    forest.call("by A", parent=a)
    with forest.agent("B"):
        forest.call("by B")
    forest.reward(1.0, parent=a)
    forest.close(a)

    found = placed(forest, rule, gamma=0.0)

    assert found["by A"] == 1.0
    assert found["by B"] is None


@pytest.mark.parametrize("rule", RULES)
def test_a_reward_of_an_agent_without_calls_is_reported(rule: Credit) -> None:
    """A reward given inside an agent that made no call is not pushed onto another's."""
    forest = Forest()
    with forest.agent("B"):
        forest.call("by B")
    with forest.agent("A"):
        forest.reward(1.0)

    assert placed(forest, rule) == {"by B": None}
    assert len(reasons(forest, rule)) == 1


def test_next_gives_a_reward_outside_any_agent_to_whoever_acted_last() -> None:
    """A reward at the root of a rollout with several agents judges the latest call."""
    forest = Forest()
    with forest.inside("root"):
        with forest.agent("A"):
            forest.call("by A")
        with forest.agent("B"):
            forest.call("by B")
        forest.reward(1.0)

    assert placed(forest) == {"by A": None, "by B": 1.0}


def test_next_places_rewards_of_concurrent_agents_each_with_its_own() -> None:
    """Two agents at work at once, calls and rewards interleaved, keep their own rewards."""
    forest = Forest()
    names = {"A": {c.AGENT_NAME: "A"}, "B": {c.AGENT_NAME: "B"}}
    with forest.inside("root"):
        a, b = (forest.open("agent", attributes) for attributes in names.values())
        forest.call("by A", parent=a)
        forest.call("by B", parent=b)
        forest.reward(0.1, parent=a)
        forest.reward(0.2, parent=b)
        forest.close(a, b)

    assert placed(forest) == {"by A": 0.1, "by B": 0.2}


# --- parentage and links -------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_a_reward_inside_a_call_goes_to_that_call(rule: Credit) -> None:
    """A reward whose parent is a call judges it, whatever ended since."""
    forest = Forest()
    first = forest.call("first")
    forest.call("second")
    forest.reward(1.0, parent=first)

    assert placed(forest, rule) == {"first": 1.0, "second": None}


def test_a_reward_inside_a_dropped_call_is_reported() -> None:
    """A reward for a call that failed does not slide to one that worked."""
    forest = Forest()
    forest.call("first")
    failed = forest.call("second", status="ERROR")
    forest.reward(1.0, parent=failed)

    assert placed(forest) == {"first": None}
    assert explain(forest).report.dropped[-1].reason == credit.UNUSED_PARENT


def test_a_reward_on_the_call_itself_goes_to_that_call() -> None:
    """A span may be a call and carry its own reward."""
    forest = Forest()
    forest.call("first")
    (call,) = forest.spans
    carrying = replace(call, attributes={**call.attributes, **reward_attributes(0.75)})

    assert rewards(TripletAdapter().adapt([carrying])) == {"first": 0.75}


@pytest.mark.parametrize("rule", RULES)
def test_a_link_outranks_parentage_and_rule(rule: Credit) -> None:
    """A reward given inside one call, but linked to another, judges the other."""
    forest = Forest()
    forest.call("first", response_id="chatcmpl-1")
    second = forest.call("second")
    forest.reward(1.0, parent=second, response_id="chatcmpl-1")

    assert placed(forest, rule) == {"first": 1.0, "second": None}


def test_a_link_reaches_a_call_of_another_agent() -> None:
    """An explicit link says more than the agent the reward was given in."""
    forest = Forest()
    with forest.agent("worker"):
        forest.call("worked", response_id="chatcmpl-1")
    with forest.agent("judge"):
        forest.call("verdict")
        forest.reward(1.0, response_id="chatcmpl-1")

    assert placed(forest) == {"worked": 1.0, "verdict": None}


@pytest.mark.parametrize("kind", ["tool", "agent"])
def test_a_link_to_another_span_means_the_last_call_inside(kind: str) -> None:
    """A tool's or an agent's span stands for the last call made within it."""
    forest = Forest()
    attributes = {"tool": {c.OPERATION: c.EXECUTE_TOOL}, "agent": {c.AGENT_NAME: "A"}}[kind]
    with forest.inside("root"):
        with forest.inside("target", **attributes) as target:
            forest.call("first inside")
            with forest.inside("deeper"):
                forest.call("last inside")
        forest.call("after")
        forest.reward(1.0, span_id=target)

    assert placed(forest) == {"first inside": None, "last inside": 1.0, "after": None}


def test_a_link_to_a_span_without_calls_is_reported() -> None:
    """A tool that made no call has nothing to credit, and no other call is taken for it."""
    forest = Forest()
    forest.call("first")
    tool = forest.make("tool")
    forest.reward(1.0, span_id=tool)

    assert placed(forest) == {"first": None}
    assert reasons(forest) == {credit.UNUSED_TARGET: 1}


def test_a_link_to_a_dropped_call_is_reported() -> None:
    """A reward for a call that made no transition is not given to another."""
    forest = Forest()
    forest.call("first")
    forest.call("second", response_id="chatcmpl-2", status="ERROR")
    forest.reward(1.0, response_id="chatcmpl-2")

    assert placed(forest) == {"first": None}
    assert explain(forest).report.dropped[-1].reason == credit.UNUSED_TARGET


def test_a_link_to_a_repeated_response_id_means_the_latest_before_it() -> None:
    """A server that repeats its ids: each reward judges the latest such call before it."""
    forest = Forest()
    for index in range(3):
        forest.call(f"call {index}", response_id="chatcmpl-same")
        forest.reward(float(index), response_id="chatcmpl-same")

    assert placed(forest) == {"call 0": 0.0, "call 1": 1.0, "call 2": 2.0}


def test_a_link_to_a_duplicate_reaches_the_call_that_was_kept() -> None:
    """A reward for the span that was dropped as a duplicate judges the one that stands for it."""
    forest = Forest()
    with forest.inside("root"):
        outer = forest.open_call("answer", response_id="chatcmpl-1")
        inner = forest.call("answer", response_id="chatcmpl-1", parent=outer)
        forest.close(outer)
        forest.reward(("outer", 1.0), span_id=outer)
        forest.reward(("inner", 0.5), span_id=inner)
        forest.reward(("inside", 0.25), parent=inner)

    ((step,),) = (path.transitions for path in explain(forest).trajectories)

    assert step.rewards == {"outer": 1.0, "inner": 0.5, "inside": 0.25}


# --- last ----------------------------------------------------------------------------------------


def test_last_gives_the_final_reward_to_the_last_call() -> None:
    """Under 'last' the final reward goes to the last call; earlier ones are reported."""
    forest = Forest()
    for index in range(3):
        forest.call(f"call {index}")
        forest.reward(index / 2)

    assert placed(forest, "last") == {"call 0": None, "call 1": None, "call 2": 1.0}
    assert reasons(forest, "last") == {credit.NOT_FINAL: 2}


def test_last_gives_a_reward_between_calls_to_the_last_one() -> None:
    """The rollout's only reward is its final one, though calls came after it."""
    forest = Forest()
    forest.call("first")
    forest.reward(1.0)
    forest.call("second")

    assert placed(forest, "last") == {"first": None, "second": 1.0}


def test_last_keeps_linked_rewards_where_they_belong() -> None:
    """A linked reward is no candidate for the last call."""
    forest = Forest()
    first = forest.call("first")
    forest.call("second")
    forest.reward(0.5)
    forest.reward(1.0, span_id=first)

    assert placed(forest, "last") == {"first": 1.0, "second": 0.5}


# --- sibling -------------------------------------------------------------------------------------


def test_sibling_gives_a_reward_to_the_latest_call_beside_it() -> None:
    """Only a call with the same parent counts, though one deeper ended later."""
    forest = Forest()
    with forest.inside("root"):
        forest.call("beside")
        with forest.inside("operation"):
            forest.call("below")
        forest.reward(1.0)

    assert placed(forest, "sibling") == {"beside": 1.0, "below": None}


def test_sibling_reports_a_reward_without_a_call_beside_it() -> None:
    """A reward whose siblings are no calls is reported."""
    forest = Forest()
    with forest.inside("root"):
        with forest.inside("operation"):
            forest.call("below")
        forest.reward(1.0)

    assert placed(forest, "sibling") == {"below": None}
    assert reasons(forest, "sibling") == {credit.NO_SIBLING: 1}


def test_sibling_takes_roots_of_one_trace_for_siblings() -> None:
    """Without a root span the calls and rewards of one trace stand side by side."""
    forest = Forest()
    forest.call("first")
    forest.reward(1.0)
    other = Forest(trace_id="b" * 32, tick=10)
    other.reward(0.5)

    found = TripletAdapter("sibling").explain([*forest.spans, *other.spans])

    assert rewards(found.trajectories) == {"first": 1.0}
    assert found.report.reasons() == {credit.NO_SIBLING: 1}


# --- discounted ----------------------------------------------------------------------------------


def test_discounted_makes_returns_of_rewards() -> None:
    """Each step gets its own reward and, discounted, those that follow."""
    forest = Forest()
    forest.call("first")
    forest.call("second")
    forest.reward(1.0)
    forest.call("third")
    forest.reward(2.0)

    assert placed(forest, "discounted", gamma=0.5) == {"first": 1.0, "second": 2.0, "third": 2.0}


def test_discounted_leaves_steps_without_a_reward_after_them_at_none() -> None:
    """A step after the last reward has no return, which is not 0."""
    forest = Forest()
    forest.call("first")
    forest.reward(1.0)
    forest.call("second")

    assert placed(forest, "discounted") == {"first": 1.0, "second": None}


def test_discounted_counts_a_shared_step_once_with_the_mean_of_its_branches() -> None:
    """A step that several paths share stays one transition, with the mean of what follows it."""
    forest = Forest()
    with forest.inside("root"):
        forest.call("plan")
        calls = [forest.open_call(f"branch {index}") for index in range(3)]
        forest.close(*calls)
        for call, value in zip(calls[:2], (1.0, 0.0), strict=True):
            forest.reward(value, span_id=call)

    found = explain(forest, "discounted", gamma=0.5)

    assert found.report.transitions == 4
    assert len(found.trajectories) == 3
    assert rewards(found.trajectories) == {
        "plan": 0.25,
        "branch 0": 1.0,
        "branch 1": 0.0,
        "branch 2": None,
    }


def test_discounted_keeps_the_named_rewards_as_given() -> None:
    """The return replaces the number to train on, not the record of what was given."""
    forest = Forest()
    forest.call("first")
    forest.reward(1.0)
    forest.call("second")
    forest.reward(1.0)

    ((first, _),) = (path.transitions for path in explain(forest, "discounted").trajectories)

    assert first.reward == pytest.approx(1.99)
    assert first.rewards == {"primary": 1.0}


@pytest.mark.parametrize(
    ("given", "before", "gamma", "expected"),
    [
        ([], [], 0.9, []),
        ([1.0], [-1], 0.5, [1.0]),
        ([None, None], [-1, 0], 0.5, [None, None]),
        ([None, None, 4.0], [-1, 0, 1], 0.5, [1.0, 2.0, 4.0]),
        ([1.0, None, 4.0], [-1, 0, 1], 0.0, [1.0, 0.0, 4.0]),
        ([0.0, 2.0, 4.0], [-1, 0, 0], 1.0, [3.0, 2.0, 4.0]),
        ([1.0, 2.0], [-1, -1], 1.0, [1.0, 2.0]),
    ],
)
def test_discounted_adds_up_returns(
    given: list[float | None], before: list[int], gamma: float, expected: list[float | None]
) -> None:
    """Returns add up from the end of each path, and missing stays missing."""
    assert credit.discounted(given, before, gamma) == expected


# --- size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_many_rewards_in_a_deep_chain_are_placed(rule: Credit) -> None:
    """Rewards at every depth of a chain with its only call at the top all find it or a reason."""
    depth = 4_000
    forest = Forest()
    parent = forest.open("top")
    forest.call("only", parent=parent)
    for _ in range(depth):
        parent = forest.open(parent=parent)
        forest.reward(1.0, parent=parent)

    found = explain(forest, rule).report

    assert found.rewards == depth
    assert found.rewards_placed == (0 if rule == "sibling" else 1)
    assert len(found.dropped) == depth - found.rewards_placed


def test_rewards_of_many_agents_in_a_deep_chain_are_placed() -> None:
    """A chain of agents, each with a call and a reward of its own, keeps all of them apart."""
    forest = Forest()
    parent = None
    for index in range(1_200):
        parent = forest.open("agent", {c.AGENT_NAME: f"agent {index}"}, parent=parent)
        forest.call(f"call {index}", parent=parent)
        forest.reward(float(index), parent=parent)

    found = placed(forest)

    assert found == {f"call {index}": float(index) for index in range(1_200)}


def test_linked_rewards_to_operations_find_their_calls_among_many() -> None:
    """Links to thousands of operations each reach the call inside their own."""
    forest = Forest()
    with forest.inside("root"):
        for index in range(1_200):
            with forest.inside("operation") as operation:
                forest.call(f"call {index}")
            forest.reward(float(index), span_id=operation)

    found = explain(forest)

    assert rewards(found.trajectories) == {f"call {i}": float(i) for i in range(1_200)}
    assert len(paths(found.trajectories)) == 1


# --- calls that came to nothing ------------------------------------------------------------------


def test_a_reward_beyond_a_lost_call_is_noted() -> None:
    """It goes to the last call that came to something, and not in silence."""
    forest = Forest()
    with forest.inside("root"):
        forest.call("first")
        forest.call("second", status="ERROR")
        forest.reward(1.0)

    found = explain(forest)

    assert rewards(found.trajectories) == {"first": 1.0}
    assert found.report.notes[credit.PASSED_OVER] == 1


def test_a_reward_after_a_call_was_asked_again_is_not_noted() -> None:
    """What followed the lost call is what the reward judges."""
    forest = Forest()
    with forest.inside("root"):
        forest.call("first")
        forest.call("second", status="ERROR")
        forest.call("third")
        forest.reward(1.0)

    found = explain(forest)

    assert rewards(found.trajectories)["third"] == 1.0
    assert credit.PASSED_OVER not in found.report.notes


def test_a_linked_reward_is_not_noted() -> None:
    """Who names a call means it, whatever was lost since."""
    forest = Forest()
    with forest.inside("root"):
        forest.call("first", response_id="chatcmpl-1")
        forest.call("second", status="ERROR")
        forest.reward(1.0, response_id="chatcmpl-1")

    assert credit.PASSED_OVER not in explain(forest).report.notes
