"""Rows for Agent Lightning are its triplets."""

import json
from pathlib import Path

import pytest
from tests.formats.consumers.recorded import TASKS, TRIES, recorded

types = pytest.importorskip("agentlightning.types")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def test_rows_validate_as_triplets(tmp_path: Path) -> None:
    """Every line is a triplet, and what its trainer reads of one is there."""
    path = tmp_path / "triplets.jsonl"
    recorded(tmp_path / "traces.duckdb").export("agentlightning", path)

    found = [types.Triplet.model_validate_json(line) for line in path.read_text().splitlines()]

    assert len(found) == 2 * len(TASKS) * TRIES
    first, second = found[:2]
    assert first.prompt["token_ids"] == [3, 4, 5, 6]
    assert first.response["token_ids"] == [7, 8, 9]
    assert (first.reward, second.reward) == (None, 1.0)
    assert second.metadata["agent_name"] == "solver"
    assert json.loads(first.model_dump_json())["prompt"]["image_urls"] == []
