"""Many short processes: each leaves a segment, and the first look packs them."""

import json
import resource
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

COUNT = 1_000
_FORKS = """
    import os, sys
    from lightning_otel import Store, auto_trace, emit_action, emit_reward

    store = Store(sys.argv[1])
    with auto_trace(store=":memory:"):  # what is imported here is there in every child
        emit_reward(0.0)
    for number in range(int(sys.argv[2])):
        if not os.fork():
            with auto_trace(store=store, rollout_id=f"r{number}"):
                emit_action("done")
                emit_reward(1.0)
            os._exit(0)
        assert os.wait()[1] == 0
"""


@pytest.mark.timeout(300)  # a thousand processes
def test_a_thousand_short_processes_are_listed_soon(tmp_path: Path) -> None:
    """None of their spans is missing or there twice, and later looks open one file."""
    place = str(tmp_path / "traces.duckdb")
    subprocess.run([sys.executable, "-c", textwrap.dedent(_FORKS), place, str(COUNT)], check=True)

    def ask(*words: str) -> Any:
        command = [sys.executable, "-m", "lightning_otel", *words, "--store", place]
        return json.loads(subprocess.check_output(command))

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = ask("ls", "--all", "--format", "json")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)

    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert cpu_s <= 1.5
    assert sorted(row["rollout_id"] for row in rows) == sorted(f"r{n}" for n in range(COUNT))
    assert {(row["spans"], row["reward"], row["status"]) for row in rows} == {(3, 1.0, "succeeded")}
    told = ask("stats", "--format", "json")
    assert (told["files"], told["segments"]) == (1, 0)
    assert told["accounting"]["ended"] == told["accounting"]["stored"] == 3 * COUNT
