"""Settlers and writers killed at every point, with a reader polling: each span once, always.

``LIGHTNING_TEST_KILLS`` is how often settlers and writers are killed together; a few by default.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.harness import trials
from tests.waiting import wait_until

from lightning_otel import Store
from lightning_otel.demo.server import DemoServer
from lightning_otel.store import settle
from lightning_otel.store.layout import Layout
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import Span

KILLS = int(os.environ.get("LIGHTNING_TEST_KILLS", "4"))
WALL_S = 50

AT_ONCE = """\
import os, signal, sys, threading, time
from lightning_otel import Store
from lightning_otel.store import layout as layout_module, settle as settle_module
settle_module.COMMIT_AHEAD_US = 2_000
settle_module.GRACE_US = 0
store = Store(sys.argv[1])
def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""How a settler begins: manifests take effect at once, and nothing has a period of grace."""

KILLED: dict[str, str] = {
    "before the copy": "settle_module.make_parquet = die",
    "in the copy": """\
        def watch():
            while not any(store.layout.new.glob("spans-*.parquet")):
                pass
            die()
        threading.Thread(target=watch, daemon=True).start()
        """,
    "before the rename": "settle_module.os.replace = die",
    "after the rename": "settle_module.sync = die",
    "before the manifest": "layout_module.Layout.write_manifest = die",
    "between the manifest's copy and itself": """\
        replace = os.replace
        def replace_copy_only(old, new):
            (die if os.fspath(new).endswith("/manifest.ndjson") else replace)(old, new)
        layout_module.os.replace = replace_copy_only
        """,
    "after the manifest": """\
        write = layout_module.Layout.write_manifest
        def write_and_die(*args, **options):
            write(*args, **options)
            die()
        layout_module.Layout.write_manifest = write_and_die
        """,
    "between two batches": """\
        settle_module.BATCH_BYTES = 1
        write, left = layout_module.Layout.write_manifest, [2]
        def write_one_only(*args, **options):
            left[0] -= 1
            return write(*args, **options) if left[0] else die()
        layout_module.Layout.write_manifest = write_one_only
        """,
    "before the clean-up": """\
        store.settle()
        time.sleep(0.5)
        layout_module.Path.unlink = die
        """,
    "in the clean-up": """\
        store.settle()
        time.sleep(0.5)
        unlink = layout_module.Path.unlink
        def unlink_and_die(*args, **options):
            unlink(*args, **options)
            die()
        layout_module.Path.unlink = unlink_and_die
        """,
}
"""What kills a settler, by where it does. What it changes are the library's own functions, in a
process of its own: a real SIGKILL, at the same place each time."""

WRITER = """\
import os, sys, time
from lightning_otel.store.layout import Layout
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import Span
writer = SpanWriter(Layout(sys.argv[1]))
acknowledged = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
number = 0
while True:
    number += 1
    span_id = f"{os.getpid():08x}{number:08x}"
    writer.add(Span(trace_id=f"{os.getpid():032x}", span_id=span_id, parent_span_id=None,
        name="work", start_ns=number, end_ns=number + 1, attributes={"text": "x" * 500}))
    os.write(acknowledged, span_id.encode() + b"\\n")
    time.sleep(0.0005)
    if number % 200 == 0:
        writer.seal()
"""
SETTLER = """\
settle_module.GRACE_US = 5_000_000  # longer than any read takes: that is what it is for
while True:
    store.settle()
"""


def _run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=WALL_S,
    )


@pytest.fixture
def filled(layout: Layout) -> Layout:
    """The paths of a store with 3,000 spans in three sealed segments."""
    for first in range(1, 3_000, 1_000):
        writer = SpanWriter(layout)
        for number in range(first, first + 1_000):
            writer.add(
                Span(
                    trace_id=f"{number // 10:032x}",
                    span_id=f"{number:016x}",
                    parent_span_id=None,
                    name="work",
                    start_ns=1_000 * number,
                    end_ns=1_000 * number + 500,
                    attributes={"text": f"{number * 7919:0500x}"},
                )
            )
        writer.seal()
    return layout


def _counts(store: Store) -> Counter[str]:
    return Counter(row["span_id"] for row in store.sql("SELECT span_id FROM spans"))


@pytest.mark.parametrize("where", KILLED)
def test_settler_killed_anywhere_leaves_each_span_once(
    store: Store, filled: Layout, where: str
) -> None:
    """For who reads right after, for the next settler, and once all is cleaned up."""
    before = _counts(store)
    script = AT_ONCE + textwrap.dedent(KILLED[where]) + "\nstore.settle()\ntime.sleep(1)\n"

    killed = _run(script, filled.catalogue)
    right_after = _counts(store)
    ended = _run(AT_ONCE + "store.settle(); time.sleep(.5); store.settle()\n", filled.catalogue)
    after = _counts(store)

    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert ended.returncode == 0, ended.stderr
    assert len(before) == 3_000
    assert right_after == before == after
    assert sum(file.rows for file in filled.read_manifest().live_files) == 3_000
    assert filled.segments() == []


def test_two_settlers_at_once_settle_each_span_once(store: Store, filled: Layout) -> None:
    """Four that start together: one is elected, the others leave it to that one."""
    script = AT_ONCE + "sys.stdin.read(1); print(store.settle().rows)\n"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(filled.catalogue)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]

    for each in started:
        assert each.stdin is not None
        each.stdin.write("x")
        each.stdin.flush()
    rows = [int(each.communicate(timeout=WALL_S)[0]) for each in started]

    assert sum(rows) == 3_000
    assert set(_counts(store).values()) == {1}
    assert sum(file.rows for file in filled.read_manifest().live_files) == 3_000


def _damage(path: Path, at: int, content: bytes) -> None:
    """Change bytes of a file as a disk does that decays: its size and time stay."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("place", ["live", "live, settled first", "data", "data, and no segment"])
def test_flipped_bit_is_never_read_as_truth(
    store: Store, filled: Layout, tmp_path: Path, place: str
) -> None:
    """L14: any one bit, in a copy each: spans may be missing, none is read with another value."""
    is_live = place.startswith("live")
    if not is_live:
        store.settle()
    query = "SELECT span_id, hash(COLUMNS(* EXCLUDE span_id)) FROM spans"
    truth = {row["span_id"]: row for row in store.sql(query)}
    chance = random.Random(7)
    lost = 0
    for number in range(trials(100, 8)):
        copy = tmp_path / str(number) / "traces.duckdb"
        shutil.copytree(filled.root, f"{copy}.d")
        damaged = Store(copy)
        assert damaged.layout is not None
        if "no segment" in place:
            for segment in damaged.layout.segments():
                segment.unlink()
        folder = damaged.layout.live if is_live else damaged.layout.data
        path = chance.choice(sorted(each for each in folder.iterdir() if each.name[0] != "_"))
        at = chance.randrange(path.stat().st_size)
        _damage(path, at, bytes([path.read_bytes()[at] ^ 1 << chance.randrange(8)]))

        if "settled" in place:
            damaged.settle()

        for _ in range(2):
            found = {row["span_id"]: row for row in damaged.sql(query)}
            assert found.items() <= truth.items()
            damaged.settle()
        assert damaged.accounting().is_balanced or not is_live
        lost += len(truth) - len(found)

    assert (lost == 0) == (place == "data")


def test_damaged_bytes_count_every_span_that_stood_there(store: Store, layout: Layout) -> None:
    """L14: of a killed process a zeroed page took several spans: the numbers tell how many."""
    script = """\
import os, sys
from opentelemetry.sdk.trace import TracerProvider
from lightning_otel.store.layout import Layout
from lightning_otel.store.writer import SpanWriter
writer = SpanWriter(Layout(sys.argv[1]))
tracer = TracerProvider().get_tracer("host")
for number in range(200):
    span = tracer.start_span(str(number), attributes={"text": "x" * 500})
    writer.started(span)
    span.end()
    writer.ended(span, {})
os._exit(0)
"""
    assert _run(script, layout.catalogue).returncode == 0
    (segment,) = layout.segments()
    _damage(segment, 40_960, bytes(8192))

    before = store.accounting()
    store.settle()
    after = store.accounting()

    assert before == after
    assert 3 <= 200 - after.stored <= 10
    assert (after.ended, after.missing) == (200, 0)
    assert after.rejected == {"damaged": 200 - after.stored}


@pytest.fixture
def start() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """A function that starts a script; what still runs at the end of the test is killed."""
    started = []

    def begin(script: str, *arguments: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", script, *map(str, arguments)]
        started.append(child := subprocess.Popen(command, text=True))
        return child

    yield begin
    for child in started:
        child.kill()
        child.wait()


@pytest.mark.timeout(60 + KILLS * 4)
def test_kills_of_settlers_and_writers_lose_nothing(
    store: Store, layout: Layout, tmp_path: Path, start: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """Two writers and a settler, each killed at random and started anew, and a reader polling."""
    acknowledged = tmp_path / "acknowledged"
    scripts = [WRITER, WRITER, AT_ONCE + SETTLER]
    children = [start(script, layout.catalogue, acknowledged) for script in scripts]
    wait_until(acknowledged.exists)  # on a busy machine a process takes its time to begin
    chance = random.Random()
    reads = 0

    for _ in range(KILLS):
        until = time.monotonic() + chance.uniform(0.2, 1.2)
        while time.monotonic() < until:
            known = acknowledged.read_text().split("\n")[:-1]
            found = _counts(store)
            assert set(found.values()) <= {1}
            assert not set(known) - set(found)
            reads += 1
        place = chance.randrange(len(children))
        children[place].kill()
        children[place].wait()
        children[place] = start(scripts[place], layout.catalogue, acknowledged)
    for child in children:
        child.kill()
        child.wait()
    _run(AT_ONCE + "store.settle(); time.sleep(.5); store.settle()\n", layout.catalogue)

    found = _counts(store)
    known = acknowledged.read_text().split()
    assert reads >= KILLS
    assert len(known) > 100
    assert set(found.values()) == {1}
    assert not set(known) - set(found)
    assert len(found) - len(known) <= 2 * (KILLS + 1)  # written, and killed before it was told
    assert sum(file.rows for file in layout.read_manifest().live_files) == len(found)


ROLLOUT = """\
import os, sys, time, openai, lightning_otel
from opentelemetry import trace
tracer = trace.get_tracer("agent")
with lightning_otel.auto_trace():
    client = openai.OpenAI(base_url=sys.argv[1], api_key="k")
    with tracer.start_as_current_span("step"):
        client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": "What is 17*23?"}]
        )
        lightning_otel.emit_reward(1.0)
    with tracer.start_as_current_span("next step"):
        print("in the middle", flush=True)
        time.sleep(60)
"""


def test_rollout_whose_process_dies_is_incomplete(
    server: DemoServer,
    store: Store,
    spawn: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs while it lives; killed, it keeps its tree and stays out of what is trained on."""
    environment = {**os.environ, "LIGHTNING_OTEL_STORE": store.name}
    command = [sys.executable, "-c", ROLLOUT, server.base_url]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "in the middle\n"

    (alive,) = store.rollouts()
    while_alive = len(store.transitions().rows())
    child.kill()
    child.communicate(timeout=WALL_S)
    (dead,) = store.rollouts()
    monkeypatch.setattr(settle, "COMMIT_AHEAD_US", 2)
    store.settle()
    assert store.layout is not None
    for segment in store.layout.segments():  # so that the file alone is read
        segment.unlink()
    (settled,) = store.rollouts()
    spans = {span.name: span for span in store.spans()}
    report = store.report()

    assert [row["status"] for row in (alive, dead, settled)] == [
        "running",
        "incomplete",
        "incomplete",
    ]
    assert while_alive == 1
    assert sorted(name for name, span in spans.items() if span.is_incomplete)[-1] == "next step"
    root = next(span for span in spans.values() if span.parent_span_id is None)
    assert root.is_incomplete
    assert spans["step"].parent_span_id == spans["next step"].parent_span_id == root.span_id
    assert store.transitions().rows() == []
    assert list(store.trajectories()) == []
    assert (report.calls, report.transitions, report.rewards, report.rewards_placed) == (1, 0, 1, 0)
    assert report.reasons() == {"incomplete: the rollout broke off before its end": 2}
    (step,) = store.transitions(include_incomplete=True)
    assert step.reward == 1.0
    assert store.report(include_incomplete=True).transitions == 1
    _check_commands(store, spawn)


def _check_commands(store: Store, spawn: Callable[..., Any]) -> None:
    """What the commands say of an incomplete rollout."""

    def said(*words: str, code: int = 0) -> str:
        done = spawn(*words, env={"LIGHTNING_OTEL_STORE": store.name})
        assert done.returncode == code, done.stderr
        return str(done.stdout + done.stderr)

    assert "incomplete" in said("ls", "--jsonl")
    assert said("show").count("  incomplete\n") == 2
    assert "incomplete   1 rollout\n" in said("stats")
    assert "left out: 2 × incomplete: the rollout broke off" in said("export", "triplets", code=3)
    assert "1 of triplets → stdout" in said("export", "triplets", "--incomplete")
