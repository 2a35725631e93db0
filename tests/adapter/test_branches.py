"""Which call follows which, whatever the clocks say, and why each path begins: drawn forests.

A path is its agent, its cause and its answers; ``?`` stands after the cause if it is a guess.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.adapter.forest import Forest, call_attributes, conversation, draw, paths, said, text_of

from lightning_otel import Store, TripletAdapter
from lightning_otel.types import Span, Trajectory
from lightning_otel.types import conventions as c

TASK = "s:you|u:fix"
ONE, TWO, THREE, FOUR = (
    "|".join([TASK, *(f"a:c{step}|t:r{step}" for step in range(steps))]) for steps in (1, 2, 3, 4)
)
CODING = f"c0<{TASK} c1<{ONE} c2<{TWO}"
HANDOFF = f"handoff@{c.HANDOFF_TARGET}=billing( )"

CASES: dict[str, tuple[str, str]] = {
    # --- time and place
    "calls in turn are one path": ("a b d", "start a b d"),
    "calls at once are branches": (
        "root( +a +b +d -a -b -d )",
        "parallel a, parallel b, parallel d",
    ),
    "a call before several at once is shared": (
        "root( plan +a +b +d -a -b -d )",
        "start plan a, parallel plan b, parallel plan d",
    ),
    "operations at once are not mixed": (
        "root( plan +x( +y( x/a1 y/b1 x/a2 y/b2 -x -y )",
        "start plan a1 a2, parallel plan b1 b2",
    ),
    "after operations at once the one that ended last goes on": (
        "root( +x( +y( x/a y/b -y -x d )",
        "parallel a, parallel b d",
    ),
    "a nested call follows none that runs": ("+out out/in -out d", "start in, start out d"),
    "calls of no length": ("#counted=no a@at=7 b@at=7 d@at=7", "start? a b d"),
    "a stream that outlives its operation": (
        "root( x( a +stream ) y( b ) -stream d )",
        "parallel b, parallel a stream d",
    ),
    "a stream and what began beside it": (
        "root( x( +stream ) b -stream )",
        "parallel stream, parallel b",
    ),
    # --- agents
    "agents have paths of their own": (
        "root( +A[ +B[ A/a1 B/b1 A/a2 B/b2 -A -B )",
        "A start a1 a2, B start b1 b2",
    ),
    "agents in turn start": ("root( A[ a ] B[ b ] )", "A start a, B start b"),
    "an agent that works again goes on": ("root( A[ a ] A[ b ] )", "A start a b"),
    "an agent at work twice at once": (
        "root( +A@as=x[ +A@as=y[ x/a1 y/b1 x/a2 y/b2 -x -y )",
        "A parallel a1 a2, A parallel b1 b2",
    ),
    "an agent in a span interrupts nothing": (
        "A[ a1 x( B[ b ] ) a2 ]",
        "A start a1 a2, B sub_agent b",
    ),
    "agents called by a tool and by one another": (
        "boss[ a tool( worker[ b helper[ x( d ) ] ] ) ]",
        "boss start a, worker sub_agent b, helper sub_agent d",
    ),
    "a sub-agent twice at once": (
        "boss[ +A@as=x[ +A@as=y[ x/a y/b -x -y ]",
        "A sub_agent a, A sub_agent b",
    ),
    "a span names who goes on": (
        f"triage[ a {HANDOFF} billing[ b ] ]",
        "triage start a, billing hand_off b",
    ),
    "a handoff names nobody who began before it": (
        f"team( billing[ b ] triage[ a {HANDOFF} ] )",
        "billing start b, triage start a",
    ),
    "another takes the conversation on": (
        "team( triage[ a<s:sort|u:wrong ] billing[ b<s:bills|u:wrong|a:a|u:go ]"
        " critic[ d<u:wrong|a:other|u:go ] )",
        "triage start a, billing hand_off b, critic start d",
    ),
    "nobody takes on an answer that is still under way": (
        "root( A[ +a<wrong ] B[ b<wrong|a|go ] -a )",
        "A start a, B start b",
    ),
    # --- conversations
    "conversations in turns": (
        "a1<hello b1<other a2<hello|a1|more b2<other|b1|more a3<hello|a1|more|a2|end",
        "parallel b1 b2, start a1 a2 a3",
    ),
    "the longest conversation goes on": (
        "a1<hello a2<hello|a1|more b<other a3<hello|a1|more|a2|end",
        "parallel b, start a1 a2 a3",
    ),
    "equal conversations go on where they were held": (
        "root( +x( +y( x/same<q y/same<q x/a<q|same|why y/b<q|same|why -x -y )",
        "parallel same a, parallel same b",
    ),
    "a second answer to one conversation": (
        "a1<hello bad<hello|a1|and good<hello|a1|and end<hello|a1|and|good|thanks",
        "start a1 bad, retry a1 good end",
    ),
    "a conversation that goes back": (
        "a1<hello left<hello|a1|left right<hello|a1|right",
        "start a1 left, rewind a1 right",
    ),
    "a summary after the task": (
        f"{CODING} after<{TASK}|u:so-far",
        "start c0 c1 c2, compaction after",
    ),
    "a window over the last messages": (
        f"{CODING} c3<{THREE} c4<s:you|{FOUR.split('|', 4)[4]}",
        "start c0 c1 c2 c3 c4",
    ),
    "results left out": (
        f"c0@tokens=10<{TASK} c1@tokens=500<{ONE} c2@tokens=900<{TWO}"
        f" c3@tokens=300<{THREE.replace('r0', 'cut')}",
        "start c0 c1 c2 c3",
    ),
    "a new task is none": (f"{CODING} new<s:you|u:test", "start c0 c1 c2, start? new"),
    "a summary that is asked first": (
        f"{CODING} sum-up<s:condense|u:all after<{TASK}|u:sum-up",
        "start c0 c1 c2, start sum-up, compaction after",
    ),
    "a summary in place of all": (
        f"{CODING} so-far-so-good<{THREE}|u:sum-up after<s:you|u:so-far-so-good",
        "start c0 c1 c2 so-far-so-good, compaction after",
    ),
    # --- identity
    "a title after the agent": (f"{CODING} t<s:titles|u:fix", "start c0 c1 c2, start t"),
    "a title before the agent": (f"t<s:titles|u:fix {CODING}", "start t, start c0 c1 c2"),
    "a title without instructions": (
        "a<fix b<fix|a|go t<title-of-fix",
        "start a b, start? t",
    ),
    "two agents without names": ("a<s:triage|u:look b<s:expert|u:look", "start a, start b"),
    "instructions with a date": (
        "a<s:on-2026-11-28|u:one b<s:on-2026-11-29|u:two",
        "start a b",
    ),
    "a side call of a named agent": (
        f"A[ {CODING} t<s:titles|u:fix ]",
        "A start c0 c1 c2, A start? t",
    ),
    # --- asked again
    "after a failed call": ("root( lost@error<hello a<hello )", "retry a"),
    "after an abandoned call": ("root( lost@abandoned<hello a<hello )", "retry a"),
    "after a process died": ("root( +lost@process=died<hello a<hello )", "retry a"),
    "beside a call that may still run": ("root( +lost<hello a<hello )", "start a"),
    "with a remark": ("lost@error<hello a<hello|u:please", "retry a"),
    "another question": ("lost@error<hello a<evening", "start a"),
    "beside the failed one": ("root( +lost@error +a -lost -a )", "start a"),
    "an answer not gone on with": ("a<hello b<hello d<hello|b|go", "start a, retry b d"),
    "an answer its client refused": ("a@error@whole<parse b<parse", "start a, retry b"),
    "an agent that repeats nothing": ("a<next b<next d<next", "start a b d"),
    # --- tools that ask a model themselves
    "no span tells of the tool": (
        "plan<task in<page end<task|plan|sum",
        "parallel in, start plan end",
    ),
    "the tool asks twice": (
        "plan<task x<page y<page2 end<task|plan|both",
        "parallel x y, start plan end",
    ),
    "the tool has a loop in it": (
        "plan<task find<query found<query|find|page end<task|plan|found",
        "parallel find found, start plan end",
    ),
    "a tool a turn": (
        "plan<task x<page look<task|plan|x y<page2 end<task|plan|x|look|y",
        "parallel x, parallel y, start plan look end",
    ),
    "nobody goes on with it": ("plan<task then<two end<three", "start plan then end"),
    "a tool of an agent without a history": (
        "A[ plan<task tool( in<page more<page2 ) end<result ]",
        "A parallel in more, A start plan end",
    ),
    "a tool asks with the agent's history": (
        "plan<task tool( reflect<task|plan|right? ) end<task|plan|it-is",
        "parallel reflect, start plan end",
    ),
    "a tool ends the conversation": ("plan<task tool( end<task|plan|now )", "start plan end"),
    "each call in a tool of its own": (
        "tool( plan<task ) tool( end<task|plan|go )",
        "start plan end",
    ),
    "a tool in a tool": (
        "plan<task tool( in<page tool( deep<word ) out<next ) end<result",
        "parallel deep, parallel in out, start plan end",
    ),
    "an agent that calls itself": (
        "A[ plan<task tool( A[ in<part ] ) end<result ]",
        "A parallel in, A start plan end",
    ),
    "another agent in a tool": (
        "A[ plan<task tool( B[ x<part ] ) go<result tool( B[ y<part2 ] ) end<result2 ]",
        "A start plan go end, B sub_agent x y",
    ),
    # --- processes
    "one process's calls, judged by another": ("a b #trace=b,process=p2,tick=50 !1", "start a b"),
    "calls of two processes are a guess": ("a #trace=b,process=p2,tick=50 b", "start? a b"),
}


def told(path: Trajectory) -> str:
    """The agent of a trajectory, its cause and its answers."""
    cause = f"{path.cause}{'?' * path.is_guess}"
    return " ".join(
        [path.agent, cause, *map(text_of, (s.action for s in path.transitions))]
    ).strip()


@pytest.mark.parametrize(("drawing", "expected"), CASES.values(), ids=CASES)
def test_paths_follow_time_conversations_and_agents(drawing: str, expected: str) -> None:
    """Every call is on a path; a step that several share is one, and sees what came next."""
    found = TripletAdapter().adapt(draw(drawing).spans)

    assert ", ".join(map(told, found)) == expected
    steps = [step for path in found for step in path.transitions]
    assert len({id(step) for step in steps}) == len({step.span_id for step in steps})
    for path in found:
        for step, after in zip(path.transitions, path.transitions[1:], strict=False):
            assert step.is_shared or step.next_observation == after.observation


def test_every_way_of_reading_a_store_says_the_same(tmp_path: Path) -> None:
    """Rows without bodies are those with bodies, each without four columns."""
    store = Store(tmp_path / "t.duckdb")
    for number, (drawing, _) in enumerate(CASES.values()):
        for span in draw(drawing, rollout_id=f"r{number}", process=f"p{number}-").spans:
            ours = {**span.attributes, c.RESPONSE_ID: span.span_id}
            trace_id = f"{number:031x}{span.trace_id[0]}"
            store.add([replace(span, scope=c.SCOPE, trace_id=trace_id, attributes=ours)])

    steps = store.transitions()

    thin = store.transitions(bodies=False)
    rows = {row["span_id"]: row for row in steps.dicts()}
    for row in thin.dicts():
        assert row.items() <= rows.pop(row["span_id"]).items()
        assert not row.keys() & {"observation", "action", "tools", "prompt_ids"}
    assert not rows
    told = sorted(step.span_id for step in steps if step.next_observation is not None)
    assert sorted(step.span_id for step in thin if step.next_observation is not None) == told


def test_a_shortened_conversation_is_seen_by_the_step_before() -> None:
    """What went on with it is its next observation, though it ends its path."""
    found = TripletAdapter().adapt(draw(f"c0<{TASK} c1<{ONE} end<{TASK}|u:so-far").spans)

    before, after = (path.transitions[-1] for path in found)
    assert before.done
    assert before.next_observation == after.observation


def test_a_conversation_is_continued_by_any_of_its_choices() -> None:
    """Where a model answered several times, the program may go on with any of the answers."""
    forest = Forest()
    choices = json.dumps([said("assistant", "no"), said("assistant", "yes")])
    forest.make("chat", {**call_attributes("question", "unused"), c.OUTPUT_MESSAGES: choices})
    forest.call("aside")
    forest.call("went on", conversation("question", "yes", "why"))

    assert paths(TripletAdapter().adapt(forest.spans)) == [["aside"], ["no yes", "went on"]]


def test_a_conversation_ignores_what_is_not_repeated() -> None:
    """Reasoning and empty text of an answer, and fields beside the parts, are not sent again."""
    forest = Forest()
    call = {"type": "tool_call", "id": "t1", "name": "add", "arguments": {"a": [1, 2]}}
    more = [{"type": "reasoning", "content": "hm"}, {"type": "text", "content": ""}, call]
    answer = {"role": "assistant", "parts": more, "finish_reason": "tool_calls"}
    result = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "t1", "response": 3}]}
    first = forest.make(
        "chat", {**call_attributes("1 + 2", ""), c.OUTPUT_MESSAGES: json.dumps([answer])}
    )
    forest.call("aside")
    last = forest.call("3", [said("user", "1 + 2"), {"role": "assistant", "parts": [call]}, result])

    found = TripletAdapter().adapt(forest.spans)

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
    odd = {**call_attributes([{"parts": []}, {"role": 7}], "x"), c.HANDOFF_TARGET: ["no", "text"]}
    forest.make("chat", odd, status="ERROR")

    assert paths(TripletAdapter().adapt(forest.spans)) == [["aside"], ["first", "second"]]


def test_a_chain_of_nested_calls_beyond_the_recursion_limit_is_adapted() -> None:
    """Four thousand calls, each inside the one before, are as many branches."""
    forest = Forest()
    parent = None
    for index in range(4_000):
        parent = forest.open_call(f"{index}", parent=parent)
    forest.close(*reversed([span.span_id for span in forest.spans]))

    found = TripletAdapter().explain(forest.spans)

    assert found.report.transitions == len(found.trajectories) == 4_000


HERE = "#process=p1,clock=0"
ANY_CLOCK = {
    "a host that serves requests": (
        "root( POST@kind=CLIENT( {there} serve@kind=SERVER( a ) {here} ) !0"
        " POST@kind=CLIENT( {there} serve@kind=SERVER( b ) {here} ) !1 )",
        "start a=0 b=1",
    ),
    "a call here, one there, one here": (
        "root( a POST@kind=CLIENT( {there} serve@kind=SERVER( b ) {here} ) d )",
        "start a b d",
    ),
    "a conversation over two hosts": (
        "a<hello {there} #trace=b b<hello|a|more {here} #trace=a d<hello|a|more|b|end !1",
        "start a b d=1",
    ),
}
CLOCKS = {
    "nothing ties two hosts": ("root( a #process=p2 b #process=p1 )", "start? a b"),
    "nobody waited for the server": (
        "root( step( #process=p2 a #process=p1 ) b )",
        "start? a b",
    ),
    "a clock steps back an hour": ("A[ a !0 #clock=-3600 b !1 d !2 ]", "A start a=0 b=1 d=2"),
    "a clock steps back beside another process": (
        "A[ a !0 #clock=-3600 b !1 d !2 ] #trace=b,process=p2,clock=0,tick=50 B[ e ]",
        "A start a=0 b=1 d=2, B start e",
    ),
    "a clock steps back, uncounted": ("#counted=no A[ a #clock=-3600 b d ]", "A start? b d a"),
    "the conversation puts an uncounted clock right": (
        "#counted=no A[ a<hello #clock=-3600 b<hello|a|more b/!1 d<hello|a|more|b|end d/!2 ]",
        "A start a b=1 d=2",
    ),
    "two left the same words": (
        "#process=p2,tick=50 a<hello a<hello #process=p1,tick=0 b<hello|a|more",
        "start? b a, retry? b a",
    ),
    "a clock that runs backwards": ("#counted=no a@at=9-1 b@at=3-4", "start? b a"),
    "an end before a start at one instant": ("#counted=no b@at=5-9 a@at=1-5", "start? a b"),
}
EVERY = {
    **CLOCKS,
    **{
        f"{name}, {skew}": (drawing.format(there=f"#process=p2,clock={skew}", here=HERE), expected)
        for name, (drawing, expected) in ANY_CLOCK.items()
        for skew in (0, 300, -300)
    },
}


@pytest.mark.parametrize(("drawing", "expected"), EVERY.values(), ids=EVERY)
def test_calls_are_in_the_order_they_were_made(drawing: str, expected: str) -> None:
    """By what a process counted, who asked whom, and what was said; else by the clocks."""
    found = TripletAdapter().explain(reversed(draw(drawing).spans))

    text = ", ".join(map(told, found.trajectories))
    for path in found.trajectories:
        for step in path.transitions:
            if step.reward is not None:
                answer = text_of(step.action)
                text = re.sub(rf"\b{answer}\b", f"{answer}={step.reward:g}", text)
    assert text == expected
    assert found.report.repairs == ()


def test_contradicting_parents_and_counts_lose_nothing() -> None:
    """A count that says the child came first, and clients that wait in circles, are no trap."""
    spans = [
        Span("t", "a", "b", "a", 1, 9, process="p", sequence=0, end_sequence=1, kind="CLIENT"),
        Span("t", "b", "c", "b", 2, 8, process="q", sequence=0, end_sequence=1, kind="SERVER"),
        Span("t", "c", None, "c", 3, 7, process="p", sequence=2, end_sequence=3, kind="CLIENT"),
        Span("t", "d", "c", "d", 4, None, process="q", sequence=-1, kind="SERVER"),
    ]

    assert TripletAdapter().explain(spans).report.spans == 4
