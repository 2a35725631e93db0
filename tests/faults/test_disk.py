"""A disk that is full, gone or slow (rows L9, L11, L12), and a clock that jumps (L21).

The host does not notice, what waited is written when the disk answers, and each loss is counted.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.harness import Host, note, trials

from lightning_otel.store.layout import Layout

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
        STORE
        + """
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
        """.replace("\n        ", "\n"),
    )
    times = trials(50, 5)

    host.check(times, warnings=1, row="L9", tries=times)


def test_disk_full_for_too_long_loses_a_counted_number(tmp_path: Path) -> None:
    """L9: beyond 8 MiB spans are lost, and their number is in the store to the span."""
    host = Host(
        tmp_path,
        STORE
        + """
        end("before")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = max([os.path.getsize(path) for path in segments()], default=10_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 700, hard))
        for _ in range(150):
            end("full", 100_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        end("after", 2000)
        print("done")
        """.replace("\n        ", "\n"),
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
        STORE
        + """
        for _ in range(100):
            end("before")
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(segments()[0]) + 700, hard))
        for _ in range(500):
            end("full", 2000)
        print("done")
        """.replace("\n        ", "\n"),
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
    Layout(store).create()
    command = ["-m", "lightning_otel", "run", "--store", str(store), "--", "python", "-c"]
    shown = shlex.join([sys.executable, *command, "import lightning_otel; print('done')"])

    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 0; exec {shown}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "1 span not stored: the disk did not take them" in done.stderr
    assert "error" not in done.stderr.lower()


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
        STORE
        + """
        for _ in range(int(sys.argv[1])):
            for _ in range(7):
                end("before")
            shutil.rmtree(store, ignore_errors=True)
            for _ in range(5):
                end("after")
        print("done")
        """.replace("\n        ", "\n"),
    )
    times = trials(50, 3)

    # Of what came after the last removal, all; of what was removed, the number.
    host.check(times, warnings=1, lost=7 * times + 5 * (times - 1), row="L11", tries=times)

    assert host.accounted().dropped == {"removed": 7 * times + 5 * (times - 1)}


def test_store_that_may_not_be_written_loses_nothing(tmp_path: Path) -> None:
    """L11: spans wait for the permission."""
    host = Host(
        tmp_path,
        STORE
        + """
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
        """.replace("\n        ", "\n"),
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
    hang_s = trials(2, 1)

    done = host.run(hang_s)
    before = host.accounted()
    note("L12", host.settled_counts())

    assert (done.code, done.output, done.errors) == (0, "2 True\n", "")
    assert (before.slow_writes, before.dropped) == (2, {})
    assert before.slow_held > 50


@pytest.mark.parametrize(
    ("write_s", "threads", "stall_s"),
    [(0.4, 1, 3.0), (0.1, 1, 3.0), (15.0, 3, 1.5)],
    ids=["slow", "less-slow", "hangs"],
)
def test_disk_that_is_slow_at_every_write_takes_a_share_of_the_time(
    tmp_path: Path, write_s: float, threads: int, stall_s: float
) -> None:
    """L12: in ten seconds a thread stands still for few; one that is in the write has no bound.

    The slow write is a patch of ``os.write``: no disk at hand is slow on command.
    """
    host = Host(
        tmp_path,
        """
        write_s, threads = float(sys.argv[1]), int(sys.argv[2])
        write, until = os.write, time.monotonic() + 6
        def slow(descriptor, data):
            if descriptor != _acks and time.monotonic() < until:
                time.sleep(write_s)
            return write(descriptor, data)
        os.write = slow
        stalls = []
        def work():
            stall_s = 0.0
            while time.monotonic() < until:
                began = time.monotonic()
                end("work", 100)
                stall_s += time.monotonic() - began
                time.sleep(0.01)
            stalls.append(stall_s)
        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        print(sorted(stalls)[max(0, threads - 2)])
        """,
    )

    done = host.run(write_s, threads)
    found = host.accounted()

    assert float(done.output) < stall_s
    assert (done.code, done.errors, found.dropped) == (0, "", {})
    assert found.slow_held > 50
    assert host.counts().lost == 0


@pytest.mark.parametrize("is_flushed", [False, True], ids=["exit", "force_flush"])
def test_spans_that_wait_for_a_slow_disk_are_kept_at_the_end(
    tmp_path: Path,
    is_flushed: bool,
) -> None:
    """L12: the program ends, or flushes, while its spans wait in memory.

    The slow write is a patch of ``os.write``: no disk at hand is slow on command.
    """
    host = Host(
        tmp_path,
        """
        from opentelemetry.sdk.trace import TracerProvider
        trace.set_tracer_provider(TracerProvider())  # ours is not shown to the program
        write = os.write
        def slow(descriptor, data):
            os.write = write
            time.sleep(1)
            return write(descriptor, data)
        end("before")
        os.write = slow
        for _ in range(20):
            end("waits")
        if sys.argv[1] == "True":
            print(trace.get_tracer_provider().force_flush())
            sys.stdout.flush()
            os._exit(0)
        """,
    )

    done = host.run(is_flushed)
    found = host.accounted()

    assert (done.code, done.output) == (0, "True\n" if is_flushed else "")
    assert (found.slow_writes, found.slow_held, found.dropped) == (1, 20, {})


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
