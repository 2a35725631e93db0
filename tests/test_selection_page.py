"""What docs/selection.md says is run as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

from tests.pages import DOCS, python, ran

from lightning_otel.adapter.selection import Wanted

PAGE = DOCS / "selection.md"
RECORD = """
import lightning_otel as lo
for agent in ("planner", "planner-draft"):
    with lo.auto_trace(agent=agent, mode="train", resources={"*": {"prompt": "v1"}}):
        lo.emit_observation("the task")
        lo.emit_action("the plan")
        lo.emit_reward(1.0)
"""


def test_page_runs(tmp_path: Path) -> None:
    """Of two agents' steps the one that is wanted is found, and no reason to leave any out."""
    done = ran(python(PAGE, before=RECORD), tmp_path)

    assert done.stdout == "1 {}\n"


def test_page_names_every_keyword() -> None:
    """The table lists what selects, no more and no less; the command has an option for each."""
    page = PAGE.read_text()
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    told = subprocess.run(
        [sys.executable, "-m", "lightning_otel", "export", "sft", "--help"],
        capture_output=True, text=True, timeout=50,
    )  # fmt: skip

    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(Wanted.__annotations__)
    for name in {*named, "adapter"} - {"rollout_id", "rewarded"}:
        assert f"--{name.replace('_', '-')}" in told.stdout
    assert "--rollout" in told.stdout
