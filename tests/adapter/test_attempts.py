"""Spans sorted into attempts, with rewards that come from elsewhere or days later."""

import pytest
from tests.adapter.forest import SECOND, Forest, reward_attributes, rewards

from lightning_otel import conventions as c
from lightning_otel.adapter import WAITING, TripletAdapter, attempts
from lightning_otel.types import Span

DAY = 24 * 3600


def late(
    *values: float,
    at: int = DAY,
    span_id: str | None = None,
    response_id: str | None = None,
    rollout_id: str | None = None,
    attempt_id: str | None = None,
    name: str = "late",
) -> Span:
    """A reward from another process, in a trace of its own, as given outside a recording."""
    attributes = reward_attributes(*(values or (0.5,)), span_id=span_id, response_id=response_id)
    if rollout_id is not None:
        attributes[c.ROLLOUT_ID] = rollout_id
    if attempt_id is not None:
        attributes[c.ATTEMPT_ID] = attempt_id
    return Span(
        trace_id=f"trace-of-{name}",
        span_id=name,
        parent_span_id=None,
        name=c.SPAN_ANNOTATION,
        start_ns=at * SECOND,
        end_ns=at * SECOND,
        attributes=attributes,
        process="another",
    )


def rollout(name: str, answer: str, response_id: str | None = None, tick: int = 0) -> Forest:
    """A rollout of one call under a root."""
    forest = Forest(rollout_id=name, trace_id=f"trace-of-{name}", process=name, tick=tick)
    with forest.inside(c.SPAN_ROLLOUT):
        forest.call(answer, response_id=response_id)
    return forest


def homes(spans: list[Span]) -> dict[str, attempts.AttemptKey]:
    """The attempt of each span, by its id."""
    return {span.span_id: key for key, members in attempts.group(spans).items() for span in members}


def test_group_sorts_by_rollout_and_attempt() -> None:
    """Spans belong to the attempt they name; without a rollout to their trace, first attempt."""
    plain = Forest(rollout_id=None, attempt_id=None, trace_id="foreign")
    first, second = Forest(attempt_id="1"), Forest(attempt_id="2", trace_id="b" * 32)
    for forest in (plain, first, second):
        forest.call("x")

    found = attempts.group([*plain.spans, *second.spans, *first.spans])

    assert set(found) == {("foreign", "1"), ("r1", "1"), ("r1", "2")}


def test_group_joins_the_traces_of_one_rollout() -> None:
    """A rollout may lie in any number of traces, and a trace hold several rollouts."""
    one, two = Forest(trace_id="1" * 32), Forest(trace_id="2" * 32)
    three = Forest(rollout_id="r2", trace_id="2" * 32, process="p3")
    for forest in (one, two, three):
        forest.call("x")

    found = attempts.group([*one.spans, *two.spans, *three.spans])

    assert {key.rollout_id: len(members) for key, members in found.items()} == {"r1": 2, "r2": 1}


@pytest.mark.parametrize("odd", ["", 7, None, ["r"]])
def test_group_ignores_a_rollout_id_that_is_no_text(odd: object) -> None:
    """An id of another type is as good as none: the trace stands for the rollout."""
    forest = Forest(rollout_id=None)
    forest.make("work", {c.ROLLOUT_ID: odd, c.ATTEMPT_ID: odd})

    found = attempts.group(forest.spans)

    assert set(found) == {("a" * 32, "1")}


def test_group_orders_attempts_by_their_start() -> None:
    """Rollouts come out in the order they began, whatever order their spans came in."""
    spans = [
        span
        for name, tick in (("c", 30), ("a", 20), ("b", 10))
        for span in rollout(name, "x", tick=tick).spans
    ]

    found = attempts.group(spans)

    assert [key.rollout_id for key in found] == ["b", "a", "c"]


def test_group_takes_the_ended_one_of_two_spans_with_one_id() -> None:
    """A span noted at its start and again at its end is one span, the ended one."""
    forest = Forest()
    opened = forest.open_call("x")
    started = forest.spans
    forest.close(opened)
    ended = forest.spans

    found = [attempts.group([*started, *ended]), attempts.group([*ended, *started])]

    assert found == [{attempts.AttemptKey("r1", "1"): ended}] * 2


def test_group_takes_the_earliest_of_conflicting_spans() -> None:
    """Two different spans with one id are one conflict, decided alike in any order."""
    early, late_one = Forest(), Forest(tick=5)
    early.call("early")
    late_one.call("late")

    found = TripletAdapter().explain([*late_one.spans, *early.spans])

    assert rewards(found.trajectories) == {"early": None}
    assert found.report.spans == 1


def test_explain_moves_a_reward_to_the_response_it_names() -> None:
    """A reward in a trace of its own reaches the call whose response id it gives."""
    spans = [*rollout("r1", "one", "chatcmpl-1").spans, *rollout("r2", "two", "chatcmpl-2").spans]

    found = TripletAdapter().explain([late(0.5, response_id="chatcmpl-1"), *spans])

    assert rewards(found.trajectories) == {"one": 0.5, "two": None}
    assert (found.report.rewards, found.report.rewards_placed) == (1, 1)
    assert found.report.rollouts == 2
    assert found.report.dropped == ()


def test_explain_moves_a_reward_to_the_span_it_names() -> None:
    """A reward that names a span reaches it; an operation stands for the last call inside."""
    forest = Forest()
    with forest.inside("operation") as operation:
        forest.call("first")
        last = forest.call("second")
    forest.call("third")

    by_operation = TripletAdapter().adapt([*forest.spans, late(span_id=operation)])
    by_call = TripletAdapter().adapt([*forest.spans, late(span_id=last)])

    assert rewards(by_operation) == {"first": None, "second": 0.5, "third": None}
    assert rewards(by_call) == rewards(by_operation)


def test_explain_moves_a_reward_of_a_judging_rollout() -> None:
    """A judge with its own rollout gives its rewards to what it judged, and keeps its calls."""
    judged = rollout("judged", "answer", "chatcmpl-1")
    judge = Forest(rollout_id="judge", trace_id="j" * 32, process="judge", tick=50)
    with judge.inside(c.SPAN_ROLLOUT):
        judge.call("verdict")
        judge.reward(0.25, response_id="chatcmpl-1")

    found = TripletAdapter().explain([*judge.spans, *judged.spans])

    assert rewards(found.trajectories) == {"answer": 0.25, "verdict": None}
    assert found.report.rollouts == 2


def test_explain_reports_a_link_to_nothing_in_its_own_rollout() -> None:
    """A reward whose target never came waits, and is reported once; it makes no rollout."""
    orphan = late(response_id="chatcmpl-gone")

    found = TripletAdapter().explain([*rollout("r1", "one").spans, orphan])

    assert rewards(found.trajectories) == {"one": None}
    assert [(each.span_id, each.reason) for each in found.report.dropped] == [("late", WAITING)]
    assert found.report.rollouts == 1


def test_explain_places_a_reward_that_names_only_a_rollout() -> None:
    """A reward for a rollout goes by the rule, as if it had been given at its end."""
    forest = Forest()
    with forest.inside(c.SPAN_ROLLOUT):
        forest.call("first")
        forest.call("second")

    found = TripletAdapter().adapt([late(rollout_id="r1"), *forest.spans])

    assert rewards(found) == {"first": None, "second": 0.5}


def test_group_gives_a_rollouts_reward_to_the_attempt_before_it() -> None:
    """Of several attempts a reward without one judges the latest that had begun."""
    first = Forest(attempt_id="1", trace_id="1" * 32)
    second = Forest(attempt_id="2", trace_id="2" * 32, process="p2", tick=100)
    first.call("first")
    second.call("second")
    spans = [*first.spans, *second.spans]
    between = late(at=50, rollout_id="r1", name="between")
    after = late(at=200, rollout_id="r1", name="after")
    before = late(at=0, rollout_id="r1", name="before")

    found = homes([*spans, between, after, before])

    assert [found[name].attempt_id for name in ("between", "after", "before")] == ["1", "2", "1"]


def test_group_follows_a_link_across_the_attempts_of_a_rollout() -> None:
    """A reward that names a span of the first attempt judges that one, though a second began."""
    first = Forest(attempt_id="1", trace_id="1" * 32)
    second = Forest(attempt_id="2", trace_id="2" * 32, process="p2", tick=100)
    target = first.call("first")
    second.call("second")

    found = homes([*first.spans, *second.spans, late(span_id=target, rollout_id="r1")])

    assert found["late"] == ("r1", "1")


def test_group_prefers_the_rewards_own_attempt() -> None:
    """Where a server repeats its response ids, a reward judges the call beside it."""
    own = rollout("own", "mine", "chatcmpl-1")
    own.reward(1.0, response_id="chatcmpl-1")
    other = rollout("other", "not mine", "chatcmpl-1", tick=1)

    found = TripletAdapter().adapt([*other.spans, *own.spans])

    assert rewards(found) == {"mine": 1.0, "not mine": None}


def test_group_takes_the_latest_of_repeated_responses_before_the_reward() -> None:
    """A response id that several rollouts hold means the latest of them before the reward."""
    spans = [
        span
        for name, tick in (("r1", 0), ("r2", 100), ("r3", 200))
        for span in rollout(name, name, "chatcmpl-1", tick=tick).spans
    ]
    rewards_given = [
        late(at=at, response_id="chatcmpl-1", name=f"at-{at}") for at in (0, 50, 150, 250)
    ]

    found = homes([*spans, *rewards_given])

    assert [found[each.span_id].rollout_id for each in rewards_given] == ["r1", "r1", "r2", "r3"]


def test_group_prefers_a_response_to_a_span() -> None:
    """A reward that names both is placed by the response."""
    one, two = rollout("r1", "one", "chatcmpl-1"), rollout("r2", "two", "chatcmpl-2")
    root = two.spans[0].span_id

    found = homes([*one.spans, *two.spans, late(response_id="chatcmpl-1", span_id=root)])

    assert found["late"].rollout_id == "r1"


def test_group_moves_no_reward_to_another_reward() -> None:
    """A reward that names a reward, even itself, waits for something else."""
    forest = rollout("r1", "one")
    given = forest.reward(1.0)
    itself = late(span_id="itself", name="itself")
    another = late(span_id=given, name="another")

    found = attempts.sort_out([*forest.spans, itself, another])

    assert found.waiting == [another, itself]


def test_group_keeps_a_reward_on_a_working_span_in_place() -> None:
    """A span that is an operation and carries a reward does not leave its tree for a link."""
    one = rollout("r1", "one", "chatcmpl-1")
    two = Forest(rollout_id="r2", trace_id="2" * 32, process="p2")
    both = {**reward_attributes(1.0, response_id="chatcmpl-1"), c.OPERATION: c.EXECUTE_TOOL}
    tool = two.make("tool", both)

    found = homes([*one.spans, *two.spans])

    assert found[tool].rollout_id == "r2"


def test_group_keeps_damaged_rewards_in_place() -> None:
    """A reward that is no number is reported where it was given."""
    damaged = late(response_id="chatcmpl-1")
    attributes = {**damaged.attributes, c.REWARD_VALUE: "NaN"}
    spans = [*rollout("r1", "one", "chatcmpl-1").spans]
    spans.append(
        Span("own", "damaged", None, c.SPAN_ANNOTATION, SECOND, SECOND, attributes=attributes)
    )

    found = homes(spans)

    assert found["damaged"].rollout_id == "own"
