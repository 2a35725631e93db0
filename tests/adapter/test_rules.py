"""The rules that give one reward to several calls, and rules of one's own."""

from collections.abc import Iterable, Sequence

import pytest
from tests.adapter.forest import Forest, rewards, text_of
from tests.adapter.test_credit import explain, placed, reasons

from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter, credit
from lightning_otel.errors import ConfigError
from lightning_otel.types import Call, CreditRule, Reward

# --- step ----------------------------------------------------------------------------------------


def test_step_gives_a_reward_to_every_call_of_its_operation() -> None:
    """Calls made in one operation are one step, and each of them gets its reward."""
    forest = Forest()
    with forest.inside("root"):
        for name in ("a", "b"):
            with forest.inside(c.SPAN_OPERATION):
                forest.call(f"{name} 1")
                with forest.inside("tool"):
                    forest.call(f"{name} 2")
                forest.reward({"a": 0.25, "b": 0.5}[name])

    assert placed(forest, "step") == {"a 1": 0.25, "a 2": 0.25, "b 1": 0.5, "b 2": 0.5}


def test_step_begins_after_the_last_reward() -> None:
    """Without operations a step is what was done since the last reward."""
    forest = Forest()
    with forest.inside("root"):
        forest.call("first")
        forest.call("second")
        forest.reward(1.0)
        forest.call("third")
        forest.reward(0.0)
        forest.call("fourth")

    assert placed(forest, "step") == {"first": 1.0, "second": 1.0, "third": 0.0, "fourth": None}


def test_step_never_slides_past_a_rewarded_call() -> None:
    """A second reward for one step is reported; calls before that step do not get it."""
    forest = Forest()
    with forest.inside("root"):
        forest.call("planned")
        with forest.inside(c.SPAN_OPERATION):
            forest.call("done")
            forest.reward(1.0)
        forest.reward(0.5)

    assert placed(forest, "step") == {"planned": None, "done": 1.0}
    assert reasons(forest, "step") == {credit.ALREADY_REWARDED: 1}


def test_step_keeps_names_apart() -> None:
    """A reward of another name for the whole goes to all calls of the whole."""
    forest = Forest()
    with forest.inside("root"):
        for index in range(2):
            forest.call(f"call {index}")
            forest.reward(("progress", float(index)))
        forest.reward(("solved", 1.0))

    found = explain(forest, "step")

    ((first, second),) = (path.transitions for path in found.trajectories)
    assert first.rewards == {"progress": 0.0, "solved": 1.0}
    assert second.rewards == {"progress": 1.0, "solved": 1.0}
    assert found.report.rewards_placed == 3


def test_step_leaves_a_running_call_out() -> None:
    """A call that had not ended when the reward was given is none of its step."""
    forest = Forest()
    with forest.inside("root"):
        forest.call("ended")
        running = forest.open_call("running")
        forest.reward(1.0)
        forest.close(running)
        forest.reward(0.5)

    assert placed(forest, "step") == {"ended": 1.0, "running": 0.5}


# --- agents --------------------------------------------------------------------------------------


def test_agents_gives_a_teams_reward_to_each_agents_latest_call() -> None:
    """A reward outside any agent judges all who worked; one inside an agent judges that one."""
    forest = Forest()
    with forest.inside("root"):
        with forest.agent("A"):
            forest.call("A 1")
            forest.reward(0.25)
            forest.call("A 2")
        with forest.agent("B"):
            forest.call("B 1")
        forest.reward(1.0)

    found = explain(forest, "agents")

    assert rewards(found.trajectories) == {"A 1": 0.25, "A 2": 1.0, "B 1": 1.0}
    assert (found.report.rewards, found.report.rewards_placed) == (2, 2)


def test_agents_looks_no_further_than_the_team_around_the_reward() -> None:
    """Agents of another part of the tree are not of the team that the reward was given in."""
    forest = Forest()
    with forest.inside("root"):
        with forest.inside("team"), forest.agent("A"):
            forest.call("A 1")
        with forest.inside("other team"):
            with forest.agent("B"):
                forest.call("B 1")
            forest.reward(1.0)

    assert placed(forest, "agents") == {"A 1": None, "B 1": 1.0}


# --- one's own -----------------------------------------------------------------------------------


def everyone(reward: Reward, calls: Sequence[Call]) -> Iterable[Call]:
    """To all calls so far."""
    return calls


def second_to_last(reward: Reward, calls: Sequence[Call]) -> Call | str | None:
    """To the call before the latest."""
    return calls[-2] if len(calls) > 1 else "too few calls"


def test_a_rule_of_ones_own_sees_the_calls_before_the_reward() -> None:
    """It is given those of the reward's agent that had ended, in order of their end."""
    seen: list[list[str]] = []

    def watch(reward: Reward, calls: Sequence[Call]) -> None:
        seen.append([text_of(call.action) for call in calls])
        assert [*calls[:1], *calls[1:]] == list(calls)

    forest = Forest()
    with forest.inside("root"):
        with forest.agent("A"):
            slow = forest.open_call("A slow")
            forest.call("A quick")
            forest.close(slow)
            forest.reward(1.0)
        with forest.agent("B"):
            forest.call("B 1")
            forest.reward(1.0)
        forest.reward(1.0)

    found = reasons(forest, watch)

    assert seen == [["A quick", "A slow"], ["B 1"], ["A quick", "A slow", "B 1"]]
    assert found == {credit.NOT_CHOSEN: 3}


def test_a_rule_of_ones_own_places_or_says_why_not() -> None:
    """One call, several, or a text that is the reason in the report."""
    forest = Forest()
    forest.call("first")
    forest.reward(0.5)
    forest.call("second")
    forest.reward(1.0)

    assert placed(forest, second_to_last) == {"first": 1.0, "second": None}
    assert reasons(forest, second_to_last) == {"too few calls": 1}
    assert placed(forest, everyone) == {"first": 0.5, "second": 1.0}
    assert explain(forest, everyone).credited[0].by == "custom"


def test_a_rule_of_ones_own_is_not_asked_about_links_and_parents() -> None:
    """What a reward says itself is no matter of a rule."""
    forest = Forest()
    first = forest.call("first")
    forest.call("second", response_id="chatcmpl-2")
    forest.reward(0.5, parent=first)
    forest.reward(1.0, response_id="chatcmpl-2")

    assert placed(forest, lambda reward, calls: pytest.fail("asked")) == {
        "first": 0.5,
        "second": 1.0,
    }


@pytest.mark.parametrize("answer", [3.0, [None]])
def test_a_rule_that_gives_no_call_is_an_error(answer: object) -> None:
    """What is neither a call it was given, nor a reason, is a mistake in the rule."""
    forest = Forest()
    forest.call("first")
    forest.reward(1.0)
    rule: CreditRule = lambda reward, calls: answer  # type: ignore[assignment, return-value]  # noqa: E731

    with pytest.raises((ConfigError, TypeError), match=r"credit function|not iterable"):
        TripletAdapter(rule).adapt(forest.spans)
