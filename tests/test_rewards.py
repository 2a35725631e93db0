"""What docs/rewards.md says is run as it stands there, and prints what it says."""

from pathlib import Path

from tests.pages import DOCS, blocks, python, ran

PAGE = DOCS / "rewards.md"


def test_page_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    """The Python blocks, one after the other in an empty folder, print the page's outputs."""
    done = ran(python(PAGE), tmp_path)

    assert done.stdout == "".join(blocks(PAGE, "text"))
