"""What the server frees goes back to the system; see ``serve/memory.py``."""

import re
import sys
from pathlib import Path

import pytest

from lightning_otel.serve.memory import give_back

_SIZE, _COUNT = 1000, 100_000


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps what is freed")
def test_what_was_freed_is_given_back() -> None:
    """However small its pieces were, and whatever stays behind them."""
    pieces = [bytes(_SIZE) for _ in range(_COUNT)]
    last = pieces.pop()
    pieces.clear()
    before = resident_mb()

    give_back()

    assert before - resident_mb() > 0.7 * _SIZE * _COUNT / 2**20
    assert len(last) == _SIZE


def resident_mb() -> float:
    """What this process has in memory."""
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024
