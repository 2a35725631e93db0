"""Ended spans are in the file when ``end()`` returns, and the program never feels a broken disk."""

import fcntl
import itertools
import logging
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
import pytest
from opentelemetry.trace import Tracer

from lightning_otel import Store, auto_trace, operation
from lightning_otel.store import journal
from lightning_otel.store.layout import Layout
from lightning_otel.store.lines import parsed
from lightning_otel.store.segment import Segment, ask_to_close
from lightning_otel.store.writer import SpanWriter, writer_for, writer_if_any
from lightning_otel.types import Span


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """An empty store's paths."""
    layout = Layout(tmp_path / "traces.duckdb")
    layout.create()
    return layout


@pytest.fixture
def writer(layout: Layout) -> Iterator[SpanWriter]:
    """A writer whose segment is closed after the test."""
    writer = SpanWriter(layout)
    yield writer
    if writer.segment is not None:
        writer.segment.close()


@pytest.fixture
def tracer(writer: SpanWriter, tracer_of: Callable[[SpanWriter], Tracer]) -> Tracer:
    """A tracer that feeds the writer."""
    return tracer_of(writer)


def _records(path: Path) -> list[dict[str, Any]]:
    """Every record of a segment, in order, after the room for its last word."""
    return [parsed(line) for line in path.read_bytes().splitlines()[1:]]


def _lines(layout: Layout) -> list[dict[str, Any]]:
    """Every record of every segment, in order."""
    return [record for path in layout.segments() for record in _records(path)]


def _ended(layout: Layout) -> list[str]:
    return [line["name"] for line in _lines(layout) if line["record"] == "span"]


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_writer_has_the_span_in_the_file_when_it_ends(
    layout: Layout, writer: SpanWriter, tracer: Tracer
) -> None:
    """The start stands there while the span runs, the end as soon as it has one."""
    span = tracer.start_span("work", attributes={"a": 1})
    (start,) = _lines(layout)
    span.end()
    _, end = _lines(layout)

    assert (start["record"], start["name"], start["end_ns"]) == ("start", "work", None)
    assert (end["record"], end["name"], end["attributes"]) == ("span", "work", {"a": 1})
    assert end["end_ns"] >= end["start_ns"] > 0
    assert start["sequence"] == end["sequence"] == 1
    assert end["end_sequence"] == 2
    assert start["process"] == end["process"] == writer.process


def test_writer_rotates_a_full_segment(
    layout: Layout, writer: SpanWriter, tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full one is sealed, and the next one knows every span still open."""
    monkeypatch.setattr(journal, "ROTATE_BYTES", 4_000)
    root = tracer.start_span("root")
    for number in range(20):
        tracer.start_span(f"step {number}").end()

    paths = layout.segments()
    segments = [_records(path) for path in paths]

    assert len(paths) > 2
    assert writer.paths == paths
    for lines in segments[:-1]:
        ended = sum(line["record"] == "span" for line in lines)
        assert lines[-1] == {"record": "seal", "rotated": True, "counts": {"ended": ended}}
    for lines in segments[1:]:
        assert (lines[0]["record"], lines[0]["name"]) == ("start", "root")
    assert [_is_locked(path) for path in paths] == [False] * (len(paths) - 1) + [True]
    root.end()
    assert sorted(_ended(layout)) == sorted(["root", *(f"step {number}" for number in range(20))])


def test_writer_does_not_rotate_without_room_for_the_seal(
    layout: Layout, writer: SpanWriter, tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unsealed, the open spans of the full segment would be taken for those of a dead process."""
    root = tracer.start_span("root")
    monkeypatch.setattr(journal, "ROTATE_BYTES", 1)
    append = Segment.append

    def without_room_for_seals(self: Segment, lines: bytes, **named: Any) -> bool:
        if b'"seal"' in lines:
            raise OSError(28, "no space left")
        return append(self, lines, **named)

    # A patch, because the disk must fill up between two writes.
    monkeypatch.setattr(Segment, "append", without_room_for_seals)
    tracer.start_span("one").end()
    full = layout.segments()
    monkeypatch.setattr(Segment, "append", append)
    root.end()

    assert len(full) == 1
    assert _lines(layout)[-1]["record"] == "seal"
    assert sorted(_ended(layout)) == ["one", "root"]


def test_seal_closes_the_segment_cleanly(
    layout: Layout, writer: SpanWriter, tracer: Tracer
) -> None:
    """A sealed segment says so and is unlocked; the next span opens another one."""
    tracer.start_span("one").end()
    writer.seal()
    (first,) = layout.segments()
    is_locked = _is_locked(first)
    tracer.start_span("two").end()

    assert not is_locked
    assert _records(first)[-1] == {"record": "seal", "rotated": False, "counts": {"ended": 1}}
    assert len(layout.segments()) == 2
    assert _ended(layout) == ["one", "two"]


def test_seal_waits_for_open_spans(layout: Layout, writer: SpanWriter, tracer: Tracer) -> None:
    """With a span open the segment stays open, as the process is not at its end."""
    span = tracer.start_span("open")

    writer.seal()
    span.end()

    (path,) = layout.segments()
    assert _is_locked(path)
    assert [line["record"] for line in _lines(layout)] == ["start", "span"]


def test_seal_without_a_segment_makes_none(layout: Layout, writer: SpanWriter) -> None:
    """Nothing was recorded, so nothing is sealed."""
    writer.seal()

    assert layout.segments() == []


def test_writer_that_is_asked_goes_on_in_a_new_segment(
    layout: Layout, writer: SpanWriter, tracer: Tracer
) -> None:
    """With its next line, whatever threads write; the old one is sealed, and nothing is lost."""
    root = tracer.start_span("root")
    first = writer.paths[0]
    ask_to_close(first)
    idle = layout.segments()

    def work(name: str) -> None:
        for number in range(50):
            tracer.start_span(f"{name}.{number}").end()

    threads = [threading.Thread(target=work, args=(f"t{index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        ask_to_close(writer.paths[-1])
    for thread in threads:
        thread.join()
    writer.rotate()
    root.end()

    assert idle == [first]
    assert len(writer.paths) > 2
    for path in writer.paths[:-1]:
        assert _records(path)[-1]["record"] == "seal"
    ended = [f"t{index}.{number}" for index in range(4) for number in range(50)]
    assert sorted(_ended(layout)) == sorted(["root", *ended])
    assert Store(layout.catalogue).accounting().is_balanced


def test_writer_makes_a_removed_store_anew(
    layout: Layout, writer: SpanWriter, tracer: Tracer
) -> None:
    """Who removes the store while a program runs gets a new one, with the spans still open."""
    root = tracer.start_span("root")
    shutil.rmtree(layout.root)

    tracer.start_span("step").end()
    root.end()

    assert [(span.name, span.is_incomplete) for span in Store(layout.catalogue).spans()] == [
        ("root", False),
        ("step", False),
    ]


def test_writer_never_writes_into_a_descriptor_that_is_not_its_own(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    """A program that closes all descriptors, as daemons do, gets no line in its next files."""
    script = """
    tracer.start_span("before").end()
    os.closerange(3, 4096)
    users = [open(f"{sys.argv[1]}.{number}", "wb") for number in range(50)]
    tracer.start_span("after").end()
    writer.seal()
    print(names(), sum(os.path.getsize(file.name) for file in users))
    """

    printed = run_python(FORKS + textwrap.dedent(script), tmp_path / "traces.duckdb")

    assert printed.splitlines() == ["['after', 'before'] 0"]


def test_writer_leaves_the_file_that_took_its_number(
    layout: Layout, writer: SpanWriter, tracer: Tracer, tmp_path: Path
) -> None:
    """Whoever puts a file of its own under the very number of ours gets no span's end in it."""
    span = tracer.start_span("before")
    assert writer.segment is not None
    descriptor = writer.segment._descriptor
    with (tmp_path / "users").open("wb") as file:
        os.dup2(file.fileno(), descriptor)

        span.end()
        writer.seal()

        assert os.fstat(descriptor).st_ino == os.fstat(file.fileno()).st_ino
    os.close(descriptor)
    assert (tmp_path / "users").read_bytes() == b""
    assert _ended(layout) == ["before"]


def test_writer_survives_a_log_handler_that_makes_spans(
    layout: Layout, writer: SpanWriter, tracer: Tracer
) -> None:
    """The warning about a refused span may itself become a span, on another thread."""
    layout.live.rename(layout.root / "away")
    layout.live.write_text("in the way")
    ended = threading.Event()

    class Handler(logging.Handler):
        """Ends a span on another thread and waits for it."""

        def emit(self, record: logging.LogRecord) -> None:
            """Handle a record."""

            def work() -> None:
                tracer.start_span("logged").end()
                ended.set()

            thread = threading.Thread(target=work)
            thread.start()
            thread.join(10)

    handler = Handler()
    journal.log.addHandler(handler)
    try:
        tracer.start_span("first").end()
    finally:
        journal.log.removeHandler(handler)
    layout.live.unlink()
    (layout.root / "away").rename(layout.live)
    tracer.start_span("last").end()

    assert ended.is_set()
    assert sorted(_ended(layout)) == ["first", "last", "logged"]


def test_writer_in_a_signal_handler_during_a_write(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    """A handler that ends spans while one is being written neither hangs nor loses any."""
    script = """
    import signal, sys
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from lightning_otel.store import journal, writer as module
    from lightning_otel.store.layout import Layout
    journal.ROTATE_BYTES = 20_000
    layout = Layout(sys.argv[1])
    layout.create()
    writer = module.SpanWriter(layout)
    class Feed(SpanProcessor):
        def on_start(self, span, parent_context=None):
            writer.started(span)
        def on_end(self, span):
            writer.ended(span, {})
    provider = TracerProvider()
    provider.add_span_processor(Feed())
    tracer = provider.get_tracer("test")
    handled = 0
    def handle(number, frame):
        global handled
        handled += 1
        tracer.start_span(f"handled {handled}").end()
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
    for number in range(3000):
        tracer.start_span(f"main {number}").end()
    signal.setitimer(signal.ITIMER_REAL, 0)
    lines = b"".join(path.read_bytes() for path in layout.segments()).splitlines()
    names = [line.split(b'"name":"')[1].split(b'"')[0].decode()
             for line in lines if line.startswith(b'{"record":"span"')]
    wanted = {f"main {n}" for n in range(3000)} | {f"handled {n + 1}" for n in range(handled)}
    print(handled > 50, len(names) == len(wanted), set(names) == wanted)
    """

    assert run_python(script, tmp_path / "traces.duckdb").split() == ["True", "True", "True"]


def test_writer_interrupted_at_any_call_keeps_its_sum(writer: SpanWriter, tracer: Tracer) -> None:
    """Ctrl-C raises wherever a function begins or one in C returns: what ended is accounted for."""
    stores = str(Path(journal.__file__).parent)
    sums = []
    for calls in itertools.count(1):
        span = tracer.start_span("work", attributes={"text": "x"})
        left = calls

        def interrupt(frame: FrameType, event: str, _: object) -> None:
            nonlocal left
            if event in ("call", "c_return") and frame.f_code.co_filename.startswith(stores):
                left -= 1
                if not left:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        is_interrupted = False
        sys.setprofile(interrupt)
        try:
            span.end()
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            sys.setprofile(None)
        sums.append(writer.accounting())
        if not is_interrupted:
            break

    assert len(sums) > 30
    assert [found.missing for found in sums] == [0] * len(sums)
    assert sums[-1].stored > 1


FORKS = """
import os, sys, threading, time
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from lightning_otel import Store, auto_trace, operation
from lightning_otel.store.layout import Layout
from lightning_otel.store.writer import writer_for
writer = writer_for(Layout(sys.argv[1]))
class Feed(SpanProcessor):
    def on_start(self, span, parent_context=None):
        writer.started(span)
    def on_end(self, span):
        writer.ended(span, {})
provider = TracerProvider()
provider.add_span_processor(Feed())
tracer = provider.get_tracer("test")
def names():
    return sorted(span.name for span in Store(sys.argv[1]).spans())
"""


def test_writer_after_a_fork_has_a_segment_of_its_own(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    """Parent and child write side by side, and the child's death frees nothing of the parent's."""
    script = """
    tracer.start_span("before").end()
    child = os.fork()
    if not child:
        tracer.start_span("child").end()
        os._exit(0)
    os.waitpid(child, 0)
    tracer.start_span("after").end()
    print(names(), len({path.name.split("-")[2] for path in writer.layout.segments()}))
    done = Store(sys.argv[1]).settle()
    print(done.segments, done.rows, names())
    """

    printed = run_python(FORKS + textwrap.dedent(script), tmp_path / "traces.duckdb")

    names = "['after', 'before', 'child']"
    assert printed.splitlines() == [f"{names} 2", f"1 1 {names}"]


def test_writer_after_a_fork_without_pythons_hooks(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    """A child forked by C code starts a segment of its own with its first span."""
    script = """
    import ctypes, os, sys
    from lightning_otel.store.layout import Layout
    from lightning_otel.store.writer import writer_for
    from lightning_otel.types import Span
    layout = Layout(sys.argv[1])
    writer = writer_for(layout)
    writer.add(Span("1" * 32, "1" * 16, None, "parent", 1, 2))
    child = ctypes.PyDLL(None).fork()
    writer.add(Span("2" * 32, f"{os.getpid():016x}", None, "both", 1, 2))
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    print([path.read_bytes().count(b'"record":"span"') for path in layout.segments()])
    print(len({path.name.split("-")[2] for path in layout.segments()}))
    """

    assert run_python(script, tmp_path / "traces.duckdb").splitlines() == ["[2, 1]", "2"]


@pytest.mark.parametrize("text", ["plain", 'quoted "x" \\ ✓', "rollout-0"])
def test_records_are_those_since_a_position_that_mention_a_text(
    layout: Layout, writer: SpanWriter, make_span: Callable[..., Span], text: str
) -> None:
    """What this process wrote is read back without DuckDB, across rotations."""
    writer.add(make_span(name="earlier", attributes={"id": text}))
    since = writer.position()
    writer.add(make_span(name="one", attributes={"id": text}))
    writer.seal()
    writer.add(make_span(name="other"))
    writer.add(make_span(name="two", attributes={"id": text}))

    found = writer.records(since, orjson.dumps(text).decode()[1:-1])

    assert found is not None
    assert [record["name"] for record in found] == ["one", "two"]


def test_writer_in_memory_keeps_lines(make_span: Callable[..., Span]) -> None:
    """Without a place the lines stay in the process."""
    writer = SpanWriter(None)
    since = writer.position()
    writer.add(make_span(name="a"))
    writer.seal()

    found = writer.records(since, "work")

    assert found == []
    assert [record["name"] for record in writer.records(since, '"a"') or []] == ["a"]


def test_writer_for_is_one_a_store_and_process(tmp_path: Path) -> None:
    """Whoever writes to a store in a process shares one segment."""
    layout = Layout(tmp_path / "traces.duckdb")
    none_yet = writer_if_any(layout)

    writer = writer_for(layout)

    assert none_yet is None
    assert writer_for(Layout(tmp_path / "traces.duckdb")) is writer
    assert writer_if_any(layout) is writer
    assert Store(tmp_path / "traces.duckdb").writer() is writer


def test_traced_process_imports_no_duckdb(run_python: Callable[..., str]) -> None:
    """Nothing the traced process needs pulls in the database."""
    script = """
    import sys
    import lightning_otel.exporters.duckdb, lightning_otel.store.writer, lightning_otel.tracing
    print([name for name in ("duckdb", "pyarrow", "pandas") if name in sys.modules])
    """

    assert run_python(script).strip() == "[]"


def test_what_waits_for_a_slow_disk_is_read_in_its_own_process(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write of more than half a second is followed by a rest, and spans wait in memory."""
    write = os.write

    def write_slowly(descriptor: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", write)
        time.sleep(0.6)
        return write(descriptor, data)

    with auto_trace(store=store) as recording:
        monkeypatch.setattr(os, "write", write_slowly)
        for _ in range(6):
            with operation("step"):
                pass
        waiting = store.writer().accounting().pending
        live = [span for span in recording.spans() if span.parent_span_id == recording.span_id]
        read = [span for span in store.spans() if span.parent_span_id == recording.span_id]

    assert waiting > 0
    assert [len(found) for found in (live, read)] == [6, 6]
    assert all(span.end_ns is not None for span in live + read)
