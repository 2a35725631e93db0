"""What holds of every forest of spans, whatever tracers left behind."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.adapter.forests import forests, odd_spans

from lightning_otel import conventions as c
from lightning_otel.adapter import (
    Adaptation,
    TripletAdapter,
    attempts,
    branches,
    calls,
    conversations,
    tree,
)
from lightning_otel.adapter.attributes import has_id
from lightning_otel.types import Call, Credit, Span, Transition

rules = st.sampled_from(["next", "last", "sibling", "discounted"])


def transitions(found: Adaptation) -> list[Transition]:
    """Each transition once."""
    steps = (step for path in found.trajectories for step in path.transitions)
    return list({id(step): step for step in steps}.values())


@given(forests, rules)
def test_every_mark_is_used_or_reported_once(spans: list[Span], rule: Credit) -> None:
    """An action is one transition or reported; nothing else is reported as a mark."""
    found = TripletAdapter(rule).explain(spans)

    actions = Counter(span.span_id for span in spans if span.name == c.SPAN_ACTION)
    used = Counter(step.span_id for step in transitions(found) if step.span_id in actions)
    dropped = Counter(each.span_id for each in found.report.dropped if each.noun == "mark")
    assert used + Counter({k: n for k, n in dropped.items() if k in actions}) == actions
    assert set(dropped) - set(actions) <= {
        span.span_id for span in spans if span.name == c.SPAN_OBSERVATION
    }
    assert max(dropped.values(), default=1) == 1


@given(forests, rules)
def test_no_reward_without_a_link_changes_its_agent(spans: list[Span], rule: Credit) -> None:
    """A reward given inside an agent, and not inside a call, stays with that agent's calls."""
    found = TripletAdapter(rule).explain(spans)

    agents: dict[float, str] = {}
    for members in attempts.group(spans).values():
        built = tree.build(members)
        for position, span in enumerate(built.spans):
            parent = built.parents[position]
            is_linked = f"{c.LINK_PREFIX}.0.key_match" in span.attributes
            is_inside = parent != tree.NO_PARENT and calls.is_call(built.spans[parent])
            if c.REWARD_VALUE in span.attributes and not is_linked and not is_inside:
                agents[span.attributes[c.REWARD_VALUE]] = built.agents[position]
    for step in transitions(found):
        for value in step.rewards.values():
            assert agents.get(value, "") in ("", step.agent)


@given(forests)
def test_every_path_is_a_sequence(spans: list[Span]) -> None:
    """Steps of a path are numbered, of one agent and attempt, and each sees the next one's view."""
    for path in TripletAdapter().adapt(spans):
        steps = path.transitions
        assert [step.step for step in steps] == list(range(len(steps)))
        assert {(s.rollout_id, s.attempt_id, s.agent) for s in steps} == {
            (path.rollout_id, path.attempt_id, path.agent)
        }
        assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
        for step, following in pairwise(steps):
            assert step.is_shared or step.next_observation == following.observation


@given(forests)
def test_no_step_begins_before_the_one_it_follows_ended(spans: list[Span]) -> None:
    """On the attempt's clock every step follows one that had ended."""
    for members in attempts.group(spans).values():
        built = tree.build(members)
        found = {i: calls.read_call(s, built.agents[i]) for i, s in enumerate(built.spans)}
        own = {
            i: call
            for i, call in found.items()
            if isinstance(call, Call) and calls.is_call(built.spans[i])
        }
        positions = list(own)

        talks = [
            conversations.read_conversation(call.observation, call.action) for call in own.values()
        ]
        before = branches.link_calls(built, positions, list(own.values()), talks, ()).before

        for call, previous in enumerate(before):
            assert previous < call
            if previous >= 0:
                assert built.ends[positions[previous]] <= built.starts[positions[call]]


@given(forests)
def test_every_tree_is_a_forest(spans: list[Span]) -> None:
    """Whatever the parents were, each span has one way up, and its subtree is one interval."""
    built = tree.build(spans)

    for node in range(len(built.spans)):
        above = built.parents[node]
        steps = 0
        while above != tree.NO_PARENT:
            assert built.contains(above, node)
            above = built.parents[above]
            steps += 1
        assert steps == built.depths[node]
        assert sorted(built.first) == list(range(len(built.spans)))
        assert built.starts[node] <= built.ends[node]


@given(odd_spans, rules)
def test_odd_spans_never_raise(spans: list[Span], rule: Credit) -> None:
    """Repeated ids and attributes of every wrong type cost their spans a reason at most."""
    found = TripletAdapter(rule).explain(spans)

    report = found.report
    nouns = Counter(each.noun for each in report.dropped)
    assert report.calls == report.transitions + nouns["call"]
    assert report.rewards == report.rewards_placed + nouns["reward"]
    named = {(span.trace_id, span.span_id) for span in spans if has_id(span.span_id)}
    nameless = [span for span in spans if not has_id(span.span_id)]
    assert len(named) + bool(nameless) <= report.spans <= len(named) + len(nameless)
