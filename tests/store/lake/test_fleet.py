"""Two machines with disks of their own, one lake, a trainer, and SIGKILL.

``LIGHTNING_TEST_LAKE_S`` is for how long they run, in seconds.
"""

import os
from pathlib import Path

import pytest
from tests.store.lake import fleet

SECONDS = float(os.environ.get("LIGHTNING_TEST_LAKE_S", "8"))


@pytest.mark.timeout(90 + 3 * SECONDS)
def test_machines_that_are_killed_publish_everything_once(remote_lake: str, tmp_path: Path) -> None:
    """Every acknowledged span is in the lake, none twice, and every read on the way answered."""
    outcome = fleet.run(remote_lake, tmp_path / "machines", SECONDS)

    (tmp_path / "outcome.txt").write_text(str(outcome))
    assert outcome.acknowledged > 0
    assert (outcome.lost, outcome.unacknowledged_lost, outcome.doubled) == (0, 0, 0)
    assert outcome.in_lake == outcome.recorded
    assert outcome.failed_reads == []
    assert outcome.went_back == 0
    assert outcome.is_equal
