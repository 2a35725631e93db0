"""Tools that ask a model themselves: what they ask is a branch, and the step goes on elsewhere.

Each forest is drawn: what is indented lies inside, and a call is its answer, ``:`` and what it was
asked, in turns of user and assistant. After it stand the paths, each with its cause.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.adapter.forest import Forest, answers, said, text_of

from lightning_otel import Store, TripletAdapter
from lightning_otel import conventions as c
from lightning_otel.dataset.narrow import without_bodies
from lightning_otel.types import Trajectory

FORESTS = {
    "no span tells of the tool": (
        """
        plan: task
        inner: a page to sum up
        end: task|plan|summed up
        """,
        ["start plan end", "parallel inner"],
    ),
    "the tool asks twice": (
        """
        plan: task
        one: a page
        two: another page
        end: task|plan|both
        """,
        ["start plan end", "parallel one two"],
    ),
    "the tool has an agent's loop in it": (
        """
        plan: task
        find: query
        found: query|find|page
        end: task|plan|found
        """,
        ["start plan end", "parallel find found"],
    ),
    "a tool a turn": (
        """
        plan: task
        one: page
        look: task|plan|one
        two: page 2
        end: task|plan|one|look|two
        """,
        ["start plan look end", "parallel one", "parallel two"],
    ),
    "what nobody went on with follows by time": (
        """
        plan: task
        then: another task
        end: a third task
        """,
        ["start plan then end"],
    ),
    "inside a tool of agents without a history": (
        """
        agent A
          plan: task
          tool
            inner: page
            more: page 2
          end: result
        """,
        ["start plan end", "parallel inner more"],
    ),
    "a tool that asks with the agent's own history": (
        """
        plan: task
        tool
          reflect: task|plan|is that right?
        end: task|plan|it is
        """,
        ["start plan end", "parallel reflect"],
    ),
    "a tool that ends the conversation": (
        """
        plan: task
        tool
          answer: task|plan|now answer
        """,
        ["start plan answer"],
    ),
    "each call in a tool of its own": (
        """
        tool
          plan: task
        tool
          end: task|plan|go on
        """,
        ["start plan end"],
    ),
    "a tool in a tool": (
        """
        plan: task
        tool
          inner: page
          tool
            deep: word
          outer: next page
        end: result
        """,
        ["start plan end", "parallel inner outer", "parallel deep"],
    ),
    "an agent that calls itself": (
        """
        agent A
          plan: task
          tool
            agent A
              inner: part
          end: result
        """,
        ["start plan end", "parallel inner"],
    ),
    "another agent in a tool is no branch of its caller": (
        """
        agent A
          plan: task
          tool
            agent B
              one: part
          go on: result
          tool
            agent B
              two: part 2
          end: result 2
        """,
        ["start plan go on end", "sub_agent one two"],
    ),
}


def drawn(text: str, **options: Any) -> Forest:
    """The spans of a drawing."""
    forest = Forest(**options)
    around: list[tuple[int, str]] = []
    for line in text.strip("\n").splitlines():
        depth = len(line) - len(line.lstrip())
        while around and around[-1][0] >= depth:
            forest.close(around.pop()[1])
        parent = around[-1][1] if around else None
        word, _, asked = line.strip().partition(": ")
        if asked:
            turns = [
                said(("user", "assistant")[i % 2], it) for i, it in enumerate(asked.split("|"))
            ]
            forest.call(word, turns, response_id=f"reply {word}", parent=parent)
        else:
            attributes = {c.OPERATION: c.EXECUTE_TOOL}
            if word.startswith("agent"):
                attributes = {c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: word[6:]}
            around.append((depth, forest.open(word, attributes, parent=parent)))
    forest.close(*(span for _, span in reversed(around)))
    return forest


def path_of(trajectory: Trajectory) -> str:
    """The cause of a trajectory and its answers."""
    return " ".join([trajectory.cause, *answers(trajectory)])


@pytest.mark.parametrize(("drawing", "expected"), FORESTS.values(), ids=FORESTS)
def test_a_step_goes_on_where_its_history_does(drawing: str, expected: list[str]) -> None:
    """What a tool asks is a branch; each step sees what its own conversation saw next."""
    found = TripletAdapter().adapt(drawn(drawing).spans)

    assert sorted(map(path_of, found)) == sorted(expected)
    for trajectory in found:
        for step, after in zip(trajectory.transitions, trajectory.transitions[1:], strict=False):
            assert text_of(step.next_observation) == text_of(after.observation)


def test_every_way_of_reading_a_store_says_the_same(tmp_path: Path) -> None:
    """Rows without bodies are told from narrow columns alone where that can be."""
    store = Store(tmp_path / "t.duckdb")
    for number, (drawing, _) in enumerate(FORESTS.values()):
        spans = drawn(drawing, rollout_id=f"r{number}", trace_id=f"{number + 1:032x}").spans
        store.add(replace(span, scope=c.SCOPE) for span in spans)

    steps = store.transitions()

    assert len(steps.rows()) == 43
    thin = store.transitions(bodies=False)
    assert sorted(map(repr, thin)) == sorted(repr(without_bodies(step)) for step in steps)
    assert sorted((row["span_id"], row["branch"]) for row in thin.dicts()) == sorted(
        (row["span_id"], row["branch"]) for row in steps.dicts()
    )
