"""Spans sorted into attempts; where rewards from elsewhere go, `test_credit.py` shows."""

import pytest
from tests.adapter.forest import answers, draw

from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter

CASES = {
    "by the ids they name, else by trace": (
        "#rollout=,attempt=,trace=c a #rollout=r1,attempt=2,trace=b b #attempt=1 d",
        "cc.1 a, r1.2 b, r1.1 d",
    ),
    "a rollout in two traces": ("#trace=b a #trace=d b", "r1.1 a b"),
    "two rollouts in one trace": ("a #rollout=r2 b", "r1.1 a, r2.1 b"),
    "in the order they began": (
        "#rollout=r3,tick=30 a #rollout=r1,tick=20 b #rollout=r2,tick=10 d",
        "r2.1 d, r1.1 b, r3.1 a",
    ),
    "ids that are no text": (
        f"#rollout=,attempt= a@{c.ROLLOUT_ID}=7@{c.ATTEMPT_ID}=8",
        "aa.1 a",
    ),
}


@pytest.mark.parametrize(("drawing", "expected"), CASES.values(), ids=CASES)
def test_spans_belong_to_attempts(drawing: str, expected: str) -> None:
    """The attempts with their calls, in the order they began."""
    found = TripletAdapter().adapt(draw(drawing).spans)

    told = [
        " ".join([f"{path.rollout_id[:2]}.{path.attempt_id}", *answers(path)]) for path in found
    ]
    assert ", ".join(told) == expected


def test_a_damaged_reward_stays_where_it_was_given() -> None:
    """It is reported there, whatever it names."""
    found = TripletAdapter().explain(draw("a@id=r1 #rollout=,attempt=,trace=b !NaN@id=r1").spans)

    assert (found.report.rollouts, found.report.rewards) == (2, 1)
