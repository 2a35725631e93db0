"""Where Agent Lightning 0.3 and we agree, on generated rollouts, and where we differ on purpose.

``LIGHTNING_TEST_TREES`` is how many are generated. What differs, each with both results:

1.  A reward whose call has one already slides to an earlier call there; here it is reported.
2.  A call whose span outlives its parent is lost there, with all below it.
3.  Of agents at work side by side, there the one that ended last gets the other's reward.
4.  A reward before its agent's first call goes to another agent's call there.
5.  Two records of one request beside each other, without a response id, are two calls there.
6.  A call whose span is not named ``openai.chat.completion`` is none there.
7.  A thousand nested spans are a RecursionError there.
8.  A message without a role is a KeyError of ``TraceToMessages`` there.
9.  A reward's link is not looked at there.
10. Of a rollout's rewards its trainers take the last one for all steps; here each has its own.
11. Calls side by side are one sequence there, and several branches here.
12. A call that failed without an answer is a step there, and has a reason here.
13. A span that never ended is a TypeError there, and has a reason here.
14. A key that is exactly ``agentlightning.reward`` is an error for the whole rollout there.
15. Of spans in two traces with one id only the last is there.
16. A cycle of parents is a ValueError there.
17. A judge's calls within a reward's span are left out there; here, name agents in ``track_only``.
18. Token ids told as JSON text are not read there either, but a step without ids is text here.
19. Of calls in turn with one response id only the first is there; here a server repeats its ids.
20. The proxy's adapter orders by ``sequence_id`` there; here clocks and causes do.
21. AutoGen's ``recipient_agent_type``, agent-framework's ``executor.id`` and Weave's names are
    agents there; here they are none.
"""

import json
import os
from typing import Any

import pytest
from tests.adapter.differential.trees import CALL, Fact, Program
from tests.adapter.differential.upstream import (
    LlmProxyTraceToTriplet,
    Step,
    TraceToMessages,
    find_final_reward,
    ours,
    steps,
    stored_there,
    their_span,
    theirs,
)
from tests.adapter.forest import draw
from tests.adapter.readers.test_readers import stored

from lightning_otel import TripletAdapter
from lightning_otel.types import conventions as c

CASES: dict[str, tuple[str, str, str]] = {
    "1 a second reward does not slide": (
        "root( first last !.1 !.9 )",
        "first=0.9 last=0.1",
        "first=- last=0.1 ! its call already has a reward of that name, and the first one counts",
    ),
    "2 a stream outlives its step": (
        "root@at=0-20( step@at=1-3( streamed@at=1-6 ) after@at=7-8 )",
        "after=-",
        "streamed=- after=-",
    ),
    "3 a reward stays with its agent among several at once": (
        "root( +planner[ +writer[ planner/planned writer/written planner/!1 -planner -writer )",
        "planned=- written=1",
        "planned=1 written=-",
    ),
    "4 a reward does not go to another agent": (
        "root( planner[ planned ] writer[ !1 ] )",
        "planned=1",
        "planned=- ! no call of the same agent came before it",
    ),
    "5 two records of one request": (
        "root( +said@as=one@scope=one +said@as=two@scope=two -one -two )",
        "said=- said=-",
        "said=- ! duplicate: one recorded the same request",
    ),
    "7 a thousand nested spans": (
        "step( " * 1000 + "deep" + " )" * 1000,
        "RecursionError",
        "deep=-",
    ),
    "9 a link says what a reward judges": (
        "root( first@id=chatcmpl-1 last@id=chatcmpl-2 !1@id=chatcmpl-1 )",
        "first=- last=1",
        "first=1 last=-",
    ),
    "12 a call that failed is no step": (
        "root( lost@error said )",
        "=- said=-",
        "said=- ! failed: the call ended in an error",
    ),
    "13 a span that never ended harms no other": (
        "root( said +lost )",
        "TypeError",
        "said=- ! incomplete: the call never ended",
    ),
    "14 an odd key harms no other span": (
        "root( said ) note@agentlightning.reward=1.0( )",
        "ValueError: Cannot unflatten",
        "said=-",
    ),
    "15 an id is one within its trace": (
        "one@span_id=00000000000000aa #trace=b two@span_id=00000000000000aa",
        "two=- two=-",
        "one=- two=-",
    ),
    "16 a cycle of parents": (
        "one@parent=two two@parent=one",
        "ValueError: No root spans",
        "one=- two=-",
    ),
    "17 a judge's calls are calls": (
        "root( said +!1@as=judging judging/verdict -judging )",
        "said=1",
        "said=1 verdict=-",
    ),
    "17 which track_only leaves out": (
        f"root( said +!1@as=judging judging/verdict@{c.TRACK_ONLY}=planner -judging )",
        "said=1",
        "said=1 ! not tracked: the agent is not in track_only",
    ),
    "19 a server repeats its ids": (
        "root( first@id=same last@id=same )",
        "first=-",
        "first=- last=-",
    ),
}


def facts_of(drawing: str) -> list[Fact]:
    """A drawing as their tracer records it."""
    return [
        {
            "number": number,
            "span_id": span.span_id,
            "parent_id": span.parent_span_id,
            "trace_id": span.trace_id,
            "name": CALL if span.operation == c.CHAT else span.name,
            "start": span.start_ns / 1e9,
            "end": None if span.end_ns is None else span.end_ns / 1e9,
            "status": "ERROR" if span.status == "ERROR" else "OK",
            "attributes": _flatten(span.attributes, has_failed=span.status == "ERROR"),
            **({"scope": f"InstrumentationScope({span.scope}, 1.0, , None)"} if span.scope else {}),
        }
        for number, span in enumerate(draw(drawing, process="11").spans)
    ]


def _flatten(attributes: Any, *, has_failed: bool) -> dict[str, Any]:
    keys = {c.INPUT_MESSAGES: "gen_ai.prompt", c.OUTPUT_MESSAGES: "gen_ai.completion"}
    found = {k: v for k, v in attributes.items() if k not in (*keys, c.OPERATION, "drawn")}
    for key, row in keys.items():
        if key == c.INPUT_MESSAGES or not has_failed:
            for number, message in enumerate(json.loads(attributes.get(key, "[]"))):
                found[f"{row}.{number}.role"] = message["role"]
                found[f"{row}.{number}.content"] = message["parts"][0]["content"]
    if attributes.get(c.OPERATION) == c.INVOKE_AGENT:
        name = found.pop(c.AGENT_NAME)
        found |= {"agentops.span.kind": "agent", "operation.name": name}
    return found


def told(found: Any) -> str:
    """The label and reward of each step."""
    return " ".join(f"{s.label}={'-' if s.reward is None else f'{s.reward:g}'}" for s in found)


@pytest.mark.parametrize(("drawing", "there", "here"), CASES.values(), ids=CASES)
def test_results_differ_on_purpose(drawing: str, there: str, here: str) -> None:
    """What they find, or the error they raise, and what we find, with what was left out."""
    facts = facts_of(drawing)

    try:
        expected = told(theirs(facts))
    except (RecursionError, TypeError, ValueError) as exc:
        expected = f"{type(exc).__name__}: {exc}"
    found = ours(facts)

    assert expected.startswith(there) if "Error" in there else expected == there
    reasons = "".join(f" ! {reason}" for reason in found.report.reasons())
    assert told(steps(found)) + reasons == here


@pytest.mark.parametrize("name", ["chat gpt-5", "chat_model.llm", "openai.responses"])
def test_a_call_is_known_by_what_it_tells(name: str) -> None:
    """6: not by the name of its span."""
    facts = [{**fact, "name": name} for fact in facts_of("said")]

    assert theirs(facts) == []
    assert told(steps(ours(facts))) == "said=-"


def test_a_message_may_lack_its_role() -> None:
    """8: what was asked is the user's if nobody says otherwise."""
    facts = facts_of("said")
    del facts[0]["attributes"]["gen_ai.prompt.0.role"]
    facts[0]["attributes"]["gen_ai.request.type"] = "chat"

    with pytest.raises(KeyError, match="role"):
        TraceToMessages().adapt([their_span(fact) for fact in facts])
    (step,) = steps(ours(facts))
    assert step.asked == (("user", "go on", "[]"),)


def test_rewards_on_the_way_are_kept() -> None:
    """10: the runner's final reward is the last one; the steps keep each their own here."""
    facts = facts_of("root( a !0 b !.5 d !1 )")

    assert find_final_reward([their_span(fact) for fact in facts]) == 1.0
    assert told(steps(ours(facts))) == "a=0 b=0.5 d=1"


def test_calls_side_by_side_are_branches() -> None:
    """11: neither of two parallel calls follows the other."""
    facts = facts_of("root( plan +one +two -one -two )")

    assert told(theirs(facts)) == told(steps(ours(facts))) == "plan=- one=- two=-"
    for path in ours(facts).trajectories:
        answers = [step.action[0]["parts"][0]["content"] for step in path.transitions]
        assert not {"one", "two"} <= set(answers)


def test_a_step_without_token_ids_is_text() -> None:
    """18: there it is a step with empty ids, which only fails where it is trained on."""
    facts = facts_of("said")
    facts[0]["attributes"] |= {"prompt_token_ids": "[1, 2]", "response_token_ids": "[3]"}

    (there,) = theirs(facts)
    found = ours(facts)
    assert (there.prompt_ids, there.response_ids) == ((), ())
    assert [s.capture for path in found.trajectories for s in path.transitions] == ["text"]


def test_clocks_order_and_not_the_store() -> None:
    """20: a sequence id is given on arrival, so what ended first comes first there."""
    facts = facts_of("#tick=9 one( ) one #tick=1 two( ) two")
    for fact in facts[::2]:
        ids = [fact["number"]]
        fact["name"] = "litellm_request"
        fact["attributes"] = {"prompt_token_ids": ids, "response_token_ids": ids}

    there = LlmProxyTraceToTriplet().adapt([their_span(fact) for fact in facts])
    assert [triplet.prompt["token_ids"] for triplet in there] == [[0], [2]]
    assert told(steps(ours(facts))) == "two=- one=-"


@pytest.mark.parametrize("key", ["recipient_agent_type", "executor.id"])
def test_names_that_are_no_agents(key: str) -> None:
    """21: a topic's subscriber or a step of a workflow is no agent that was trained."""
    facts = facts_of(f"step@{key}=writer_1( said )")

    assert [step.agent for step in theirs(facts)] == ["writer_1"]
    assert [step.agent for step in steps(ours(facts))] == [""]


TREES = int(os.environ.get("LIGHTNING_TEST_TREES", "600"))
PARTS = 4


def _rewards(own: list[Step]) -> list[float]:
    return [step.reward for step in own if step.reward is not None]


def _without_rewards(own: list[Step]) -> list[Step]:
    return [step._replace(reward=None) for step in own]


@pytest.mark.parametrize("part", range(PARTS))
def test_generated_rollouts_are_adapted_alike(part: int) -> None:
    """Agent, messages, tool calls, token ids, logprobs, reward and order are those they find."""
    compared = rewarded = trees = 0
    for seed in range(part, TREES, PARTS):
        program = Program(seed)
        if not program.facts:
            continue

        found = ours(program.facts)

        own, expected = steps(found), theirs(program.facts)
        assert len(expected) == program.calls, f"seed {seed}"
        if any(each.by.startswith("outcome: ") for each in found.credited):
            # Theirs goes to the latest call, ours to the last one of the main conversation.
            assert _rewards(own) == _rewards(expected), f"seed {seed}"
            assert _without_rewards(own) == _without_rewards(expected), f"seed {seed}"
        else:
            assert own == expected, f"seed {seed}"
        trees += 1
        compared += len(expected)
        rewarded += sum(step.reward is not None for step in expected)
    assert trees > 0.6 * TREES / PARTS
    assert compared > 2 * trees
    assert rewarded > trees / 2


@pytest.mark.parametrize("name", ["openai_agents", "langgraph"])
def test_recorded_agents_are_told_alike(name: str) -> None:
    """Agent and reward of each call that its own tracer recorded."""
    expected = stored_there(name)

    assert expected
    assert {
        step.response_id: (step.agent, step.reward)
        for path in TripletAdapter().adapt(stored(name))
        for step in path.transitions
    } == expected
