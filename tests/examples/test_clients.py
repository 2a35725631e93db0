"""Programs on other vendors' clients: as without us, and each request a call and a transition."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.examples.models import Asked, serve_models
from tests.examples.programs import CLIENTS, Program

from lightning_otel import Store

RUNS = {
    "run": (sys.executable, "-m", "lightning_otel", "run", "--quiet", "--", sys.executable),
    "opentelemetry-instrument": (
        str(Path(sys.executable).with_name("opentelemetry-instrument")),
        "--traces_exporter", "duckdb", "--metrics_exporter", "none", "--logs_exporter", "none",
        sys.executable,
    ),
}  # fmt: skip


def run(program: Program, *within: str, **more: str) -> tuple[str, list[Asked]]:
    """Run it; gives what it printed and what the server was asked."""
    with serve_models() as (url, log):
        addresses = {"ANTHROPIC_BASE_URL": url, "GOOGLE_GEMINI_BASE_URL": url}
        keys = {"ANTHROPIC_API_KEY": "k", "GEMINI_API_KEY": "k", "PYTHONHASHSEED": "0"}
        done = subprocess.run(
            [*(within or [sys.executable]), str(program.path)],
            env={**os.environ, **addresses, **keys, **more},
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, log


def spoken_of(answer: dict[str, Any]) -> list[str]:
    """The texts and the names of tools in an answer, as the server wrote it."""
    candidates = answer.get("candidates")
    blocks = candidates[0]["content"]["parts"] if candidates else answer["content"]
    return [
        each.get("text") or each.get("thinking") or each.get("name") or each["functionCall"]["name"]
        for each in blocks
    ]


@pytest.mark.timeout(220)  # two programs
@pytest.mark.parametrize("way", RUNS)
@pytest.mark.parametrize("program", CLIENTS, ids=lambda program: program.name)
def test_each_request_is_a_call_and_the_program_undisturbed(
    program: Program, way: str, tmp_path: Path
) -> None:
    """The same output and the same requests; one transition a request, which says the answer."""
    for module in program.needs:
        pytest.importorskip(module)
    place = tmp_path / "traces.duckdb"

    out, asked = run(program)
    recorded, log = run(program, *RUNS[way], LIGHTNING_OTEL_STORE=str(place))

    assert recorded == out

    def write(each: Asked) -> str:
        return json.dumps([each.path, each.body], sort_keys=True)

    assert sorted(map(write, log)) == sorted(map(write, asked))
    store = Store(place)
    report = store.transitions().report()
    assert report.calls == report.transitions == len(log) == sum(program.agents.values())
    assert len(store.sql("SELECT 1 FROM calls").rows()) == len(log)
    said = [
        [part.get("content") or part.get("name") for part in step.action[0]["parts"]]
        for step in store.transitions()
    ]
    assert sorted(said) == sorted(spoken_of(each.answer) for each in log)
