"""Why each trajectory begins where it does: one rule, one test, on trees as agents leave them."""

import json
from typing import Any

import pytest
from tests.adapter.forest import Forest, answers, call_attributes, said

from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter
from lightning_otel.types import BranchCause, Trajectory


def causes(forest: Forest) -> dict[str, BranchCause]:
    """The cause of each trajectory, by its answers."""
    return {" ".join(answers(path)): path.cause for path in TripletAdapter().adapt(forest.spans)}


def talk(*turns: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages of a user and an assistant in turn, after instructions if there are some."""
    told = [said("system", system)] if system else []
    return told + [
        said("user" if i % 2 == 0 else "assistant", turn) for i, turn in enumerate(turns)
    ]


def only(found: list[Trajectory], answer: str) -> Trajectory:
    """The trajectory that ends with an answer."""
    return next(path for path in found if answers(path)[-1] == answer)


# --- what follows none of its agent's ------------------------------------------------------------


def test_start_is_the_cause_of_what_nothing_else_explains() -> None:
    """An agent that begins to work, alone or beside others at the top, starts."""
    forest = Forest()
    with forest.inside("root"):
        with forest.agent("A"):
            forest.call("a")
        with forest.agent("B"):
            forest.call("b")

    assert causes(forest) == {"a": "start", "b": "start"}


def test_parallel_is_the_cause_of_calls_that_overlap() -> None:
    """Twenty calls at once are twenty trajectories for the same cause."""
    forest = Forest()
    with forest.inside("root"):
        forest.close(*[forest.open_call(f"call {index}") for index in range(20)])

    assert set(causes(forest).values()) == {"parallel"}


def test_parallel_is_the_cause_of_calls_in_operations_that_overlap() -> None:
    """Calls that do not overlap themselves are parallel if what holds them is."""
    forest = Forest()
    with forest.inside("root"):
        forest.call("plan")
        left, right = forest.open("left"), forest.open("right")
        for step in "12":
            forest.call(f"left{step}", parent=left)
            forest.call(f"right{step}", parent=right)
        forest.close(left, right)

    assert causes(forest) == {"plan left1 left2": "start", "plan right1 right2": "parallel"}


def test_parallel_is_the_cause_of_a_stream_that_outlives_its_operation() -> None:
    """What began while a stream was still read ran beside it, and so did the stream."""
    forest = Forest()
    with forest.inside("root"):
        with forest.inside("operation"):
            stream = forest.open_call("stream")
        forest.call("meanwhile")
        forest.close(stream)

    assert causes(forest) == {"stream": "parallel", "meanwhile": "parallel"}


def test_sub_agent_is_the_cause_of_an_agent_called_by_a_tool() -> None:
    """An agent inside another one's span is a sub-agent, whatever lies between; so is its own."""
    forest = Forest()
    with forest.agent("boss"):
        forest.call("boss")
        with forest.inside("execute_tool", **{c.OPERATION: c.EXECUTE_TOOL}), forest.agent("worker"):
            forest.call("worker")
            with forest.agent("helper"), forest.inside("step"):
                forest.call("helper")

    assert causes(forest) == {"boss": "start", "worker": "sub_agent", "helper": "sub_agent"}


def test_sub_agent_is_the_cause_of_each_of_several_at_once() -> None:
    """Two runs of one sub-agent beside each other are sub-agents both."""
    forest = Forest()
    with forest.agent("boss"):
        one, two = (forest.open("run", {c.AGENT_NAME: "worker"}) for _ in range(2))
        forest.call("one", parent=one)
        forest.call("two", parent=two)
        forest.close(one, two)

    assert causes(forest) == {"one": "sub_agent", "two": "sub_agent"}


def test_hand_off_is_the_cause_where_a_span_names_the_agent() -> None:
    """A hand-off's span says who goes on, even where that agent's span lies inside the first."""
    forest = Forest()
    with forest.agent("triage"):
        forest.call("triage")
        forest.make("handoff billing", {c.HANDOFF_TARGET: "billing"})
        with forest.agent("billing"):
            forest.call("billing")

    assert causes(forest) == {"triage": "start", "billing": "hand_off"}


def test_hand_off_names_nobody_who_began_before_it() -> None:
    """An agent that was at work before the hand-off did not begin by it."""
    forest = Forest()
    with forest.inside("team"):
        with forest.agent("billing"):
            forest.call("billing")
        with forest.agent("triage"):
            forest.call("triage")
            forest.make("handoff billing", {c.HANDOFF_TARGET: "billing"})

    assert causes(forest) == {"billing": "start", "triage": "start"}


def test_hand_off_is_the_cause_where_another_takes_the_conversation_on() -> None:
    """Messages that begin with all another agent saw and answered are a hand-off, by themselves."""
    forest = Forest()
    with forest.inside("team"):
        with forest.agent("triage"):
            forest.call("to billing", talk("my bill is wrong", system="sort"))
        with forest.agent("billing"):
            forest.call("sorry", talk("my bill is wrong", "to billing", "go on", system="bills"))
        with forest.agent("critic"):
            forest.call("fine", talk("my bill is wrong", "something else", "go on"))

    assert causes(forest) == {"to billing": "start", "sorry": "hand_off", "fine": "start"}


@pytest.mark.parametrize("how", ["failed", "abandoned", "incomplete"])
def test_retry_is_the_cause_after_a_call_that_came_to_nothing(how: str) -> None:
    """What is asked again after a failed, abandoned or unended call is a retry."""
    forest = Forest()
    with forest.inside("root"):
        attributes = call_attributes(talk("hello"), "lost")
        if how == "failed":
            forest.make("chat", attributes, status="ERROR")
        elif how == "abandoned":
            forest.make("chat", {**attributes, c.ABANDONED: True})
        else:
            forest.open("chat", attributes, process="died", sequence=0)
        forest.call("again", talk("hello"))

    assert causes(forest) == {"again": "retry"}


def test_retry_is_no_cause_beside_a_call_that_may_still_run() -> None:
    """A call that never ended in the same process was not given up, as far as anybody knows."""
    forest = Forest()
    with forest.inside("root"):
        forest.open_call("hangs", talk("hello"))
        forest.call("other", talk("hello"))

    assert causes(forest) == {"other": "start"}


def test_retry_is_the_cause_of_the_same_question_with_a_remark() -> None:
    """A failed call's messages with one more that is no answer ask the same again."""
    forest = Forest()
    forest.make("chat", call_attributes(talk("hello"), "lost"), status="ERROR")
    forest.call("again", [*talk("hello"), said("user", "please answer in JSON")])

    assert causes(forest) == {"again": "retry"}


def test_retry_is_no_cause_where_another_question_failed() -> None:
    """A call that asks something else after a failure starts."""
    forest = Forest()
    forest.make("chat", call_attributes(talk("hello"), "lost"), status="ERROR")
    forest.call("other", talk("good evening"))

    assert causes(forest) == {"other": "start"}


def test_retry_is_no_cause_of_calls_that_ran_beside_the_failed_one() -> None:
    """Of samples taken at once one may fail: the others did not ask again."""
    forest = Forest()
    with forest.inside("root"):
        lost = forest.open("chat", call_attributes("go on", "lost"), status="ERROR")
        other = forest.open_call("other")
        forest.close(lost, other)

    assert causes(forest) == {"other": "start"}


def test_retry_throws_away_an_answer_that_is_not_gone_on_with() -> None:
    """An agent that repeats what was said, and not that answer, took another one in its place."""
    forest = Forest()
    forest.call("no JSON", talk("hello"))
    forest.call("JSON", talk("hello"))
    forest.call("more", talk("hello", "JSON", "go on"))

    assert causes(forest) == {"no JSON": "start", "JSON more": "retry"}


def test_retry_throws_away_an_answer_that_its_client_refused() -> None:
    """A whole answer that the client could not use is a step, and the next try is one beside it."""
    forest = Forest()
    attributes = {**call_attributes("parse", "no JSON"), c.FINISH_REASONS: ["stop"]}
    forest.make("chat", attributes, status="ERROR")
    forest.call("JSON", "parse")

    assert causes(forest) == {"no JSON": "start", "JSON": "retry"}


def test_an_agent_that_repeats_nothing_is_asked_the_same_without_a_retry() -> None:
    """Nobody knows whether the same question to an agent without memory is asked again."""
    forest = Forest()
    for index in range(3):
        forest.call(f"{index}", talk("what next?"))

    assert causes(forest) == {"0 1 2": "start"}


# --- what follows an earlier step ----------------------------------------------------------------


def test_retry_is_the_cause_of_a_second_answer_to_one_conversation() -> None:
    """Two calls that continue one conversation with the same words are tries at one step."""
    forest = Forest()
    forest.call("a1", talk("hello"))
    forest.call("bad", talk("hello", "a1", "and then"))
    forest.call("good", talk("hello", "a1", "and then"))
    forest.call("end", talk("hello", "a1", "and then", "good", "thanks"))

    assert causes(forest) == {"a1 bad": "start", "a1 good end": "retry"}


def test_rewind_is_the_cause_of_a_conversation_that_goes_back() -> None:
    """A search goes back to an earlier step and tries another way, one after the other."""
    forest = Forest()
    forest.call("a1", talk("hello"))
    forest.call("left", talk("hello", "a1", "try left"))
    forest.call("right", talk("hello", "a1", "try right"))

    assert causes(forest) == {"a1 left": "start", "a1 right": "rewind"}


def test_parallel_is_the_cause_of_conversations_in_turns() -> None:
    """Two conversations of one agent that alternate run beside each other, though no call does."""
    forest = Forest()
    forest.call("a1", talk("hello"))
    forest.call("b1", talk("other"))
    forest.call("a2", talk("hello", "a1", "and then"))
    forest.call("b2", talk("other", "b1", "and then"))
    forest.call("a3", talk("hello", "a1", "and then", "a2", "at last"))

    assert causes(forest) == {"b1 b2": "parallel", "a1 a2 a3": "start"}


def tool_turns(*results: str) -> list[dict[str, Any]]:
    """A task, and for each result an answer that called a tool and what that gave."""
    found = talk("fix the bug", system="you code")
    for index, result in enumerate(results):
        found += [said("assistant", f"call {index}"), said("tool", result)]
    return found


def coding(forest: Forest, steps: int) -> list[str]:
    """An agent that calls a tool some times, each time with all that was said."""
    return [
        forest.call(f"call {step}", tool_turns(*[f"result {i}" for i in range(step)]))
        for step in range(steps)
    ]


def test_compaction_is_the_cause_of_a_summary_after_the_task() -> None:
    """The conversation's beginning and a summary in place of the rest are its continuation."""
    forest = Forest()
    coding(forest, 3)
    forest.call("after", [*tool_turns(), said("user", "so far: two files were read")])

    assert causes(forest) == {"call 0 call 1 call 2": "start", "after": "compaction"}


def test_compaction_is_the_cause_of_a_window_over_the_last_messages() -> None:
    """A conversation whose oldest messages were dropped repeats the later ones."""
    forest = Forest()
    coding(forest, 4)
    whole = tool_turns(*[f"result {i}" for i in range(4)])
    forest.call("call 4", [whole[0], *whole[-4:]])

    assert causes(forest) == {"call 0 call 1 call 2 call 3": "start", "call 4": "compaction"}


def test_compaction_is_the_cause_of_results_left_out() -> None:
    """As many messages with fewer tokens, since old results were cut short, are a compaction."""
    forest = Forest()
    for step, tokens in enumerate((10, 500, 900)):
        given = tool_turns(*[f"result {i}" for i in range(step)])
        attributes = {**call_attributes(given, f"call {step}"), c.INPUT_TOKENS: tokens}
        forest.make("chat", attributes)
    cut = tool_turns("[left out]", "result 1", "result 2")
    forest.make("chat", {**call_attributes(cut, "call 3"), c.INPUT_TOKENS: 300})

    assert causes(forest) == {"call 0 call 1 call 2": "start", "call 3": "compaction"}


def test_compaction_is_no_cause_of_a_new_task() -> None:
    """The same instructions with another task repeat nothing that was said, and follow by time."""
    forest = Forest()
    coding(forest, 3)
    forest.call("new", talk("write a test", system="you code"))

    assert causes(forest) == {"call 0 call 1 call 2 new": "start"}


def test_compaction_keeps_sight_and_return_of_what_came_after() -> None:
    """The step before sees the shortened conversation next, and earns what comes of it."""
    forest = Forest()
    coding(forest, 2)
    forest.call("end", [*tool_turns(), said("user", "so far")])
    forest.reward(1.0)

    found = TripletAdapter(credit="discounted", gamma=0.5).adapt(forest.spans)

    last = only(found, "call 1").transitions[-1]
    assert last.done
    assert last.next_observation == only(found, "end").transitions[0].observation
    assert [step.reward for path in found for step in path.transitions] == [0.25, 0.5, 1.0]


def test_retry_discards_no_return() -> None:
    """An answer that was thrown away earns nothing of what the other one led to."""
    forest = Forest()
    forest.call("bad", talk("hello"))
    forest.call("good", talk("hello"))
    forest.call("end", talk("hello", "good", "thanks"))
    forest.reward(1.0)

    found = TripletAdapter(credit="discounted", gamma=0.5).adapt(forest.spans)

    assert [[step.reward for step in path.transitions] for path in found] == [[None], [0.5, 1.0]]


def test_causes_are_read_from_choices_and_odd_messages() -> None:
    """Several choices, absent roles and empty messages break no rule."""
    forest = Forest()
    attributes = call_attributes([{"parts": []}, {"role": 7}], "x")
    forest.make("chat", {**attributes, c.OUTPUT_MESSAGES: json.dumps([{"parts": ["y"]}] * 2)})
    forest.make("chat", {**attributes, c.HANDOFF_TARGET: ["no", "text"]}, status="ERROR")
    with forest.agent("A"):
        forest.make("chat", {**attributes, c.INPUT_MESSAGES: "[]"})

    assert len(TripletAdapter().explain(forest.spans).trajectories) == 2
