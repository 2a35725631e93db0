"""What docs/curves.md says is run as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.test_picture import parsed, texts

PAGE = Path(__file__).parent.parent / "docs" / "curves.md"


def blocks(language: str) -> list[str]:
    """The page's code blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands draw and analyse what the demo did, and so do the Python blocks after them."""
    scripts = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join([scripts, os.environ["PATH"]]))
    monkeypatch.delenv("LIGHTNING_OTEL_STORE", raising=False)

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50)
        assert done.returncode == 0, done.stderr
        return done.stdout

    out = run("bash", "-euc", blocks("bash")[0])
    told = run(sys.executable, "-W", "error", "-c", "\n".join(blocks("python")))

    assert "success rate, reward from 0.5 on  24 values" in out
    assert "resource version, in the order they first acted" in out
    assert " · cost 0." in out
    assert "reward  24 values  mean of 5: " in told
    assert (tmp_path / "curves.html").read_text().count("<svg") == 2
    parsed((tmp_path / "curves.svg").read_text())


def test_the_picture_is_the_demos() -> None:
    """The page's curve is what the demo draws, and small."""
    drawn = (PAGE.parent / "curves.svg").read_text()

    assert {"240 values · line: mean of the last 24", "reward"} <= set(texts(parsed(drawn)))
    assert len(drawn) < 60_000
