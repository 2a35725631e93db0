"""What docs/resources.md says is run as it stands there, and names what there is."""

from pathlib import Path

from tests.pages import DOCS, python, ran

from lightning_otel.cli.resources import resources
from lightning_otel.resources import bodies

PAGE = DOCS / "resources.md"


def test_page_runs(tmp_path: Path) -> None:
    """From publication to rollback; what cannot be compared yet is told, not made up."""
    done = ran(python(PAGE), tmp_path)

    first, told, *difference = done.stdout.splitlines()
    assert first == "system_prompt@1 system_prompt@2"
    assert "cannot be compared: no task was done with both" in told
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
