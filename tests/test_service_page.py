"""The blocks of docs/service.md run beside a real server, and the page has every operation."""

import json
from pathlib import Path

import pytest
from tests.pages import DOCS, blocks, part, python, ran
from tests.serve.serving import Serving

from lightning_otel import Store, auto_trace, emit_action

pytest.importorskip("hypercorn", reason="needs the extra serve")

PAGE = DOCS / "service.md"


def test_page_runs_and_names_every_operation(tmp_path: Path) -> None:
    """The server's store has two steps of an agent; its OpenAPI document lists the operations."""
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
        answer = running.ask("GET", "/openapi.json", authorization=f"Bearer {running.key}")

    assert done.stdout == "".join(blocks(here, "text"))
    page = PAGE.read_text()
    for operation in json.loads(answer.body)["paths"]:
        tail = operation.rpartition("/")[2].partition(":")[0].partition("{")[0]
        assert operation.partition("{")[0] in page or f"…/{tail}" in page, operation
