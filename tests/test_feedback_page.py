"""What docs/feedback.md says is run as it stands there, and prints what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "feedback.md"


def blocks(language: str) -> list[str]:
    """The page's code blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_page_runs_and_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks, one after the other in an empty folder, print the page's outputs.

    Then its commands find the same rewards there.
    """
    monkeypatch.delenv("LIGHTNING_OTEL_STORE")
    scripts = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join([scripts, os.environ["PATH"]]))
    _, function, *_ = blocks("python")
    (tmp_path / "rewards.py").write_text(function.partition("\nstore")[0])

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks("python"))],
        capture_output=True, text=True, cwd=tmp_path, timeout=50,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(blocks("text"))
    shell = subprocess.run(
        ["bash", "-euc", "".join(blocks("bash"))],
        capture_output=True, text=True, cwd=tmp_path, timeout=50,
    )  # fmt: skip
    assert "3 judged by it before" in shell.stderr
