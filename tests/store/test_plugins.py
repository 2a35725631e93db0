"""Adapters of one's own, and selections, as a store takes them."""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.adapter.forest import Forest

from lightning_otel import Store, TripletAdapter
from lightning_otel.errors import AdapterError, ConfigError
from lightning_otel.types import Span, Trajectory
from lightning_otel.types import conventions as c

PLUGIN = """
from lightning_otel import TripletAdapter
class Own:
    def adapt(self, spans):
        return TripletAdapter().adapt(span for span in spans if span.name != 'secret')
class Broken:
    def adapt(self, spans):
        raise KeyError('role')
class Strange:
    def adapt(self, spans):
        return ['no trajectory']
number = 7
"""
ENTRIES = """[lightning_otel.adapters]
own = {0}:Own
broken = {0}:Broken
strange = {0}:Strange
number = {0}:number
missing = {0}:Missing
absent = {0}_absent:Own
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two rollouts of two agents each, an hour apart, the second one's reward received."""
    store = Store(tmp_path / "t.duckdb")
    for number in (1, 2):
        forest = Forest(rollout_id=f"r{number}", trace_id=f"{number:032x}", tick=3600 * number)
        for agent in ("planner", "writer") if number == 1 else ("planner",):
            with forest.agent(agent):
                forest.call(f"{agent} {number}")
        extra = {c.RECEIVED: "otlp:10.0.0.9"} if number == 2 else {}
        forest.make(c.SPAN_ANNOTATION, {c.REWARD_VALUE: float(number), **extra})
        stamps = {c.MODE: "train" if number == 1 else "val"}
        stamps[c.RESOURCES] = json.dumps({"*": {"prompt": f"v{number}"}})
        store.add(replace(s, attributes={**s.attributes, **stamps}) for s in forest.spans)
    return store


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that registers adapters, some of them broken; gives its module's name."""
    module = "lightning_plugin"
    (tmp_path / f"{module}.py").write_text(PLUGIN)
    info = tmp_path / "lightning_plugin-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-plugin\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRIES.format(module))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield module
    sys.modules.pop(module, None)


@pytest.mark.parametrize("bodies", [True, False])
@pytest.mark.parametrize(
    ("wanted", "agents"),
    [
        ({}, ["planner 1", "planner 2", "writer 1"]),
        ({"agents": "plan*"}, ["planner 1", "planner 2"]),
        ({"agents": "writer"}, ["writer 1"]),
        ({"agents": "nobody"}, []),
        ({"rollout_id": "r2"}, ["planner 2"]),
        ({"rollout_id": ["r1", "r2", "r3"]}, ["planner 1", "planner 2", "writer 1"]),
        ({"rollout_id": []}, []),
        ({"since": 7200 * 10**9}, ["planner 2"]),
        ({"until": 7200 * 10**9}, ["planner 1", "writer 1"]),
        ({"mode": "val"}, ["planner 2"]),
        ({"min_reward": 1.0}, ["planner 2", "writer 1"]),
        ({"max_reward": 1.0}, ["writer 1"]),  # a missing reward is not 0
        ({"rewarded": False}, ["planner 1"]),
        ({"received": False, "rewarded": True}, ["writer 1"]),
        ({"resource_version": "prompt@v2"}, ["planner 2"]),
        ({"resource_version": "prompt@*"}, ["planner 1", "planner 2", "writer 1"]),
        ({"resource_version": "model@v2"}, []),
        ({"capture": "text"}, ["planner 1", "planner 2", "writer 1"]),
        ({"capture": "exact"}, []),
    ],
)
def test_a_store_gives_the_transitions_that_are_wanted(
    store: Store, wanted: Any, agents: list[str], bodies: bool
) -> None:
    """Every keyword, with and without bodies, as objects and as rows."""
    table = store.transitions(**wanted, bodies=bodies)

    assert sorted(f"{step.agent} {step.rollout_id[1:]}" for step in table) == agents
    assert len(list(table.dicts())) == len(agents)
    assert sum(len(each.transitions) for each in store.trajectories(**wanted)) == len(agents)
    assert ("observation" in table.columns) == bodies


def test_an_agent_is_looked_for_in_its_rollouts_alone(store: Store) -> None:
    """Rollouts that an agent was not in are not read, and the funnel says of how many it tells."""
    assert store.report(agents="writer").rollouts == 1
    assert store.report(agents="writer").transitions == 2
    assert store.report(agents="*").rollouts == 2


def test_adapters_are_given_as_objects_functions_and_classes(store: Store) -> None:
    """What has ``explain`` or ``adapt`` is an adapter, and so is a function."""

    def function(spans: Iterable[Span]) -> list[Trajectory]:
        return TripletAdapter("last").adapt(spans)

    expected = [step.reward for step in store.transitions(credit="last")]
    for adapter in (function, TripletAdapter("last")):
        assert [step.reward for step in store.transitions(adapter=adapter)] == expected
        assert [s.reward for s in store.transitions(adapter=adapter, bodies=False)] == expected
    report = store.report(adapter=function)
    assert (report.spans, report.rollouts, report.transitions) == (8, 2, 3)


def test_a_registered_adapter_is_found_by_name(store: Store, plugin: str) -> None:
    """Any installed package may register one."""
    found = store.transitions(adapter="own").rows()

    assert found == store.transitions().rows()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "the adapter broken failed: KeyError: 'role'"),
        ("strange", "the adapter strange gave a str among its trajectories"),
        ("number", r"the adapter number is a int; it needs a method adapt\(spans\)"),
        ("missing", "the adapter missing .*lightning-plugin 1.2.* cannot be loaded: AttributeErr"),
        ("absent", "the adapter absent .* cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_broken_adapter_is_named(store: Store, plugin: str, name: str, message: str) -> None:
    """The error says which one, from which package, and what is wrong with it."""
    with pytest.raises(AdapterError, match=message):
        store.transitions(adapter=name).rows()


def test_an_unknown_adapter_names_those_there_are(store: Store, plugin: str) -> None:
    """A misspelt name is answered with the names that are registered."""
    with pytest.raises(ConfigError, match=r"no adapter 'onw'; .* absent, broken, missing, "):
        store.transitions(adapter="onw")


def test_options_of_ours_mean_nothing_to_another_adapter(store: Store, plugin: str) -> None:
    """A rule of credit that nobody would follow is refused."""
    with pytest.raises(ConfigError, match="mean nothing to the adapter own"):
        store.transitions(adapter="own", credit="last")
