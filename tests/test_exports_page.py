"""What docs/exports.md says is run as it stands there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_otel import Store, formats
from lightning_otel.demo import run_agent

PAGE = Path(__file__).parent.parent / "docs" / "exports.md"


def blocks(language: str) -> list[str]:
    """The page's code blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run(command: list[str], folder: Path) -> str:
    """A command's stdout; it must succeed."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "LIGHTNING_OTEL_STORE"},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=55
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(180)  # many commands, each a process
def test_page_runs(tmp_path: Path) -> None:
    """Every command and every block of Python works on a recorded store."""
    run_agent(Store(tmp_path / ".lightning" / "traces.duckdb"), rollouts=4, seed=0)
    commands, program = blocks("bash")[0], "\n".join(blocks("python"))

    out = run(["bash", "-euc", commands], tmp_path)
    said = run([sys.executable, "-W", "error", "-c", program], tmp_path)

    assert json.loads(out.splitlines()[-1])["rollout_id"]
    written = {path.name for path in tmp_path.iterdir()}
    assert {"sft.jsonl", "sft.parquet", "sft", "kto.jsonl", "dpo.jsonl", "left.jsonl"} <= written
    assert "grpo" not in "".join(written)
    assert said.startswith('4 4 {"no reward;')
    assert said.count("The answer is") == 4


def test_page_names_every_format() -> None:
    """The table is that of the formats there are."""
    assert set(re.findall(r"^\| `([\w-]+)` \|", PAGE.read_text(), re.MULTILINE)) == set(
        formats.names()
    )
