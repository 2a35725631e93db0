"""A span that ended is in the store, however its process came to its end, and it is there once."""

import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_otel import Store
from lightning_otel import conventions as c

PROGRAM = '''
"""Ends spans, and notes in a shared file how many of them ``end()`` has come back from."""

import concurrent.futures, mmap, multiprocessing, os, signal, struct, subprocess, sys, time

import lightning_otel
from opentelemetry import trace

MODE, STORE, ACKS = sys.argv[1:4]
SPANS = 40
tracer = trace.get_tracer("program")


def work(slot, count=SPANS):
    with open(ACKS, "r+b") as file:
        acks = mmap.mmap(file.fileno(), 0)
    for number in range(count):
        tracer.start_span(f"{slot}.{number}", attributes={"text": "x" * 300}).end()
        struct.pack_into("Q", acks, 8 * slot, number + 1)


@lightning_otel.auto_trace(store=STORE)
def traced_work(slot):
    work(slot)


def end_of_one_process():
    if MODE.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, MODE))
    if MODE == "_exit":
        os._exit(3)
    if MODE == "abort":
        os.abort()
    if MODE == "execv":
        os.execv(sys.executable, [sys.executable, "-c", "raise SystemExit(5)"])
    if MODE == "sys.exit":
        sys.exit(4)
    if MODE == "exception":
        raise ValueError("the program's own")


def many_processes():
    kind, _, method = MODE.partition(" ")
    # A forked child is within the recording; any other one makes its own.
    target = work if method == "fork" else traced_work
    context = multiprocessing.get_context(method or "spawn")
    if kind == "process":
        children = [context.Process(target=target, args=(slot,)) for slot in (1, 2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
    if kind == "pool":
        with context.Pool(2) as pool:  # leaving it terminates the workers
            pool.map(target, [1, 2], chunksize=1)
    if kind == "executor":
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
            list(executor.map(target, [1, 2]))
    if kind == "grandchild":
        again = [sys.executable, __file__, "work 2", STORE, ACKS]
        script = f"import subprocess; subprocess.run({again!r}, check=True)"
        subprocess.run([sys.executable, "-c", script], check=True)
    if kind == "leaving":
        child = os.fork()
        work(1 if child else 2)
        if child:
            os.waitpid(child, 0)


def be_killed():
    """One child after the other works until it is killed."""
    for slot in range(int(MODE.split()[1])):
        child = os.fork()
        if not child:
            with lightning_otel.auto_trace(store=STORE, rollout_id=f"r{slot}"):
                work(slot, 10**9)
        print(child, flush=True)
        os.waitpid(child, 0)


if __name__ == "__main__":
    if MODE.startswith("work"):
        traced_work(int(MODE.split()[1]))
    elif MODE.startswith("killed"):
        be_killed()
    else:
        with lightning_otel.auto_trace(store=STORE):
            work(0)
            end_of_one_process()
            many_processes()
'''
SLOTS = 16


class Trial:
    """The program in one mode, with its store and its acknowledgements."""

    def __init__(self, folder: Path) -> None:
        self._program = folder / "program.py"
        self._program.write_text(PROGRAM)
        self._acks = folder / "acks"
        self._acks.write_bytes(bytes(8 * SLOTS))
        self.store = Store(folder / "traces.duckdb")

    def start(self, mode: str) -> "subprocess.Popen[str]":
        """The started program."""
        return subprocess.Popen(
            [sys.executable, str(self._program), mode, self.store.name, str(self._acks)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def acked(self) -> list[int]:
        """How many spans each process ended and knows of."""
        return list(struct.unpack(f"{SLOTS}Q", self._acks.read_bytes()))

    def check(self, *, extra: int = 0) -> None:
        """Every acknowledged span is stored, once, before settling and after.

        Args:
            extra: How many spans a process may have ended without knowing of it.
        """
        for _ in range(2):
            names = self._ended()
            assert len(names) == len(set(names))
            kept = [0] * SLOTS
            for name in names:
                slot, number = map(int, name.split("."))
                kept[slot] = max(kept[slot], number + 1)
            assert all(
                acked <= stored <= acked + extra
                for acked, stored in zip(self.acked(), kept, strict=True)
            )
            assert len(names) == sum(kept)
            self.store.settle()

    def _ended(self) -> list[str]:
        rows = self.store.sql(
            "SELECT name FROM spans WHERE scope = 'program' AND end_ns IS NOT NULL"
        )
        return [row["name"] for row in rows]

    def roots(self) -> list[bool]:
        """For each rollout's root span, whether it has an end."""
        rows = self.store.sql(
            "SELECT end_ns IS NOT NULL AS is_ended FROM spans WHERE name = ?", [c.SPAN_ROLLOUT]
        )
        return [row["is_ended"] for row in rows]


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    """A program and a store of its own."""
    return Trial(tmp_path)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_kill_at_any_moment_loses_no_acknowledged_span(trial: Trial) -> None:
    """SIGKILL comes at random, ten times; a killed rollout keeps its root, without an end."""
    program = trial.start("killed 10")
    assert program.stdout is not None
    for slot in range(10):
        child = int(program.stdout.readline())
        _wait_until(lambda slot=slot: trial.acked()[slot] > 0)  # type: ignore[misc]  # a default
        time.sleep(random.uniform(0, 0.03))
        os.kill(child, 9)
    _, errors = program.communicate(timeout=30)

    assert (program.returncode, errors) == (0, "")
    trial.check(extra=1)
    assert trial.roots() == [False] * 10


@pytest.mark.parametrize(
    ("mode", "status"),
    [
        ("SIGTERM", -15),
        ("SIGHUP", -1),
        ("SIGKILL", -9),
        ("abort", -6),
        ("_exit", 3),
        ("execv", 5),
        ("sys.exit", 4),
        ("exception", 1),
    ],
)
def test_exit_of_any_kind_loses_nothing(trial: Trial, mode: str, status: int) -> None:
    """The program ends as it would without us, and all it recorded is there."""
    program = trial.start(mode)
    output, errors = program.communicate(timeout=30)

    assert (program.returncode, output) == (status, "")
    assert errors == "" or errors.rstrip().endswith("ValueError: the program's own")
    assert trial.acked()[0] == 40
    trial.check()
    assert trial.roots() == [mode in ("sys.exit", "exception")]


@pytest.mark.parametrize(
    ("mode", "slots", "rollouts"),
    [
        ("process fork", 3, 1),
        ("process spawn", 3, 3),
        ("process forkserver", 3, 3),
        ("pool fork", 3, 1),
        ("executor fork", 3, 1),
        ("executor spawn", 3, 3),
        ("leaving", 3, 1),
    ],
)
def test_child_processes_lose_nothing(trial: Trial, mode: str, slots: int, rollouts: int) -> None:
    """What children of every kind record is kept, and each rollout has one root."""
    program = trial.start(mode)
    output, errors = program.communicate(timeout=40)

    assert (program.returncode, output, errors) == (0, "", "")
    assert trial.acked()[:slots] == [40] * slots
    trial.check()
    assert trial.roots() == [True] * rollouts


def test_grandchild_loses_nothing(trial: Trial) -> None:
    """A program started by a program that was started keeps its spans in the same store."""
    program = trial.start("grandchild")
    output, errors = program.communicate(timeout=40)

    assert (program.returncode, output, errors) == (0, "", "")
    assert trial.acked()[:3] == [40, 0, 40]
    trial.check()
    assert trial.roots() == [True, True]
