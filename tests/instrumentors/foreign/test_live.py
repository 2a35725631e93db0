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
        "openinference.instrumentation.openai", "openinference-instrumentation-openai",
    ),
    "openllmetry": ("opentelemetry.instrumentation.openai", "opentelemetry-instrumentation-openai"),
    "openinference-langchain": (
        "openinference.instrumentation.langchain", "openinference-instrumentation-langchain",
    ),
    "openllmetry-langchain": (
        "opentelemetry.instrumentation.langchain", "opentelemetry-instrumentation-langchain",
    ),
}  # fmt: skip
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


CASES = [
    *((scenario, order, names) for scenario in ("tools", "concurrent", "stream", "failing")
      for names in EVERY for order in ("ours-first", "theirs-first")),
    ("langchain", "ours-first", ("openinference-langchain",)),
    ("langchain", "ours-first", ("openllmetry-langchain",)),
    ("langchain", "ours-first", ("openinference-langchain", "openinference")),
    ("langchain", "ours-first", ("openllmetry-langchain", "openllmetry", "official")),
]  # fmt: skip


@pytest.mark.parametrize(("scenario", "order", "names"), CASES, ids=str)
@pytest.mark.pain(3)
def test_each_request_is_one_transition(scenario: str, order: str, names: tuple[str, ...]) -> None:
    """Whole, streamed, concurrent and equal requests, whoever wrapped the client first."""
    alone = ran(scenario, order)
    found = ran(scenario, order, *names)

    assert (found["outcome"], found["agents"]) == (alone["outcome"], alone["agents"])
    # Traceloop's asks every instrumentor of a client below it to stand back; ours does not.
    assert (found["levels"], found["rollouts"], found["replaced"]) == (["exact"], 1, [])
    # A stream that was left is no training data, whoever recorded it.
    answered = found["answered"][:1] if scenario == "stream" else found["answered"]
    assert found["steps"] == sorted(answered)
    others = {r: n for r, n in found["dropped"].items() if not r.startswith("duplicate: ")}
    if scenario == "failing":
        assert [r.startswith("failed: ") for r in others] == [True]
        assert sum(others.values()) == 1
    elif scenario != "stream":
        assert others == {}
        assert found["calls"] == len(answered)  # other records of a request are no calls
    if scenario in ("tools", "concurrent"):
        # One record of each of theirs for each request, and one of ours.
        assert sum(found["dropped"].values()) == len(names) * len(answered)
    active = [note for note in found["notes"] if "is active in this process" in note]
    assert len(active) == len(names)
    for name in names:
        assert any(PACKAGES[name][1] in note for note in active)
