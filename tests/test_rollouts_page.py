"""What docs/rollouts.md says is run as it stands there."""

from pathlib import Path

from tests.pages import DOCS, python, ran

PAGE = DOCS / "rollouts.md"
PRINTED = """\
2+2 succeeded 1.0
2+2 succeeded 1.0
2*3 succeeded 0.0
2*3 succeeded 0.0
[{'n': 4}]
1 1.0
a plan 4
succeeded 2 spans
"""


def test_page_runs(tmp_path: Path) -> None:
    """Each rollout is run, rewarded and recorded; the evaluator judges; the hook is told."""
    done = ran(python(PAGE), tmp_path)

    assert done.stdout == PRINTED
