"""What docs/training.md says is run as it stands there."""

import json
from pathlib import Path

from tests.pages import DOCS, blocks, python, ran

PAGE = DOCS / "training.md"


def test_python_and_shell_blocks_run(tmp_path: Path) -> None:
    """The algorithm learns, becomes live, is resumed; the shell sees what was recorded."""
    done = ran(python(PAGE), tmp_path)

    assert done.stdout.splitlines() == [
        "succeeded 3 ('prompt',) 1.0",
        "1 0.0",
        "2 0.33",
        "3 0.67",
        "5 5",
    ]
    (tmp_path / "agent.py").write_text("def act(task):\n    return float(task == 'tea')\n")
    (tmp_path / "tasks.jsonl").write_text('"tea"\n"cake"\n')
    (tmp_path / "val.jsonl").write_text('"tea"\n')
    (commands,) = blocks(PAGE, "bash")
    shell = ran(["bash", "-euc", commands], tmp_path)
    told, end = json.JSONDecoder().raw_decode(shell.stdout)
    assert (told["status"], told["step"], told["metrics"]["rollouts"]) == ("succeeded", 2, 10)
    listed = [line.split("\t")[1:4] for line in shell.stdout[end:].strip().splitlines()[1:]]
    assert listed == [
        ["baseline", "succeeded", "2"],
        ["baseline", "succeeded", "1"],
        ["Polite", "succeeded", "5"],
    ]
