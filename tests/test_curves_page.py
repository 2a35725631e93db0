"""What docs/curves.md says is run as it stands there."""

from pathlib import Path

from tests.pages import DOCS, blocks, python, ran
from tests.test_picture import parsed, texts

PAGE = DOCS / "curves.md"


def test_the_page_runs(tmp_path: Path) -> None:
    """The commands draw and analyse what the demo did, and so do the Python blocks after them."""
    out = ran(["bash", "-euc", *blocks(PAGE, "bash")], tmp_path).stdout
    told = ran(python(PAGE), tmp_path).stdout

    assert "success rate, reward from 0.5 on  24 values" in out
    assert "resource version, in the order they first acted" in out
    assert " · cost 0." in out
    assert "reward  24 values  mean of 5: " in told
    parsed((tmp_path / "curves.svg").read_text())


def test_the_picture_is_the_demos() -> None:
    """The page's curve is what the demo draws, and small."""
    drawn = (PAGE.parent / "curves.svg").read_text()

    assert {"240 values · line: mean of the last 24", "reward"} <= set(texts(parsed(drawn)))
    assert len(drawn) < 60_000
