"""Rows for Agent Lightning are its triplets."""

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tests.formats.consumers.recorded import TASKS, TRIES, recorded

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


@pytest.fixture
def triplet(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its class, from its own file; what its package imports beside (400 MB) is left out."""
    spec = importlib.util.find_spec("agentlightning")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("agentlightning is not installed here")
    package = types.ModuleType("agentlightning")
    package.__path__ = list(spec.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "agentlightning", package)
    return importlib.import_module("agentlightning.types").Triplet


def test_rows_validate_as_triplets(tmp_path: Path, triplet: Any) -> None:
    """Every line is a triplet, and what its trainer reads of one is there."""
    path = tmp_path / "triplets.jsonl"
    recorded(tmp_path / "traces.duckdb").export("agentlightning", path)

    found = [triplet.model_validate_json(line) for line in path.read_text().splitlines()]

    assert len(found) == 2 * len(TASKS) * TRIES
    first, second = found[:2]
    assert first.prompt["token_ids"] == [3, 4, 5, 6]
    assert first.response["token_ids"] == [7, 8, 9]
    assert (first.reward, second.reward) == (None, 1.0)
    assert second.metadata["agent_name"] == "solver"
    assert json.loads(first.model_dump_json())["prompt"]["image_urls"] == []
