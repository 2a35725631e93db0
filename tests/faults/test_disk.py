"""A disk that is full, gone or slow (rows L9, L11, L12), and a clock that jumps (L21).

The host does not notice, what waited is written when the disk answers, and each loss is counted.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.faults.harness import IS_FULL, Host, Outcome, note, trials
from tests.processes.conftest import WAYS

from lightning_otel import Store
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

STORE = """
import glob, resource, shutil
is_recorded = "TRACEPARENT" in os.environ
store = os.environ["LIGHTNING_OTEL_STORE"] + ".d" if is_recorded else "nowhere"
def segments():
    return glob.glob(store + "/live/*-*.ndjson")
"""


def test_disk_full_in_the_middle_of_a_record_loses_nothing(tmp_path: Path) -> None:
    """L9: of a record only a part fits; with room again all later ones are there."""
    host = Host(
        tmp_path,
        STORE,
        """
        for number in range(int(sys.argv[1])):
            end("before", 2000)
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            size = max([os.path.getsize(path) for path in segments()], default=10_000)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 700, hard))
            for _ in range(20):
                end("full", 2000)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            end("after", 2000)
        print("done")
        """,
    )
    times = trials(50, 5)

    host.check(times, warnings=1, row="L9", tries=times)


def test_disk_full_for_too_long_loses_a_counted_number(tmp_path: Path) -> None:
    """L9: beyond 8 MiB spans are lost, and their number is in the store to the span."""
    host = Host(
        tmp_path,
        STORE,
        """
        end("before")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = max([os.path.getsize(path) for path in segments()], default=10_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 700, hard))
        for _ in range(150):
            end("full", 100_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        end("after", 2000)
        print("done")
        """,
    )

    done = host.run()
    found = host.accounted()
    counts = host.settled_counts(lost=found.dropped["disk"])

    assert (done.code, done.output) == (0, "done\n")
    assert len(done.errors.splitlines()) == 1
    assert found.ended == counts.ended == 152
    note("L9", counts, counted=found.dropped["disk"])
    assert 100 < found.dropped["disk"] < 120  # a span's start takes as much room as its end


def test_disk_full_to_the_end_says_what_is_lost(tmp_path: Path) -> None:
    """L9: what waits in memory dies with the process; its number is said, and in the store."""
    host = Host(
        tmp_path,
        STORE,
        """
        for _ in range(100):
            end("before")
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(segments()[0]) + 700, hard))
        for _ in range(500):
            end("full", 2000)
        print("done")
        """,
    )

    done = host.run()
    found = host.accounted()
    counts = host.settled_counts(lost=500)

    assert (done.code, done.output) == (0, "done\n")
    assert "500 spans are lost" in done.errors
    assert (found.ended, found.stored, found.dropped) == (600, 100, {"disk": 500})
    note("L9", counts, counted=500)


def test_run_on_a_full_disk_says_what_was_not_stored(tmp_path: Path) -> None:
    """R20: the program ends as it would, and no error of DuckDB is shown."""
    store = tmp_path / "s.duckdb"
    Store(store).add([])
    command = ["-m", "lightning_otel", "run", "--store", str(store), "--", "python", "-c"]
    shown = shlex.join([sys.executable, *command, "import lightning_otel; print('done')"])

    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 0; exec {shown}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "1 span not stored: the disk did not take them" in done.stderr
    assert "error" not in done.stderr.lower()


COMMANDS = """
import contextlib, ctypes, io, json, os, resource, sys
from lightning_otel.cli import main
fault, *lines = sys.argv[1:]
if fault == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
elif os.geteuid() == 0 and not all(  # root may write anywhere, but without these capabilities
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0 for capability in (1, 2, 3)
):
    sys.exit(77)
elif os.geteuid() == 0 and "again" not in os.environ:
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "again": "1"})
answers = []
for line in lines:
    sys.argv, out = ["lightning-otel", *line.split()], io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main()
        except SystemExit as exc:
            answers.append((line, exc.code, out.getvalue()))
print(json.dumps(answers))
"""


@pytest.mark.parametrize(
    ("fault", "remedy"), [("full", "disk is full"), ("read-only", "read-only here")]
)
def test_commands_say_what_the_disk_refused(
    store: Store, tmp_path: Path, fault: str, remedy: str
) -> None:
    """L9, L11: commands that read go on; of the others each says what to do about the disk."""
    for number in range(1, 3):
        store.add([Span(f"{number:032x}", f"{number:016x}", None, "chat", number, number + 1,
                        attributes={c.OPERATION: "chat", "key": "sk-" + "a1" * 20})])  # fmt: skip
        store.writer().seal()
    folder = Path(f"{store.name}.d")
    if fault == "read-only":
        store.settle()
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o500 if path.is_dir() else 0o400)
    reads = ["ls", "show", "stats", "export spans -o -", "export sft --dry-run", "tail --once"]
    writes = ["compact", "reward @last 1", "redact --secrets --yes"]
    # Of this kind of a full disk SQLite knows no more than that it failed.
    writes += (
        [f"export spans -o {tmp_path}/o.jsonl"]
        if fault == "full"
        else ["resources publish p x", "tail --consumer me --once"]
    )
    lines = [f"{line} --store {store.name}" for line in (*reads, *writes)]

    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, fault, *lines],
        capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path,
    )  # fmt: skip
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o700)

    if done.returncode == 77:
        pytest.skip("root may write anywhere here")
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    for number, (line, code, text) in enumerate(answers):
        # With no room for temporary files, either, some that read say so, too.
        if number >= len(reads) or (fault == "full" and code not in (0, 3)):
            assert code in (1, 2, 4), (line, text)
            assert remedy in text.rpartition("try: ")[2], (line, text)
        else:
            assert code in (0, 3), (line, text)


def test_disk_that_takes_back_what_it_refused_keeps_each_line_whole(tmp_path: Path) -> None:
    """L9: part of a line lands, then the disk says no; no later line is swallowed.

    The half write is a patch of ``os.write``: no disk at hand does that on command.
    """
    host = Host(
        tmp_path,
        """
        write = os.write
        def half(descriptor, data):
            if descriptor == _acks:
                return write(descriptor, data)
            write(descriptor, data[: len(data) // 2])
            raise OSError(5, "it broke")
        for _ in range(20):
            span = tracer.start_span("refused")
            os.write = half
            span.end()
            acknowledge()
            os.write = write
            end("taken")
        """,
    )

    host.check(warnings=1, is_compared=False, row="L9")


def test_store_that_is_removed_is_made_again(tmp_path: Path) -> None:
    """L11: what stood in the removed segment is counted, what comes later is stored."""
    host = Host(
        tmp_path,
        STORE,
        """
        for _ in range(int(sys.argv[1])):
            for _ in range(7):
                end("before")
            shutil.rmtree(store, ignore_errors=True)
            for _ in range(5):
                end("after")
        print("done")
        """,
    )
    times = trials(50, 3)

    # Of what came after the last removal, all; of what was removed, the number.
    host.check(times, warnings=1, lost=7 * times + 5 * (times - 1), row="L11", tries=times)

    assert host.accounted().dropped == {"removed": 7 * times + 5 * (times - 1)}


def test_store_that_may_not_be_written_loses_nothing(tmp_path: Path) -> None:
    """L11: spans wait for the permission."""
    host = Host(
        tmp_path,
        STORE,
        """
        def allow(is_allowed):
            for folder in (store + "/new", store + "/live"):
                if os.path.isdir(folder):
                    os.chmod(folder, 0o700 if is_allowed else 0o500)
            if os.geteuid() == 0 or is_allowed and os.getuid() == 0:
                os.seteuid(0 if is_allowed else 65534)  # root may write anywhere
        allow(False)
        for _ in range(50):
            end("refused")
        if os.getuid() == 0:
            os.seteuid(0)
        allow(True)
        end("after")
        print("done")
        """,
    )

    host.check(warnings=1, row="L11")


def test_program_out_of_descriptors_loses_nothing(tmp_path: Path) -> None:
    """L11: with no descriptor left for a segment, spans wait until there is one."""
    host = Host(
        tmp_path,
        """
        import resource
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        taken = []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        for _ in range(50):
            end("refused")
        for descriptor in taken:
            os.close(descriptor)
        end("after")
        print("done")
        """,
    )

    host.check(warnings=1, row="L11")


@pytest.mark.timeout(120)
def test_write_that_hangs_stalls_the_program_once(tmp_path: Path) -> None:
    """L12: one stall; then spans wait in memory, more than fit ask again, and none is lost.

    The hang is a patch of ``os.write``: no disk at hand hangs on command.
    """
    host = Host(
        tmp_path,
        """
        hang_s = float(sys.argv[1])
        write, hanging_until = os.write, 0.0
        def hang(descriptor, data):
            if descriptor != _acks and time.monotonic() < hanging_until:
                time.sleep(hang_s)
            return write(descriptor, data)
        os.write = hang
        end("before")
        stalls = []
        def timed(size):
            began = time.monotonic()
            end("work", size)
            stalls.append(time.monotonic() - began)
        hanging_until = time.monotonic() + hang_s * 1.4
        while time.monotonic() < hanging_until + hang_s:
            timed(1000)
            time.sleep(0.005)
        hanging_until = time.monotonic() + hang_s / 2
        for _ in range(200):
            timed(100_000)
        print(sum(stall > hang_s * 0.9 for stall in stalls), max(stalls) < hang_s * 1.5)
        """,
    )
    hang_s = 2 if IS_FULL else 1.3

    done = host.run(hang_s)
    before = host.accounted()
    note("L12", host.settled_counts())

    assert (done.code, done.output, done.errors) == (0, "2 True\n", "")
    assert (before.slow_writes, before.dropped) == (2, {})
    assert before.slow_held > 50


SLOW = """
write, writes = os.write, 0
def slow(descriptor, data):
    global writes
    if descriptor != _acks:
        writes += 1
        time.sleep(slow_s(writes))
    return write(descriptor, data)
os.write = slow
"""
"""Each write takes as long as the function ``slow_s`` says of its number.

A patch of ``os.write``: no disk at hand is slow on command.
"""


@pytest.mark.parametrize("write_s", [0.025, 0.1, 0.4])
@pytest.mark.parametrize("door", WAYS)
def test_program_on_a_slow_disk_ends_with_a_write_a_span(
    tmp_path: Path, door: str, write_s: float
) -> None:
    """L12: below a second no span waits in memory, and starts ride with the next end."""
    host = Host(
        tmp_path,
        SLOW,
        f"""
        slow_s = lambda number: {write_s}
        for _ in range(20):
            end("work")
        print(writes)
        """,
    )

    began = time.monotonic()
    done = subprocess.run(
        [*WAYS[door], str(host.path)],
        env={**host.environment(is_recorded=False), "LIGHTNING_OTEL_STORE": host.store.name}
        | {"LIGHTNING_OTEL": "1"},
        capture_output=True, text=True, timeout=50, check=False, cwd=tmp_path,
    )  # fmt: skip
    took_s = time.monotonic() - began

    (row,) = host.store.sql("SELECT count(end_ns) AS n FROM spans WHERE scope = 'host'")
    account = host.accounted()
    assert (done.returncode, row["n"]) == (0, 20), done.stderr
    assert int(done.stdout) <= 20 + 4  # the rollout's own, the segment's first line, two starts
    assert took_s < 1.2 * 20 * write_s + 10
    assert (account.slow_writes, account.slow_held, account.dropped) == (0, 0, {})


def test_disk_that_hangs_at_every_write_holds_the_thread_inside_alone(tmp_path: Path) -> None:
    """L12: the others stand still for a second in all, and the end of the program asks no more."""
    host = Host(
        tmp_path,
        SLOW,
        """
        until = time.monotonic() + 6
        slow_s = lambda number: 15.0
        stalls = []
        def work():
            stall_s = 0.0
            while time.monotonic() < until:
                began = time.monotonic()
                end("work", 100)
                stall_s += time.monotonic() - began
                time.sleep(0.01)
            stalls.append(stall_s)
        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        print(sorted(stalls)[1])
        """,
    )

    done = host.run()
    counts = host.counts()

    assert done.code == 0
    assert float(done.output) < 1.5
    assert done.wall_s < 15 + 5
    assert counts.lost > 50
    assert lost_as_told(done) == counts.lost


def lost_as_told(done: Outcome) -> int:
    """How many spans a program said were lost; nothing else is said."""
    (line,) = done.errors.splitlines()
    match = re.match(r"(\d+) spans are lost: .* hangs to the end", line)
    assert match is not None, line
    return int(match[1])


@pytest.mark.parametrize(
    ("way", "output", "lost"),
    [
        ("time.sleep(1.5); end('next')", "", 0),
        ("", "", 21),
        ("print(trace.get_tracer_provider().force_flush()); sys.stdout.flush()", "False\n", 21),
    ],
    ids=["next span", "exit", "force_flush"],
)
def test_spans_that_wait_for_a_hanging_disk(
    tmp_path: Path, way: str, output: str, lost: int
) -> None:
    """L12: the next span writes them once the disk has rested; on the way out it is not asked."""
    host = Host(
        tmp_path,
        SLOW,
        f"""
        from opentelemetry.sdk.trace import TracerProvider
        trace.set_tracer_provider(TracerProvider())  # ours is not shown to the program
        slow_s = lambda number: 1.3 if number == 3 else 0
        end("before")
        for _ in range(21):
            end("waits")
        {way}
        """,
    )

    done = host.run()
    account, counts = host.accounted(), host.counts()

    assert (done.code, done.output, counts.lost, account.dropped) == (0, output, lost, {})
    if lost:
        assert lost_as_told(done) == lost
    else:
        assert (account.slow_writes, account.slow_held, done.errors) == (1, 21, "")


def test_interpreter_that_is_held_is_no_slow_disk(tmp_path: Path) -> None:
    """L12: a library that keeps the interpreter's lock for over a second loses no span."""
    host = Host(
        tmp_path,
        """
        import ctypes
        sleep_holding_the_lock = ctypes.PyDLL(None).usleep
        is_over = False
        def work():
            while not is_over:
                end("work")
        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        for _ in range(3):
            sleep_holding_the_lock(1_300_000)
            time.sleep(0.01)
        is_over = True
        os._exit(0)
        """,
    )

    host.run()

    assert host.counts().lost == 0
    assert host.accounted().slow_held == 0


def test_processors_that_a_crowd_wants_are_no_slow_disk(tmp_path: Path) -> None:
    """L12: among many busy processes a long write is not the disk's, whose threads wait as well."""
    host = Host(
        tmp_path,
        SLOW,
        """
        import subprocess
        crowd = [
            subprocess.Popen(["nice", "-n", "19", "sh", "-c", "while :; do :; done"])
            for _ in range(40 * os.cpu_count())
        ]
        try:
            time.sleep(1)
            slow_s = lambda number: 1.3 if number == 3 else 0
            for _ in range(22):
                end("work")
        finally:
            for process in crowd:
                process.kill()
        os._exit(0)
        """,
    )

    host.run()

    counts = host.counts()
    assert (counts.lost, host.accounted().slow_held) == (0, 0)
    assert host.accounted().stored >= 22


@pytest.mark.parametrize("moment", ["before", "between"])
def test_descriptor_that_is_reused_gets_no_byte(tmp_path: Path, moment: str) -> None:
    """S13: the program closes all descriptors and opens files, before a span or in the middle."""
    host = Host(
        tmp_path,
        f"""
        def reuse():
            global _acks, files
            os.closerange(3, 4096)
            files = [open(f"file-{{number}}", "wb") for number in range(1200)]
            _acks = os.open(os.environ["FAULT_ACKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        end("first")
        if {moment == "before"}:
            reuse()
        span = tracer.start_span("work")
        if {moment == "between"}:
            reuse()
        span.end()
        acknowledge()
        end("last")
        print(sum(os.path.getsize(file.name) for file in files))
        """,
    )

    done = host.run()

    assert (done.code, done.output, done.errors) == (0, "0\n", "")
    assert host.settled_counts().lost == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root has privileges to drop")
def test_children_that_may_not_write_say_what_is_lost(tmp_path: Path) -> None:
    """S12: a program drops its privileges and forks."""
    host = Host(
        tmp_path,
        """
        end("before")
        os.setgid(65534)
        os.setuid(65534)
        end("after")
        for _ in range(4):
            child = os.fork()
            if not child:
                for _ in range(10):
                    tracer.start_span("child").end()
                sys.exit(0)
            os.waitpid(child, 0)
        """,
    )
    tmp_path.chmod(0o755)

    done = host.run()

    assert (done.code, host.counts().lost) == (0, 0)
    assert done.errors.count("refuses spans ([Errno 13] Permission denied") == 4
    assert done.errors.count("10 spans are lost") == 4
    assert len(done.errors.splitlines()) == 8


def test_program_on_a_disk_without_locks_is_told(tmp_path: Path) -> None:
    """L11: a lock that keeps nobody out is noticed before spans are lost by it.

    A patch of ``fcntl.flock``: no filesystem at hand is without locks.
    """
    host = Host(
        tmp_path,
        """
        import fcntl
        fcntl.flock = lambda descriptor, operation: None
        end("one")
        end("two")
        """,
    )

    done = host.run()

    assert done.code == 0
    assert done.errors.count("file locks do not work") == 1


def test_clock_that_goes_back_leaves_no_negative_duration(tmp_path: Path) -> None:
    """L21: the wall clock is set back by an hour; the order is that of the sequence numbers."""
    host = Host(
        tmp_path,
        """
        import opentelemetry.sdk.trace as sdk
        now, back = sdk.time_ns, 0
        sdk.time_ns = lambda: now() - back
        end("first")
        span = tracer.start_span("across")
        time.sleep(0.05)
        back = 3_600_000_000_000
        span.end()
        acknowledge()
        end("last")
        """,
    )

    host.check(row="L21")

    rows = host.store.sql(
        "SELECT name, (end_ns - start_ns) / 1e9 AS s FROM spans WHERE scope = 'host' "
        "ORDER BY process, sequence"
    ).rows()
    assert [row["name"] for row in rows] == ["first", "across", "last"]
    assert all(row["s"] >= 0 for row in rows)
    assert 0.05 <= rows[1]["s"] < 30
    assert json.dumps(rows)
