"""What docs/concepts.md says is run as it stands there, and its picture is of what it runs."""

from pathlib import Path

from tests.pages import DOCS, blocks, python, ran
from tests.test_picture import parsed, texts

PAGE = DOCS / "concepts.md"


def test_the_page_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    """The Python blocks, one after the other, print the page's outputs and draw its picture."""
    done = ran(python(PAGE), tmp_path)
    ran(["lightning-otel", "show", "@last", "--svg", "made.svg"], tmp_path)

    assert done.stdout == "".join(blocks(PAGE, "text"))
    for path in (tmp_path / "made.svg", DOCS / "concepts.svg"):
        said = texts(parsed(path.read_text()))
        assert {"sum · 4 spans · 2 steps · 1 of 1 reward credited", "1 → #1"} <= set(said)
