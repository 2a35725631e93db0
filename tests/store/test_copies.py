"""A copy made while the store is in use: no span that it holds is lost, none comes twice."""

import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import count, permutations
from pathlib import Path

import duckdb
import pytest
from tests.store.conftest import Write

from lightning_otel import Store
from lightning_otel.store import settle
from lightning_otel.store.layout import Layout
from lightning_otel.store.lines import read_records
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.views.doctor import examine

PARTS = ("manifests", "live", "data", "new")
SECRET = "swordfish"
WORK: dict[str, Callable[[Store], object]] = {
    "settle": lambda store: store.settle(),
    "compact": lambda store: store.compact(),
    "redact": lambda store: store.redact(patterns=[SECRET]),
    "drop": lambda store: store.compact(rollout_ids=["r1"]),
}


def _spans(first: int, number: int = 40) -> list[Span]:
    return [
        Span(
            f"{n:032x}", f"{n:016x}", None, SECRET, 1_000 * n, 1_000 * n + 5,
            attributes={c.ROLLOUT_ID: f"r{n % 3}", "said": SECRET},
        )
        for n in range(first, first + number)
    ]  # fmt: skip


def _copy(layout: Layout, to: Path, part: str) -> None:
    to.mkdir(exist_ok=True, parents=True, mode=0o700)
    if part == "manifests":
        for path in layout.root.glob("manifest*"):
            shutil.copy(path, to)
    else:
        shutil.copytree(layout.root / part, to / part)


def _list_ids(layout: Layout) -> set[str]:
    """Return the ids of all ended spans in a store's files and segments, whatever counts."""
    ids = {
        record["span_id"]
        for path in layout.segments()
        for record in read_records(path)
        if record.get("end_ns")
    }
    files = [str(path) for path in layout.root.rglob("spans-*.parquet")]
    if files:
        ids |= {
            row[0] for row in duckdb.sql(f"SELECT span_id FROM read_parquet({files})").fetchall()
        }
    return ids


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    "work", [("settle",) * 3, ("compact",) * 3, ("settle", "compact", "settle")]
)
@pytest.mark.parametrize("order", list(permutations(PARTS[:3])))
def test_copy_keeps_every_span_it_holds(
    store: Store, layout: Layout, tmp_path: Path, work: tuple[str, ...], order: tuple[str, ...]
) -> None:
    """S8: whatever is copied first, and whatever the store does to its files meanwhile."""
    numbers = count(1, 40)
    copy = Store(tmp_path / "copy" / "traces.duckdb")
    still_open = SpanWriter(layout)

    def go_on(act: str) -> None:
        for _ in range(2):
            writer = SpanWriter(layout)
            for span in _spans(next(numbers)):
                writer.add(span)
            writer.seal()
            WORK[act](store)
            settle.wait_until_visible(layout)
        WORK[act](store)

    go_on("settle")
    for span in _spans(next(numbers), 5):
        still_open.add(span)
    for part, act in zip([*order, "new"], [*work, ""], strict=True):
        _copy(layout, copy.layout.root, part)
        if act:
            for span in _spans(next(numbers), 5):
                still_open.add(span)
            if part == order[1]:
                still_open.seal()
            go_on(act)
    _check_copy(copy, _list_ids(copy.layout))


def _list_shown(store: Store) -> list[str]:
    return sorted(row["span_id"] for row in store.sql("SELECT span_id FROM spans WHERE end_ns > 0"))


def _check_copy(copy: Store, ids: set[str]) -> None:
    shown = _list_shown(copy)
    assert len(shown) == len(set(shown))
    for _ in range(3):
        copy.settle()
        copy.compact()
        settle.wait_until_visible(copy.layout)
    is_told = any(finding.level == "problem" for finding in examine(copy))
    assert is_told or _list_shown(copy) == sorted(ids)
    copy.repair()
    assert _list_shown(copy) == sorted(ids)
    assert not copy.layout.segments()


@pytest.mark.parametrize("work", ["redact", "drop"])
@pytest.mark.parametrize(
    ("order", "grace_us"),
    [("dm", 0), ("dMm", 0), ("md", 0), ("md", 60_000_000), ("dm", 60_000_000)],
)
def test_what_was_taken_out_does_not_come_back_by_a_copy(
    store: Store, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write,
    work: str, order: str, grace_us: int,
) -> None:  # fmt: skip
    """A file that was masked or thinned out is not adopted, whichever of both the copy has."""
    monkeypatch.setattr(settle, "COMMIT_AHEAD_US", 2)
    monkeypatch.setattr(settle, "GRACE_US", 0)
    write(_spans(1))
    store.settle()
    store.settle()  # the segment goes
    monkeypatch.setattr(settle, "GRACE_US", grace_us)
    copy = Store(tmp_path / "copy" / "traces.duckdb")

    for part in order:
        if part == order[-1]:
            WORK[work](store)
            store.compact() if "M" in order else store.settle()
        if part != "M":
            _copy(layout, copy.layout.root, {"m": "manifests", "d": "data"}[part])
    _copy(layout, copy.layout.root, "live")
    _copy(layout, copy.layout.root, "new")
    for act in (copy.settle, copy.repair, copy.compact):
        act()
        rows = copy.sql("SELECT rollout_id, attributes::VARCHAR AS text, name FROM spans").rows()
        assert not [row for row in rows if work == "redact" and SECRET in str(row)]
        assert not [row for row in rows if work == "drop" and row["rollout_id"] == "r1"]
    if order == "md":
        assert len(rows) == len(store.spans().rows())


AGENT = """
import sys, lightning_otel as lo
from opentelemetry import trace
from lightning_otel.store import settle
settle.GRACE_US, settle.COMMIT_AHEAD_US = 0, 2_000
number, store = 0, lo.Store(sys.argv[1])
while True:
    with lo.auto_trace(store=store):
        for _ in range(20):
            trace.get_tracer("agent").start_span(f"n{number}").end()
            print(number, flush=True)
            number += 1
    store.compact() if number % 60 else store.settle()
"""


def test_agent_writes_while_its_store_is_copied(store: Store, tmp_path: Path) -> None:
    """S8: `cp -r` and `export duckdb` have each span that ended before, settled and compacted."""
    said = tmp_path / "said"
    with said.open("w") as file:
        agent = subprocess.Popen([sys.executable, "-c", AGENT, store.name], stdout=file)
    try:
        for number in range(4):
            while said.read_text().count("\n") < 60 * (number + 1):
                assert agent.poll() is None
                time.sleep(0.02)
            ended = {f"n{line}" for line in said.read_text().split("\n")[:-1]}
            if number < 3:
                copy = Store(tmp_path / f"copy{number}" / "traces.duckdb")
                # It says so if a file vanishes meanwhile.
                subprocess.run(["cp", "-r", Path(store.name).parent, Path(copy.name).parent])
                copy.settle()
                copy.compact()
                names = Counter(row["name"] for row in copy.sql("SELECT name FROM spans"))
            else:
                store.pack(tmp_path / "packed.duckdb")
                with duckdb.connect(tmp_path / "packed.duckdb", read_only=True) as con:
                    names = Counter(
                        name for (name,) in con.sql("SELECT name FROM spans").fetchall()
                    )
            del names["agentlightning.rollout"]
            assert ended <= names.keys()
            assert set(names.values()) == {1}
    finally:
        agent.kill()
        agent.wait()
