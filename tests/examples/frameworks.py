"""Runs the frameworks' examples in every mode, and prints what was recorded of each.

    python -m tests.examples.frameworks [NAME ...]

Modes: own telemetry off and on; whole and streamed; under ``run``, ``opentelemetry-instrument`` and
``auto_trace`` (R, O, A). Without names, of all that is installed. Exits with 1 if anything is not
as it should be. CI runs two of the modes; this runs by hand, in the environments ``frameworks`` and
``frameworks-openai-2``.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests import facts
from tests.examples.checker import SETTINGS
from tests.examples.policy import FrameworkPolicy
from tests.examples.programs import EXAMPLES, FRAMEWORKS
from tests.examples.table import is_here

from lightning_otel import Store, TripletAdapter
from lightning_otel.adapter.tokens import encode_ids
from lightning_otel.demo.server import DemoServer, LogEntry
from lightning_otel.types import Transition
from lightning_otel.types import conventions as c

DRIVER = Path(__file__).with_name("own_telemetry.py")
BIN = Path(sys.executable).parent
HEAD = (
    *("framework", "telemetry", "answers", "under", "requests", "calls", "transitions", "exact"),
    "agents",
)
MODES = tuple(itertools.product(("on", "off"), ("streamed", "whole"), "ORA"))
AGENTS = {"desk": 2, "reporter": 2}
"""Steps of each agent, where its framework's telemetry names it."""
UNNAMED = {"dspy_react": {"": 3}}
"""Steps of programs without agents."""


def check(name: str, mode: Sequence[str], folder: Path) -> list[object]:
    """Return a row of the table, which ends with what is not as it should be."""
    telemetry, answers, door = mode
    store = Store(folder / "traces.duckdb")
    process, log = run_mode(name, telemetry, answers == "streamed", door, folder)
    explanation = TripletAdapter().explain(store.spans())
    (counts,) = store.sql(
        "SELECT (SELECT count(*) FROM calls) AS calls, (SELECT count(*) FROM rollouts) AS rollouts"
    )
    paths = [path.transitions for path in explanation.trajectories]
    steps = [step for path in paths for step in path]
    agents = Counter(step.agent for step in steps)
    rewarded = [step for step in steps if step.reward]
    # The main conversation's: most calls belong to it, and of equals it ended last.
    main = max(paths, key=lambda path: (len(path), path[-1].end_ns), default=())
    last = main[-1] if main else None
    wrong = {
        f"exit code {process.returncode}: {process.stderr[-400:]}": process.returncode != 0,
        f"{counts['rollouts']} rollouts": counts["rollouts"] != 1,
        f"left out: {explanation.report.reasons()}": not len(log) == counts["calls"] == len(steps),
        f"token ids: {explanation.report.inexact}": explanation.report.exact != len(steps),
        f"{len(paths)} trajectories": len(paths) != 2,
        "agents": telemetry == "on" and agents != Counter(UNNAMED.get(name, AGENTS)),
        "reward": rewarded != [last],
        **dict.fromkeys(_find_differences(steps, log), True),
    }
    return [
        name,
        *mode,
        len(log),
        counts["calls"],
        len(steps),
        explanation.report.exact,
        ", ".join(f"{agent or '–'} {count}" for agent, count in sorted(agents.items())),
        "; ".join(text for text, is_wrong in wrong.items() if is_wrong) or "–",
    ]


def run_mode(
    name: str, telemetry: str | None, is_stream: bool, door: str, folder: Path
) -> tuple[subprocess.CompletedProcess[str], list[LogEntry]]:
    """Run the program in a mode; the server's log is the truth."""
    path = str(folder / "traces.duckdb")
    recorder = {
        "R": [str(BIN / "lightning-otel"), "run", "--quiet", "--store", path, "--"],
        "O": [str(BIN / "opentelemetry-instrument"), "--traces_exporter", "duckdb"],
    }.get(door, [])
    program = str(EXAMPLES / "frameworks" / f"{name}.py")
    driver = [str(DRIVER), telemetry, path if door == "A" else ""] if telemetry else []
    with DemoServer(FrameworkPolicy()) as server:
        variables = {"OPENAI_BASE_URL": server.base_url, "LIGHTNING_OTEL_STORE": path}
        if telemetry:
            variables["LIGHTNING_OTEL_RETOKENIZATION_FIX"] = "1"
        # The driver alone switches telemetry on.
        variables["OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"] = "agno,dspy,haystack,smolagents"
        process = subprocess.run(
            [*recorder, sys.executable, *driver, program, *["stream"] * is_stream],
            cwd=folder,
            env={**os.environ, **SETTINGS, **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return process, server.log


def _find_differences(steps: Sequence[Transition], log: Sequence[LogEntry]) -> Iterator[str]:
    """Find requests whose step has other messages or token ids than the server's log."""
    rest = [
        (
            list(step.observation), list(step.action),
            encode_ids([step.prompt_ids]), encode_ids([step.response_ids]),
        )
        for step in steps
    ]  # fmt: skip
    keys = c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, c.PROMPT_TOKEN_IDS, c.RESPONSE_TOKEN_IDS
    for exchange in log:
        content = facts.read(facts.content(exchange))
        own = tuple(content.get(key) for key in keys)
        if own in rest:
            rest.remove(own)
        else:
            yield f"no step says what was asked and answered: {json.dumps(own[0][-1:])}"


def main(names: Sequence[str]) -> int:
    """Print the table; 1 if anything is wrong."""
    print(f"| {' | '.join(HEAD)} | wrong |\n|{' --- |' * (len(HEAD) + 1)}")  # noqa: T201
    is_wrong = False
    for name, mode in itertools.product(names, MODES):
        with tempfile.TemporaryDirectory() as folder:
            row = check(name, mode, Path(folder))
        is_wrong |= row[-1] != "–"
        print(f"| {' | '.join(map(str, row))} |", flush=True)  # noqa: T201
    return int(is_wrong)


if __name__ == "__main__":
    here = [name for name, module in FRAMEWORKS.items() if is_here(module)]
    sys.exit(main(sys.argv[1:] or here))
