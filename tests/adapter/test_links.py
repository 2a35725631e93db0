"""What links of rewards name: any attributes, which all must match, and nothing by guess."""

import json

import pytest
from tests.adapter.forest import Forest, rewards
from tests.adapter.test_credit import RULES, explain, placed, reasons

from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter, credit
from lightning_otel.types import Credit


@pytest.mark.parametrize("rule", RULES)
def test_a_link_by_attribute_reaches_the_call_that_has_it(rule: Credit) -> None:
    """An attribute of the call itself is as good as an id, whatever the rule."""
    forest = Forest()
    with forest.inside("root"):
        tagged = forest.open_call("first")
        forest.tag(tagged, ticket="T-1")
        forest.close(tagged)
        forest.call("second")
        forest.reward(1.0, match={"ticket": "T-1"})

    found = explain(forest, rule)

    assert rewards(found.trajectories) == {"first": 1.0, "second": None}
    assert [each.by for each in found.credited] == ["link"]


def test_a_link_by_attribute_to_an_operation_means_the_last_call_inside() -> None:
    """A span around calls stands for the last of them, as with its id."""
    forest = Forest()
    with forest.inside("root"):
        with forest.inside("work", ticket="T-1"):
            forest.call("first")
            forest.call("second")
        forest.call("third")
        forest.reward(1.0, match={"ticket": "T-1"})

    assert placed(forest) == {"first": None, "second": 1.0, "third": None}


def test_all_of_a_links_attributes_must_match() -> None:
    """A span that has one of two is not meant."""
    forest = Forest()
    with forest.inside("root"):
        for ticket, try_ in (("T-1", "1"), ("T-1", "2"), ("T-2", "1")):
            with forest.inside("work", **{"ticket": ticket, "try": try_}):
                forest.call(f"{ticket} {try_}")
        forest.reward(1.0, match={"ticket": "T-1", "try": "1"})
        forest.reward(0.5, match={"ticket": "T-2", "try": "2"})

    assert placed(forest) == {"T-1 1": 1.0, "T-1 2": None, "T-2 1": None}
    assert reasons(forest) == {credit.UNKNOWN_TARGET: 1}


def test_a_link_that_contradicts_itself_matches_nothing() -> None:
    """One attribute cannot have two values: neither of them is taken for the one meant."""
    forest = Forest()
    with forest.inside("root"):
        with forest.inside("work", ticket="T-1"):
            forest.call("first")
        again = {
            f"{c.LINK_PREFIX}.1.key_match": "ticket",
            f"{c.LINK_PREFIX}.1.value_match": "T-2",
        }
        forest.tag(forest.reward(1.0, match={"ticket": "T-1"}), **again)

    assert reasons(forest) == {credit.UNKNOWN_TARGET: 1}


def test_a_link_by_span_id_and_response_id_must_match_both() -> None:
    """An id that contradicts another one means no span at all."""
    forest = Forest()
    first = forest.call("first", response_id="chatcmpl-1")
    forest.call("second", response_id="chatcmpl-2")
    forest.reward(1.0, span_id=first, response_id="chatcmpl-1")
    forest.reward(0.5, span_id=first, response_id="chatcmpl-2")

    assert placed(forest) == {"first": 1.0, "second": None}
    assert reasons(forest) == {credit.UNKNOWN_TARGET: 1}


@pytest.mark.parametrize(
    ("value", "text"), [(3, "3"), (True, "true"), (0.5, "0.5"), (("a", "b"), '["a","b"]')]
)
def test_a_link_compares_what_is_no_text_by_its_json(value: object, text: str) -> None:
    """Numbers, booleans and lists match as JSON writes them, as the store's SQL does."""
    forest = Forest()
    with forest.inside("root"):
        with forest.inside("work", key=value):
            forest.call("first")
        forest.call("second")
        forest.reward(1.0, match={"key": text})

    assert placed(forest) == {"first": 1.0, "second": None}


def test_a_link_by_attribute_means_the_latest_before_the_reward() -> None:
    """Of several spans with the attribute each reward judges the one just before it."""
    forest = Forest()
    with forest.inside("root"):
        for index in range(3):
            with forest.inside("work", kind="draft"):
                forest.call(f"draft {index}")
            forest.reward(float(index), match={"kind": "draft"})

    assert placed(forest) == {"draft 0": 0.0, "draft 1": 1.0, "draft 2": 2.0}


def test_a_link_does_not_name_rewards() -> None:
    """A reward that carries the attribute itself is not what is judged."""
    forest = Forest()
    with forest.inside("root"):
        with forest.inside("work", ticket="T-1"):
            forest.call("first")
        tagged = forest.open(c.SPAN_ANNOTATION, {c.REWARD_VALUE: 0.5, "ticket": "T-1"})
        forest.close(tagged)
        forest.reward(("late", 1.0), match={"ticket": "T-1"})

    ((step,),) = (path.transitions for path in explain(forest).trajectories)

    assert step.rewards == {"primary": 0.5, "late": 1.0}


def test_a_link_by_trace_means_the_last_call_of_its_first_span() -> None:
    """Agent Lightning's key for a trace is read too."""
    forest = Forest()
    with forest.inside("root"):
        forest.call("first")
    other = Forest(trace_id="b" * 32, tick=10, process="p2")
    with other.inside("root"):
        other.call("second")
    other.reward(1.0, match={c.LINK_TRACE_ID: "a" * 32, c.OPERATION: c.CHAT})

    assert rewards(TripletAdapter().adapt([*forest.spans, *other.spans])) == {
        "first": 1.0,
        "second": None,
    }


def test_many_links_by_attribute_find_their_calls() -> None:
    """A thousand calls, each judged by an attribute of its own."""
    forest = Forest()
    with forest.inside("root"):
        for index in range(1_000):
            call = forest.open_call(f"call {index}")
            forest.tag(call, item=str(index))
            forest.close(call)
        for index in range(1_000):
            forest.reward(float(index), match={"item": str(index)})

    assert placed(forest) == {f"call {index}": float(index) for index in range(1_000)}


# --- sequences -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_a_sequence_gives_each_step_its_number(rule: Credit) -> None:
    """One number for each call so far, in order; None leaves a step without, under any rule."""
    forest = Forest()
    with forest.inside("root"):
        for index in range(3):
            forest.call(f"call {index}")
        forest.reward(steps=[0.25, None, 1.0])
        forest.call("after")

    found = explain(forest, rule, gamma=0.0)

    worth = {"call 0": 0.25, "call 1": None, "call 2": 1.0, "after": None}
    if rule == "discounted":
        worth["call 1"] = 0.0
    assert rewards(found.trajectories) == worth
    assert [each.by for each in found.credited] == ["sequence"]
    assert (found.report.rewards, found.report.rewards_placed) == (1, 1)


def test_a_sequence_of_another_length_is_reported() -> None:
    """Which step a number is missing for would be a guess."""
    forest = Forest()
    forest.call("first")
    forest.call("second")
    forest.reward(steps=[1.0, 0.5, 0.25])

    assert placed(forest) == {"first": None, "second": None}
    assert reasons(forest) == {credit.WRONG_LENGTH.format(3, 2): 1}


def test_a_sequence_is_of_the_agent_or_operation_it_was_given_in() -> None:
    """Other agents' calls, and those of other operations, are not counted."""
    forest = Forest()
    with forest.inside("root"):
        with forest.agent("A"):
            forest.call("A 1")
            forest.call("A 2")
            forest.reward(steps=[1.0, 2.0])
        with forest.inside("operation"):
            forest.call("o 1")
            forest.call("o 2")
            forest.reward(steps=[3.0, 4.0])

    assert placed(forest) == {"A 1": 1.0, "A 2": 2.0, "o 1": 3.0, "o 2": 4.0}


def test_a_sequence_is_linked_like_any_reward() -> None:
    """Linked to an operation it is of the calls inside; to a response, of that one call."""
    forest = Forest()
    with forest.inside("root"):
        with forest.inside("operation", ticket="T-1") as operation:
            forest.call("first")
            forest.call("second", response_id="chatcmpl-2")
        forest.call("third", response_id="chatcmpl-3")
        forest.reward(steps=[0.25, 0.5], span_id=operation)
        forest.reward(steps=[1.0], response_id="chatcmpl-3")
        forest.reward(steps=[9.0, 9.0], response_id="chatcmpl-2")
        forest.reward(steps=[9.0, 9.0], match={"ticket": "T-1"})

    assert placed(forest) == {"first": 0.25, "second": 0.5, "third": 1.0}
    assert reasons(forest) == {credit.WRONG_LENGTH.format(2, 1): 1, credit.ALREADY_REWARDED: 1}


def test_a_sequence_before_any_call_is_reported() -> None:
    """There is no step to judge yet."""
    forest = Forest()
    forest.reward(steps=[1.0])
    forest.call("first")

    assert reasons(forest) == {credit.NO_CALL_BEFORE: 1}
    assert json.loads(forest.spans[0].attributes[c.REWARD_STEPS]) == [1.0]
