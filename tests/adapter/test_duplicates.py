"""Several instrumentors record one request: one call, with the best that each of them has."""

import json
from typing import Any

import pytest
from tests.adapter.forest import (
    SECOND,
    Forest,
    call_attributes,
    rewards,
    said,
    token_attributes,
)

from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter
from lightning_otel.adapter.duplicates import DUPLICATE_OF
from lightning_otel.types import Transition

THEIRS = "opentelemetry.instrumentation.openai.v1"
OTHERS = "openinference.instrumentation.openai"


def steps(forest: Forest) -> list[Transition]:
    """All transitions, each once."""
    found = TripletAdapter().adapt(forest.spans)
    return list({id(step): step for path in found for step in path.transitions}.values())


def attributes(
    answered: str, response_id: str | None = None, *, model: str | None = "m", **more: Any
) -> dict[str, Any]:
    """Attributes of a call to a model."""
    named = {} if model is None else {c.REQUEST_MODEL: model}
    return {**call_attributes("go on", answered, response_id), **named, **more}


def nested(forest: Forest, outer: dict[str, Any], inner: dict[str, Any]) -> tuple[str, str]:
    """A call of theirs around one of ours."""
    above = forest.open("theirs", outer, scope=THEIRS)
    below = forest.make("ours", inner, parent=above, scope=c.SCOPE)
    forest.close(above)
    return above, below


# --- what is one request -------------------------------------------------------------------------


def test_a_record_within_another_of_the_same_model_is_it() -> None:
    """Without any response id, the nested record of another make is the same request."""
    forest = Forest()
    above, below = nested(forest, attributes("answer"), attributes("answer"))

    found = TripletAdapter().explain(forest.spans)

    assert [step.span_id for step in found.trajectories[0].transitions] == [below]
    assert found.report.reasons() == {DUPLICATE_OF.format(THEIRS): 1}
    assert found.report.dropped[0].span_id == above
    assert (found.report.calls, found.report.transitions) == (2, 1)


@pytest.mark.parametrize("theirs", ["m", "openai/m", None])
def test_a_provider_before_the_models_name_is_no_difference(theirs: str | None) -> None:
    """A name with a provider before it, or none at all, may be the same model."""
    forest = Forest()
    nested(forest, attributes("answer", model=theirs), attributes("answer"))

    assert len(steps(forest)) == 1


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (attributes("answer", model="big"), attributes("answer", model="small")),
        (attributes("answer", "chatcmpl-1"), attributes("answer", "chatcmpl-2")),
        (attributes("one answer"), attributes("another answer")),
        (attributes("answer", **{c.OPERATION: c.EMBEDDINGS}), attributes("answer")),
    ],
)
def test_records_that_disagree_are_two_requests(
    outer: dict[str, Any], inner: dict[str, Any]
) -> None:
    """Other models, response ids, answers or operations: not one request, nested or not."""
    forest = Forest()
    nested(forest, outer, inner)

    assert (
        DUPLICATE_OF.format(THEIRS) not in TripletAdapter().explain(forest.spans).report.reasons()
    )


def test_two_records_of_one_make_are_two_requests() -> None:
    """One instrumentor records a request once: nested or beside, its two spans are two calls."""
    forest = Forest()
    above = forest.open("a", attributes("answer"), scope=THEIRS)
    forest.make("b", attributes("answer"), parent=above, scope=THEIRS)
    forest.close(above)
    forest.close(*[forest.open("c", attributes("answer"), scope=THEIRS) for _ in range(2)])
    forest.make("elsewhere", attributes("other", model="other"), scope=OTHERS)

    assert len(steps(forest)) == 5


def test_concurrent_calls_of_one_make_with_one_id_are_two() -> None:
    """A server that gives two concurrent requests one id does not make them one."""
    forest = Forest()
    made = [forest.open("a", attributes(str(n), "same"), scope=THEIRS) for n in range(2)]
    forest.close(*made)

    assert len(steps(forest)) == 2


def test_a_record_made_after_the_fact_is_of_its_request() -> None:
    """LiteLLM makes its spans when all is over, with the times of the request."""
    forest = Forest()
    with forest.inside("agent"):
        ours = forest.make("ours", attributes("answer", "id-1"), scope=c.SCOPE)
        made = forest._made[ours]
        times = {"start_ns": made.start * SECOND, "end_ns": (made.end or 0) * SECOND}
        late = forest.make("late", attributes("answer", "id-1"), scope="litellm", **times)

    found = TripletAdapter().explain(forest.spans)

    assert [s.span_id for path in found.trajectories for s in path.transitions] == [ours]
    assert [dropped.span_id for dropped in found.report.dropped] == [late]


def test_a_servers_repeated_id_does_not_join_two_makes_in_turn() -> None:
    """One id for two requests in turn, each seen by another make, is two requests."""
    forest = Forest()
    forest.make("a", attributes("one", "same"), scope=c.SCOPE)
    forest.make("b", attributes("two", "same"), scope=THEIRS)

    assert len(steps(forest)) == 2


def test_a_rollouts_span_is_no_call_whatever_is_written_on_it() -> None:
    """LiteLLM's callback writes its calls' attributes on the span around them."""
    forest = Forest()
    written = attributes("answer", "id-1")
    with forest.inside(c.SPAN_ROLLOUT, **written):
        call = forest.make("ours", attributes("answer", "id-1"), scope=c.SCOPE)
        forest.reward(0.5)

    found = TripletAdapter().explain(forest.spans)

    (step,) = found.trajectories[0].transitions
    assert (step.span_id, step.reward, found.report.calls) == (call, 0.5, 1)


def test_two_tries_within_one_record_are_one_request_and_a_try() -> None:
    """Of several requests within a framework's call the last that came through is that call."""
    forest = Forest()
    above = forest.open("framework", attributes("second"), scope=THEIRS)
    failed = forest.make("first", {c.OPERATION: c.CHAT, c.REQUEST_MODEL: "m"}, parent=above)
    forest._made[failed].extra.update(scope=c.SCOPE, status="ERROR")
    good = forest.make("second", attributes("second"), parent=above, scope=c.SCOPE)
    forest.close(above)

    found = TripletAdapter().explain(forest.spans)

    assert [s.span_id for path in found.trajectories for s in path.transitions] == [good]
    assert {dropped.span_id for dropped in found.report.dropped} == {failed, above}


def test_overlapping_records_asked_the_same_under_one_parent_are_one() -> None:
    """Where the two do not nest, overlap and equal messages tell."""
    forest = Forest()
    with forest.inside("agent"):
        one = forest.open("theirs", attributes("answer"), scope=THEIRS)
        other = forest.open("ours", attributes("answer"), scope=c.SCOPE)
        forest.close(one, other)

    assert [step.span_id for step in steps(forest)] == [other]


@pytest.mark.parametrize("difference", ["question", "time", "parent"])
def test_records_beside_each_other_are_two_unless_all_fits(difference: str) -> None:
    """Other messages, no overlap, or another parent and no answer: two requests."""
    forest = Forest()
    asked = "else" if difference == "question" else "go on"
    theirs = {**call_attributes(asked, "answer"), c.REQUEST_MODEL: "m"}
    if difference == "parent":
        del theirs[c.OUTPUT_MESSAGES]
    with forest.inside("agent"):
        one = forest.open("theirs", theirs, scope=THEIRS)
        if difference == "time":
            forest.close(one)
        within = forest.open("tool") if difference == "parent" else None
        other = forest.open("ours", attributes("answer"), parent=within, scope=c.SCOPE)
        forest.close(other, *([within] if within else []))
        if difference != "time":
            forest.close(one)

    found = TripletAdapter().explain(forest.spans).report
    assert not any(reason.startswith("duplicate") for reason in found.reasons())


@pytest.mark.parametrize(("answer", "count"), [("answer", 1), ("another", 2)])
def test_records_in_trees_of_their_makes_are_one_if_answered_alike(answer: str, count: int) -> None:
    """Each make tells the graph's node with a span of its own, and the call under that."""
    forest = Forest()
    with forest.inside("agent"):
        our_node = forest.open("node", scope=c.SCOPE)
        their_node = forest.open("node", scope=THEIRS)
        ours = forest.open("ours", attributes("answer", "id-1"), parent=our_node, scope=c.SCOPE)
        theirs = forest.open("theirs", attributes(answer), parent=their_node, scope=THEIRS)
        forest.close(ours, theirs, our_node, their_node)

    assert len(steps(forest)) == count


def test_instructions_told_apart_are_the_first_message() -> None:
    """A make that keeps the instructions out of the messages was asked the same all the same."""
    forest = Forest()
    apart = json.dumps([{"type": "text", "content": "be brief"}])
    among = json.dumps([said("system", "be brief"), said("user", "go on")])
    with forest.inside("agent"):
        theirs = attributes("answer", **{c.SYSTEM_INSTRUCTIONS: apart})
        one = forest.open("theirs", theirs, scope=THEIRS)
        ours = attributes("answer", "id-1", **{c.INPUT_MESSAGES: among})
        other = forest.open("ours", ours, scope=c.SCOPE)
        forest.close(one, other)

    assert [step.span_id for step in steps(forest)] == [other]


def test_concurrent_equal_requests_pair_off() -> None:
    """Eight equal requests at once, each recorded twice, are eight."""
    forest = Forest()
    with forest.inside("agent"):
        opened = []
        for _ in range(8):
            opened.append(forest.open("theirs", attributes("answer"), scope=THEIRS))
            opened.append(forest.open("ours", attributes("answer"), scope=c.SCOPE))
        forest.close(*opened)

    found = TripletAdapter().explain(forest.spans).report

    assert (found.transitions, found.reasons()) == (8, {DUPLICATE_OF.format(THEIRS): 8})


# --- what the one call is made of ----------------------------------------------------------------


def test_each_field_is_the_richest_records() -> None:
    """Token ids are ours, messages and usage whoever's has them, the agent the tree's."""
    forest = Forest()
    with forest.agent("planner"):
        above = forest.open(
            "theirs", attributes("answer", "chatcmpl-1", **{c.INPUT_TOKENS: 7}), scope=THEIRS
        )
        bare = {c.OPERATION: c.CHAT, c.RESPONSE_ID: "chatcmpl-1"}
        ours = forest.make(
            "ours", {**bare, **token_attributes([1], [2], [-0.5])}, parent=above, scope=c.SCOPE
        )
        forest.close(above)

    (step,) = steps(forest)

    assert (step.span_id, step.agent, step.model) == (ours, "planner", "m")
    assert (list(step.prompt_ids), list(step.response_ids), list(step.logprobs)) == (
        [1],
        [2],
        [-0.5],
    )
    assert (step.input_tokens, step.capture) == (7, "exact")
    assert step.action == ({**said("assistant", "answer"), "finish_reason": "stop"},)


def test_structure_is_that_of_the_record_that_has_it() -> None:
    """A richer record that hangs in the air takes agent and place of the one in the tree."""
    forest = Forest()
    air = forest.open("air", attributes("answer", "id-1"), parent="", scope=c.SCOPE)
    forest._made[air].attributes.update(token_attributes([1], [2]))
    with forest.agent("planner"):
        forest.make("theirs", attributes("answer", "id-1"), scope=THEIRS)
    forest.close(air)

    (step,) = steps(forest)

    assert (step.span_id, step.agent, step.capture) == (air, "planner", "exact")


def test_the_agent_is_the_richest_records() -> None:
    """Where two makes name agents, ours names the one that acts, not the program around it."""
    forest = Forest()
    with forest.agent("program"):
        above = forest.open("ours", attributes("answer"), scope=c.SCOPE)
        forest._made[above].attributes[c.AGENT_NAME] = "writer"
        deeper = attributes("answer", **{c.AGENT_NAME: "program"})
        forest.make("theirs", deeper, parent=above, scope=THEIRS)
        forest.close(above)

    assert [step.agent for step in steps(forest)] == ["writer"]


def test_what_ours_cut_is_taken_whole_from_theirs() -> None:
    """Messages that ours could not keep whole are read from another record."""
    forest = Forest()
    cut = {c.INPUT_MESSAGES: '[{"role": "us', c.CUT: json.dumps({"x": 1})}
    nested(forest, attributes("answer", "id-1"), attributes("answer", "id-1", **cut))

    (step,) = steps(forest)

    assert step.observation == (said("user", "go on"),)


def test_what_ours_says_was_abandoned_stays_so() -> None:
    """A record that knows no better does not turn an abandoned stream into a transition."""
    forest = Forest()
    abandoned = attributes("ans", "id-1", **{c.ABANDONED: True})
    nested(forest, attributes("ans", "id-1"), abandoned)

    found = TripletAdapter().explain(forest.spans).report

    assert found.transitions == 0
    assert len(found.reasons()) == 2


@pytest.mark.parametrize("target", ["theirs", "ours"])
def test_a_reward_for_either_record_is_the_calls(target: str) -> None:
    """A reward linked to a record that is not kept judges the request all the same."""
    forest = Forest()
    above, below = nested(forest, attributes("answer"), attributes("answer"))
    forest.reward(0.5, span_id=above if target == "theirs" else below)

    assert [step.reward for step in steps(forest)] == [0.5]


def test_a_reward_given_within_the_outer_record_is_the_calls() -> None:
    """Parentage counts for the record that is not kept too."""
    forest = Forest()
    above = forest.open("theirs", attributes("answer"), scope=THEIRS)
    forest.make("ours", attributes("answer"), parent=above, scope=c.SCOPE)
    forest.make("reward", {c.REWARD_VALUE: 0.5}, parent=above)
    forest.close(above)

    assert [step.reward for step in steps(forest)] == [0.5]


@pytest.mark.pain(3)
def test_three_makes_at_once_are_one_call() -> None:
    """Outer, middle and inner record of three makes are one request, two of them dropped."""
    forest = Forest()
    outer = forest.open("outer", attributes("answer"), scope=OTHERS)
    middle = forest.open("middle", attributes("answer", "id-1"), parent=outer, scope=THEIRS)
    inner = forest.make("inner", attributes("answer", "id-1"), parent=middle, scope=c.SCOPE)
    forest.close(middle, outer)

    found = TripletAdapter().explain(forest.spans)

    assert [s.span_id for path in found.trajectories for s in path.transitions] == [inner]
    assert set(found.report.reasons()) == {DUPLICATE_OF.format(s) for s in (THEIRS, OTHERS)}


@pytest.mark.parametrize("has_root", [False, True])
@pytest.mark.parametrize("exact", ["outer", "inner"])
def test_what_is_beside_the_outermost_record_is_beside_the_request(
    has_root: bool, exact: str
) -> None:
    """A reward after two nested records is the call's sibling, whichever of them is the richer."""
    forest = Forest()
    root = forest.open("root") if has_root else None
    records: dict[str, str] = {}
    records["outer"] = forest.open_call(
        "said", response_id="chatcmpl-1", parent=root, scope="litellm"
    )
    records["inner"] = forest.open_call(
        "said", response_id="chatcmpl-1", parent=records["outer"], scope="openai"
    )
    forest._made[records[exact]].attributes.update(token_attributes([1], [2]))
    forest.close(records["inner"], records["outer"])
    forest.reward(0.5, parent=root)

    for rule in ("next", "sibling", "last"):
        found = TripletAdapter(rule).explain(forest.spans)  # type: ignore[arg-type]  # of the rules

        assert rewards(found.trajectories) == {"said": 0.5}
