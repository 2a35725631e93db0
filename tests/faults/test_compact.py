"""Compacts killed with SIGKILL at any step, and several at once, lose and double nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.harness import IS_FULL

_PRELUDE = """
import os, random, signal, sys, time
from lightning_otel import Store
from lightning_otel.store import parquet, rewrite, settle
from lightning_otel.store.layout import now_us
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import Span

settle.GRACE_US, settle.COMMIT_AHEAD_US = 0, 2_000
store = Store(sys.argv[1])
layout = store.layout
layout.create()
NOW = time.time_ns()

def span(number, rollout, hours):
    start = NOW - int(hours * 3.6e12) + number
    return Span(f"{number:032x}", f"{number:016x}", None, "s", start, start + 1,
                attributes={"agentlightning.rollout_id": rollout, "n": number, "pad": "x" * 99})

def in_child(function, *arguments):
    child = os.fork()
    if not child:
        try:
            os._exit(int(function(*arguments) or 0))
        except BaseException as exc:
            print(type(exc).__name__, exc, file=sys.stderr, flush=True)
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def fill():
    # Two files of old and young spans, one of old ones, and a segment to be settled.
    number = 0
    for hours in ((100, 1), (1, 100), (100, 100), (1, 1)):
        writer = SpanWriter(layout)
        for index in range(20):
            age = hours[index % 2]
            writer.add(span(number, f"r{age}-{index % 4}", age))
            number += 1
        writer.seal()
        if hours != (1, 1):
            assert in_child(lambda: store.settle() and 0) == 0
    time.sleep(0.01)

def work(retains):
    store.compact(older_than_s=48 * 3600 if retains else None)

def wait():
    # Until what was committed is in effect, so that the next one sweeps.
    manifest = layout.read_manifest()
    times = [file.added_us for file in manifest.files]
    times += [file.dropped_us or 0 for file in manifest.files]
    while max([*times, *(each.settled_us for each in manifest.segments)]) >= now_us():
        time.sleep(0.002)

def unstored(manifest):
    return {k: v for k, v in manifest.counts.items() if k.startswith(("dropped", "rejected"))}

def look(wanted):
    (row,) = store.sql(
        "SELECT count(*) n, count(DISTINCT span_id) d, "
        "count(*) FILTER (json_extract(attributes, '$.n')::INT <> ('0x' || span_id[9:])::INT) w "
        "FROM spans"
    )
    return 0 if row["n"] == row["d"] in wanted and row["w"] == 0 else 1 + row["n"]
"""

_KILLED = """
STEPS = {
    "before the settling": (settle, "sweep", 0, False),
    "before the rows are placed": (rewrite.Rewrite, "_index_rows", 0, False),
    "before they are gathered": (rewrite.Rewrite, "_place_rows", 0, True),
    "before the file is written": (rewrite, "write_file", 0, False),
    "when it is written": (parquet, "sync", 1, False),
    "before its rename": (rewrite, "write_file", 0, True),
    "before the manifest": (rewrite, "replace_files", 0, False),
    "after the first file's": (rewrite, "replace_files", 0, True),
    "after the second file's": (rewrite, "replace_files", 1, True),
    "in the manifest's own rename": (os, "replace", int(sys.argv[3]), False),
}
retains = sys.argv[2] == "True"

def killed(module, name, number, is_after):
    function, left = getattr(module, name), [number]
    def call(*arguments, **named):
        left[0] -= 1
        if left[0] == -1 and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = function(*arguments, **named)
        if left[0] == -1:
            os.kill(os.getpid(), signal.SIGKILL)
        return found
    setattr(module, name, call)
    work(retains)

fill()
young = 40
for step, where in STEPS.items():
    # There is always something new to be done.
    writer = SpanWriter(layout)
    for number in range(5):
        writer.add(span(100 + young, "new", 1))
        young += 1
    writer.seal()
    code = in_child(killed, *where)
    wait()
    seen = in_child(look, range(young, young + 41) if retains else {young + 40})
    if code not in (0, -signal.SIGKILL) or seen:
        print(step, code, seen)
    if code == -signal.SIGKILL:
        print("killed")
for _ in range(3):
    assert in_child(work, retains) == 0
    wait()
assert in_child(lambda: store.settle() and 0) == 0
manifest = layout.read_manifest()
rows = sum(file.rows for file in manifest.live_files)
print("left", in_child(look, {young if retains else young + 40}), rows)
print(unstored(manifest), store.accounting().missing)
print(sorted(path.name for path in layout.new.iterdir()), layout.segments())
print({path.name for path in layout.data.glob("spans-*")} == {f.name for f in manifest.files})
"""

_AT_ONCE = """
fill()
seed = random.Random(int(sys.argv[2]))
number, killed = 1_000, 0
for round in range(6):
    for each in range(2):
        writer = SpanWriter(layout)
        for _ in range(10):
            writer.add(span(number, f"n{number % 3}", 1))
            number += 1
        writer.seal()
    children = []
    for act in (store.settle, work, work):
        child = os.fork()
        if not child:
            try:
                act() if act == store.settle else act(False)
            except Exception as exc:
                os._exit(0 if "another process" in str(exc) else 98)
            os._exit(0)
        children.append(child)
    time.sleep(seed.uniform(0.05, 0.5))
    if round % 2:
        os.kill(children[1], signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    killed += -9 in codes
    if not set(codes) <= {0, -9} or in_child(look, {80 + number - 1_000}):
        print("round", round, codes)
for _ in range(2):
    assert in_child(work, False) == 0
    wait()
print(in_child(look, {200}), sum(f.rows for f in layout.read_manifest().live_files))
print(unstored(layout.read_manifest()), store.accounting().missing)
"""


@pytest.mark.parametrize(("retains", "rename"), [(False, 1), (True, 3)] if IS_FULL else [(True, 3)])
def test_compact_killed_at_every_step_is_done_by_the_next_one(
    tmp_path: Path, run_python: Callable[..., str], retains: bool, rename: int
) -> None:
    """Readers see each span once after every kill; in the end all is done, and counted once."""
    lines = run_python(_PRELUDE + _KILLED, tmp_path / "traces.duckdb", retains, rename).splitlines()

    kills = lines.count("killed")
    rows = 90 if retains else 130
    assert [line for line in lines if line != "killed"] == [
        f"left 0 {rows}",
        "{'dropped.age': 40} 0" if retains else "{} 0",
        "[] []",
        "True",
    ]
    assert kills >= 9


def test_compacts_and_settlers_at_once_and_killed_at_random(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    """One works at a time, whoever is killed, while new segments keep coming."""
    lines = run_python(_PRELUDE + _AT_ONCE, tmp_path / "traces.duckdb", 11).splitlines()

    assert lines == ["0 200", "{} 0"]
