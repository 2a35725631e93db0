"""What docs/elsewhere.md says is run as it stands there."""

import subprocess
from pathlib import Path

from tests.pages import DOCS, blocks, environment, ran
from tests.receivers.requests import json_of
from tests.serve.serving import request_of

from lightning_otel import Store, auto_trace, emit_reward

PAGE = DOCS / "elsewhere.md"


def test_spans_from_elsewhere_arrive(tmp_path: Path) -> None:
    """`serve` listens and stops when told to, and `import` reads what a Collector wrote."""
    (commands,) = blocks(PAGE, "bash")
    serve, load = commands.strip().splitlines()
    (tmp_path / "traces.jsonl").write_bytes(json_of(request_of(3)))

    with subprocess.Popen(
        ["bash", "-c", f"exec {serve}"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        assert running.stdout.readline().startswith("http://127.0.0.1:43")
        running.terminate()
    ran(["bash", "-euc", load], tmp_path)

    assert running.returncode == 0
    store = Store(tmp_path / ".lightning" / "traces.duckdb")
    assert store.sql("SELECT count(*) AS n FROM spans").rows() == [{"n": 3}]


def test_the_statement_finds_rewards_of_ones_own(store: Store) -> None:
    """It runs, and what this process gave is not taken for somebody else's."""
    (statement,) = blocks(PAGE, "sql")
    with auto_trace(store=store):
        emit_reward(0.5)

    (row,) = store.sql(statement)

    assert row["reward"] == 0.5
