"""What docs/rewards.md says is run as it stands there, and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "rewards.md"


def blocks(language: str) -> list[str]:
    """The page's code blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_page_runs_and_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks, one after the other in an empty folder, print the page's outputs."""
    monkeypatch.delenv("LIGHTNING_OTEL_STORE")

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks("python"))],
        capture_output=True, text=True, cwd=tmp_path, timeout=50,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(blocks("text"))
