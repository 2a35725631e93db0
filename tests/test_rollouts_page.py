"""What docs/rollouts.md says is run as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "rollouts.md"
PRINTED = """\
2+2 succeeded 1.0
2+2 succeeded 1.0
2*3 succeeded 0.0
2*3 succeeded 0.0
[{'n': 4}]
1 1.0
a plan 4
succeeded 2 spans
"""


def test_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rollout is run, rewarded and recorded; the evaluator judges; the hook is told."""
    monkeypatch.delenv("LIGHTNING_OTEL_STORE")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    program = [sys.executable, "-W", "error", "-c", "\n".join(blocks)]

    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, timeout=50)

    assert done.returncode == 0, done.stderr
    assert done.stdout == PRINTED
