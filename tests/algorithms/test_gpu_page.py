"""The page for GPU machines runs as written, with another address, engine and model."""

from pathlib import Path

import pytest
from examples.closed_loop import tiny  # noqa: F401  # skipped without transformers below

pytest.importorskip("trl")

from tests.algorithms.gpu_page import run_page
from tests.pages import DOCS, blocks, part

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def test_the_page_closes_the_loop(tmp_path: Path) -> None:
    """Two steps, the trainer killed between them: the agent uses what was announced."""
    page = part(DOCS / "training.md", __file__)
    trainer = run_page(tmp_path, blocks(page, "python"), blocks(page, "bash"), steps=2)

    run = trainer.runs.get("@last")
    measured = trainer.runs.metrics(run.run_id)
    metrics = {each.name: each.value for each in measured}
    trained = sum(int(each.value) for each in measured if each.name == "rollouts")
    versions = {step.resources.get("endpoint") for step in trainer.store.transitions(bodies=False)}
    assert run.step == 2
    assert trainer.runs.claims(run).counts()["trained"] == trained >= 64
    assert {"1", "2"} <= {str(version) for version in versions}
    assert metrics["share/endpoint"] == 1.0
    assert metrics["unknown_staleness"] == 0.0
    assert metrics["mismatch/kl"] < 0.02
