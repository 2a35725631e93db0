"""A trainer killed at any boundary of a step loses no row and repeats none, when it is resumed.

``LIGHTNING_TEST_KILLS`` above 5 kills at every boundary; by default at those that matter most.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.trainer.kills import BOUNDARIES, ROWS, STEPS

ROOT = Path(__file__).parents[2]
FEW = ("after the step", "after the transaction", "after the publication")


def test_kill_at_each_boundary_loses_and_repeats_no_row(tmp_path: Path) -> None:
    """Each row is in the checkpoint once, acknowledged once, and each step published once."""
    is_long = int(os.environ.get("LIGHTNING_TEST_KILLS", "5")) > 5
    boundaries = list(BOUNDARIES) if is_long else list(FEW)

    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.kills", str(tmp_path), *boundaries],
        cwd=ROOT, capture_output=True, text=True, timeout=240 if is_long else 55,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["boundary"] for each in told] == boundaries
    rows = {
        f"r{2 * task + turn}-task {task}" for task in range(STEPS * ROWS // 2) for turn in (0, 1)
    }
    for each in told:
        where = each["boundary"]
        assert each["signal"] == 9, where
        assert (each["status"], each["step"]) == ("succeeded", STEPS), where
        assert sorted(each["rows"]) == sorted(rows), where
        assert each["claims"] == {"trained": len(rows)}, where
        assert each["losses"] == [1, 2, 3], where
        assert each["prompts"] == [f"after {ROWS * step} rows" for step in (1, 2, 3)], where
        assert each["canary"] == f"after {ROWS * STEPS} rows", where
        assert each["folders"] == ["00000002", "00000003"], where
