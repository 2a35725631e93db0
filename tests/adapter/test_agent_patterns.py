"""Patterns of agents mean the same wherever they are read, and never raise there."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_otel.adapter import agent_patterns
from lightning_otel.errors import ConfigError


@pytest.mark.parametrize(
    ("names", "agent", "is_tracked"),
    [
        (None, "anyone", True),
        (["planner"], "planner", True),
        (["planner"], "planner2", False),
        (("plan*", "critic"), "planner", True),
        (["*critic"], "the critic", True),
        (["*"], "", True),
        (["planner"], "", False),
        ([], "planner", False),
        ("planner", "planner", True),
        ("planner", "critic", False),
        (["Planner"], "planner", False),
        (["agent[1]"], "agent[1]", True),
        (["agent[1]"], "agent1", True),
        (["re:^exec"], "executor", True),
        (["re:^exec"], "an executor", False),
        (["re:or$", "x"], "executor", True),
        (["re:(?i)PLAN"], "planner", True),
        (["re:("], "re:(", True),
        (["re:("], "anyone", False),
        (["re:(", "anyone"], "anyone", True),
        ([3, None], "3", False),
    ],
)
def test_is_tracked_by_name_glob_or_expression(names: object, agent: str, is_tracked: bool) -> None:
    """Without a list all agents count; with one, those that a pattern of it means."""
    assert agent_patterns.is_tracked(agent, names) == is_tracked


@given(agent=st.text(), patterns=st.lists(st.text(), max_size=3))
def test_an_exact_name_always_counts(agent: str, patterns: list[str]) -> None:
    """Whatever characters it has, and whatever stands beside it."""
    assert agent_patterns.is_tracked(agent, [*patterns, agent])


@given(agent=st.text(), patterns=st.lists(st.text().map("re:{}".format), max_size=3))
def test_patterns_read_from_spans_never_raise(agent: str, patterns: list[str]) -> None:
    """Those that were not refused in time mean nobody."""
    valid = []
    for pattern in patterns:
        try:
            valid += agent_patterns.check_patterns(pattern)
        except ConfigError as exc:
            assert repr(pattern) in str(exc)  # noqa: PT017  # of some patterns it is raised

    assert agent_patterns.is_tracked(agent, patterns) == agent_patterns.is_tracked(
        agent, [*valid, *(pattern for pattern in patterns if pattern == agent)]
    )


def test_resources_of_an_agent_are_the_first_named() -> None:
    """Of each resource, those named inside before those outside; others' are not its own."""
    outer = agent_patterns.resources_text(
        {"*": {"model": "m", "prompt": "v1"}, "a": {"prompt": "v2"}}
    )
    inner = agent_patterns.resources_text(
        {"re:^plan": {"prompt": "v3"}, "planner": {"prompt": "v4", "x": "y"}}, outer
    )

    agent_patterns.resources_of("planner", inner).clear()  # each caller's own
    found = {
        name: agent_patterns.resources_of(name, inner) for name in ("planner", "plan", "a", "b")
    }

    assert json.loads(inner)["a"] == {"prompt": "v2"}
    assert found == {
        "planner": {"model": "m", "prompt": "v3", "x": "y"},
        "plan": {"model": "m", "prompt": "v3"},
        "a": {"model": "m", "prompt": "v1"},
        "b": {"model": "m", "prompt": "v1"},
    }


@pytest.mark.parametrize("stamped", [None, 3, "", "{", "[]", '{"a": 3}', '{"a": []}', "null"])
def test_resources_that_cannot_be_read_are_none(stamped: object) -> None:
    """Spans are read whoever wrote them."""
    assert agent_patterns.resources_of("a", stamped) == {}


@pytest.mark.parametrize(
    ("resources", "version"),
    [({}, None), ({"b": "2", "a": "1"}, "a@1,b@2"), ({"prompt": "v3"}, "prompt@v3")],
)
def test_one_version_names_them_all(resources: dict[str, str], version: str | None) -> None:
    """In order of their names."""
    assert agent_patterns.join_versions(resources) == version
