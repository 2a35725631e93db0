"""What docs/resources.md says is run as it stands there, and names what there is."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_otel.cli.resources import resources
from lightning_otel.resources import bodies

PAGE = Path(__file__).parent.parent / "docs" / "resources.md"


def test_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From publication to rollback; what cannot be compared yet is told, not made up."""
    monkeypatch.delenv("LIGHTNING_OTEL_STORE")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    program = [sys.executable, "-W", "error", "-c", "\n".join(blocks)]

    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, timeout=50)

    assert done.returncode == 0, done.stderr
    first, told, *difference = done.stdout.splitlines()
    assert first == "system_prompt@1 system_prompt@2"
    assert "there are 0 tasks that were done with both, and 8 are the fewest" in told
    assert difference[:2] == ["--- system_prompt@1", "+++ system_prompt@2"]


def test_page_names_every_command_and_key() -> None:
    """No command, and no key of a body or of a sampling, is left out."""
    page = PAGE.read_text()

    for name in resources.commands:
        assert f"`{name}`" in page or f"resources {name}`" in page
    for keys in bodies._KEYS.values():
        for key in keys:
            assert key in page
    for key in (*bodies._RANGES, *bodies._OTHERS):
        is_told = f"`{key}`" in page or key.startswith("max_") or key.endswith("_penalty")
        assert is_told, key
