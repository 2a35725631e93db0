"""What docs/redaction.md says is run as it stands there, and prints what it says."""

from pathlib import Path

from tests.pages import DOCS, blocks, python, ran

PAGE = DOCS / "redaction.md"


def test_page_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    """In an empty folder, with a store of its own."""
    done = ran(python(PAGE), tmp_path)

    assert done.stdout == "".join(blocks(PAGE, "text"))
