"""What docs/viewer.md says is run as it stands there, and its picture is small."""

from pathlib import Path

from tests.pages import DOCS, blocks, ran

PAGE = DOCS / "viewer.md"


def test_the_page_runs(tmp_path: Path) -> None:
    """The commands fill a store, and ask it as the page for SQL does."""
    out = ran(["bash", "-euc", "\n".join(blocks(PAGE, "bash"))], tmp_path).stdout

    assert len([line for line in out.splitlines() if line.startswith("rollout-")]) == 3


def test_the_picture_is_one() -> None:
    """A PNG of at most 150 kB."""
    picture = (DOCS / "viewer.png").read_bytes()

    assert picture.startswith(b"\x89PNG")
    assert len(picture) <= 150_000
