"""Which call follows which: conversations, time, and what ran side by side."""

import json
from typing import Any

from tests.adapter.forest import Forest, answers, call_attributes, paths, said

from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter, branches


def found_paths(forest: Forest) -> list[list[str]]:
    """The answers along each path."""
    return paths(TripletAdapter().adapt(forest.spans))


def conversation(*turns: str) -> list[dict[str, Any]]:
    """Messages of a user and an assistant in turn."""
    return [said("user" if i % 2 == 0 else "assistant", turn) for i, turn in enumerate(turns)]


def test_paths_run_from_every_root_to_every_leaf() -> None:
    """A step that two others follow lies on two paths."""
    assert branches.paths([-1, 0, 1, 1, -1]) == [[0, 1, 2], [0, 1, 3], [4]]


def test_calls_one_after_the_other_are_one_path() -> None:
    """Calls that share no conversation follow one another by time."""
    forest = Forest()
    for index in range(3):
        forest.call(f"call {index}")

    assert found_paths(forest) == [["call 0", "call 1", "call 2"]]


def test_twenty_concurrent_calls_are_twenty_branches() -> None:
    """Calls that overlap in time follow nothing and one another not."""
    forest = Forest()
    with forest.inside("root"):
        forest.close(*[forest.open_call(f"call {index}") for index in range(20)])

    assert found_paths(forest) == [[f"call {index}"] for index in range(20)]


def test_a_call_before_five_parallel_ones_is_shared_by_five_paths() -> None:
    """A plan and five calls that carry it out are five paths with one common transition."""
    forest = Forest()
    with forest.inside("root"):
        forest.call("plan")
        forest.close(*[forest.open_call(f"part {index}") for index in range(5)])

    found = TripletAdapter().adapt(forest.spans)

    assert paths(found) == [["plan", f"part {index}"] for index in range(5)]
    assert len({id(path.transitions[0]) for path in found}) == 1


def test_a_conversation_is_continued_by_its_history() -> None:
    """Two interleaved conversations of one agent are two paths, told apart by their messages."""
    forest = Forest()
    forest.call("a1", conversation("hello"))
    forest.call("b1", conversation("other"))
    forest.call("a2", conversation("hello", "a1", "and then"))
    forest.call("b2", conversation("other", "b1", "and then"))
    forest.call("a3", conversation("hello", "a1", "and then", "a2", "at last"))

    assert found_paths(forest) == [["b1", "b2"], ["a1", "a2", "a3"]]


def test_a_conversation_is_continued_by_any_of_its_choices() -> None:
    """Where a model answered several times, the program may go on with any of the answers."""
    forest = Forest()
    attributes = call_attributes("question", "unused")
    choices = [said("assistant", "no"), said("assistant", "yes")]
    forest.make("chat", {**attributes, c.OUTPUT_MESSAGES: json.dumps(choices)})
    forest.call("aside")
    forest.call("went on", conversation("question", "yes", "why"))

    assert found_paths(forest) == [["aside"], ["no yes", "went on"]]


def test_the_longest_conversation_is_continued() -> None:
    """A call follows the latest turn of its conversation, not an earlier one."""
    forest = Forest()
    forest.call("a1", conversation("hello"))
    forest.call("a2", conversation("hello", "a1", "more"))
    forest.call("aside", "something else")
    forest.call("a3", conversation("hello", "a1", "more", "a2", "end"))

    assert found_paths(forest) == [["aside"], ["a1", "a2", "a3"]]


def test_a_conversation_ignores_what_is_not_repeated() -> None:
    """Reasoning and empty text of an answer, and fields beside the parts, are not sent again."""
    forest = Forest()
    answer = {
        "role": "assistant",
        "parts": [
            {"type": "reasoning", "content": "hm"},
            {"type": "text", "content": ""},
            {"type": "tool_call", "id": "t1", "name": "add", "arguments": {"a": [1, 2]}},
        ],
        "finish_reason": "tool_calls",
    }
    repeated = {"role": "assistant", "parts": answer["parts"][2:]}
    result = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "t1", "response": 3}]}
    asked = said("user", "1 + 2")
    attributes = {**call_attributes("1 + 2", ""), c.OUTPUT_MESSAGES: json.dumps([answer])}
    first = forest.make("chat", attributes)
    forest.call("aside")
    last = forest.call("3", [asked, repeated, result])

    found = TripletAdapter().adapt(forest.spans)

    assert [[step.span_id for step in path.transitions][::2] for path in found][1] == [first]
    assert [step.span_id for step in found[1].transitions] == [first, last]


def test_messages_of_any_shape_are_compared() -> None:
    """Parts that are no list, no objects, or nested beyond measure break nothing."""
    deep: Any = "end"
    for _ in range(100):
        deep = [deep]
    strange: list[Any] = [
        {"role": "user"},
        {"role": ["user"], "parts": "text"},
        {"role": "user", "parts": [1, None, ["x"]]},
        {"parts": [{"type": ["odd"]}, {"type": "text", "content": {"a": deep}}]},
    ]
    forest = Forest()
    forest.call("first", strange)
    forest.call("aside")
    forest.call("second", [*strange, said("assistant", "first"), said("user", "on")])

    found = TripletAdapter().explain(forest.spans)

    assert found.report.transitions == 3
    assert paths(found.trajectories) == [["aside"], ["first", "second"]]


def test_equal_conversations_go_on_where_they_were_held() -> None:
    """Of calls that left the same conversation behind, the one beside is continued."""
    forest = Forest()
    with forest.inside("root"):
        operations = [forest.open("operation") for _ in range(3)]
        for operation in operations:
            forest.call("same", conversation("question"), parent=operation)
        for index, operation in enumerate(operations):
            turns = conversation("question", "same", "why")
            forest.call(f"because {index}", turns, parent=operation)
        forest.close(*operations)

    assert found_paths(forest) == [["same", f"because {index}"] for index in range(3)]


def test_concurrent_operations_are_not_mixed() -> None:
    """Calls inside operations that ran side by side follow only calls of their own operation."""
    forest = Forest()
    with forest.inside("root"):
        forest.call("plan")
        left, right = forest.open("left"), forest.open("right")
        forest.call("left 1", parent=left)
        forest.call("right 1", parent=right)
        forest.call("left 2", parent=left)
        forest.call("right 2", parent=right)
        forest.close(left, right)

    assert found_paths(forest) == [["plan", "left 1", "left 2"], ["plan", "right 1", "right 2"]]


def test_a_call_after_parallel_operations_follows_the_one_that_ended_last() -> None:
    """What comes after a fan-out follows the latest call of it; the others end there."""
    forest = Forest()
    with forest.inside("root"):
        left, right = forest.open("left"), forest.open("right")
        forest.call("left", parent=left)
        forest.call("right", parent=right)
        forest.close(right, left)
        forest.call("after")

    assert found_paths(forest) == [["left"], ["right", "after"]]


def test_concurrent_agents_of_one_name_are_not_mixed() -> None:
    """Two runs of one agent at once are two branches, though their calls alternate."""
    forest = Forest()
    with forest.inside("root"):
        one, two = (forest.open("agent", {c.AGENT_NAME: "worker"}) for _ in range(2))
        for step in range(2):
            forest.call(f"one {step}", parent=one)
            forest.call(f"two {step}", parent=two)
        forest.close(one, two)

    found = TripletAdapter().adapt(forest.spans)

    assert paths(found) == [["one 0", "one 1"], ["two 0", "two 1"]]
    assert [(path.agent, path.branch) for path in found] == [("worker", 0), ("worker", 1)]


def test_runs_of_an_agent_one_after_the_other_are_one_path() -> None:
    """An agent invoked twice in turn goes on where it stopped."""
    forest = Forest()
    with forest.inside("root"):
        for index in range(2):
            with forest.agent("worker"):
                forest.call(f"run {index}")

    assert found_paths(forest) == [["run 0", "run 1"]]


def test_agents_have_trajectories_of_their_own() -> None:
    """Calls of concurrent agents, alternating, are one trajectory an agent."""
    forest = Forest()
    with forest.inside("root"):
        a, b = (forest.open("agent", {c.AGENT_NAME: name}) for name in "AB")
        for step in range(3):
            forest.call(f"a{step}", parent=a)
            forest.call(f"b{step}", parent=b)
        forest.close(a, b)

    found = TripletAdapter().adapt(forest.spans)

    assert {path.agent: answers(path) for path in found} == {
        "A": ["a0", "a1", "a2"],
        "B": ["b0", "b1", "b2"],
    }


def test_a_sub_agent_inside_a_tool_interrupts_nothing() -> None:
    """The calls of an agent go on after a tool in which another agent worked."""
    forest = Forest()
    with forest.agent("outer"):
        forest.call("outer 1")
        with forest.inside("tool"), forest.agent("inner"):
            forest.call("inner 1")
        forest.call("outer 2")

    assert found_paths(forest) == [["outer 1", "outer 2"], ["inner 1"]]


def test_nested_calls_follow_none_that_still_run() -> None:
    """A call inside another began before that one ended, so it is no next step of it."""
    forest = Forest()
    outer = forest.open_call("outer")
    forest.call("inner", parent=outer)
    forest.close(outer)
    forest.call("after")

    assert found_paths(forest) == [["inner"], ["outer", "after"]]


def test_calls_of_no_length_follow_one_another() -> None:
    """On a clock too coarse to tell them apart calls still form one path, in order of their ids."""
    forest = Forest(is_counted=False)
    for index in range(3):
        forest.call(f"call {index}", start_ns=7, end_ns=7)

    assert found_paths(forest) == [["call 0", "call 1", "call 2"]]


def test_a_call_that_outlives_its_operation_holds_up_the_next() -> None:
    """What begins while a stream of the operation before still runs is a branch."""
    forest = Forest()
    with forest.inside("root"):
        with forest.inside("operation"):
            forest.call("before")
            stream = forest.open_call("stream")
        with forest.inside("operation"):
            forest.call("meanwhile")
        forest.close(stream)
        forest.call("after")

    assert found_paths(forest) == [["meanwhile"], ["before", "stream", "after"]]


def test_a_chain_of_nested_calls_beyond_the_recursion_limit_is_adapted() -> None:
    """Four thousand calls, each inside the one before, are as many branches."""
    forest = Forest()
    parent = None
    for index in range(4_000):
        parent = forest.open_call(f"{index}", parent=parent)
    forest.close(*reversed([span.span_id for span in forest.spans]))

    found = TripletAdapter().explain(forest.spans)

    assert found.report.transitions == len(found.trajectories) == 4_000
