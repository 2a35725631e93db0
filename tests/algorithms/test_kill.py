"""GRPO killed while it claims, trains, writes or acknowledges: no row is lost, none comes twice.

``LIGHTNING_TEST_KILLS`` above 5 kills at every boundary; by default at one of each kind.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.trainer.kills import BOUNDARIES

if find_spec("trl") is None:  # to import it takes seconds, and only the child needs it
    pytest.skip("could not import 'trl'", allow_module_level=True)

ROOT = Path(__file__).parents[2]
RUN = """
import runpy, sys, types
tests = sys.modules["tests"] = types.ModuleType("tests")  # a library here has one of that name
tests.__path__ = ["tests"]
runpy.run_module("tests.algorithms.kills", run_name="__main__", alter_sys=True)
"""
FEW = ("after the claim", "after the step", "while the files are written", "within the transaction")


@pytest.mark.timeout(300)
def test_killed_grpo_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    """To the bit, with each rollout acknowledged once and each step published once."""
    is_long = int(os.environ.get("LIGHTNING_TEST_KILLS", "5")) > 5
    boundaries = list(BOUNDARIES) if is_long else list(FEW)

    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), *boundaries],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    whole, *others = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["boundary"] for each in others] == boundaries
    assert whole["changed"]
    assert whole["rows"] == [4.0, 4.0]
    assert whole["claims"] == {"trained": 8}
    for each in others:
        assert each["signal"] == 9, each["boundary"]
        assert {**each, "boundary": "", "signal": 0} == {**whole, "boundary": ""}
