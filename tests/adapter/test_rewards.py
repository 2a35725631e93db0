"""Spans read into rewards, and the reason where one is damaged."""

import math
from typing import Any

import pytest
from tests.adapter.forest import Forest, reward_attributes
from tests.adapter.forest import rewards as rewards_of

from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter, credit, rewards
from lightning_otel.types import Reward, Span


def span(attributes: dict[str, Any], name: str = c.SPAN_ANNOTATION) -> Span:
    """A span of no length."""
    return Span("t", "s", None, name, 1, 1, attributes=attributes)


def read(attributes: dict[str, Any]) -> Reward:
    """The reward, which must be sound."""
    found = rewards.read_reward(span(attributes))
    assert isinstance(found, Reward)
    return found


def test_read_reward_reads_several_names_with_the_primary_first() -> None:
    """The value of the first name is the reward; all names are kept in order."""
    found = read(reward_attributes(("ok", 1.0), ("short", 0.25)))

    assert found.value == 1.0
    assert list(found.values.items()) == [("ok", 1.0), ("short", 0.25)]


def test_read_reward_names_what_has_no_name() -> None:
    """A value without a name is called primary, or by its place."""
    found = read({"agentlightning.reward.0.value": 1, "agentlightning.reward.1.value": 2})

    assert found.values == {"primary": 1.0, "reward_1": 2.0}


def test_read_reward_keeps_the_primary_of_a_repeated_name() -> None:
    """Where two values have one name the first counts, so the primary cannot change."""
    found = read(reward_attributes(("ok", 1.0), ("ok", 0.0)))

    assert (found.value, dict(found.values)) == (1.0, {"ok": 1.0})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, rewards.NOT_FINITE),
        (math.inf, rewards.NOT_FINITE),
        (-math.inf, rewards.NOT_FINITE),
        pytest.param(10**5000, rewards.NOT_FINITE, id="huge"),
        ("NaN", rewards.NOT_A_NUMBER),
        ("0.5", rewards.NOT_A_NUMBER),
        (True, rewards.NOT_A_NUMBER),
        (None, rewards.NOT_A_NUMBER),
        ([1.0], rewards.NOT_A_NUMBER),
    ],
)
@pytest.mark.parametrize("index", [0, 1])
def test_read_reward_reports_a_value_that_is_no_finite_number(
    index: int, value: object, reason: str
) -> None:
    """One bad value, primary or not, makes the reward a reported one rather than part of one."""
    attributes = {**reward_attributes(("ok", 1.0), ("short", 0.25))}
    attributes[f"agentlightning.reward.{index}.value"] = value

    assert rewards.read_reward(span(attributes)) == reason


def test_read_reward_reports_a_reward_without_its_primary() -> None:
    """Values that begin at 1 lack the one that counts."""
    attributes = {"agentlightning.reward.1.name": "short", "agentlightning.reward.1.value": 1.0}

    assert rewards.read_reward(span(attributes)) == rewards.NO_PRIMARY


def test_read_reward_takes_other_spans_for_no_reward() -> None:
    """Annotations and work without a reward are none, and no damaged one either."""
    assert rewards.read_reward(span({"note": "fine"})) is None
    assert rewards.read_reward(span({}, "work")) is None


def test_read_reward_reads_links_in_any_order() -> None:
    """A link may name a span, a response, or both, beside keys that say nothing to us."""
    attributes = {
        **reward_attributes(1.0),
        "agentlightning.link.0.key_match": "trace_id",
        "agentlightning.link.0.value_match": "t",
        "agentlightning.link.1.key_match": "gen_ai.response.id",
        "agentlightning.link.1.value_match": "chatcmpl-1",
        "agentlightning.link.2.key_match": "span_id",
        "agentlightning.link.2.value_match": "abc",
    }

    found = read(attributes)

    assert found.links == (
        ("trace_id", "t"),
        ("gen_ai.response.id", "chatcmpl-1"),
        ("span_id", "abc"),
    )


@pytest.mark.parametrize(("key", "value"), [("user.id", "u1"), ("span_id", "")])
def test_a_link_that_matches_nothing_is_no_reward_for_somebody_else(key: str, value: str) -> None:
    """A reward that was linked on purpose does not fall back on a rule when nothing answers."""
    forest = Forest()
    forest.call("first")
    link = {f"{c.LINK_PREFIX}.0.key_match": key, f"{c.LINK_PREFIX}.0.value_match": value}
    forest.make(c.SPAN_ANNOTATION, {**reward_attributes(1.0), **link})

    found = TripletAdapter().explain(forest.spans)

    assert rewards_of(found.trajectories) == {"first": None}
    assert found.report.reasons() == {credit.UNKNOWN_TARGET: 1}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("[1, null, 0.5]", (1.0, None, 0.5)),
        ([1, 2], (1.0, 2.0)),
        ("[]", None),
        ("[null]", None),
        ("[NaN]", None),
        ("[1e999]", None),
        ("[true]", None),
        ('["1"]', None),
        ("{}", None),
        ("[", None),
        (3, None),
    ],
)
def test_read_reward_reads_a_sequence(steps: Any, expected: tuple[float | None, ...]) -> None:
    """A sequence is a list of finite numbers and nulls; anything else is a damaged reward."""
    found = rewards.read_reward(span({**reward_attributes(1.5), c.REWARD_STEPS: steps}))

    if expected is None:
        assert found == rewards.NO_SEQUENCE
    else:
        assert isinstance(found, Reward)
        assert found.steps == expected


def test_read_reward_takes_a_sequence_under_one_name_only() -> None:
    """Which of several names the numbers belong to would be a guess."""
    attributes = {**reward_attributes(("a", 1.0), ("b", 2.0)), c.REWARD_STEPS: "[1.0]"}

    assert rewards.read_reward(span(attributes)) == rewards.NO_SEQUENCE


def test_explain_places_sound_rewards_beside_damaged_ones() -> None:
    """A damaged reward is reported, counted, and costs no other reward its place."""
    forest = Forest()
    forest.call("first")
    forest.make(c.SPAN_ANNOTATION, {**reward_attributes(1.0), c.REWARD_VALUE: "NaN"})
    forest.reward(0.5)

    found = TripletAdapter().explain(forest.spans)

    assert rewards_of(found.trajectories) == {"first": 0.5}
    assert (found.report.rewards, found.report.rewards_placed) == (2, 1)
    assert found.report.reasons() == {rewards.NOT_A_NUMBER: 1}


def test_explain_credits_all_names_and_the_primary_as_the_number() -> None:
    """A transition carries every named reward, and the primary one where one number is wanted."""
    forest = Forest()
    forest.call("first")
    forest.reward(("ok", 1.0), ("short", 0.25))

    ((step,),) = (path.transitions for path in TripletAdapter().adapt(forest.spans))

    assert step.reward == 1.0
    assert step.rewards == {"ok": 1.0, "short": 0.25}


def test_explain_credits_a_second_name_to_the_same_call() -> None:
    """Two rewards of different names for one call are both kept; the first stays the primary."""
    forest = Forest()
    forest.call("first")
    forest.reward(("ok", 1.0))
    forest.reward(("short", 0.25))

    ((step,),) = (path.transitions for path in TripletAdapter().adapt(forest.spans))

    assert (step.reward, step.rewards) == (1.0, {"ok": 1.0, "short": 0.25})
