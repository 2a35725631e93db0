"""However a process ends, every span whose end returned is in the store, once."""

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lightning_otel import Store

TRACED = """\
import os, signal, subprocess, sys
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
import lightning_otel as lo

STORE, LOG = sys.argv[1], sys.argv[2]

def work(count=20):
    with lo.auto_trace(store=STORE):
        for _ in range(count):
            span_id = lo.emit_message("x" * 500)
            with open(LOG, "a") as log:
                log.write(span_id + "\\n")

def child():
    work()

if __name__ == "__main__":
    with lo.auto_trace(store=STORE):
        work()
        WAY
"""
WAYS = {
    "returns": ("pass", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "raises": ("raise RuntimeError('x')", 1),
    "os._exit": ("os._exit(4)", 4),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "SIGHUP": ("os.kill(os.getpid(), signal.SIGHUP)", -signal.SIGHUP),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "abort": ("os.abort()", -signal.SIGABRT),
    "execv": ("os.execv(sys.executable, [sys.executable, '-c', 'pass'])", 0),
    "fork and _exit": ("p = os.fork(); (work(), os._exit(0)) if p == 0 else os.waitpid(p, 0)", 0),
    "multiprocessing fork": (
        "p = mp.get_context('fork').Process(target=child); p.start(); p.join()",
        0,
    ),
    "multiprocessing spawn": (
        "p = mp.get_context('spawn').Process(target=child); p.start(); p.join()",
        0,
    ),
    "multiprocessing forkserver": (
        "p = mp.get_context('forkserver').Process(target=child); p.start(); p.join()",
        0,
    ),
    "pool killed on leaving": ("pool = mp.get_context('fork').Pool(2); pool.map(work, [10] * 4); "
        "pool.terminate()", 0),
    "ProcessPoolExecutor": ("list(ProcessPoolExecutor(2).map(work, [10] * 4))", 0),
    "grandchild": ("subprocess.run([sys.executable, sys.argv[0], STORE, LOG, 'leaf'])", 0),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_exit_loses_no_ended_span(tmp_path: Path, way: str) -> None:
    """Every span id that was told before the end is stored once, and the exit status is its own."""
    code, status = WAYS[way]
    if way == "grandchild":
        code = f"len(sys.argv) > 3 or {code}"
    script, log = tmp_path / "traced.py", tmp_path / "log"
    script.write_text(TRACED.replace("WAY", code))

    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store"), str(log)],
        capture_output=True,
        timeout=50,
    )

    assert done.returncode == status, done.stderr.decode()
    _check(Store(tmp_path / "store"), log.read_text().split())


def test_eight_writers_and_a_reader_agree(tmp_path: Path) -> None:
    """A reader that polls while eight processes write sees a count that only grows."""
    script = tmp_path / "traced.py"
    script.write_text(TRACED.replace("work()\n        WAY", "work(400)"))
    logs = [tmp_path / f"log{number}" for number in range(8)]
    store = Store(tmp_path / "store")
    store.writer()  # makes the store, so that the reader finds one
    writers = [
        subprocess.Popen([sys.executable, str(script), str(tmp_path / "store"), str(log)])
        for log in logs
    ]

    counts = []
    while any(writer.poll() is None for writer in writers):
        (row,) = store.sql("SELECT count(*) AS n FROM spans WHERE name = 'agentlightning.message'")
        counts.append(row["n"])
        store.settle()
    told = [line for log in logs for line in log.read_text().split()]

    assert [writer.returncode for writer in writers] == [0] * 8
    assert counts == sorted(counts)
    assert len(told) == 8 * 400
    _check(store, told)


def _check(store: Store, told: list[str]) -> None:
    rows = Counter(row["span_id"] for row in store.sql("SELECT span_id FROM spans"))

    assert [span_id for span_id in told if rows[span_id] != 1] == []
    assert max(rows.values()) == 1


def test_fork_in_the_middle_leaves_both_sides_whole(tmp_path: Path) -> None:
    """A span open at a fork and ended on both sides is one row, and nobody else's is lost."""
    code = (
        "pids = []\n"
        "        for _ in range(5):\n"
        "            pid = os.fork()\n"
        "            if pid == 0:\n"
        "                work(5)\n"
        "                sys.exit(0)\n"
        "            pids.append(pid)\n"
        "        [os.waitpid(pid, 0) for pid in pids]"
    )
    script, log = tmp_path / "traced.py", tmp_path / "log"
    script.write_text(TRACED.replace("WAY", code))

    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store"), str(log)],
        capture_output=True,
        timeout=50,
    )

    assert done.returncode == 0, done.stderr.decode()
    told = log.read_text().split()
    assert len(told) == 20 + 5 * 5
    _check(Store(tmp_path / "store"), told)
