"""Instrumentors of other families switched on beside ours: still one transition a request.

They patch their libraries for good, so each case is a process. `python tests/environments.py
foreign` makes the environment in which none of these is skipped.
"""

import json
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("program.py")
PACKAGES = {
    "official": ("opentelemetry.instrumentation.genai.openai", "genai-openai"),
    "openinference": (
        "openinference.instrumentation.openai",
        "openinference-instrumentation-openai",
    ),
    "openllmetry": ("opentelemetry.instrumentation.openai", "opentelemetry-instrumentation-openai"),
    "openinference-langchain": (
        "openinference.instrumentation.langchain",
        "openinference-instrumentation-langchain",
    ),
    "openllmetry-langchain": (
        "opentelemetry.instrumentation.langchain",
        "opentelemetry-instrumentation-langchain",
    ),
}
OPENAI = ("official", "openinference", "openllmetry")
EVERY = (("official",), ("openinference",), ("openllmetry",), OPENAI)


def is_there(module: str) -> bool:
    """Whether a module can be imported; nothing of it is."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@cache
def ran(scenario: str, order: str, *names: str) -> dict[str, Any]:
    """What came of the scenario with those instrumentors switched on."""
    for module in [PACKAGES[name][0] for name in names]:
        if not is_there(module):
            pytest.skip(f"could not import '{module}'")
    done = subprocess.run(
        [sys.executable, PROGRAM, scenario, order, *names],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for trouble in ("Traceback", "Failed to detach context"):
        assert trouble not in done.stderr, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_each_request_is_one_transition(found: dict[str, Any]) -> None:
    """Every answer is a transition, and nothing else is one."""
    assert found["steps"] == sorted(found["answered"])
    assert found["rollouts"] == 1
    others = {r: n for r, n in found["dropped"].items() if not r.startswith("duplicate: ")}
    assert others == {}
    assert found["calls"] == len(found["answered"]) + sum(found["dropped"].values())


@pytest.mark.parametrize("order", ["ours-first", "theirs-first"])
@pytest.mark.parametrize("names", EVERY, ids="+".join)
@pytest.mark.parametrize("scenario", ["tools", "concurrent"])
@pytest.mark.pain(3)
def test_each_request_is_one_transition(scenario: str, names: tuple[str, ...], order: str) -> None:
    """Whole, streamed, concurrent and equal requests, whoever wrapped the client first."""
    found = ran(scenario, order, *names)

    assert_each_request_is_one_transition(found)
    assert found["levels"] == ["exact"]
    # One record of each of theirs for each request, and one of ours.
    assert sum(found["dropped"].values()) == len(names) * len(found["answered"])
    assert found["outcome"] == ran(scenario, order)["outcome"]


@pytest.mark.parametrize("order", ["ours-first", "theirs-first"])
@pytest.mark.parametrize("names", EVERY, ids="+".join)
def test_switched_off_ours_leaves_theirs_as_they_were(names: tuple[str, ...], order: str) -> None:
    """What theirs put into the client's classes stands there, the same objects, when ours goes."""
    found = ran("tools", order, *names)

    assert found["replaced"] == []


@pytest.mark.parametrize("names", EVERY, ids="+".join)
def test_a_stream_left_early_is_no_transition_whoever_records_it(names: tuple[str, ...]) -> None:
    """What theirs recorded of it does not turn an abandoned stream into training data."""
    alone = ran("stream", "ours-first")

    found = ran("stream", "ours-first", *names)

    assert found["outcome"] == alone["outcome"]
    assert found["steps"] == [found["answered"][0]]
    assert found["levels"] == ["exact"]


@pytest.mark.parametrize("names", EVERY, ids="+".join)
def test_a_refused_request_stays_one_failure(names: tuple[str, ...]) -> None:
    """A failed call is dropped once as failed, and its other records as duplicates of it."""
    found = ran("failing", "ours-first", *names)

    failed = {r: n for r, n in found["dropped"].items() if r.startswith("failed: ")}
    assert sum(failed.values()) == 1
    assert found["steps"] == found["answered"]
    assert found["outcome"] == ran("failing", "ours-first")["outcome"]


@pytest.mark.parametrize(
    "names",
    [
        ("openinference-langchain",),
        ("openllmetry-langchain",),
        ("openinference-langchain", "openinference"),
        ("openllmetry-langchain", "openllmetry", "official"),
    ],
    ids="+".join,
)
def test_each_request_of_langchain_is_one_transition(names: tuple[str, ...]) -> None:
    """Records of the framework's call and of the client's request are one call of the agent."""
    pytest.importorskip("langchain.agents")

    found = ran("langchain", "ours-first", *names)

    assert_each_request_is_one_transition(found)
    # Traceloop's asks every instrumentor of a client below it to stand back; ours does not.
    assert found["levels"] == ["exact"]
    assert found["outcome"] == ran("langchain", "ours-first")["outcome"]
    assert found["agents"] == ran("langchain", "ours-first")["agents"]


@pytest.mark.parametrize("names", EVERY, ids="+".join)
def test_doctor_names_those_that_are_active(names: tuple[str, ...]) -> None:
    """Each that was switched on is named as active, the others at most as installed."""
    found = ran("tools", "ours-first", *names)

    active = [note for note in found["notes"] if "is active in this process" in note]
    assert len(active) == len(names)
    for name in names:
        assert any(PACKAGES[name][1] in note for note in active)
