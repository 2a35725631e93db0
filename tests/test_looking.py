"""What docs/looking.md says is run as it stands there."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.pages import DOCS, blocks

PAGE = DOCS / "looking.md"


def test_commands_show_what_the_demo_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands run, and their picture has as many spans and steps as the page's own."""
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    monkeypatch.delenv("LIGHTNING_OTEL_STORE", raising=False)

    done = subprocess.run(
        ["bash", "-euc", *blocks(PAGE, "bash")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )

    assert done.returncode == 0, done.stderr
    made, kept = ((folder / name).read_text() for folder, name in (
        (tmp_path, "rollout.svg"), (PAGE.parent, "looking.svg")
    ))  # fmt: skip
    for svg in (made, kept):
        texts = [element.text for element in ElementTree.fromstring(svg).iter() if element.text]
        assert "4 spans · 2 steps · 1 of 1 reward credited" in " ".join(texts)
        assert "1 → #1" in texts
    assert len(kept) < 8000


def test_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks record a step, show it, and write it as a conversation."""
    monkeypatch.delenv("LIGHTNING_OTEL_STORE", raising=False)
    program = "\n".join([*blocks(PAGE, "python"), "print(recording._repr_html_()[:4])"])

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path, capture_output=True, text=True, timeout=50,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    line, start = done.stdout.splitlines()
    assert line.startswith("1.0 ({'role': 'user', 'content': '2+2'}")
    assert start == "<svg"
    assert (tmp_path / "messages.parquet").exists()
