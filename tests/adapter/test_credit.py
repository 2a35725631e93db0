"""Which call each reward belongs to: drawn forests, with what each call earns under a rule.

An outcome names each call's reward, with the named rewards where they are not that one; after ``!``
the rewards that were left out, and ``? skipped`` where one skipped a failed call.
"""

import re
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from tests.adapter.forest import Forest, draw, reward_attributes, steps_of, text_of

from lightning_otel import Store, TripletAdapter
from lightning_otel.adapter import Adaptation
from lightning_otel.adapter.advantages import last_rewards
from lightning_otel.adapter.rewards import NO_STEP_BEFORE, with_evaluations
from lightning_otel.errors import ConfigError
from lightning_otel.store.views import LAST_REWARD
from lightning_otel.types import Call, Credit, CreditRule, Reward
from lightning_otel.types import conventions as c

ALL = " ".join(get_args(Credit))
REASONS = {
    "already": "its call already has a reward of that name, and the first one counts",
    "before": "no call of the same agent came before it",
    "final": "only the rollout's final reward counts under the rule 'last'",
    "unknown": "its link matches no span of the attempt it belongs to",
    "target": "its link names a span or response that made no transition",
    "failed": NO_STEP_BEFORE,
    "parent": "the call it was given in made no transition",
    "waits": "it waits: no call of its rollout, and nothing that its link names, is in the store",
    "retracted": "it was retracted",
    "infinite": "the reward's value is not finite",
    "3 for 2": "its sequence has 3 numbers for 2 steps",
    "2 for 1": "its sequence has 2 numbers for 1 steps",
}
LATE = "#rollout=,attempt=,trace=f,process=p9,tick=900"
"""From another process, in a trace of its own, without a word of the rollout."""
LATER = "#trace=e,process=p8,tick=950"
SECOND = "#rollout=r2,trace=b,process=p2,tick=100"
RETRY = "#attempt=2,trace=b,process=p2,tick=100"

AGENT = "a<s:do|u:x b<s:do|u:x|a:a|u:y"
CASES: dict[str, tuple[str, dict[str, str]]] = {
    # --- by time and place
    "each call has the reward after it": (
        "root( a !0 b !.5 c !1 )",
        {
            "previous step agents": "a=0 b=0.5 c=1",
            "last": "a=- b=- c=1 ! final, final",
            "discounted": "a=0.5(primary=0) b=1(primary=0.5) c=1",
        },
    ),
    "no reward is not 0": ("a b !1", {"previous": "a=- b=1", "discounted": "a=0.5 b=1"}),
    "nothing to learn": ("a", {"previous": "a=-"}),
    "a second reward never slides to the call before": (
        "root( a b !.1 !.9 )",
        {"previous": "a=- b=0.1 ! already", "discounted": "a=0.05 b=0.1 ! already"},
    ),
    "a reward that shares one name is reported whole": (
        "a !ok=1,short=.5 !style=.7,ok=0",
        {"previous": "a=1(ok=1,short=0.5) ! already"},
    ),
    "a second name": ("a !ok=1 !short=.25", {"previous": "a=1(ok=1,short=0.25)"}),
    "before any call": ("!1 a", {"previous": "a=- ! before"}),
    "while a call runs": ("a +b !1 -b", {"previous": "a=1 b=-"}),
    "at the same instant": ("#counted=no !1@at=7 a@at=7", {"previous": "a=1"}),
    "inside the operation it is given in": (
        "root( +work( work/a b work/!1 -work )",
        {"previous": "a=1 b=-"},
    ),
    "of the part around an operation without calls": (
        "root( work( a ) judge( score( !1 ) ) ) other( b )",
        {"previous": "a=1 b=-"},
    ),
    "deep inside what stands beside": ("root( x( y( z( a ) ) ) !1 )", {"previous": "a=1"}),
    "inside an operation that ended before another call": (
        "root( +work( work/a -work b work/!1 )",
        {"previous": "a=1 b=-"},
    ),
    "outside every span": ("root( a b ) !1", {"previous": "a=- b=1"}),
    "each operation, and then the whole again": (
        "work( a !.2 ) work( b !.3 ) !1",
        {"previous": "a=0.2 b=0.3 ! already"},
    ),
    "operations beside each other": (
        "+x( +y( x/a y/b x/!.2 y/!.3 -x -y",
        {"previous": "a=0.2 b=0.3"},
    ),
    "no number": ("a !NaN !.5", {"previous": "a=0.5 ! infinite"}),
    "marks are steps": ("do:left !.2 do:right !.3", {"previous": "left=0.2 right=0.3"}),
    # --- agents
    "one agent's reward never goes to another": ("+A[ A/a B[ b ] A/!1 -A", {ALL: "a=1 b=-"}),
    "an agent without calls": (
        f"B[ b ] A[ !1@.{c.AGENT_NAME}=A ]",
        {"previous last step agents discounted": "b=- ! before"},
    ),
    "outside any agent": (
        "root( A[ a ] B[ b ] !1 )",
        {"previous": "a=- b=1", "agents": "a=1 b=1"},
    ),
    "agents at work at once": (
        "root( +A[ +B[ A/a B/b A/!.1 B/!.2 -A -B )",
        {"previous": "a=0.1 b=0.2"},
    ),
    "a team's reward": ("root( A[ a !.25 b ] B[ d ] !1 )", {"agents": "a=0.25 b=1 d=1"}),
    "a team and no other": (
        "root( team( A[ a ] ) other( B[ b ] !1 ) )",
        {"agents": "a=- b=1"},
    ),
    # --- the outcome
    "a title comes after the agent": (
        f"root( {AGENT} t<s:titles|u:x !1 )",
        {
            "previous last agents": "a=- b=1 t=-",
            "step": "a=1 b=1 t=-",
            "discounted": "a=0.5 b=1 t=-",
        },
    ),
    "from a shell, days later": (
        f"root( {AGENT} t<s:titles|u:x ) #attempt=,trace=f,process=p9,tick=900 !1",
        {"previous": "a=- b=1 t=-"},
    ),
    "beside traces of the program's own": (
        f"+{c.SPAN_ROLLOUT}@as=r( #trace=b work( {AGENT} t<s:titles|u:x ) #trace=a r/!1 -r",
        {"previous": "a=- b=1 t=-"},
    ),
    "in one of two recordings": (
        f"{c.SPAN_ROLLOUT}( {AGENT} t<s:titles|u:x )"
        f" #trace=b {c.SPAN_ROLLOUT}( z<s:commits|u:x !1 )",
        {"previous": "a=- b=- t=- z=1"},
    ),
    "a side call that is linked": (
        f"root( {AGENT} t@id=r<s:titles|u:x !1@id=r !.5 )",
        {"previous": "a=- b=- t=1 ! already"},
    ),
    "in an operation after the agent": (
        f"root( {AGENT} w( t<s:titles|u:x !1 ) )",
        {"previous": "a=- b=- t=1"},
    ),
    "where steps have rewards, the last one is a step's": (
        "root( a<s:do|u:x !.5 b<s:do|u:x|a:a|u:y !.25 t<s:titles|u:x !1 )",
        {"previous": "a=0.5 b=0.25 t=1"},
    ),
    "steps of another name": (
        "root( a<s:do|u:x !ok=.5 b<s:do|u:x|a:a|u:y t<s:titles|u:x !1 )",
        {"previous": "a=0.5(ok=0.5) b=1 t=-"},
    ),
    "of equal conversations the first": (
        "root( a<s:do|u:x t<s:titles|u:x !1 )",
        {"previous": "a=1 t=-"},
    ),
    "of equal agents the one that ended last": (
        "root( A[ a ] t<s:titles|u:x B[ b ] c<s:commits|u:x !1 )",
        {"previous": "a=- t=- b=1 c=-"},
    ),
    "the agent of the rollout": (
        f"root@.{c.AGENT_NAME}=A( {AGENT} t<s:titles|u:x !1 )",
        {"previous last": "a=- b=1 t=-"},
    ),
    # --- parents
    "inside a call": ("a b a/!1", {ALL: "a=1 b=-"}),
    "inside a lost call": ("a b@error b/!1", {"previous": "a=- ! parent"}),
    "on the call itself": (f"a@{c.REWARD_VALUE}=0.75", {"previous": "a=0.75"}),
    # --- links
    "a link outranks parent and rule": ("a@id=r1 b b/!1@id=r1", {ALL: "a=1 b=-"}),
    "a link reaches another agent": (
        "A[ a@id=r1 ] judge[ b !1@id=r1 ]",
        {"previous": "a=1 b=-"},
    ),
    "a tool is the last call in it": (
        "root( tool( a x( b ) ) d !1@span=tool )",
        {"previous": "a=- b=1 d=-"},
    ),
    "an agent is the last call in it": (
        "root( A[ a x( b ) ] d !1@span=A )",
        {"previous": "a=- b=1 d=-"},
    ),
    "a link to a span without calls": ("a tool( ) !1@span=tool", {"previous": "a=- ! target"}),
    "a link to a lost call": ("a b@id=r2@error !1@id=r2", {"previous": "a=- ! target"}),
    "a server that repeats its ids": (
        "a@id=r !0@id=r b@id=r !1@id=r d@id=r !2@id=r",
        {"previous": "a=0 b=1 d=2"},
    ),
    "either record of one request": (
        "root( +a@id=r a/a@id=r@as=in -a !x=1@span=a !y=2@span=in in/!z=3 )",
        {"previous": "a=1(x=1,y=2,z=3)"},
    ),
    "an attribute": ("root( a@ticket=T1 b !1@ticket=T1 )", {ALL: "a=1 b=-"}),
    "an operation's attribute": (
        "root( work@ticket=T1( a b ) d !1@ticket=T1 )",
        {"previous": "a=- b=1 d=-"},
    ),
    "all attributes of a link": (
        "root( w@ticket=T1@try=1( a ) w@ticket=T1@try=2( b ) w@ticket=T2@try=1( d )"
        " !1@ticket=T1@try=1 !.5@ticket=T2@try=2 )",
        {"previous": "a=1 b=- d=- ! unknown"},
    ),
    "a link that contradicts itself": (
        "root( w@ticket=T1( a ) !1@ticket=T1@ticket=T2 )",
        {"previous": "a=- ! unknown"},
    ),
    "ids that contradict each other": (
        "a@id=r1 b@id=r2 !1@span=a@id=r1 !.5@span=a@id=r2",
        {"previous": "a=1 b=- ! unknown"},
    ),
    "no text is compared by its JSON": (
        "root( x@k=3( a ) y@k=true( b ) z@k=0.5( d ) !1@k=3 !2@k=true !3@k=0.5 )",
        {"previous": "a=1 b=2 d=3"},
    ),
    "the latest with the attribute": (
        "root( w@sort=x( a ) !0@sort=x w@sort=x( b ) !1@sort=x )",
        {"previous": "a=0 b=1"},
    ),
    "rewards are no targets": (
        "root( w@ticket=T1( a ) !.5@.ticket=T1 !late=1@ticket=T1 )",
        {"previous": "a=1(late=1,primary=0.5)"},
    ),
    "a trace": (
        f"root( a ) #trace=b,process=p2 root( b ) !1@trace=a@{c.OPERATION}=chat",
        {"previous": "a=1 b=-"},
    ),
    "a link to nothing": ("a !1@user.id=u1 !2@span=", {"previous": "a=- ! unknown, unknown"}),
    "a link beats a rule, whenever it comes": (
        "a@id=r1 b !.5 !.1@id=r1 !late=-1@span=a !1@op=nowhere",
        {"previous": "a=0.1(primary=0.1,late=-1) b=0.5 ! unknown"},
    ),
    # --- the rules
    "the final reward to the last call": ("a !1 b", {"last": "a=- b=1"}),
    "a linked reward is not the final one": ("a b !.5 !1@span=a", {"last": "a=1 b=0.5"}),
    "beside it": ("root( a w( b ) !1 )", {"previous": "a=- b=1"}),
    "returns": (
        "a b !1 d !2",
        {"discounted": "a=1 b=2(primary=1) d=2", "previous": "a=- b=1 d=2"},
    ),
    "after the last reward": ("a !1 b", {"discounted": "a=1 b=-"}),
    "the mean of what branches": (
        "root( a +x +y +z -x -y -z !1@span=x !0@span=y )",
        {"discounted": "a=0.25 x=1 y=0 z=-"},
    ),
    "an answer thrown away earns nothing": (
        "a<hello b<hello d<hello|b|thanks !1",
        {"discounted": "a=- b=0.5 d=1"},
    ),
    "a shortened conversation earns what comes of it": (
        "a<s:you|u:fix b<s:you|u:fix|a:a|t:r0 d<s:you|u:fix|u:so-far !1",
        {"discounted": "a=0.25 b=0.5 d=1"},
    ),
    "every call of a step": (
        "root( x( a tool( b ) !.25 ) y( d tool( e ) !.5 ) )",
        {"step": "a=0.25 b=0.25 d=0.5 e=0.5"},
    ),
    "a step begins after the last reward": (
        "root( a b !1 d !0 e )",
        {"step": "a=1 b=1 d=0 e=-"},
    ),
    "a step that has one": ("root( a w( b !1 ) !.5 )", {"step": "a=- b=1 ! already"}),
    "a step a name": (
        "root( a !x=0 b !x=1 !y=1 )",
        {"step": "a=0(x=0,y=1) b=1(x=1,y=1)"},
    ),
    "a running call is of the next step": ("root( a +b !1 -b !.5 )", {"step": "a=1 b=0.5"}),
    # --- sequences
    "a number a step": (
        "root( a b d !:.25,-,1 e )",
        {
            "previous last step agents": "a=0.25 b=- d=1 e=-",
            "discounted": "a=0.5(primary=0.25) b=0.5 d=1 e=-",
        },
    ),
    "a number too many": ("a b !:1,.5,.25", {"previous": "a=- b=- ! 3 for 2"}),
    "the steps of an agent, of an operation": (
        "root( A[ a b !:1,2 ] w( d e !:3,4 ) )",
        {"previous": "a=1 b=2 d=3 e=4"},
    ),
    "linked numbers": (
        "root( w@ticket=T1( a b@id=r2 ) d@id=r3"
        " !:.25,.5@span=w !:1@id=r3 !:9,9@id=r2 !:9,9@ticket=T1 )",
        {"previous": "a=0.25 b=0.5 d=1 ! 2 for 1, already"},
    ),
    "numbers before any call": ("!:1 a", {"previous": "a=- ! before"}),
    # --- calls that came to nothing
    "past a failed call": ("root( a b@error !1 )", {"previous": "a=1 ? skipped"}),
    "after failed calls alone": ("root( a@error !1 )", {"previous": "! failed"}),
    "the lost call was asked again": ("root( a b@error d !1 )", {"previous": "a=- d=1"}),
    "who names a call means it": ("root( a@id=r1 b@error !1@id=r1 )", {"previous": "a=1"}),
    # --- rollouts, attempts and traces
    "days later, by its response": (
        f"a@id=r1 {SECOND} b@id=r2 {LATE} !.5@id=r1",
        {"previous": "a=0.5 b=-"},
    ),
    "days later, by its span": (f"w( a b ) d {LATE} !.5@span=w", {"previous": "a=- b=0.5 d=-"}),
    "days later, by the rollout": (
        "root( a b ) #attempt=,trace=f,process=p9,tick=900 !.5",
        {"previous": "a=- b=0.5"},
    ),
    "a judge's own rollout": (
        f"root( a@id=r1 ) {SECOND} root( b !.25@id=r1 )",
        {"previous": "a=0.25 b=-"},
    ),
    "what it names never came": (f"a {LATE} !1@id=gone", {"previous": "a=- ! waits"}),
    "a reward for a reward": (
        f"root( a !1@as=given ) {LATE} !2@span=given",
        {"previous": "a=1 ! waits"},
    ),
    "the attempt that had begun": (
        f"#tick=9 a {RETRY} b"
        " #attempt=,trace=f,process=p9,tick=50 !x=1 #tick=200 !y=2 #tick=1 !z=3",
        {"previous": "a=1(x=1) b=2(y=2) ! before"},
    ),
    "a link across attempts": (
        f"a {RETRY} b #attempt=,trace=f,process=p9,tick=200 !.5@span=a",
        {"previous": "a=0.5 b=-"},
    ),
    "its own attempt first": (
        f"a@id=r {SECOND} b@id=r #rollout=r1,trace=a,process=p1 !1@id=r",
        {"previous": "a=1 b=-"},
    ),
    "the latest rollout that holds the response": (
        f"#tick=9 a@id=r {SECOND} b@id=r {LATE} #tick=1 !w=1@id=r #tick=50 !x=2@id=r"
        " #tick=150 !y=3@id=r",
        {"previous": "a=1(w=1,x=2) b=3(y=3)"},
    ),
    "a response before a span": (
        f"a@id=r1 {SECOND} w( b ) {LATE} !1@id=r1@span=w",
        {"previous": "a=- b=- ! unknown"},
    ),
    "a tool that carries a reward stays": (
        f"a@id=r1 {SECOND} tool@{c.REWARD_VALUE}=1@{c.LINK_PREFIX}.0.key_match={c.RESPONSE_ID}"
        f"@{c.LINK_PREFIX}.0.value_match=r1( b )",
        {"previous": "a=- b=- ! unknown"},
    ),
    # --- retractions
    "retracted": ("root( a !1@as=given !undo@span=given )", {ALL: "a=- ! retracted"}),
    "retracted twice": (
        f"a !1@as=given !undo@span=given {LATE} !undo@span=given",
        {"previous": "a=- ! retracted"},
    ),
    "retracted by another process, and later": (
        f"a !1@as=given {LATE} !undo@span=given",
        {ALL: "a=- ! retracted"},
    ),
    "retracted before it was given": (
        f"a !1@as=given {LATE} #tick=0 !undo@span=given",
        {"previous": "a=- ! retracted"},
    ),
    "one of two rewards of one name": (
        "root( a !1@as=given !.5 !undo@span=given )",
        {"previous": "a=0.5 ! retracted"},
    ),
    "the other of two rewards of one name": (
        "root( a !1 !.5@as=given !undo@span=given )",
        {"previous": "a=1 ! retracted"},
    ),
    "a retraction of nothing known": (
        f"a !1 !undo@span=gone !undo {LATE} !undo@span=gone",
        {"previous": "a=1"},
    ),
    "a retraction of a call": ("a@as=call !1 !undo@span=call", {"previous": "a=1"}),
    "a retraction is no target": (
        "a !undo@span=gone@as=undo !1@span=undo",
        {"previous": "a=- ! unknown"},
    ),
    "a late reward, retracted from a third place": (
        f"a {SECOND} b@id=r2 {LATE} !1@id=r2@as=given {LATER} !undo@span=given",
        {"previous": "a=- b=- ! retracted"},
    ),
    "a waiting reward that was retracted": (
        f"a {LATE} !1@id=gone@as=given {LATER} !undo@span=given",
        {"previous": "a=- ! retracted"},
    ),
    "numbers a step, retracted": (
        "a b !:1,2@as=given !undo@span=given",
        {"previous": "a=- b=- ! retracted"},
    ),
    "no call, and the first reward retracted": (
        "root( w( ) !.3@as=given !tone=9 !undo@span=given )",
        {"previous": "! before, retracted"},
    ),
    # --- evaluations, as others note them
    "an event of a call": (
        "root( a b !0.5@on=a !1 )",
        {"previous agents step": "a=0.5 b=1"},
    ),
    "an event of an agent, and of the root": (
        "root( A[ a b ] !0.5@on=A c ) !1@on=root",
        {"previous": "a=- b=0.5 c=1"},
    ),
    "several events of a call": (
        "a !ok=1,tone=0.25@on=a !ok=0@on=a",
        {"previous": "a=1(ok=1,tone=0.25) ! already"},
    ),
    "an event and a reward of one call": ("a !0.5@on=a !1@span=a", {"previous": "a=0.5 ! already"}),
    "an event of a reward": ("a !1@as=given !1@on=given", {"previous": "a=1"}),
    "an event without a number": ("a !fine@on=a !true@on=a", {"previous": "a=-"}),
    "no call at all": (
        "root( w( ) !.3 !.5,tone=9 !tone=9 !.1@span=w !.9@span=w !7@id=gone )",
        {"previous": "! before, before, before, target, target, unknown"},
    ),
}
RUNS = [(name, rule) for name, (_, rules) in CASES.items() for key in rules for rule in key.split()]


def outcome(found: Adaptation) -> str:
    """What each call earned, and why the other rewards did not count."""
    words = []
    for step in steps_of(found):
        worth = "-" if step.reward is None else f"{step.reward:g}"
        if step.rewards and step.rewards != {c.PRIMARY_REWARD: step.reward}:
            worth += (
                "(" + ",".join(f"{name}={value:g}" for name, value in step.rewards.items()) + ")"
            )
        words.append(f"{text_of(step.action)}={worth}")
    reasons = {text: name for name, text in REASONS.items()}
    left = [reasons[each.reason] for each in found.report.dropped if each.noun == "reward"]
    if left:
        words.append("! " + ", ".join(sorted(left)))
    if any(note.startswith("reward skipped a failed call") for note in found.report.notes):
        words.append("? skipped")
    return " ".join(words)


@pytest.mark.parametrize(("name", "rule"), RUNS)
@pytest.mark.pain(21)
def test_each_reward_goes_where_it_belongs(name: str, rule: Credit) -> None:
    """To one call, to several, or to none with a reason; never to another in silence."""
    drawing, expected = CASES[name]

    found = TripletAdapter(rule, 0.5).explain(with_evaluations(draw(drawing).spans))

    (wanted,) = (text for rules, text in expected.items() if rule in rules.split())
    assert outcome(found) == wanted


def test_the_views_say_the_same(store: Store) -> None:
    """The SQL of ``rewards`` and ``rollouts`` places and sums them as the adapter does."""
    expected: dict[str, float] = {}
    homes: dict[str, tuple[str, str]] = {}
    steps: dict[str, float | None] = {}
    for number, (drawing, _) in enumerate(CASES.values()):
        apart = re.sub(r"(@id=|rollout=)(?=\w)", rf"\g<1>{number}-", drawing)
        forest = draw(apart, rollout_id=f"{number}-r1", process=f"p{number}-")
        store.add(forest.spans)
        found = TripletAdapter().explain(with_evaluations(forest.spans))
        expected |= last_rewards(found.outcomes)
        own = {step.span_id: (step.rollout_id, step.attempt_id) for step in steps_of(found)}
        steps |= {step.span_id: step.reward for step in steps_of(found)}
        homes |= {each.span_id: own[each.calls[0]] for each in found.credited}

    narrow = store.transitions(bodies=False).dicts()
    rows = {row["span_id"]: row for row in store.sql("FROM rewards")}
    query = f"SELECT rollout_id, {LAST_REWARD} AS reward FROM rollouts GROUP BY 1"
    earned = {row["rollout_id"]: row["reward"] for row in store.sql(query)}

    assert {key: (rows[key]["rollout_id"], rows[key]["attempt_id"]) for key in homes} == homes
    assert {row["span_id"]: row["reward"] for row in narrow} == steps
    assert {k: v for k, v in earned.items() if v is not None} == pytest.approx(expected)


_PREFIX = c.REWARD_PREFIX
NOT_CHOSEN = "the credit function chose no call for it"
NO_PRIMARY = "the reward names values, but its first and primary one is missing"
NO_SEQUENCE = "the reward's steps are not a list of numbers and nulls under one name"


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({f"{_PREFIX}.0.value": 1, f"{_PREFIX}.1.value": 2}, {"primary": 1, "reward_1": 2}),
        (reward_attributes(("ok", 1.0), ("ok", 0.0)), {"ok": 1.0}),
        ({f"{_PREFIX}.1.value": 1.0}, NO_PRIMARY),
        ({"note": "fine"}, {}),
        ({**reward_attributes(1.5), c.REWARD_STEPS: [2]}, {"primary": 2.0}),
        ({**reward_attributes(1.5), c.REWARD_STEPS: "[0.5]"}, {"primary": 0.5}),
        *[
            ({**reward_attributes(1.5), c.REWARD_STEPS: steps}, NO_SEQUENCE)
            for steps in ("[]", "[null]", "[NaN]", "[1e999]", "[true]", '["1"]', "{}", "[", 3)
        ],
        ({**reward_attributes(("a", 1.0), ("b", 2.0)), c.REWARD_STEPS: "[1.0]"}, NO_SEQUENCE),
    ],
)  # fmt: skip
def test_what_an_annotation_says_of_a_reward(attributes: dict[str, Any], expected: Any) -> None:
    """Its named numbers, or the reason why they are none."""
    forest = draw("a")
    forest.make(c.SPAN_ANNOTATION, attributes)

    found = TripletAdapter().explain(forest.spans)

    assert (dict(steps_of(found)[0].rewards) or next(iter(found.report.reasons()), {})) == expected


# --- a rule of one's own -------------------------------------------------------------------------


def test_a_rule_of_ones_own_sees_the_calls_before_the_reward() -> None:
    """It is given those of the reward's agent that had ended, in order of their end."""
    seen: list[list[str]] = []

    def watch(reward: Reward, calls: Sequence[Call]) -> None:
        seen.append([text_of(call.action) for call in calls])
        assert [*calls[:1], *calls[1:]] == list(calls)

    spans = draw("root( A[ +slow quick -slow !1 ] B[ b !1 ] !1 )").spans

    found = TripletAdapter(watch).explain(spans)

    assert seen == [["quick", "slow"], ["b"], ["quick", "slow", "b"]]
    assert found.report.reasons() == {NOT_CHOSEN: 3}


@pytest.mark.parametrize(
    ("rule", "expected", "reasons"),
    [
        (lambda _, calls: calls, {"a": 0.5, "b": 1.0}, {}),
        (lambda _, calls: [], {"a": None, "b": None}, {NOT_CHOSEN: 2}),
        (
            lambda _, calls: calls[-2] if len(calls) > 1 else "too few calls",
            {"a": 1.0, "b": None},
            {"too few calls": 1},
        ),
    ],
)  # fmt: skip
def test_a_rule_of_ones_own_places_or_says_why_not(
    rule: CreditRule, expected: dict[str, float | None], reasons: dict[str, int]
) -> None:
    """One call, several, or a text that is the reason in the report."""
    found = TripletAdapter(rule).explain(draw("a !.5 b !1").spans)

    assert {text_of(step.action): step.reward for step in steps_of(found)} == expected
    assert found.report.reasons() == reasons
    assert {each.by for each in found.credited} <= {"custom"}


def test_a_rule_of_ones_own_is_not_asked_about_links_and_parents() -> None:
    """What a reward says itself is no matter of a rule."""
    adapter = TripletAdapter(lambda reward, calls: pytest.fail("asked"))

    assert outcome(adapter.explain(draw("a b@id=r2 a/!.5 !1@id=r2").spans)) == "a=0.5 b=1"


@pytest.mark.parametrize("answer", [3.0, [None]])
def test_a_rule_that_gives_no_call_is_an_error(answer: object) -> None:
    """What is neither a call it was given, nor a reason, is a mistake in the rule."""
    rule: CreditRule = lambda reward, calls: answer  # type: ignore[assignment, return-value]  # noqa: E731

    with pytest.raises((ConfigError, TypeError), match=r"credit function|not iterable"):
        TripletAdapter(rule).adapt(draw("a !1").spans)


# --- size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", get_args(Credit))
def test_many_rewards_in_a_deep_chain_are_placed(rule: Credit) -> None:
    """Rewards at every depth of a chain with its only call at the top all find it or a reason."""
    depth = 4_000
    forest = Forest()
    parent = forest.open("top")
    forest.call("only", parent=parent)
    for _ in range(depth):
        parent = forest.open(parent=parent)
        forest.reward(1.0, parent=parent)

    found = TripletAdapter(rule).explain(forest.spans).report

    assert found.rewards == depth
    assert found.rewards_placed == 1
    assert len(found.dropped) == depth - 1


@pytest.mark.parametrize("how", ["agents in each other", "operations", "attributes"])
def test_many_rewards_each_find_their_call(how: str) -> None:
    """A thousand agents in each other, linked operations, or calls with a number of their own."""
    forest = Forest()
    parent = None
    for index in range(1_000):
        if how == "agents in each other":
            parent = forest.open("agent", {c.AGENT_NAME: f"agent {index}"}, parent=parent)
            forest.call(f"{index}", parent=parent)
            forest.reward(float(index), parent=parent)
        elif how == "operations":
            with forest.inside() as operation:
                forest.call(f"{index}")
            forest.reward(float(index), span_id=operation)
        else:
            forest.tag(forest.call(f"{index}"), item=str(index))
    for index in range(1_000) if how == "attributes" else ():
        forest.reward(float(index), match={"item": str(index)})

    found = TripletAdapter().explain(forest.spans)

    assert {text_of(step.action): step.reward for step in steps_of(found)} == {
        f"{index}": float(index) for index in range(1_000)
    }
