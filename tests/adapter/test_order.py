"""The order of spans whose clocks disagree: right where something tells it, flagged where not."""

from dataclasses import replace
from typing import Any

import pytest
from tests.adapter.forest import SECOND, Forest, answers, paths, rewards, said

from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter, tree
from lightning_otel.types import Span

MINUTES = 60 * SECOND
HOUR = 3600 * SECOND


def shifted(spans: list[Span], by_ns: int, since: int = 0) -> list[Span]:
    """The spans on a clock that is wrong, from one of them on."""
    return [
        each
        if index < since
        else replace(
            each,
            start_ns=each.start_ns + by_ns,
            end_ns=None if each.end_ns is None else each.end_ns + by_ns,
        )
        for index, each in enumerate(spans)
    ]


def uncounted(spans: list[Span]) -> list[Span]:
    """The spans of a process that did not count."""
    return [replace(each, sequence=-1, end_sequence=-1) for each in spans]


def talk(*turns: str) -> list[dict[str, Any]]:
    """Messages of a user and an assistant in turn."""
    return [said("user" if i % 2 == 0 else "assistant", turn) for i, turn in enumerate(turns)]


def names(spans: list[Span]) -> list[str]:
    """The spans' names in order."""
    return [each.name for each in tree.build(spans).spans]


def served(skew_ns: int) -> list[Span]:
    """A host that asks another one twice and judges each answer; the other's clock is wrong."""
    asking, serving = Forest(process="a"), Forest(process="b")
    with asking.inside("root"):
        for index in range(2):
            with asking.inside("POST") as request:
                serving.tick = asking.tick
                server = serving.open("serve", parent=request, kind="SERVER")
                serving.call(f"answer {index}", parent=server)
                serving.close(server)
                asking.tick = serving.tick
            asking.reward(float(index))
    client = [
        replace(each, kind="CLIENT") if each.name == "POST" else each for each in asking.spans
    ]
    return [*client, *shifted(serving.spans, skew_ns)]


@pytest.mark.parametrize("skew_ns", [0, 5 * MINUTES, -5 * MINUTES])
def test_a_host_five_minutes_off_is_ordered_by_who_asked_whom(skew_ns: int) -> None:
    """Requests put the other host's calls in their place, and each reward finds its call."""
    found = TripletAdapter().explain(served(skew_ns))

    assert paths(found.trajectories) == [["answer 0", "answer 1"]]
    assert rewards(found.trajectories) == {"answer 0": 0.0, "answer 1": 1.0}
    assert not found.trajectories[0].is_guess
    assert found.report.repairs == ()


@pytest.mark.parametrize("skew_ns", [0, 5 * MINUTES, -5 * MINUTES])
def test_the_steps_of_hosts_in_turn_are_known_by_the_one_that_waited(skew_ns: int) -> None:
    """A call here, one there, one here: who waited for whom tells the order."""
    here, there = Forest(process="a"), Forest(process="b", tick=4)
    with here.inside("root"):
        here.call("one")
        with here.inside("POST") as request:
            server = there.open("serve", parent=request, kind="SERVER")
            there.call("two", parent=server)
            there.close(server)
            here.tick = there.tick
        here.call("three")
    spans = [replace(each, kind="CLIENT") if each.name == "POST" else each for each in here.spans]

    (found,) = TripletAdapter().adapt([*spans, *shifted(there.spans, skew_ns)])

    assert answers(found) == ["one", "two", "three"]
    assert not found.is_guess


@pytest.mark.parametrize("skew_ns", [0, 5 * MINUTES, -5 * MINUTES])
def test_a_conversation_over_two_hosts_is_ordered_by_its_messages(skew_ns: int) -> None:
    """Each turn repeats the turn before, whichever host it ran on and whatever its clock says."""
    here, there = Forest(process="a", trace_id="a" * 32), Forest(process="b", trace_id="b" * 32)
    here.call("1", talk("hello"))
    there.tick = here.tick
    there.call("2", talk("hello", "1", "more"))
    here.tick = there.tick
    here.call("3", talk("hello", "1", "more", "2", "more"))
    here.reward(1.0)

    (found,) = TripletAdapter().adapt([*shifted(there.spans, skew_ns), *here.spans])

    assert answers(found) == ["1", "2", "3"]
    assert not found.is_guess
    assert [step.reward for step in found.transitions] == [None, None, 1.0]


def test_two_hosts_that_nothing_ties_are_a_guess() -> None:
    """Where only clocks tell which host came first, the trajectory says so."""
    here, there = Forest(process="a"), Forest(process="b", tick=10)
    with here.inside("root") as root:
        here.call("one")
        here.tick = 20
    there.call("two", parent=root)

    (found,) = TripletAdapter().adapt([*here.spans, *there.spans])

    assert answers(found) == ["one", "two"]
    assert found.is_guess


def test_a_server_that_nobody_waited_for_is_a_guess() -> None:
    """Without a request's span nothing says whether the other host's call had ended."""
    here, there = Forest(process="a"), Forest(process="b", tick=2)
    with here.inside("root"):
        with here.inside("step") as step:
            there.call("two", parent=step)
            here.tick = there.tick
        here.call("three")

    (found,) = TripletAdapter().adapt([*here.spans, *there.spans])

    assert answers(found) == ["two", "three"]
    assert found.is_guess


def agent_loop(*, is_counted: bool) -> list[Span]:
    """Three steps with a reward each, in a process whose clock steps back by an hour."""
    forest = Forest(is_counted=is_counted)
    with forest.agent("A"):
        for index in range(3):
            forest.call(f"{index}")
            forest.reward(float(index))
    return shifted(forest.spans, -HOUR, since=3)


def test_a_clock_that_steps_back_an_hour_changes_nothing_that_was_counted() -> None:
    """One process's own count is the order, and every reward finds its call."""
    found = TripletAdapter().adapt(agent_loop(is_counted=True))

    assert paths(found) == [["0", "1", "2"]]
    assert rewards(found) == {"0": 0.0, "1": 1.0, "2": 2.0}
    assert not found[0].is_guess


def test_a_counted_clock_that_steps_back_is_set_forward_beside_other_processes() -> None:
    """The count holds, and what came an hour early by the clock is not before the other process."""
    other = Forest(process="p2", trace_id="b" * 32, tick=50)
    with other.agent("B"):
        other.call("b")

    found = TripletAdapter().adapt([*other.spans, *agent_loop(is_counted=True)])

    assert paths(found) == [["0", "1", "2"], ["b"]]
    assert rewards(found) == {"0": 0.0, "1": 1.0, "2": 2.0, "b": None}
    assert not any(path.is_guess for path in found)


def test_a_clock_that_steps_back_uncounted_is_flagged() -> None:
    """Parents still come before their children; which child came first is the clock's guess."""
    spans = agent_loop(is_counted=False)

    (found,) = TripletAdapter().adapt(spans)

    assert names(spans)[0] == "invoke_agent"
    assert found.is_guess


def test_a_clock_that_steps_back_uncounted_is_put_right_by_the_conversation() -> None:
    """The messages tell the order of calls, and parentage what each reward judges."""
    forest = Forest(is_counted=False)
    with forest.agent("A"):
        forest.call("1", talk("hello"))
        forest.reward(1.0, parent=forest.call("2", talk("hello", "1", "more")))
        forest.reward(2.0, parent=forest.call("3", talk("hello", "1", "more", "2", "end")))
    spans = shifted(forest.spans, -HOUR, since=2)

    (found,) = TripletAdapter().adapt(spans)

    assert answers(found) == ["1", "2", "3"]
    assert [step.reward for step in found.transitions] == [None, 1.0, 2.0]
    assert not found.is_guess


def test_a_parent_starts_before_its_child_on_any_clock() -> None:
    """A child whose host is behind does not come before what called it."""
    parent = Span("t", "parent", None, "parent", 100 * SECOND, 200 * SECOND)
    child = Span("t", "child", "parent", "child", 0, 5 * SECOND, process="other")
    grandchild = Span("t", "grandchild", "child", "grandchild", SECOND, 2 * SECOND, process="other")

    built = tree.build([grandchild, child, parent])

    assert [each.name for each in built.spans] == ["parent", "child", "grandchild"]
    assert built.ends[2] < built.ends[1] < built.ends[0]


def test_contradicting_parents_and_counts_lose_nothing() -> None:
    """A count that says the child came first, and clients that wait in circles, are no trap."""
    one = [
        Span("t", "a", "b", "a", 1, 9, process="p", sequence=0, end_sequence=1, kind="CLIENT"),
        Span("t", "b", "c", "b", 2, 8, process="q", sequence=0, end_sequence=1, kind="SERVER"),
        Span("t", "c", None, "c", 3, 7, process="p", sequence=2, end_sequence=3, kind="CLIENT"),
        Span("t", "d", "c", "d", 4, None, process="q", sequence=-1, kind="SERVER"),
    ]

    built = tree.build(one)

    assert sorted(each.name for each in built.spans) == ["a", "b", "c", "d"]
    assert all(start <= end for start, end in zip(built.starts, built.ends, strict=True))


def test_a_conversation_that_two_calls_left_behind_reorders_nothing() -> None:
    """Where two calls left the same words, nobody knows which was gone on with: the clock stays."""
    here, there = Forest(process="a"), Forest(process="b", tick=50)
    there.call("1", talk("hello"))
    there.call("1", talk("hello"))
    here.call("2", talk("hello", "1", "more"))

    found = TripletAdapter().adapt([*here.spans, *there.spans])

    assert [answers(path)[0] for path in found] == ["2", "2"]
    assert all(path.is_guess for path in found)


def test_ten_thousand_spans_of_two_processes_are_ordered_without_recursion() -> None:
    """A deep chain over two hosts, each call's clock behind its caller's, keeps its depth."""
    chain = [
        Span("t", f"s{i}", f"s{i - 1}" if i else None, "link", -i, 10 + i, process=f"p{i % 2}")
        for i in range(10_000)
    ]

    built = tree.build(chain)

    assert [each.span_id for each in built.spans] == [f"s{i}" for i in range(10_000)]
    assert c.AGENT_NAME not in built.spans[0].attributes
