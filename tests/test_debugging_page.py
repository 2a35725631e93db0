"""What docs/debugging.md says is run as it stands there."""

import re
from pathlib import Path

from tests.pages import DOCS, blocks, python, ran

PAGE = DOCS / "debugging.md"
AGENT = """\
import lightning_otel as lo

with lo.auto_trace():
    lo.emit_action("a")
"""


def test_debugging_page_shows_what_is_told(tmp_path: Path) -> None:
    """The block tells, line for line, what the page says that it tells."""
    done = ran(python(PAGE), tmp_path)

    (text,) = blocks(PAGE, "text")
    shown = [re.escape(line).replace("…", ".+") for line in text.splitlines()]
    told = done.stderr.splitlines()
    assert len(told) == len(shown)
    for line, pattern in zip(told, shown, strict=True):
        assert re.fullmatch(pattern, line), (pattern, line)


def test_debugging_page_commands_tell(tmp_path: Path) -> None:
    """Both commands have an unchanged program tell what it keeps."""
    (tmp_path / "agent.py").write_text(AGENT)
    (commands,) = blocks(PAGE, "bash")

    for command in commands.strip().splitlines():
        done = ran(["bash", "-euc", command], tmp_path)

        assert "lightning-otel: kept    lightning.action" in done.stderr
