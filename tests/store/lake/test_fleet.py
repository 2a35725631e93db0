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

    assert outcome.acknowledged
    assert outcome.acknowledged <= set(outcome.recorded)
    assert sorted(outcome.in_lake) == sorted(outcome.recorded)
    assert len(set(outcome.in_lake)) == len(outcome.in_lake)
    assert outcome.bad_reads == []
    assert outcome.reads == sorted(outcome.reads)
    assert outcome.is_equal
