"""What docs/following.md says is run as it stands there."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.forwarding.collector import Endpoint
from tests.pages import DOCS, blocks, python

PAGE = DOCS / "following.md"


def test_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks record, redact and follow; the commands forward what they recorded."""
    monkeypatch.delenv("LIGHTNING_OTEL_STORE")
    program = python(PAGE)
    endpoint = Endpoint()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.url)
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, timeout=50)
    (commands,) = blocks(PAGE, "bash")
    _, once, rollout = commands.splitlines()
    words = [line.partition("#")[0].split()[1:] for line in (once, rollout)]
    words[0][2] = endpoint.url
    sent = [
        subprocess.run(
            [sys.executable, "-m", "lightning_otel", *each, *("--once",) * ("--once" not in each)],
            capture_output=True, text=True, cwd=tmp_path, timeout=50,
        )
        for each in words
    ]  # fmt: skip
    endpoint.close()

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["agentlightning.message", "agentlightning.rollout", "2"]
    assert [each.returncode for each in sent] == [0, 0], sent
    assert all("2 spans delivered" in each.stderr for each in sent)
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"4111 1111" not in stored
