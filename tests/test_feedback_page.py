"""What docs/feedback.md says is run as it stands there, and prints what it says."""

from pathlib import Path

from tests.pages import DOCS, blocks, python, ran

PAGE = DOCS / "feedback.md"


def test_page_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    """The Python blocks, one after the other in an empty folder, print the page's outputs.

    Then its commands find the same rewards there.
    """
    _, function, *_ = blocks(PAGE, "python")
    (tmp_path / "rewards.py").write_text(function.partition("\nstore")[0])

    done = ran(python(PAGE), tmp_path)

    assert done.stdout == "".join(blocks(PAGE, "text"))
    # The rollouts of the page's last block have no task, and the function says so.
    shell = ran(["bash", "-euc", "".join(blocks(PAGE, "bash"))], tmp_path, exit_code=1)
    assert "3 judged by it before" in shell.stderr
