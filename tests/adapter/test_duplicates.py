"""Several instrumentors record one request: drawn records, the call they are, and what is dropped.

Each call is its agent, its record and its reward; after ``!`` stand the records that are dropped,
with the reason where it is not that they are duplicates.
"""

import json
from typing import Any

import pytest
from tests.adapter.forest import (
    Forest,
    call_attributes,
    draw,
    said,
    steps_of,
    token_attributes,
)

from lightning_otel.adapter import TripletAdapter
from lightning_otel.types import Span, Transition
from lightning_otel.types import conventions as c

OURS, THEIRS, OTHERS = f"@scope={c.SCOPE}", "@scope=theirs", "@scope=others"
BOTH = f"+x@as=out{THEIRS} out/x@as=in{OURS}"

CASES = {
    # --- one request
    "a record within another": (f"{BOTH} -out", "in ! out"),
    "a provider before the model's name": (
        f"+x@as=out@model=openai/m{THEIRS} out/x@as=in@model=m{OURS} -out",
        "in ! out",
    ),
    "one knows no model": (f"+x@as=out{THEIRS} out/x@as=in@model=m{OURS} -out", "in ! out"),
    "one response id": ("+x@as=out@id=r out/x@as=in@id=r -out", "out ! in"),
    "the inner one has token ids": ("+x@as=out@id=r out/x@as=in@id=r@exact -out", "in ! out"),
    "two in turn within a third": (
        "+x@as=out@id=r out/x@as=a@id=r out/x@as=b@id=r -out",
        "out ! a, b",
    ),
    "three makes": (
        f"+x@as=a{OTHERS} +a/x@as=b@id=r{THEIRS} b/x@as=d@id=r{OURS} -b -a",
        "d ! a, b",
    ),
    "of one make, between two records": (
        f"+x@as=out@id=r{THEIRS} +out/x@as=mid{THEIRS} mid/x@as=in@id=r{OURS} -mid -out",
        "in ! mid, out",
    ),
    "two levels of one make in a tree of its own, and one id": (
        f"root( +m( +m/x@as=out@id=r{THEIRS} +out/x@as=mid{THEIRS} x@as=in@id=r{OURS}"
        " -mid -out -m )",
        "in ! mid, out",
    ),
    "two tries of one make within a record, and one id": (
        f"root( +m( +m/x@as=out@id=r{THEIRS} +out/x@as=a{THEIRS} -a +out/x@as=b{THEIRS}"
        f" x@as=in@id=r{OURS} -b -out -m )",
        "a, in ! b, out",
    ),
    "made after the fact": (
        f"root( x@as=in@id=r{OURS} x@as=late@id=r@scope=litellm@at=2-3 )",
        "in ! late",
    ),
    "the last of several tries within one record": (
        f"+x@as=out{THEIRS} out/x@as=a@error{OURS} out/x@as=b{OURS} -out",
        "b ! a failed, out",
    ),
    "overlapping under one parent, asked the same": (
        f"root( +x@as=a{THEIRS} +x@as=b{OURS} -a -b )",
        "b ! a",
    ),
    "in trees of their makes, answered alike": (
        f"root( +m( +n( +m/x@as=a@id=r{OURS} +n/x@as=b{THEIRS} -a -b -m -n )",
        "a ! b",
    ),
    "equal requests at once pair off": (
        "root( "
        + " ".join(f"+x@as=a{n}{THEIRS} +x@as=b{n}{OURS}" for n in range(3))
        + " -a0 -b0 -a1 -b1 -a2 -b2 )",
        "b0, b1, b2 ! a0, a1, a2",
    ),
    # --- several requests
    "other models": (
        f"+x@as=out@model=big{THEIRS} out/x@as=in@model=small{OURS} -out",
        "out, in",
    ),
    "other response ids": (f"+x@as=out@id=r1{THEIRS} out/x@as=in@id=r2{OURS} -out", "out, in"),
    "other answers": (f"+x@as=out{THEIRS} out/y@as=in{OURS} -out", "out, in"),
    "other operations": (
        f"+x@as=out@{c.OPERATION}=embeddings{THEIRS} out/x@as=in{OURS} -out",
        "in ! out an embedding",
    ),
    "of one make, nested": (f"+x@as=a{THEIRS} a/x@as=b{THEIRS} -a y{OTHERS}", "a, b, y"),
    "of one make, beside": (f"+x@as=a{THEIRS} +x@as=b{THEIRS} -a -b y{OTHERS}", "a, b, y"),
    "of one make, with one id": (f"+x@id=r{THEIRS} +y@id=r{THEIRS} -x -y", "x, y"),
    "in turn, with one id": ("x@id=r y@id=r z@id=r", "x, y, z"),
    "two makes in turn, with one id": (f"x@id=r{OURS} y@id=r{THEIRS}", "x, y"),
    "at once, without an id": ("+x +y -x -y", "x, y"),
    "an id that is no text": ("+x@id=7 +y@id=7 -x -y", "x, y"),
    "asked another question": (f"root( +x@as=a{THEIRS}<else +x@as=b{OURS} -b -a )", "a, b"),
    "asked the same in turn": (f"root( x@as=a{THEIRS} x@as=b{OURS} )", "a, b"),
    "another parent, and no answer": (
        f"root( +x@as=a@{c.OUTPUT_MESSAGES}=null{THEIRS} tool( x@as=b{OURS} ) -a )",
        "b ! a no output",
    ),
    "in trees of their makes, answered otherwise": (
        f"root( +m( +n( +m/x@as=a@id=r{OURS} +n/y@as=b{THEIRS} -a -b -m -n )",
        "a, b",
    ),
    # --- what the one call has
    "a rollout's span is no call": (
        f"{c.SPAN_ROLLOUT}@{c.OPERATION}=chat@id=r( x@id=r{OURS} !.5 )",
        "x=0.5",
    ),
    "the agent of the record in the tree": (
        f"+x@as=air@id=r@exact{OURS} A[ x@as=in@id=r{THEIRS} ] -air",
        "A air ! in",
    ),
    "the agent that the richest names": (
        f"program[ +x@as=out@{c.AGENT_NAME}=writer{OURS}"
        f" out/x@as=in@{c.AGENT_NAME}=program{THEIRS} -out ]",
        "writer out ! in",
    ),
    "what ours says was abandoned": (
        f"+x@as=out@id=r{THEIRS} out/x@as=in@id=r@abandoned{OURS} -out",
        "! in abandoned, out",
    ),
    "a reward for either": (f"{BOTH} -out !.5@span=out", "in=0.5 ! out"),
    "a reward in the outer one": (f"{BOTH} out/!.5 -out", "in=0.5 ! out"),
    "a reward beside the outer one": (f"root( {BOTH} -out !.5 )", "in=0.5 ! out"),
    "a reward beside the richer outer one": (
        f"+x@as=out@id=r@exact{THEIRS} out/x@as=in@id=r{OTHERS} -out !.5",
        "out=0.5 ! in",
    ),
}


@pytest.mark.parametrize(("drawing", "expected"), CASES.values(), ids=CASES)
@pytest.mark.pain(3)
def test_records_of_one_request_are_one_call(drawing: str, expected: str) -> None:
    """The richest record stands for it, and every other one has a reason."""
    forest = draw(drawing)

    found = TripletAdapter().explain(forest.spans)

    names = {span_id: name for name, span_id in forest.named.items()}
    kept = [
        f"{step.agent} {names[step.span_id]}".strip()
        + ("" if step.reward is None else f"={step.reward:g}")
        for step in steps_of(found)
    ]
    reasons = {
        names[each.span_id]: each.reason.partition(":")[0].removeprefix("duplicate")
        for each in found.report.dropped
    }
    dropped = ", ".join(f"{name} {reasons[name]}".strip() for name in sorted(reasons))
    assert f"{', '.join(kept)} ! {dropped}".removesuffix(" ! ").strip() == expected
    records = sum(each.noun == "record" for each in found.report.dropped)
    assert found.report.calls == len(kept) + len(reasons) - records


def merged(outer: dict[str, Any], inner: dict[str, Any]) -> Transition:
    """The call of a record of theirs around one of ours."""
    forest = Forest()
    with forest.agent("planner"):
        above = forest.open("theirs", outer, scope="theirs")
        forest.make("ours", inner, parent=above, scope=c.SCOPE)
        forest.close(above)
    (step,) = steps_of(TripletAdapter().explain(forest.spans))
    return step


def test_each_field_is_the_richest_records() -> None:
    """Token ids are ours, messages and usage whoever's has them, the agent the tree's."""
    theirs = {**call_attributes("go on", "answer", "r"), c.REQUEST_MODEL: "m", c.INPUT_TOKENS: 7}
    bare = {c.OPERATION: c.CHAT, c.RESPONSE_ID: "r", **token_attributes([1], [2], [-0.5])}

    step = merged(theirs, bare)

    assert (step.agent, step.model, step.input_tokens, step.capture) == (
        *("planner", "m", 7, "exact"),
    )
    ids = [list(held) for held in (step.prompt_ids, step.response_ids, step.logprobs)]
    assert ids == [[1], [2], [-0.5]]
    assert step.action == ({**said("assistant", "answer"), "finish_reason": "stop"},)


def test_what_ours_cut_is_taken_whole_from_theirs() -> None:
    """Messages that ours could not keep whole are read from another record."""
    whole = call_attributes("go on", "answer", "r")

    step = merged(whole, {**whole, c.INPUT_MESSAGES: '[{"role": "us', c.CUT: '{"x": 1}'})

    assert step.observation == (said("user", "go on"),)


def test_instructions_told_apart_are_the_first_message() -> None:
    """A make that keeps the instructions out of the messages was asked the same all the same."""
    apart = json.dumps([{"type": "text", "content": "be brief"}])
    among = [said("system", "be brief"), said("user", "go on")]
    forest = Forest()
    told = {**call_attributes("go on", "x"), c.SYSTEM_INSTRUCTIONS: apart}
    one = forest.open("theirs", told, scope="theirs")
    other = forest.open("ours", call_attributes(among, "x", "r"), scope=c.SCOPE)
    forest.close(one, other)

    (step,) = steps_of(TripletAdapter().explain(forest.spans))
    assert step.span_id == other
    assert [item["role"] for item in step.observation] == ["system", "user"]


@pytest.mark.parametrize("is_ours_apart", [False, True])
def test_instructions_of_two_records_stand_once(is_ours_apart: bool) -> None:
    """Whichever record tells them apart, and where one record tells them twice."""
    rules = {c.SYSTEM_INSTRUCTIONS: json.dumps([{"type": "text", "content": "be brief"}])}
    among = [said("system", "be brief"), said("user", "go on")]
    apart = {**call_attributes("go on", "x", "r"), **rules}
    whole = call_attributes(among, "x", "r")

    step = merged(whole if is_ours_apart else apart, apart if is_ours_apart else whole)
    (twice,) = steps_of(TripletAdapter().explain([one_span({**whole, **rules})]))

    for each in (step, twice):
        assert [item["role"] for item in each.observation] == ["system", "user"]


def one_span(attributes: dict[str, Any]) -> Span:
    """One call of theirs."""
    forest = Forest()
    forest.make("chat", attributes, scope="theirs")
    return forest.spans[0]


@pytest.mark.parametrize(
    ("scopes", "answers"),
    [
        (["theirs"] * 4, "abcd"),
        ([""] * 4, "abcd"),
        ([c.SCOPE, "theirs"], "ab"),
    ],
)
def test_records_without_a_duration_are_calls_of_their_own(scopes: list[str], answers: str) -> None:
    """A server that repeats its ids, told by spans that never say when they ended."""
    spans = []
    for index, (scope, answer) in enumerate(zip(scopes, answers, strict=True)):
        attributes = {
            c.OPERATION: c.CHAT, c.RESPONSE_ID: "same", c.REQUEST_MODEL: "m",
            c.INPUT_MESSAGES: json.dumps([said("user", f"ask {answer}")]),
            c.OUTPUT_MESSAGES: json.dumps([said("assistant", answer)]),
        }  # fmt: skip
        start_ns = 10**18 + index * 10**9
        end_ns = start_ns + (5 if scope == c.SCOPE else 0)
        spans.append(
            Span("1" * 32, f"{index + 1:016x}", None, "chat m", start_ns, end_ns,
                 attributes=attributes, scope=scope)
        )  # fmt: skip

    report = TripletAdapter().explain(spans).report

    assert (report.calls, report.transitions) == (len(scopes), len(scopes))
