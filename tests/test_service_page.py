"""The blocks of docs/service.md run beside a real server, and the page has every operation."""

from pathlib import Path

import pytest
from tests.pages import DOCS, blocks, part, python, ran
from tests.serve.serving import Serving

from lightning_otel import Store, auto_trace, emit_action

pytest.importorskip("hypercorn", reason="needs the extra serve")

PAGE = DOCS / "service.md"


def test_page_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    """The server's store has two steps of an agent."""
    here = part(PAGE, __file__)
    path = tmp_path / ".lightning" / "traces.duckdb"
    store = Store(path)
    for name, task in (("r1", {"category": "image"}), ("r2", None)):
        with auto_trace(store=store, rollout_id=name, task=task):
            emit_action("say", "hi")
    with Serving(path, "--port", "0") as running:
        program = python(here)
        program[-1] = program[-1].replace("http://127.0.0.1:4318", running.url)
        done = ran(program, tmp_path)

    assert done.stdout == "".join(blocks(here, "text"))


def test_page_names_every_operation() -> None:
    """Each path of the OpenAPI document is on the page."""
    from lightning_otel.serve.api import operations

    page = PAGE.read_text()
    for each in operations():
        tail = each.path.rpartition("/")[2].partition(":")[0].partition("{")[0]
        assert each.path.partition("{")[0] in page or f"…/{tail}" in page, each.path
