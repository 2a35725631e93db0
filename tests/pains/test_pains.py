"""Pains that no other test bears in its mark, and the table of all in docs/contributing.md."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind
from pydantic import BaseModel
from tests.pages import DOCS, ran
from tests.serve.serving import Serving, body_of

import lightning_otel as lo
from lightning_otel.demo.server import DemoServer
from lightning_otel.testing import captured

_OFFLINE = """
import socket, sys

def refuse(self, address, real=socket.socket.connect):
    if self.family != socket.AF_UNIX and address[0] != "127.0.0.1":
        raise AssertionError(f"somebody was asked: {address}")
    return real(self, address)

socket.socket.connect = refuse
socket.getaddrinfo = lambda *args, real=socket.getaddrinfo, **more: (
    real(*args, **more) if args[0] in ("127.0.0.1", "localhost", None) else refuse(None, args)
)
from lightning_otel.cli import main
main()
"""
_LONG = """
import resource, sys
import lightning_otel as lo

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def work(count):
    for _ in range(count):
        with lo.auto_trace(store=sys.argv[1]):
            lo.emit_observation("seen " * 2000)
            lo.emit_action("done " * 2000)
            lo.emit_reward(1.0)

work(100)
before = peak_mb()
work(400)
print(peak_mb() - before)
"""


@pytest.mark.pain(7)
def test_structured_output_gives_a_transition_with_its_reward(server: DemoServer) -> None:
    """LangChain's ``with_structured_output`` is one step, rewarded; without a reward it says so."""
    models: Any = pytest.importorskip("langchain_openai")

    class Place(BaseModel):
        """A place."""

        city: str

    model = models.ChatOpenAI(model="toy", base_url=server.base_url, api_key="k")
    for method in ("json_schema", "function_calling"):
        asks = model.with_structured_output(Place, method=method)

        with captured() as rewarded:
            asks.invoke("Name a 'Rome' or another city.")
            lo.emit_reward(0.5)
        with captured() as bare:
            asks.invoke("Name a 'Rome' or another city.")

        assert [step.reward for step in rewarded.transitions] == [0.5]
        rewarded.assert_complete()
        assert [step.reward for step in bare.transitions] == [None]
        assert (bare.report.transitions, bare.report.rewarded, bare.report.rewards) == (1, 0, 0)


@pytest.mark.pain(9)
def test_hundreds_of_rollouts_cost_no_memory_and_are_there_after_a_restart(tmp_path: Path) -> None:
    """The process that recorded 10 MB holds none of it; another one finds all of it."""
    done = ran([sys.executable, "-c", _LONG, "s.duckdb"], tmp_path)

    assert float(done.stdout) < 5
    store = lo.Store(tmp_path / "s.duckdb")
    assert store.report().transitions == 500
    assert store.report().rewarded == 500


@pytest.mark.pain(10)
def test_the_whole_way_needs_no_account_key_or_network(tmp_path: Path) -> None:
    """Recording and exporting go without any variable, and ask nobody but loopback."""
    bare = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}

    def said(*args: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", _OFFLINE, *args],
            cwd=tmp_path, env={**bare, "HOME": str(tmp_path)}, capture_output=True, text=True,
            check=True, timeout=50,
        ).stdout  # fmt: skip

    said("demo", "--rollouts", "2", "--store", "s.duckdb")
    said("export", "triplets", "-o", "steps.jsonl", "--store", "s.duckdb")

    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert len(steps) == 4


@pytest.mark.pain(14)
def test_http_and_database_spans_hide_no_call() -> None:
    """Among a thousand spans of other instrumentations the calls are shown, the rest is counted."""
    tracer = trace.get_tracer("an instrumentation of HTTP")

    with captured() as got:
        for name in ("first", "second"):
            for _ in range(250):
                with tracer.start_as_current_span("GET /things", kind=SpanKind.CLIENT):
                    tracer.start_span("SELECT things", kind=SpanKind.CLIENT).end()
            lo.emit_action(name)
            lo.emit_reward(1.0)

    assert len(got.spans) == 1005
    assert [len(path.transitions) for path in got.trajectories] == [2]
    drawn = got._repr_html_()
    assert "#0" in drawn
    assert "#1" in drawn
    assert "of 1,005 spans are drawn" in drawn


@pytest.mark.pain(19)
def test_one_process_receives_keeps_and_answers(tmp_path: Path) -> None:
    """``serve`` is one process and one port: no database, queue or collector beside it."""
    with Serving(tmp_path / "s.duckdb", "--port", "0") as serving:
        answer = serving.post(body_of(3))
        children = [
            child
            for task in Path(f"/proc/{serving.process.pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
        (row,) = lo.Store(tmp_path / "s.duckdb").sql("SELECT count(*) AS n FROM spans")

    assert answer.status == 200
    assert children == []
    assert row["n"] == 3


@pytest.mark.pain(23)
def test_an_iteration_reads_what_is_new_however_large_the_store(
    store: lo.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a store with many old rollouts a round of training reads the spans of its own alone."""
    read = 0
    real = resolve_name("lightning_otel.store.selection:build_span")

    def counting(record: Any) -> Any:
        nonlocal read
        read += 1
        return real(record)

    def work(count: int) -> Iterator[str]:
        for _ in range(count):
            with lo.auto_trace(store=store) as recording:
                lo.emit_action("a")
                lo.emit_reward(1.0)
            yield recording.rollout_id

    *_, last = work(200)
    store.settle()
    since = max(span.start_ns for span in store.spans(rollout_id=last)) + 1
    new = set(work(3))
    monkeypatch.setattr("lightning_otel.store.selection.build_span", counting)

    steps = store.transitions(since=since).rows()

    assert {step.rollout_id for step in steps} == new
    assert read == 9


ROOT = DOCS.parent
_ROW = re.compile(r"\| (\d+) \| (.+?) \| (.+?) \| (.+?) \|")


def listed() -> dict[int, set[str]]:
    """The table: node ids by the pain's number."""
    rows = _ROW.findall((DOCS / "contributing.md").read_text())
    return {int(number): set(re.findall(r"`([^`]+)`", tests)) for number, *_, tests in rows}


def marked() -> dict[int, set[str]]:
    """The tests that are there: node ids by the number in their mark."""
    found: dict[int, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        if "mark.pain" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for number in numbers_of(node):
                    name = f"{path.relative_to(ROOT)}::{node.name}"
                    found.setdefault(number, set()).add(name)
    return found


def numbers_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[int]:
    """The pains in a function's marks."""
    calls = [call for call in function.decorator_list if isinstance(call, ast.Call)]
    marks = [call for call in calls if ast.unparse(call.func) == "pytest.mark.pain"]
    return [ast.literal_eval(mark.args[0]) for mark in marks]


def test_every_pain_is_listed_once_with_its_tests() -> None:
    """All 23 are there, in order, each with a test; all tests with such a mark are listed."""
    assert list(listed()) == list(range(1, 24))
    assert all(listed().values())
    assert listed() == marked()
