"""Actions and observations marked by hand become transitions as model calls do."""

from typing import Any

import pytest
from tests.adapter.forest import Forest, paths, text_of

from lightning_otel import conventions as c
from lightning_otel.adapter import Adaptation, TripletAdapter
from lightning_otel.adapter.assembly import IDLE_MARK, INCOMPLETE_MARK, MARKED_BESIDE_CALLS
from lightning_otel.adapter.calls import NOT_TRACKED


def act(forest: Forest, text: str, **attributes: Any) -> str:
    """Mark an action."""
    return forest.make(c.SPAN_ACTION, {c.OBJECT_LITERAL: text, **attributes})


def see(forest: Forest, text: str, **attributes: Any) -> str:
    """Mark an observation."""
    return forest.make(c.SPAN_OBSERVATION, {c.OBJECT_LITERAL: text, **attributes})


def explain(forest: Forest) -> Adaptation:
    """The adaptation of a forest."""
    return TripletAdapter().explain(forest.spans)


def test_marks_become_transitions_with_the_ending_observation() -> None:
    """Each action answers what was seen since the one before; the last one's end is kept."""
    forest = Forest()
    with forest.inside("root"):
        see(forest, "start")
        act(forest, "left")
        forest.reward(0.1)
        see(forest, "wall")
        see(forest, "dark")
        act(forest, "right")
        forest.reward(1.0)
        see(forest, "exit")

    ((first, last),) = (path.transitions for path in explain(forest).trajectories)

    assert (text_of(first.observation), text_of(first.action), first.reward) == (
        "start",
        "left",
        0.1,
    )
    assert text_of(first.next_observation) == text_of(last.observation) == "wall dark"
    assert (first.done, last.done) == (False, True)
    assert (text_of(last.next_observation), last.reward) == ("exit", 1.0)
    assert (first.capture, first.step, last.step) == ("text", 0, 1)


def test_marks_speak_as_agent_and_world() -> None:
    """An action is the assistant's message, an observation the user's; names and JSON stay."""
    forest = Forest()
    forest.make(c.SPAN_OBSERVATION, {c.OBJECT_JSON: '{"x": 1}', c.MARK_NAME: "board"})
    act(forest, "e4", **{c.MARK_NAME: "move"})

    ((step,),) = (path.transitions for path in explain(forest).trajectories)

    assert step.observation == (
        {"role": "user", "parts": [{"type": "text", "content": '{"x": 1}'}], "name": "board"},
    )
    assert step.action[0]["role"] == "assistant"
    assert step.action[0]["name"] == "move"


def test_an_action_without_observation_is_a_step() -> None:
    """Two actions with nothing seen between them are two steps."""
    forest = Forest()
    act(forest, "first")
    act(forest, "second")

    found = explain(forest)

    assert paths(found.trajectories) == [["first", "second"]]
    first, last = found.trajectories[0].transitions
    assert first.next_observation == ()
    assert last.next_observation is None


def test_marks_of_agents_are_kept_apart() -> None:
    """Each agent answers what it saw itself."""
    forest = Forest()
    with forest.agent("A"):
        see(forest, "seen by A")
        with forest.agent("B"):
            see(forest, "seen by B")
            act(forest, "done by B")
        act(forest, "done by A")

    found = explain(forest).trajectories

    assert {path.agent: text_of(path.transitions[0].observation) for path in found} == {
        "A": "seen by A",
        "B": "seen by B",
    }


def test_marks_beside_model_calls_are_reported() -> None:
    """Where the agent made model calls those are its transitions, and its marks are left out."""
    forest = Forest()
    with forest.agent("A"):
        see(forest, "seen")
        forest.call("answer")
        act(forest, "done")
    with forest.agent("B"):
        act(forest, "by hand")

    found = explain(forest)

    assert paths(found.trajectories) == [["answer"], ["by hand"]]
    assert found.report.reasons() == {MARKED_BESIDE_CALLS: 2}
    assert (found.report.calls, found.report.transitions) == (2, 2)


def test_observations_of_an_agent_that_never_acts_are_reported() -> None:
    """What was seen and never acted upon is no step, and is not lost in silence."""
    forest = Forest()
    seen = see(forest, "nothing to do")

    found = explain(forest)

    assert found.trajectories == []
    assert [(each.span_id, each.noun, each.reason) for each in found.report.dropped] == [
        (seen, "mark", IDLE_MARK)
    ]


@pytest.mark.parametrize("name", [c.SPAN_ACTION, c.SPAN_OBSERVATION])
def test_a_mark_that_never_ended_is_reported(name: str) -> None:
    """A mark whose process died before its end has lost what it held."""
    forest = Forest()
    act(forest, "whole")
    forest.open(name)

    found = explain(forest)

    assert paths(found.trajectories) == [["whole"]]
    assert found.report.reasons() == {INCOMPLETE_MARK: 1}


def test_marks_honour_track_only() -> None:
    """Actions of an agent that is not tracked are no training data."""
    forest = Forest()
    with forest.agent("A"):
        act(forest, "tracked", **{c.TRACK_ONLY: ["A"]})
    with forest.agent("B"):
        act(forest, "not tracked", **{c.TRACK_ONLY: ["A"]})

    found = explain(forest)

    assert paths(found.trajectories) == [["tracked"]]
    assert found.report.reasons() == {NOT_TRACKED: 1}


@pytest.mark.parametrize("value", [5, None, ["a"], b"bytes"])
def test_a_mark_of_a_strange_value_is_still_a_step(value: object) -> None:
    """A value that is no text is shown as text."""
    forest = Forest()
    forest.make(c.SPAN_ACTION, {c.OBJECT_LITERAL: value})

    assert paths(explain(forest).trajectories) == [[str(value)]]
