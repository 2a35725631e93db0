"""A span that ended is in the store, however its process came to its end, and it is there once."""

import json
import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.faults.harness import Counts, note, trials
from tests.waiting import wait_until

from lightning_otel import Store
from lightning_otel.types import conventions as c

PROGRAM = '''
"""Ends spans, and notes in a shared file how many of them ``end()`` has come back from."""

import concurrent.futures, json, mmap, multiprocessing, os, signal, struct, subprocess, sys, time

import lightning_otel
from opentelemetry import trace

TASK, STORE, ACKS = json.loads(sys.argv[1]), *sys.argv[2:4]
SPANS = 40
tracer = trace.get_tracer("program")


def work(slot, count=SPANS):
    with open(ACKS, "r+b") as file:
        acks = mmap.mmap(file.fileno(), 0)
    for number in range(count):
        tracer.start_span(f"{slot}.{number}", attributes={"text": "x" * 300}).end()
        struct.pack_into("Q", acks, 8 * slot, number + 1)


@lightning_otel.auto_trace(store=STORE)
def traced_work(slot, count=SPANS):
    work(slot, count)


def be_killed(slot):
    print(os.getpid(), flush=True)
    work(slot, 10**9)


def end(slot, way):
    """Come to an end, in the middle of a recording."""
    work(slot)
    if way.startswith("SIG"):
        number = getattr(signal, way)
        if signal.getsignal(number) is signal.SIG_IGN:  # as a program under nohup ignores SIGHUP
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if way == "_exit":
        os._exit(3)
    if way == "abort":
        os.abort()
    if way == "execv":
        os.execv(sys.executable, [sys.executable, "-c", "raise SystemExit(5)"])
    if way == "sys.exit":
        sys.exit(4)
    if way == "exception":
        raise ValueError("the program's own")


def use_children(slot, kind, method):
    """Have other processes work, each with a slot of its own."""
    work(slot)
    slots = [slot + 1, slot + 2]
    # A forked child is within the recording; any other one makes its own.
    target = work if method == "fork" and kind != "traced process" else traced_work
    context = multiprocessing.get_context(method)
    if kind.endswith("process"):
        children = [context.Process(target=target, args=(each,)) for each in slots]
        for child in children:
            child.start()
        for child in children:
            child.join()
    if kind == "pool":
        with context.Pool(2) as pool:  # leaving it terminates the workers
            pool.map(target, slots, chunksize=1)
    if kind == "executor":
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
            list(executor.map(target, slots))
    if kind == "grandchild":
        again = [sys.executable, __file__, json.dumps([["traced_work", slots[0]]]), STORE, ACKS]
        script = f"import subprocess; subprocess.run({again!r}, check=True)"
        subprocess.run([sys.executable, "-c", script], check=True)
    if kind == "_exit":
        child = os.fork()
        if not child:
            work(slots[0])
            os._exit(0)
        os.waitpid(child, 0)
        work(slots[1])
    if kind == "both leave":
        child = os.fork()
        work(slots[1] if child else slots[0])
        if child:
            os.waitpid(child, 0)
    if kind == "all leave":
        children = []
        for each in slots:
            children.append(os.fork())
            if not children[-1]:
                work(each)
                sys.exit(0)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    statuses = []
    for name, *arguments in TASK:
        child = os.fork()
        if not child:
            if name.startswith("traced_work"):
                globals()[name](*arguments)
            else:
                with lightning_otel.auto_trace(store=STORE):
                    globals()[name](*arguments)
            sys.exit()
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(json.dumps(statuses))
'''
SLOTS = 32


class Trial:
    """The program with a store and acknowledgements of its own."""

    def __init__(self, folder: Path) -> None:
        self._program = folder / "program.py"
        self._program.write_text(PROGRAM)
        self._acks = folder / "acks"
        self._acks.write_bytes(bytes(8 * SLOTS))
        self.store = Store(folder / "traces.duckdb")

    def start(self, *task: tuple[object, ...]) -> "subprocess.Popen[str]":
        command = [sys.executable, self._program, json.dumps(task), self.store.name, self._acks]
        return subprocess.Popen(
            [str(word) for word in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def acked(self) -> list[int]:
        """How many spans each process ended and knows of."""
        return list(struct.unpack(f"{SLOTS}Q", self._acks.read_bytes()))

    def check(self, row: str = "", *, extra: int = 0) -> None:
        """Every acknowledged span is stored, once, before settling and after."""
        self._check_once(extra)
        self.store.settle()
        self._check_once(extra)
        if row:
            names, acked = self._ended(), self.acked()
            counts = Counts(sum(acked), len(names), 0, len(names) - len(set(names)))
            note(row, counts, sum(count > 0 for count in acked))

    def _check_once(self, extra: int) -> None:
        names = self._ended()
        assert len(names) == len(set(names))
        kept = [0] * SLOTS
        for name in names:
            slot, number = map(int, name.split("."))
            kept[slot] = max(kept[slot], number + 1)
        assert len(names) == sum(kept)
        found = self.store.accounting()
        assert found.is_balanced, found
        assert not found.dropped, found
        off = {
            slot: (acked, stored)
            for slot, (acked, stored) in enumerate(zip(self.acked(), kept, strict=True))
            if not acked <= stored <= acked + extra
        }
        assert not off, found

    def _ended(self) -> list[str]:
        rows = self.store.sql(
            "SELECT name FROM spans WHERE scope = 'program' AND end_ns IS NOT NULL"
        )
        return [row["name"] for row in rows]

    def roots(self) -> list[bool]:
        """For each rollout's root span, in order of their start, whether it has an end."""
        rows = self.store.sql(
            "SELECT end_ns IS NOT NULL AS is_ended FROM spans WHERE name = ? ORDER BY start_ns",
            [c.SPAN_ROLLOUT],
        )
        return [row["is_ended"] for row in rows]


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


@pytest.mark.parametrize("again", range(trials(5, 1)))
@pytest.mark.pain(6)
def test_kill_at_any_moment_loses_no_acknowledged_span(trial: Trial, again: int) -> None:
    """SIGKILL comes at random, ten times; a killed rollout keeps its root, without an end."""
    program = trial.start(*(("be_killed", slot) for slot in range(10)))
    assert program.stdout is not None
    for slot in range(10):
        child = int(program.stdout.readline())
        wait_until(lambda slot=slot: trial.acked()[slot] > 0)  # type: ignore[misc]  # a default
        time.sleep(random.uniform(0, 0.03))
        os.kill(child, 9)
    output, errors = program.communicate(timeout=30)

    assert (json.loads(output), errors) == ([-9] * 10, "")
    trial.check("L3", extra=1)
    assert trial.roots() == [False] * 10


@pytest.mark.pain(6)
def test_exit_of_any_kind_loses_nothing(trial: Trial) -> None:
    """A program ends as it would without us, and all it recorded is there."""
    statuses = {
        "SIGTERM": -15,
        "SIGHUP": -1,
        "SIGKILL": -9,
        "abort": -6,
        "_exit": 3,
        "execv": 5,
        "sys.exit": 4,
        "exception": 1,
        "end of the program": 0,
    }

    program = trial.start(*(("end", slot, way) for slot, way in enumerate(statuses)))
    output, errors = program.communicate(timeout=50)

    assert dict(zip(statuses, json.loads(output), strict=True)) == statuses
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("ValueError: the program's own")
    assert trial.acked()[: len(statuses)] == [40] * len(statuses)
    trial.check("L4")
    assert trial.roots() == [False] * 6 + [True] * 3


@pytest.mark.pain(6)
def test_forked_children_of_any_kind_lose_nothing(trial: Trial) -> None:
    """What forked children record is kept, and each rollout has one root, whoever ends it."""
    kinds = (
        "process", "traced process", "pool", "executor", "_exit", "both leave", "all leave",
    )  # fmt: skip

    program = trial.start(
        *(("use_children", 3 * number, kind, "fork") for number, kind in enumerate(kinds))
    )
    output, errors = program.communicate(timeout=50)

    assert (json.loads(output), errors) == ([0] * 7, "")
    assert trial.acked()[:21] == [40] * 21
    trial.check("L5")
    assert trial.roots() == [True] * (7 + 2)  # the traced processes have their own


@pytest.mark.parametrize(
    ("kind", "method", "acked"),
    [
        ("process", "spawn", [40, 40, 40]),
        ("process", "forkserver", [40, 40, 40]),
        ("executor", "forkserver", [40, 40, 40]),
        ("grandchild", "spawn", [40, 40, 0]),
    ],
)
def test_started_children_of_any_kind_lose_nothing(
    trial: Trial, kind: str, method: str, acked: list[int]
) -> None:
    """Programs that a traced program starts keep their own spans in the same store."""
    program = trial.start(("use_children", 0, kind, method))
    output, errors = program.communicate(timeout=50)

    assert (output.splitlines()[-1], errors) == ("[0]", "")
    assert trial.acked()[:3] == acked
    trial.check("L5")
    assert trial.roots() == [True] * sum(count > 0 for count in acked)


@pytest.mark.pain(5)
def test_eight_writers_and_a_reader_agree(trial: Trial) -> None:
    """A reader that polls and settles while eight programs write sees a count that only grows."""
    trial.store.writer()  # makes the store, so that the reader finds one

    programs = [trial.start(("traced_work", slot, 400)) for slot in range(8)]
    counts = []
    while any(program.poll() is None for program in programs):
        (row,) = trial.store.sql("SELECT count(*) AS n FROM spans WHERE scope = 'program'")
        counts.append(row["n"])
        trial.store.settle()

    ends = [program.communicate() for program in programs]
    assert ends == [("[0]\n", "")] * 8
    assert counts == sorted(counts)
    assert trial.acked()[:8] == [400] * 8
    trial.check("L13")
