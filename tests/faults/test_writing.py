"""Ways to end spans, and to fork meanwhile (rows L1, L2, L6, L7): nothing is lost or doubled.

Kills, exits and children of other kinds (L3, L4, L5) are in ``tests/processes``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.harness import Host, note, trials


@pytest.mark.timeout(300)
def test_burst_of_one_thread_loses_nothing(tmp_path: Path) -> None:
    """L1: spans of 2 KB as fast as one thread can."""
    host = Host(
        tmp_path,
        """
        for number in range(int(sys.argv[1])):
            end(str(number), 2000)
        print("done")
        """,
    )
    count = trials(100_000, 3_000)

    host.check(count, limit_s=200, row="L1")

    assert host.acked == count


@pytest.mark.timeout(300)
def test_many_threads_lose_nothing(tmp_path: Path) -> None:
    """L2: 200 threads, each with spans of its own."""
    host = Host(
        tmp_path,
        """
        def work(which):
            for number in range(int(sys.argv[1])):
                end(f"{which}.{number}", 200)
        threads = [threading.Thread(target=work, args=(which,)) for which in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print("done")
        """,
    )
    each = trials(500, 15)

    host.check(each, limit_s=200, row="L2")

    assert host.acked == 200 * each


def test_handlers_of_signals_are_the_programs_own(tmp_path: Path) -> None:
    """L4: no handler, exit hook or thread of ours appears in a recorded program."""
    host = Host(
        tmp_path,
        """
        import atexit
        end()
        names = sorted(signal.Signals, key=int)
        print([str(signal.getsignal(number)) for number in names])
        print(threading.active_count(), sys.excepthook is sys.__excepthook__)
        print(signal.getitimer(signal.ITIMER_REAL))
        """,
    )

    host.check()


def test_span_open_at_a_fork_is_one(tmp_path: Path) -> None:
    """L6: ended on both sides, it is stored once and counted once as rejected."""
    host = Host(
        tmp_path,
        """
        span = tracer.start_span("shared")
        child = os.fork()
        span.end()
        if child:
            acknowledge()
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            os._exit(0)
        """,
    )

    host.check(row="L6")

    found = host.accounted()
    assert (found.ended, found.stored, found.rejected) == (2, 1, {"foreign": 1})


@pytest.mark.timeout(120)
def test_forks_under_busy_threads_hang_and_lose_nothing(tmp_path: Path) -> None:
    """L7: children are forked while four threads end spans."""
    host = Host(
        tmp_path,
        """
        running = True
        def work():
            while running:
                end("thread")
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        children = []
        for number in range(int(sys.argv[1])):
            child = os.fork()
            if not child:
                for _ in range(3):
                    end("child")
                os._exit(7)
            children.append(child)
            time.sleep(0.002)
        codes = {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
        running = False
        for thread in threads:
            thread.join()
        print(codes)
        """,
    )
    forks = trials(60, 12)

    done = host.check(forks, row="L7", tries=forks)

    assert done.output == "{7}\n"


def test_interrupt_in_the_middle_of_a_write_loses_nothing(tmp_path: Path) -> None:
    """Ctrl-C raises wherever a span is being written; each that was begun is ended and counted."""
    host = Host(
        tmp_path,
        """
        is_writing = False
        def interrupt(*_):
            if is_writing:
                raise KeyboardInterrupt
        signal.signal(signal.SIGINT, interrupt)
        parent = os.getpid()
        child = os.fork()
        if not child:
            for _ in range(int(sys.argv[1])):
                time.sleep(0.003)
                os.kill(parent, signal.SIGINT)
            os._exit(0)
        while not os.waitpid(child, os.WNOHANG)[0]:
            try:
                is_writing = True
                for _ in range(100):
                    tracer.start_span("work", attributes={"text": "x" * 5000}).end()
                is_writing = False
            except KeyboardInterrupt:
                is_writing = False
        for _ in range(3):
            end("after")
        print("done")
        """,
    )

    done = host.run(trials(200, 40))
    before = host.accounted()
    host.store.settle()

    assert (done.code, done.output) == (0, "done\n"), done.errors
    assert host.accounted() == before
    assert before.dropped.keys() <= {"fault"}
    assert sum(before.rejected.values()) == 0
    # Spans that Ctrl-C kept from their very end never ended, or are counted as a fault.
    counts = host.counts()._replace(ended=before.ended, lost=before.missing)
    faults = sum(before.dropped.values())
    note("L4", counts._replace(lost=faults), trials(200, 40), counted=faults)


def test_spans_that_end_as_the_interpreter_does_never_hang_it(tmp_path: Path) -> None:
    """L4: daemon threads die in the middle of a write, then objects end spans in ``__del__``."""
    (tmp_path / "held.py").write_text("held = []\n")
    host = Host(
        tmp_path,
        """
        import held
        class Ends:
            def __init__(self):
                self.span = tracer.start_span("held")
            def __del__(self):
                self.span.end()
        held.held.append(Ends())
        def work():
            while True:
                end("daemon")
                time.sleep(0.001)
        for _ in range(4):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.3)
        print("done")
        """,
    )

    for _ in range(trials(10, 4)):
        done = host.run(limit_s=15)
        assert (done.code, done.output, done.errors) == (0, "done\n", "")

    host.settled_counts(extra=trials(10, 4) * 5)


def test_flush_answers_for_what_ended_before_it_alone(tmp_path: Path) -> None:
    """L4: what other threads end during a flush, or a seal at the end, is theirs to write."""
    host = Host(
        tmp_path,
        """
        write = os.write
        def write_slowly(descriptor, text):
            size = write(descriptor, text)
            time.sleep(0.001)
            return size
        os.write = write_slowly
        def work():
            while True:
                tracer.start_span("daemon").end()
        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        from lightning_otel import LightningSpanProcessor
        flush = LightningSpanProcessor().force_flush
        end("before")
        time.sleep(0.2)
        print({flush() for _ in range(trials)})
        """.replace("trials", str(trials(10_000, 2_000))),
    )

    done = host.run(limit_s=60)

    assert (done.code, done.output, done.errors) == (0, "{True}\n", "")


def test_tree_of_forks_on_a_busy_machine_loses_nothing(tmp_path: Path) -> None:
    """L12b: more processes than processors, beside busy loops; each leaves by ``os._exit``."""
    host = Host(
        tmp_path,
        """
        def grow(depth):
            for _ in range(3):
                end("work")
            children = []
            for _ in range(3 if depth else 0):
                child = os.fork()
                if not child:
                    try:
                        grow(depth - 1)
                    finally:
                        os._exit(0)
                children.append(child)
            for child in children:
                os.waitpid(child, 0)
            end("last")
        grow(int(sys.argv[1]))
        print("done")
        """,
    )
    depth = trials(6, 5)
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        done = host.run(depth)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    counts = host.settled_counts()
    note("L12b", counts)

    assert (done.code, done.output, done.errors) == (0, "done\n", "")
    assert counts.ended == 4 * (3 ** (depth + 1) - 1) // 2
