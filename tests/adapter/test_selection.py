"""Which transitions a selection wants."""

from typing import Any

import pytest
from tests.adapter.forest import draw
from tests.formats.made import step

from lightning_otel import TripletAdapter
from lightning_otel.adapter.selection import Selection
from lightning_otel.errors import ConfigError
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

OWN: Any = {
    "agent": "planner", "resource_version": "prompt@v3", "resources": {"model": "m2"},
    "mode": "train",
}  # fmt: skip


@pytest.mark.parametrize(
    ("agents", "wanted"),
    [
        ("planner", ["planner"]),
        ("plan*", ["planner", "planner-draft"]),
        ("re:^(plan|wri)", ["planner", "planner-draft", "writer"]),
        (["writer", "planner"], ["planner", "writer"]),
        (["!planner-draft", "plan*"], ["planner"]),
        (["plan*", "!planner-draft"], ["planner", "planner-draft"]),
        (["planner-draft", "!plan*", "*"], ["planner-draft", "writer", ""]),
        ("!plan*", ["writer", ""]),
        ("Planner", []),
        ([], ["planner", "planner-draft", "writer", ""]),
    ],
)
def test_the_first_pattern_that_matches_an_agent_decides(agents: Any, wanted: list[str]) -> None:
    """Names, globs, regular expressions and those left out are asked in their order."""
    selection = Selection.of({"agents": agents})

    found = [
        each for each in ("planner", "planner-draft", "writer", "") if selection.wants_agent(each)
    ]

    assert found == wanted


@pytest.mark.parametrize(
    ("wanted", "is_wanted"),
    [
        ({"resource_version": "prompt@v3"}, True),
        ({"resource_version": "prompt@*"}, True),
        ({"resource_version": "model@m2"}, True),
        ({"resource_version": "model@m1"}, False),
        ({"min_reward": 0.5, "max_reward": 0.5}, True),
        ({"min_reward": 0.6}, False),
        ({"max_reward": 0.4}, False),
        ({"capture": "text"}, True),
        ({"capture": "exact"}, False),
    ],
)
def test_a_transition_is_wanted_if_all_says_so(wanted: Any, is_wanted: bool) -> None:
    """Each keyword leaves out what it does not mean."""
    assert Selection.of(wanted).wants(step(reward=0.5, **OWN)) is is_wanted


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"agent": "x"}, "cannot be selected by agent; by agents, rollout_id"),
        ({"agents": "re:("}, "agents names 're:\\('"),
        ({"agents": ["!"]}, "an empty pattern means nobody"),
        ({"agents": [1]}, "agents names 1"),
        ({"until": True}, "until: True is no time"),
        ({"capture": "best"}, "capture is 'best'; it must be one of exact"),
    ],
)
def test_what_cannot_be_understood_is_refused(wanted: Any, message: str) -> None:
    """The error names the keyword, what was given and what may be."""
    with pytest.raises(ConfigError, match=message):
        Selection.of(wanted)


def _is_chatty(span: Span) -> bool | None:
    return False if span.attributes.get("chatty") else None


def test_a_call_matcher_decides_before_the_rules_do() -> None:
    """What it refuses is no call, what it claims is one, and None leaves it to the rules."""
    mine = f"mine@{c.OPERATION}=null@name=my-client"
    spans = draw(f"kept other@chatty=1 {mine}").spans

    plain = TripletAdapter().explain(spans).report
    refused = TripletAdapter(is_call=_is_chatty).explain(spans).report
    claimed = TripletAdapter(is_call=lambda span: "name" in span.attributes or None)

    assert (plain.calls, plain.transitions) == (2, 2)
    assert (refused.calls, refused.transitions, refused.dropped) == (1, 1, ())
    assert claimed.explain(spans).report.transitions == 3


def test_a_reward_matcher_decides_before_the_rules_do() -> None:
    """What it refuses is no reward; what it claims and has no number is reported."""
    spans = draw("answer !.5 work@my.score=3( )").spans

    refused = TripletAdapter(is_reward=lambda span: False).explain(spans).report
    claimed = TripletAdapter(is_reward=lambda span: "my.score" in span.attributes or None)
    report = claimed.explain(spans).report

    assert (refused.rewards, refused.dropped) == (0, ())
    assert (report.rewards, report.rewards_placed) == (2, 1)
    assert [each.reason for each in report.dropped] == ["the reward's value is not a number"]
