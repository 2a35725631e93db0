"""A rollout's reward by both of its definitions: the adapter's, and the SQL of the views."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tests.adapter.forest import Forest
from tests.adapter.programs import programs

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter
from lightning_otel.adapter.advantages import last_rewards
from lightning_otel.store.earnings import LAST_REWARD
from lightning_otel.types import Span


def steps_of_one_name(it: Forest) -> None:
    """A reward after each of three calls."""
    for value in (0.2, 0.1, 0.4):
        it.call("a")
        it.reward(value)


def two_for_one_call(it: Forest) -> None:
    """Two of one name, and one of another, after one call."""
    it.call("a")
    it.reward(0.5)
    it.reward(1.0)
    it.reward(("tone", 0.25))


def named(it: Forest) -> None:
    """Several numbers in one reward."""
    it.call("a")
    it.reward(("correct", 1.0), ("short", 0.4))


def no_call(it: Forest) -> None:
    """Nobody called a model: rewards of the first one's name judge the whole."""
    work = it.make()
    it.reward(0.3)
    it.reward(0.5, ("tone", 9.0))
    it.reward(("tone", 9.0))
    it.reward(0.1, span_id=work)
    it.reward(0.9, span_id=work)
    it.reward(7.0, response_id="unknown")
    it.reward(0.1, match={"session": "unknown"})


def before_any_call(it: Forest) -> None:
    """A reward with nothing to judge."""
    it.reward(0.3)
    it.call("a")


def nothing(it: Forest) -> None:
    """No reward is none, and not 0."""
    it.call("a")


def linked_beats_ruled(it: Forest) -> None:
    """A link's reward comes before a rule's, whenever it comes."""
    first = it.call("a", response_id="r-1")
    it.call("b")
    it.reward(0.5)
    it.reward(0.1, response_id="r-1")
    it.reward(("late", -1.0), span_id=first)
    it.reward(1.0, match={"agentlightning.operation.name": "nowhere"})


def linked_to_an_operation(it: Forest) -> None:
    """A span that is no call stands for the last one in it."""
    with it.inside("plan", ticket="T-17") as plan:
        it.call("a")
        it.call("b")
    it.call("c")
    it.reward(0.1, span_id=plan)
    it.reward(0.2, match={"ticket": "T-17"})
    it.reward(0.4)


def unknown_link(it: Forest) -> None:
    """What a link names is not there."""
    it.call("a")
    it.reward(0.2, response_id="r-9")
    it.reward(0.4)


def operations(it: Forest) -> None:
    """Each operation is judged by itself, and then the whole again."""
    for value in (0.2, 0.3):
        with it.inside("step"):
            it.call("a")
            it.reward(value)
    it.reward(1.0)


def beside_each_other(it: Forest) -> None:
    """Two operations that overlap: a reward stays in its own."""
    one, two = it.open("one"), it.open("two")
    it.call("a", parent=one)
    it.call("b", parent=two)
    it.reward(0.2, parent=one)
    it.reward(0.3, parent=two)
    it.close(one, two)


def agents(it: Forest) -> None:
    """An agent's reward goes to no other agent's call."""
    with it.agent("planner"):
        it.tag(it.call("a"), **{c.AGENT_NAME: "planner"})
    with it.agent("critic"):
        it.tag(it.reward(0.7), **{c.AGENT_NAME: "critic"})


def given_in_a_call(it: Forest) -> None:
    """A reward within a call judges that one."""
    it.call("a")
    call = it.open_call("b")
    it.reward(0.2, parent=call)
    it.close(call)
    it.reward(0.4)


def failed(it: Forest) -> None:
    """A failed call is no step."""
    it.call("a")
    it.call("b", status="ERROR")
    it.reward(0.4)


def sequence(it: Forest) -> None:
    """A number for each step counts as their sum."""
    it.call("a")
    it.call("b")
    it.reward(steps=(0.25, 0.5))


def marks(it: Forest) -> None:
    """Actions marked by hand are steps."""
    for value in (0.2, 0.3):
        it.make(c.SPAN_ACTION, {c.OBJECT_LITERAL: "x", c.OBJECT_TYPE: "str"})
        it.reward(value)


CASES: dict[Callable[[Forest], None], float | None] = {
    steps_of_one_name: 0.7,
    two_for_one_call: 0.5,
    named: 1.0,
    no_call: 0.9,
    before_any_call: None,
    nothing: None,
    linked_beats_ruled: 0.6,
    linked_to_an_operation: 0.5,
    unknown_link: 0.4,
    operations: 0.5,
    beside_each_other: 0.5,
    agents: None,
    given_in_a_call: 0.2,
    failed: 0.4,
    sequence: 0.75,
    marks: 0.5,
}


def by_python(spans: list[Span]) -> dict[str, float]:
    """The adapter's."""
    return last_rewards(TripletAdapter().explain(spans).outcomes)


def by_sql(store: Store) -> dict[str, float]:
    """The view's."""
    query = f"SELECT rollout_id, {LAST_REWARD} AS reward FROM rollouts GROUP BY 1"
    found = {row["rollout_id"]: row["reward"] for row in store.sql(query)}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize("make", CASES)
def test_a_reward_is_the_same_by_both(store: Store, make: Callable[[Forest], None]) -> None:
    """One table of cases runs through the adapter and the view."""
    it = Forest()
    with it.inside(c.SPAN_ROLLOUT):
        make(it)
    store.add(it.spans)
    reward = CASES[make]
    expected = {} if reward is None else {"r1": pytest.approx(reward)}

    assert by_python(it.spans) == expected
    assert by_sql(store) == expected


@given(programs)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_rewards_of_drawn_programs_are_the_same(tmp_path_factory: Any, spans: list[Span]) -> None:
    """So are those of programs nobody thought of."""
    store = Store(tmp_path_factory.mktemp("drawn") / "x.duckdb")
    store.add(spans)

    assert by_sql(store) == pytest.approx(by_python(spans))
