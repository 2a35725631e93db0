"""What holds of every reward, whatever it is linked to, however long, and under every rule."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adapter.forest import Forest
from tests.adapter.forests import forests

from lightning_otel import conventions as c
from lightning_otel.adapter import Adaptation, Advantage, Composition, TripletAdapter
from lightning_otel.types import Call, Credit, CreditRule, Estimator, Reward, Span, Transition


def newest(reward: Reward, calls: Sequence[Call]) -> Call | None:
    """The call that ended last."""
    return calls[-1] if calls else None


def all_of_them(reward: Reward, calls: Sequence[Call]) -> Sequence[Call] | str:
    """Every call so far, but none for a reward below three."""
    return calls if reward.value >= 3 else "too low"


rules: st.SearchStrategy[Credit | CreditRule] = st.sampled_from(
    [*get_args(Credit), newest, all_of_them]
)
compositions = st.sampled_from(
    [
        None,
        Composition({"name 0": 1.0}),
        Composition({"name 0": 1.0, "name 1": 0.5}, gates={"name 1": 4.0}, floor=-1.0),
        Composition({"name 1": 1.0}, gates={"name 0": 6.0}, is_normalised=True),
    ]
)
estimators = st.sampled_from(
    [None, *get_args(Estimator), Advantage("grpo", size=3), Advantage("rloo", group_by="ticket")]
)
adapters = st.builds(
    lambda credit, compose, advantage: TripletAdapter(
        credit, 0.5, **({} if compose is None else {"compose": compose}), advantage=advantage
    ),
    rules,
    compositions,
    estimators,
)


@st.composite
def judged_forests(draw: st.DrawFn) -> list[Span]:
    """Forests in which spans have tickets and tasks, and rewards links by them and sequences."""
    found = []
    for span in draw(forests):
        attributes: dict[str, Any] = dict(span.attributes)
        if draw(st.booleans()):
            attributes["ticket"] = draw(st.sampled_from(["T-0", "T-1"]))
        if draw(st.booleans()):
            attributes[c.TASK] = draw(st.sampled_from(['"sum"', '{"a": 1}', "3"]))
        if c.REWARD_VALUE in attributes:
            attributes |= _judgement(draw)
        found.append(replace(span, attributes=attributes))
    return found


def _judgement(draw: st.DrawFn) -> dict[str, Any]:
    """What a reward says of itself, besides what it has."""
    made: dict[str, Any] = {}
    if draw(st.booleans()):
        links = draw(st.lists(st.sampled_from(["T-0", "T-1", "T-2", ""]), min_size=1, max_size=2))
        for index, ticket in enumerate(links):
            made[f"{c.LINK_PREFIX}.{index}.key_match"] = "ticket" if index == 0 else c.OPERATION
            made[f"{c.LINK_PREFIX}.{index}.value_match"] = ticket if index == 0 else c.CHAT
    if draw(st.booleans()):
        numbers = st.one_of(st.none(), st.integers(0, 9), st.just(float("nan")))
        made[c.REWARD_STEPS] = json.dumps(draw(st.lists(numbers, max_size=3)))
    return made


_ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["call", "call", "call", "open", "agent", "leave", "reward", "reward"]),
        st.integers(0, 2),
        st.sampled_from(["plain", "plain", "ticket", "response", "steps", "steps", "inside"]),
        st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=1, max_size=3),
    ),
    max_size=24,
)


def _program(index: int, actions: Sequence[tuple[str, int, str, list[int | None]]]) -> list[Span]:
    """A rollout as a sound program leaves it: agents and operations at work, calls, judgements."""
    forest = Forest(
        rollout_id=f"rollout {index}", trace_id=f"{index:032x}", process=f"{index:x}f", tick=index
    )
    around = [forest.open(c.SPAN_ROLLOUT, {c.TASK: '"task"', "ticket": f"T-{index % 2}"})]
    latest = around[0]
    for kind, number, how, steps in actions:
        if kind == "call":
            made = {"ticket": f"T-{number}"} if how == "ticket" else {}
            latest = forest.open_call("x", response_id=f"r{number}", parent=around[-1])
            forest.tag(latest, **made)
            forest.close(latest)
        elif kind in ("open", "agent"):
            attributes = {c.AGENT_NAME: f"agent {number}"} if kind == "agent" else {}
            around.append(forest.open(kind, attributes, parent=around[-1]))
        elif kind == "leave" and len(around) > 1:
            forest.close(around.pop())
        elif kind == "reward":
            forest.reward(
                (f"name {number}" if number < 2 else "name 0", float(steps[0] or 0)),
                response_id=f"r{number}" if how == "response" else None,
                match={"ticket": f"T-{number}"} if how == "ticket" else None,
                steps=steps if how == "steps" else (),
                parent=latest if how == "inside" else around[-1],
            )
    forest.close(*reversed(around))
    return forest.spans


programs = st.lists(_ACTIONS, min_size=1, max_size=4).map(
    lambda each: [span for index, own in enumerate(each) for span in _program(index, own)]
)
forests_of_all_kinds = st.one_of(programs, programs, judged_forests())


def transitions(found: Adaptation) -> dict[str, Transition]:
    """Each transition once, by its span."""
    return {step.span_id: step for path in found.trajectories for step in path.transitions}


def given_by(span: Span, index: int) -> dict[str, float]:
    """The named numbers that a reward gives to one of the calls it went to."""
    attributes = span.attributes
    name = attributes[c.REWARD_NAME]
    if c.REWARD_STEPS not in attributes:
        return {name: attributes[c.REWARD_VALUE]}
    steps = [step for step in json.loads(attributes[c.REWARD_STEPS]) if step is not None]
    return {name: steps[index]}


@settings(deadline=None)
@given(forests_of_all_kinds, adapters)
def test_every_reward_went_somewhere_or_has_a_reason(
    spans: list[Span], adapter: TripletAdapter
) -> None:
    """Each reward is credited once or reported once, never both, never neither."""
    found = adapter.explain(spans)

    wanted = Counter(span.span_id for span in spans if c.REWARD_VALUE in span.attributes)
    dropped = Counter(each.span_id for each in found.report.dropped if each.noun == "reward")
    credited = Counter(each.span_id for each in found.credited)
    assert credited + dropped == wanted
    assert all(each.calls for each in found.credited)
    assert found.report.rewards == wanted.total()
    assert found.report.rewards_placed == credited.total()


@settings(deadline=None)
@given(forests_of_all_kinds, adapters)
def test_transitions_carry_what_was_credited_and_nothing_else(
    spans: list[Span], adapter: TripletAdapter
) -> None:
    """The named rewards of each step are those of the rewards that say they went there."""
    found = adapter.explain(spans)

    by_id = {span.span_id: span for span in spans}
    expected: dict[str, dict[str, float]] = {}
    for each in found.credited:
        for index, call in enumerate(each.calls):
            held = expected.setdefault(call, {})
            given_here = given_by(by_id[each.span_id], index)
            assert not held.keys() & given_here.keys()
            held |= given_here
    assert {k: step.rewards for k, step in transitions(found).items() if step.rewards} == expected


@settings(deadline=None)
@given(forests_of_all_kinds, adapters)
def test_a_reward_is_composed_or_its_absence_reported(
    spans: list[Span], adapter: TripletAdapter
) -> None:
    """A step's number is what its named rewards compose; where that is missing, the report says."""
    found = adapter.explain(spans)

    missing = Counter(each.span_id for each in found.report.dropped if each.noun == "composition")
    for span_id, step in transitions(found).items():
        worth = adapter.compose(step.rewards) if step.rewards else None
        assert missing[span_id] == (bool(step.rewards) and worth is None)
        if adapter.credit != "discounted":
            assert step.reward == worth


@settings(deadline=None)
@given(forests_of_all_kinds, adapters)
def test_every_attempt_has_an_advantage_or_a_reason(
    spans: list[Span], adapter: TripletAdapter
) -> None:
    """All steps of an attempt have one advantage; where they have none, there is one reason."""
    found = adapter.explain(spans)

    reasons = Counter(each.span_id for each in found.report.dropped if each.noun == "advantage")
    attempts: dict[tuple[str, str], list[Transition]] = {}
    for step in transitions(found).values():
        attempts.setdefault((step.rollout_id, step.attempt_id), []).append(step)
    for own in attempts.values():
        assert len({(step.group_id, step.advantage) for step in own}) == 1
        is_missing = adapter.advantage is not None and own[0].advantage is None
        assert sum(reasons[step.span_id] for step in own) == is_missing
    assert reasons.total() == sum(
        adapter.advantage is not None and own[0].advantage is None for own in attempts.values()
    )


@settings(deadline=None)
@given(forests_of_all_kinds, adapters, st.randoms(use_true_random=False))
def test_the_order_of_the_spans_changes_no_credit(
    spans: list[Span], adapter: TripletAdapter, random: Any
) -> None:
    """Shuffled spans give the same steps, credit, advantages and report."""
    expected = adapter.explain(spans)

    assert adapter.explain(sorted(spans, key=lambda span: random.random())) == expected


@settings(deadline=None)
@given(forests_of_all_kinds, adapters)
def test_no_link_is_guessed_away(spans: list[Span], adapter: TripletAdapter) -> None:
    """A reward with a link goes to what has the attributes it names, or nowhere."""
    found = adapter.explain(spans)

    by_id = {span.span_id: span for span in spans}
    for each in found.credited:
        link = by_id[each.span_id].attributes.get(f"{c.LINK_PREFIX}.0.key_match")
        assert (link is None) or each.by in ("link", "sequence")
        wanted = by_id[each.span_id].attributes.get(f"{c.LINK_PREFIX}.0.value_match")
        if link == "ticket":
            assert any(span.attributes.get("ticket") == wanted for span in spans)
