"""What every test of an algorithm has: no hub is asked, and one thread, as models here are tiny."""

import sys
from pathlib import Path

import pytest

# The tiny model and its engine are the example's.
sys.path.append(str(Path(__file__).resolve().parent.parent.parent))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
