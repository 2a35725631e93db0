"""What docs/service.md says is run as it stands there, beside a real server, and prints that."""

from pathlib import Path

import pytest
from tests.pages import DOCS, blocks, python, ran
from tests.serve.serving import Serving

from lightning_otel import Store, auto_trace, emit_action

pytest.importorskip("hypercorn", reason="needs the extra serve")

PAGE = DOCS / "service.md"


def test_page_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    """Its Python blocks, one after the other, where an agent has made two steps."""
    path = tmp_path / ".lightning" / "traces.duckdb"
    store = Store(path)
    for name, task in (("r1", {"category": "image"}), ("r2", None)):
        with auto_trace(store=store, rollout_id=name, task=task):
            emit_action("say", "hi")
    with Serving(path, "--port", "0") as running:
        program = python(PAGE)
        program[-1] = program[-1].replace("http://127.0.0.1:4318", running.url)
        done = ran(program, tmp_path)

    assert done.stdout == "".join(blocks(PAGE, "text"))


def test_page_names_what_there_is() -> None:
    """Every operation of the OpenAPI document stands on the page."""
    from lightning_otel.serve.api import operations

    page = PAGE.read_text()
    for each in operations():
        tail = each.path.rpartition("/")[2].partition(":")[0].partition("{")[0]
        assert each.path.partition("{")[0] in page or f"…/{tail}" in page, each.path
