"""What docs/exactness.md says is run as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_otel import conventions as c
from lightning_otel.config import RETOKENIZATION_FIX_ENV
from lightning_otel.instrumentors.openai import asking

PAGE = Path(__file__).parent.parent / "docs" / "exactness.md"


def blocks(language: str) -> list[str]:
    """The page's code blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks record two exact steps with what was asked, and make one row of them."""
    monkeypatch.delenv("LIGHTNING_OTEL_STORE")
    program = [sys.executable, "-W", "error", "-c", "\n".join(blocks("python"))]

    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, timeout=50)

    assert done.returncode == 0, done.stderr
    first, second, notes = done.stdout.splitlines()
    assert re.fullmatch(r"exact \d+ \d+ {'temperature': 0\.7}", first)
    assert second.startswith("exact ")
    assert "raw or processed" in notes


def test_page_names_what_there_is() -> None:
    """Hosts, keys and commands on the page are those of the code."""
    page = PAGE.read_text()
    commands = re.findall(r"lightning-otel (\w+) (--[\w-]+)", "\n".join(blocks("bash")))

    assert all(f"`*{host}`" in page for host in asking._ELSEWHERE)
    assert f"{c.LOGPROBS_MODE}=processed" in page
    assert f"{RETOKENIZATION_FIX_ENV}=1" in page
    assert len(commands) == 2
    for command, option in commands:
        told = subprocess.run(
            [sys.executable, "-m", "lightning_otel", command, "--help"],
            capture_output=True, text=True, timeout=50,
        )  # fmt: skip
        assert option in told.stdout
