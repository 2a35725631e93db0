"""What docs/exports.md says is run as it stands there."""

import json
import re
from pathlib import Path

import pytest
from tests.pages import DOCS, blocks, python, ran

from lightning_otel import Store, formats
from lightning_otel.demo import run_agent

PAGE = DOCS / "exports.md"


@pytest.mark.timeout(180)  # many commands, each a process
def test_page_runs(tmp_path: Path) -> None:
    """Every command and every block of Python works on a recorded store."""
    run_agent(Store(tmp_path / ".lightning" / "traces.duckdb"), rollouts=4, seed=0)

    out = ran(["bash", "-euc", *blocks(PAGE, "bash")], tmp_path).stdout
    said = ran(python(PAGE), tmp_path).stdout

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
