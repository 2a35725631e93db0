"""Feedback: what it comes to, and where it goes, whenever and from wherever it is given."""

import subprocess
import sys
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_otel import (
    Store,
    auto_trace,
    emit_action,
    emit_feedback,
    emit_reward,
    reward_from_feedback,
)
from lightning_otel.errors import ConfigError, NotFoundError, StoreMissingError
from lightning_otel.types import conventions as c


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ({"quality_score": 100}, 1.0),
        ({"quality_score": 0}, -1.0),
        ({"quality_score": 50, "satisfied": True}, 0.2),
        ({"rating": 5}, 1.0),
        ({"rating": 2.5, "used_result": True}, 0.1),
        ({"quality_score": 80, "rating": 4}, 0.4 * 0.6 + 0.6 * 0.6),
        ({"quality_score": 80, "rating": 4, "satisfied": True, "used_result": True}, 0.9),
        ({"quality_score": 95, "rating": 5, "satisfied": True, "used_result": True}, 1.0),
        ({"rating": 0, "satisfied": False}, -1.0),
        ({"satisfied": True}, 0.2),
        ({"satisfied": False, "used_result": False}, -0.3),
    ],
)
def test_feedback_comes_to_a_reward(said: dict[str, Any], reward: float) -> None:
    """Quality and rating are brought to -1…1 and weighted; a yes adds, a no takes away."""
    assert reward_from_feedback(**said) == pytest.approx(reward, abs=1e-12)


def test_feedback_never_replaces_what_the_program_says(store: Store) -> None:
    """Before or after it, on the step or the rollout; who asks for it gets it."""
    with auto_trace(store=store, rollout_id="r1"):
        span_id = emit_action("say", "hi")
        emit_feedback(rating=4)
        emit_reward("tone", 0.5)
        emit_reward({"resolved": 0.0}, primary="resolved")
    emit_feedback(rating=5, span_id=span_id, store=store)
    emit_feedback(rating=5, rollout_id="r1", store=store)

    (step,) = store.transitions()
    assert list(step.rewards.items()) == [("resolved", 0.0), ("tone", 0.5), ("feedback", 1.0)]
    assert step.reward == 0.0
    assert [step.reward for step in store.transitions(reward="feedback")] == [1.0]
    assert [path.reward for path in store.trajectories(reward="tone")] == [0.5]
    assert store.report(reward="other").rewarded == 0


@settings(max_examples=100, deadline=None)
@given(
    quality=st.none() | st.floats(0, 100),
    rating=st.none() | st.floats(0, 5),
    satisfied=st.none() | st.booleans(),
    used=st.none() | st.booleans(),
)
def test_feedback_stays_within_bounds_and_rises(
    quality: float | None, rating: float | None, satisfied: bool | None, used: bool | None
) -> None:
    """Whatever was said lies in -1…1, and whoever was satisfied gives no less than who was not."""
    said: dict[str, Any] = {"quality_score": quality, "rating": rating, "used_result": used}
    if all(each is None for each in (*said.values(), satisfied)):
        return

    reward = reward_from_feedback(**said, satisfied=satisfied)

    assert -1.0 <= reward <= 1.0
    no = reward_from_feedback(**said, satisfied=False)
    assert no <= reward_from_feedback(**said, satisfied=True)


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ({}, "there is no feedback; give quality_score, rating"),
        ({"quality_score": 101}, "quality_score is 101; it must be a number from 0 to 100"),
        ({"rating": -1}, "rating is -1; it must be a number from 0 to 5"),
        ({"rating": float("nan")}, "rating is nan"),
        ({"rating": "5"}, "rating is '5'"),
        ({"rating": True}, "rating is True"),
        ({"satisfied": "yes"}, "satisfied is 'yes'; it must be True or False"),
        ({"used_result": 1}, "used_result is 1"),
    ],
)
def test_feedback_that_cannot_be_is_refused(said: dict[str, Any], fault: str) -> None:
    """What was said must be what it can be: nothing is guessed, and nothing is clamped away."""
    with pytest.raises(ConfigError, match=fault):
        reward_from_feedback(**said)


@pytest.fixture
def calls(store: Store, client: openai.OpenAI) -> list[dict[str, Any]]:
    """The first of two real calls of each of four rollouts in the store."""
    for name in ("r1", "r2", "r3", "r4"):
        with auto_trace(store=store, rollout_id=name):
            for text in ("hi", "ho"):
                client.chat.completions.create(
                    model="toy", messages=[{"role": "user", "content": text}]
                )
    store.writer().seal()
    return store.sql("SELECT * FROM calls ORDER BY start_ns").rows()[::2]


@pytest.mark.pain(20)
def test_feedback_reaches_what_it_judges(store: Store, calls: list[dict[str, Any]]) -> None:
    """By response or span it judges that very step, by rollout or trace the last one."""
    said: dict[str, Any] = {"rating": 4, "satisfied": True, "text": "fine", "store": store}
    ids = [
        emit_feedback(**said, **{f"{noun}_id": call[f"{noun}_id"]})
        for noun, call in zip(("response", "span", "rollout", "trace"), calls, strict=True)
    ]

    found = [(step.rollout_id, step.step) for step in store.transitions(rewarded=True)]
    rewards = {round(step.reward or 0.0, 9) for step in store.transitions(rewarded=True)}
    assert found == [("r1", 0), ("r2", 0), ("r3", 1), ("r4", 1)]
    assert rewards == {0.8}
    (span,) = (each for each in store.spans(rollout_id="r1") if each.span_id == ids[0])
    assert {key: value for key, value in span.attributes.items() if "feedback." in key} == {
        c.FEEDBACK_RATING: 4, c.FEEDBACK_SATISFIED: True, c.FEEDBACK_TEXT: "fine"
    }  # fmt: skip


PROGRAM = """
import sys
from lightning_otel import emit_feedback
print(emit_feedback(rating=3, used_result=True, response_id=sys.argv[1], feedback_id="web-1"))
"""


def test_feedback_with_an_id_is_kept_once(
    store: Store, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent again, here or by a web server, it changes nothing; other feedback is refused."""
    monkeypatch.setenv("LIGHTNING_OTEL_STORE", store.name)
    response_id = calls[0]["response_id"]
    given: dict[str, Any] = {"response_id": response_id, "feedback_id": "web-1", "store": store}
    command = [sys.executable, "-c", PROGRAM, response_id]

    told = subprocess.run(command, capture_output=True, timeout=50, check=True, text=True).stdout
    again = emit_feedback(rating=3, used_result=True, **given)
    with pytest.raises(ConfigError, match=r"'web-1' was kept as 0\.3 and cannot become -1"):
        emit_feedback(rating=0, **given)

    assert again == told.strip()
    assert [row["value"] for row in store.sql("SELECT value FROM rewards")] == [pytest.approx(0.3)]


def test_feedback_without_a_target_judges_the_recording(store: Store) -> None:
    """Inside a recording it judges what is recorded; outside it is kept nowhere."""
    with auto_trace(store=store):
        emit_action("say", "hi")
        inside = emit_feedback(satisfied=True)

    assert inside is not None
    assert emit_feedback(satisfied=True) is None
    assert [step.reward for step in store.transitions()] == [pytest.approx(0.2)]


def test_feedback_for_what_is_not_there_is_refused(
    store: Store, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown target, no target for an id, several targets and a missing store are told."""
    with pytest.raises(NotFoundError, match="holds no response 'chatcmpl-no'"):
        emit_feedback(rating=1, response_id="chatcmpl-no", store=store)
    with pytest.raises(ConfigError, match="response and span are named; name one of them"):
        emit_feedback(rating=1, response_id="a", span_id=calls[0]["span_id"], store=store)
    with pytest.raises(ConfigError, match="'f-1' names nothing that it judges"):
        emit_feedback(rating=1, feedback_id="f-1", store=store)
    with pytest.raises(StoreMissingError):
        emit_feedback(rating=1, rollout_id="r1")
    monkeypatch.setenv("LIGHTNING_OTEL", "0")
    assert emit_feedback(rating=1, rollout_id="r1", store=store) is None
