"""What docs/training.md says is run as it stands there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "training.md"


def blocks(language: str) -> list[str]:
    """The page's code blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run(command: list[str], folder: Path) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_and_shell_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The algorithm learns, becomes live, is resumed; the shell sees what was recorded."""
    monkeypatch.delenv("LIGHTNING_OTEL_STORE", raising=False)
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )

    out = run([sys.executable, "-W", "error", "-c", "\n".join(blocks("python"))], tmp_path)

    assert out.splitlines() == [
        "succeeded 3 ('prompt',) 1.0",
        "1 0.0",
        "2 0.33",
        "3 0.67",
        "5 5",
    ]
    first, *_ = blocks("sh")[0].splitlines()
    told = json.loads(run(["bash", "-euc", f"{first.partition('#')[0]} --json"], tmp_path))
    assert (told["status"], told["step"], told["metrics"]["rollouts"]) == ("succeeded", 1, 10)
