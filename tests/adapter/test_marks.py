"""Actions and observations marked by hand become transitions as model calls do."""

import pytest
from tests.adapter.forest import Forest, draw, text_of

from lightning_otel import TripletAdapter
from lightning_otel import conventions as c

TRACKED = f"@{c.TRACK_ONLY}=A"

CASES = {
    "each action answers what was seen since the one before": (
        "root( see:start do:left !.1 see:wall see:dark do:right !1 see:exit )",
        "start>left=0.1>wall dark, wall dark>right=1>exit.",
    ),
    "actions with nothing seen": ("do:a do:b", ">a>, >b>."),
    "each agent answers what it saw": (
        "A[ see:x B[ see:y do:b ] do:a ]",
        "y>b>., x>a>.",
    ),
    "beside model calls": (
        "A[ see:x a do:b ] B[ do:d ]",
        "go on>a>., >d>. ! 2 marked by hand beside model calls",
    ),
    "an agent that never acts": ("see:x", "! 1 idle"),
    "an action that never ended": ("do:a +do:b", ">a>. ! 1 incomplete"),
    "an observation that never ended": ("do:a +see:b", ">a>. ! 1 incomplete"),
    "an agent that is not tracked": (
        f"A[ do:a{TRACKED} ] B[ do:b{TRACKED} ]",
        ">a>. ! 1 not tracked",
    ),
}


@pytest.mark.parametrize(("drawing", "expected"), CASES.values(), ids=CASES)
def test_marks_become_transitions(drawing: str, expected: str) -> None:
    """Each is what was seen, what was done, and what was seen next; ``.`` where it is done."""
    found = TripletAdapter().explain(draw(drawing).spans)

    steps = [
        f"{text_of(step.observation)}>{text_of(step.action)}"
        f"{'' if step.reward is None else f'={step.reward:g}'}"
        f">{text_of(step.next_observation)}{'.' * step.done}"
        for path in found.trajectories
        for step in path.transitions
    ]
    dropped = [
        f"{count} {reason.partition(':')[0]}" for reason, count in found.report.reasons().items()
    ]
    assert " ! ".join(filter(None, (", ".join(steps), *dropped))) == expected.removeprefix("! ")
    assert {each.noun for each in found.report.dropped} <= {"mark"}


def test_marks_speak_as_agent_and_world() -> None:
    """An action is the assistant's message, an observation the user's; names and JSON stay."""
    forest = Forest()
    forest.make(c.SPAN_OBSERVATION, {c.OBJECT_JSON: '{"x": 1}', c.MARK_NAME: "board"})
    forest.make(c.SPAN_ACTION, {c.OBJECT_LITERAL: "e4", c.MARK_NAME: "move"})

    ((step,),) = (path.transitions for path in TripletAdapter().adapt(forest.spans))

    assert step.observation == (
        {"role": "user", "parts": [{"type": "text", "content": '{"x": 1}'}], "name": "board"},
    )
    assert (step.action[0]["role"], step.action[0]["name"]) == ("assistant", "move")
