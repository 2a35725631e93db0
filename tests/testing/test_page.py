"""What docs/testing.md says is run as it stands there."""

import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from tests.pages import DOCS, blocks, part, python, ran

PAGE = part(DOCS / "testing.md", __file__)


def test_testing_page_runs(tmp_path: Path) -> None:
    """The block's own assertions hold, and it leaves no file behind."""
    done = ran(python(PAGE), tmp_path)

    assert done.stdout.splitlines()[0] == "<Captured 2 calls, 2 transitions"
    assert list(tmp_path.iterdir()) == []


def test_fixtures_isolate_tests_in_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's tests pass under pytest-xdist with the plugin named."""
    (tests,) = blocks(PAGE, "pytest")
    (conftest,) = blocks(PAGE, "py")
    (tmp_path / "conftest.py").write_text(conftest)
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / name).write_text(tests)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # of no concern here, and slow

    command = [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = ran([*command, "-p", "xdist", "-n", "2"], tmp_path)

    assert "2 passed" in done.stdout
    assert not (tmp_path / ".lightning").exists()


def test_no_fixture_is_there_unasked() -> None:
    """Pytest finds no plugin of ours by itself: nothing is imported that nobody named."""
    assert not [
        point
        for point in entry_points(group="pytest11")
        if point.value.startswith("lightning_otel")
    ]
