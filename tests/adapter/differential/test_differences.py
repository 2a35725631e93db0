"""Where Agent Lightning 0.3 and we differ, on purpose: one test each, with both results.

What is not in this file is equal: see ``test_agreement.py``. The same list, in words:

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

import pytest
from tests.adapter.differential.trees import Told
from tests.adapter.differential.upstream import (
    LlmProxyTraceToTriplet,
    TraceToMessages,
    find_final_reward,
    ours,
    steps,
    their_span,
    theirs,
)

from lightning_otel.adapter import calls, credit
from lightning_otel.adapter.duplicates import DUPLICATE_OF


def rewards_there(told: Told) -> dict[str, float | None]:
    """The reward of each call by its answer, as they find it."""
    return {step.label: step.reward for step in theirs(told.facts)}


def rewards_here(told: Told) -> dict[str, float | None]:
    """The same as we find it."""
    return {step.label: step.reward for step in steps(ours(told.facts))}


def reasons(told: Told) -> dict[str, int]:
    """What we leave out, and why."""
    return ours(told.facts).report.reasons()


def test_a_second_reward_does_not_slide() -> None:
    """1: the final 0.9 lands on the first call there; here it is reported."""
    told = Told()
    root = told.span("root", 0, 20)
    told.call("first", 1, 2, parent=root)
    told.call("last", 3, 4, parent=root)
    told.reward(0.1, 5, parent=root)
    told.reward(0.9, 6, parent=root)

    assert rewards_there(told) == {"first": 0.9, "last": 0.1}
    assert rewards_here(told) == {"first": None, "last": 0.1}
    assert reasons(told) == {credit.ALREADY_REWARDED: 1}


def test_a_child_may_outlive_its_parent() -> None:
    """2: a stream that is read after its step had ended is there, here."""
    told = Told()
    root = told.span("root", 0, 20)
    step = told.span("step", 1, 3, parent=root)
    told.call("streamed", 1, 6, parent=step)
    told.call("after", 7, 8, parent=root)

    assert list(rewards_there(told)) == ["after"]
    assert list(rewards_here(told)) == ["streamed", "after"]


def test_a_reward_stays_with_its_agent_among_several_at_once() -> None:
    """3: the planner's reward is the planner's, though the writer's call ended later."""
    told = Told()
    root = told.span("root", 0, 20)
    planner = told.agent("planner", 1, 10, root)
    writer = told.agent("writer", 2, 12, root)
    told.call("planned", 3, 4, parent=planner)
    told.call("written", 5, 6, parent=writer)
    told.reward(1.0, 8, parent=planner)

    assert rewards_there(told) == {"planned": None, "written": 1.0}
    assert rewards_here(told) == {"planned": 1.0, "written": None}


def test_a_reward_does_not_go_to_another_agent() -> None:
    """4: an agent that is rewarded before it called a model leaves the other one's call alone."""
    told = Told()
    root = told.span("root", 0, 20)
    told.call("planned", 2, 3, parent=told.agent("planner", 1, 4, root))
    told.reward(1.0, 6, parent=told.agent("writer", 5, 8, root))

    assert rewards_there(told) == {"planned": 1.0}
    assert rewards_here(told) == {"planned": None}
    assert reasons(told) == {credit.NO_CALL_BEFORE: 1}


def test_two_records_of_one_request_are_one_call() -> None:
    """5: instrumentors of two makes, side by side, with the same question and answer."""
    told = Told()
    root = told.span("root", 0, 20)
    for start, make in ((1, "one"), (2, "two")):
        scope = f"InstrumentationScope({make}, 1.0, , None)"
        told.call("said", start, start + 5, parent=root, scope=scope)

    assert [step.label for step in theirs(told.facts)] == ["said", "said"]
    assert [step.label for step in steps(ours(told.facts))] == ["said"]
    assert reasons(told) == {DUPLICATE_OF.format("two"): 1}


@pytest.mark.parametrize("name", ["chat gpt-5", "chat_model.llm", "openai.responses"])
def test_a_call_is_known_by_what_it_tells(name: str) -> None:
    """6: not by the name of its span."""
    told = Told()
    told.call("said", 1, 2, parent=told.span("root", 0, 20), name=name)

    assert theirs(told.facts) == []
    assert [step.label for step in steps(ours(told.facts))] == ["said"]


def test_a_thousand_nested_spans_are_adapted() -> None:
    """7: and any number more."""
    told = Told()
    parent = None
    for depth in range(1000):
        parent = told.span("step", depth, 5000 - depth, parent=parent)
    told.call("deep", 1001, 1002, parent=parent)

    with pytest.raises(RecursionError):
        theirs(told.facts)
    assert [step.label for step in steps(ours(told.facts))] == ["deep"]


def test_a_message_may_lack_its_role() -> None:
    """8: what was asked is the user's if nobody says otherwise."""
    told = Told()
    told.call("said", 1, 2)
    del told.facts[0]["attributes"]["gen_ai.prompt.0.role"]
    told.facts[0]["attributes"]["gen_ai.request.type"] = "chat"

    with pytest.raises(KeyError, match="role"):
        TraceToMessages().adapt([their_span(fact) for fact in told.facts])
    (step,) = steps(ours(told.facts))
    assert step.asked == (("user", "go on", "[]"),)


def test_a_link_says_what_a_reward_judges() -> None:
    """9: a reward that names the first response goes to it."""
    told = Told()
    root = told.span("root", 0, 20)
    told.call("first", 1, 2, parent=root, response_id="chatcmpl-1")
    told.call("last", 3, 4, parent=root, response_id="chatcmpl-2")
    link = {
        "agentlightning.link.0.key_match": "gen_ai.response.id",
        "agentlightning.link.0.value_match": "chatcmpl-1",
    }
    told.reward(1.0, 5, parent=root, **link)  # type: ignore[arg-type]  # dotted names

    assert rewards_there(told) == {"first": None, "last": 1.0}
    assert rewards_here(told) == {"first": 1.0, "last": None}


def test_rewards_on_the_way_are_kept() -> None:
    """10: the runner's final reward is the last one; the steps keep each their own here."""
    told = Told()
    root = told.span("root", 0, 20)
    for number in range(3):
        told.call(f"step {number}", 3 * number + 1, 3 * number + 2, parent=root)
        told.reward(number / 2, 3 * number + 3, parent=root)

    assert find_final_reward([their_span(fact) for fact in told.facts]) == 1.0
    assert rewards_here(told) == {"step 0": 0.0, "step 1": 0.5, "step 2": 1.0}


def test_calls_side_by_side_are_branches() -> None:
    """11: neither of two parallel calls follows the other."""
    told = Told()
    root = told.span("root", 0, 20)
    told.call("plan", 1, 2, parent=root)
    told.call("one", 3, 6, parent=root)
    told.call("two", 4, 7, parent=root)

    assert [step.label for step in theirs(told.facts)] == ["plan", "one", "two"]
    found = ours(told.facts)
    assert [step.label for step in steps(found)] == ["plan", "one", "two"]
    for path in found.trajectories:
        said = [step.action[0]["parts"][0]["content"] for step in path.transitions]
        assert not {"one", "two"} <= set(said)


def test_a_call_that_failed_is_no_step() -> None:
    """12: it has no action to learn from."""
    told = Told()
    root = told.span("root", 0, 20)
    asked = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "go on"}
    told.span("openai.chat.completion", 1, 2, parent=root, attributes=asked, status="ERROR")
    told.call("said", 3, 4, parent=root)

    assert [step.label for step in theirs(told.facts)] == ["", "said"]
    assert [step.label for step in steps(ours(told.facts))] == ["said"]
    assert reasons(told) == {"failed: the call ended in an error": 1}


def test_a_span_that_never_ended_harms_no_other() -> None:
    """13: a call that was cut off has a reason, the others are adapted."""
    told = Told()
    root = told.span("root", 0, 20)
    told.call("said", 1, 2, parent=root)
    told.call("cut off", 3, None, parent=root)

    with pytest.raises(TypeError):
        theirs(told.facts)
    assert list(rewards_here(told)) == ["said"]
    assert reasons(told) == {calls.INCOMPLETE: 1}


def test_an_odd_key_harms_no_other_span() -> None:
    """14: a span with a bare ``agentlightning.reward`` is no reward, and the rollout goes on."""
    told = Told()
    root = told.span("root", 0, 20)
    told.call("said", 1, 2, parent=root)
    told.span("agentlightning.annotation", 3, 3, attributes={"agentlightning.reward": 1.0})

    with pytest.raises(ValueError, match="Cannot unflatten"):
        theirs(told.facts)
    assert rewards_here(told) == {"said": None}


def test_an_id_is_one_within_its_trace() -> None:
    """15: two traces of a rollout may use one span id."""
    told = Told()
    told.call("one", 1, 2)
    told.call("two", 3, 4, trace_id="2" * 32)
    told.facts[1]["span_id"] = told.facts[0]["span_id"]

    assert {step.label for step in theirs(told.facts)} == {"two"}
    assert [step.label for step in steps(ours(told.facts))] == ["one", "two"]


def test_a_cycle_of_parents_is_adapted() -> None:
    """16: calls in a cycle are calls."""
    told = Told()
    told.call("one", 1, 2, parent=f"{2:016x}")
    told.call("two", 3, 4, parent=f"{1:016x}")

    with pytest.raises(ValueError, match="No root spans"):
        theirs(told.facts)
    assert [step.label for step in steps(ours(told.facts))] == ["one", "two"]


def test_a_judges_calls_are_calls() -> None:
    """17: a call within a reward's span is a call like any other; ``track_only`` leaves it out."""
    told = Told()
    root = told.span("root", 0, 20)
    told.call("said", 1, 2, parent=root)
    judging = told.reward(1.0, 3, parent=root)
    told.facts[-1]["end"] += 3
    told.call("a verdict", 4, 5, parent=judging)

    assert list(rewards_there(told)) == ["said"]
    assert rewards_here(told) == {"said": 1.0, "a verdict": None}
    told.facts[-1]["attributes"]["lightning.track_only"] = ["planner"]
    assert rewards_here(told) == {"said": 1.0}


def test_a_step_without_token_ids_is_text() -> None:
    """18: there it is a step with empty ids, which only fails where it is trained on."""
    told = Told()
    more = {"prompt_token_ids": "[1, 2]", "response_token_ids": "[3]"}
    told.call("said", 1, 2, more=more)

    (there,) = theirs(told.facts)
    found = ours(told.facts)
    assert (there.prompt_ids, there.response_ids) == ((), ())
    assert [s.capture for path in found.trajectories for s in path.transitions] == ["text"]
    assert found.report.exact == 0


def test_a_server_may_repeat_its_ids() -> None:
    """19: what was asked and answered anew is a call, whatever its id."""
    told = Told()
    root = told.span("root", 0, 20)
    told.call("first", 1, 2, parent=root, response_id="same")
    told.call("last", 3, 4, parent=root, response_id="same")

    assert [step.label for step in theirs(told.facts)] == ["first"]
    assert [step.label for step in steps(ours(told.facts))] == ["first", "last"]


def test_clocks_order_and_not_the_store() -> None:
    """20: a sequence id is given on arrival, so what ended first comes first there."""
    told = Told()
    for number, start in ((1, 3), (2, 1)):
        ids = {"prompt_token_ids": [number], "response_token_ids": [number]}
        told.span("litellm_request", start, start + 1, attributes=ids)
        told.call(f"call {number}", start, start + 1)

    there = LlmProxyTraceToTriplet().adapt([their_span(fact) for fact in told.facts])
    assert [triplet.prompt["token_ids"] for triplet in there] == [[1], [2]]
    assert [step.label for step in steps(ours(told.facts))] == ["call 2", "call 1"]


@pytest.mark.parametrize("key", ["recipient_agent_type", "executor.id"])
def test_names_that_are_no_agents(key: str) -> None:
    """21: a topic's subscriber or a step of a workflow is no agent that was trained."""
    told = Told()
    told.call("said", 1, 2, parent=told.span("step", 0, 20, attributes={key: "writer_1"}))

    assert [step.agent for step in theirs(told.facts)] == ["writer_1"]
    assert [step.agent for step in steps(ours(told.facts))] == [""]
