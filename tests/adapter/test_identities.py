"""Who asked: programs with side calls, samples side by side, condensers and handoffs.

Each answer tells by its first word whose it is, so that what the adapter says can be compared.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.adapter.forest import (
    Forest,
    answers,
    call_attributes,
    conversation,
    draw,
    paths,
    said,
    text_of,
)

from lightning_otel import TripletAdapter
from lightning_otel.types import Trajectory
from lightning_otel.types import conventions as c

TOOLS = json.dumps([{"type": "function", "name": "bash", "parameters": {}}])
SIDES = (
    ("titles", "You write titles.", "a title for: {}"),
    ("commits", "You write commit messages.", "describe: {}"),
    ("judge", "", "judge the answer to: {}"),
    ("router", "You choose who answers.", "{}"),
)
Asked = tuple[str, list[dict[str, Any]], str]
"""Whose call it is, what it is asked, and what it answers."""


def run_agent(rng: random.Random, name: str, rules: str, task: str) -> Iterator[Asked]:
    """An agent that grows a history, clears results in it or condenses it, and asks beside it."""
    head = [said("system", rules)] if rules else []
    messages = [*head, said("user", task)]
    habit = rng.choice(["grow", "grow", "condense", "clear"])
    if rng.random() < 0.3:
        side, system, text = rng.choice(SIDES)
        asked = [said("system", system)] if system else []
        yield f"{side}-{name}", [*asked, said("user", text.format(task))], "said"
    for step in range(rng.randint(2, 6)):
        answer = f"{name} answer {step}"
        yield name, list(messages), answer
        messages += [said("assistant", answer), said("tool", f"result {step} for {name}")]
        if habit == "clear" and step > 1:
            messages[len(head) + 2 * step - 2] = said("tool", "(cleared)")
        if habit == "condense" and step in (2, 4):
            is_apart = rng.random() < 0.7
            who = f"condenser{step}-{name}" if is_apart else name
            summary = f"{who} summary {step}"
            text = [said("user", f"summarise: {text_of(messages)}")]
            yield who, text if is_apart else [*messages, said("user", "summarise")], summary
            kept = [said("user", task)] * (rng.random() < 0.6)
            messages = [*head, *kept, said("user", f"So far: {summary}")]
        if rng.random() < 0.2:
            side, system, text = rng.choice(SIDES)
            asked = [said("system", system)] if system else []
            yield f"{side}{step}-{name}", [*asked, said("user", text.format(task))], "said"


def make_program(seed: int) -> tuple[Forest, Counter[str]]:
    """A program of agents one after the other and samples side by side; and how often each acts."""
    rng = random.Random(seed)
    forest, counts = Forest(is_counted=rng.random() < 0.8), Counter[str]()
    for part in range(rng.randint(1, 3)):
        rules = rng.choice(["You are a coder.", "You solve it, today is 2026-11-28.", ""])
        tools = {c.TOOL_DEFINITIONS: TOOLS} if rng.random() < 0.7 else {}
        width, is_shared = rng.choice([1, 1, 2, 4]), rng.random() < 0.3
        named = {c.AGENT_NAME: f"coder {part}"} if rng.random() < 0.2 else {}
        running = [
            run_agent(rng, f"agent{part}{i}", rules, f"fix {part} {i * (not is_shared)}")
            for i in range(width)
        ]
        opened: list[tuple[str, Iterator[Asked]]] = []
        while running or opened:
            if opened and (not running or rng.random() < 0.5):
                span, agent = opened.pop(rng.randrange(len(opened)))
                forest.close(span)
                running.append(agent)
                continue
            agent = running.pop(rng.randrange(len(running)))
            asked = next(agent, None)
            if asked is None:
                continue
            who, messages, answer = asked
            answer = answer if answer.startswith(who) else f"{who} {answer}"
            counts[who] += 1
            own = {**named, **tools} if who.startswith("agent") else named
            opened.append(
                (forest.open("chat", {**call_attributes(messages, answer), **own}), agent)
            )
    return forest, counts


def test_drawn_programs_are_told_apart_as_they_were_made() -> None:
    """500 programs: each agent's calls are its own, and a miss says that it is a guess."""
    total, missed = 0, list[str]()
    for seed in range(500):
        forest, counts = make_program(seed)
        held: dict[str, list[Trajectory]] = {}
        mixed: set[str] = set()
        for path in TripletAdapter().adapt(forest.spans):
            names = {answer.split()[0] for answer in answers(path)}
            mixed |= names if len(names) > 1 else set()
            for name in names:
                held.setdefault(name, []).append(path)
        total += len(counts)
        for name in counts:
            is_whole = all(path.cause == "compaction" for path in held[name][1:])
            if name in mixed or not is_whole:
                missed.append(f"{seed} {name}")
                assert any(path.is_guess for path in held[name]), (seed, name, paths(held[name]))

    assert len(missed) <= total / 100, missed


def test_tools_tell_unnamed_agents_apart() -> None:
    """The same instructions with other tools are another agent's."""
    forest = Forest()
    rules = said("system", "Do it.")
    forest.make(
        "chat", {**call_attributes([rules, said("user", "x")], "a"), c.TOOL_DEFINITIONS: TOOLS}
    )
    forest.make("chat", call_attributes([rules, said("user", "y")], "b"))

    assert paths(TripletAdapter().adapt(forest.spans)) == [["a"], ["b"]]


def test_an_answer_repeated_in_other_words_goes_on() -> None:
    """Tool calls told as text, as smolagents does; another agent is asked in between."""
    forest = Forest()
    forest.call("a", conversation("s:You lead.", "u:ask"))
    forest.call("b", conversation("s:You report.", "u:report"))
    forest.call("c", conversation("s:You lead.", "u:ask", "a:Calling tools: a", "u:b"))

    assert paths(TripletAdapter().adapt(forest.spans)) == [["b"], ["a", "c"]]


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_history_edited_in_place_goes_on(is_dropped: bool) -> None:
    """Results that are cleared, or dropped with their answers, leave one trajectory and return."""
    forest = Forest()
    turns = ["s:You code.", "u:fix"]
    for step in range(12):
        old = turns[2:-4] if step > 2 else []
        view = [] if is_dropped else [turn if turn[0] == "a" else "t:(cleared)" for turn in old]
        forest.call(f"step-{step}", conversation(*turns[:2], *view, *turns[2 + len(old) :]))
        turns += [f"a:step-{step}", f"t:result {step}"]
    forest.reward(1.0)

    (path,) = TripletAdapter("discounted", 1.0).adapt(forest.spans)

    assert [step.reward for step in path.transitions] == [1.0] * 12
    assert not path.is_guess


def test_the_outcome_says_where_it_went() -> None:
    """A reward of the whole names its reason where the latest call is another."""
    spans = draw("root( a<s:do|u:x b<s:do|u:x|a:a|u:y t<s:titles|u:x !1 )").spans

    (credited,) = TripletAdapter().explain(spans).credited

    assert credited.by == "outcome: the last step of the main conversation"


@pytest.mark.parametrize(
    ("tool", "arguments", "agent"),
    [
        ("transfer_to_agent", '{"agent_name": "expert"}', "expert"),
        ("handoff_to_agent", '{"agent_name": "the expert", "message": "go"}', "the expert"),
        ("handoff_to_the_expert", "{}", "the expert"),
    ],
)
def test_a_tool_that_hands_over_is_a_handoff(tool: str, arguments: str, agent: str) -> None:
    """As ADK, the swarms of Strands, and Agent Framework hand over."""
    forest = Forest()
    with forest.inside():
        with forest.agent("triage"):
            forest.call("a", "look")
            names = {c.OPERATION: c.EXECUTE_TOOL, c.TOOL_NAME: tool, c.TOOL_ARGUMENTS: arguments}
            forest.make("execute_tool", names)
        with forest.agent(agent):
            forest.call("b", "look this up")

    found = TripletAdapter().adapt(forest.spans)

    assert [(path.agent, path.cause) for path in found] == [
        ("triage", "start"),
        (agent, "hand_off"),
    ]
