"""Ended spans are in the file when ``end()`` returns, and the program never feels a broken disk."""

import fcntl
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
import pytest
from opentelemetry.trace import Tracer
from tests.store.conftest import MakeSpan, refuse_segments

from lightning_otel import Store, auto_trace, operation
from lightning_otel.store import journal
from lightning_otel.store.counts import Accounting
from lightning_otel.store.layout import Layout
from lightning_otel.store.lines import parse_line
from lightning_otel.store.segment import Segment, request_rotation
from lightning_otel.store.writer import SpanWriter


@pytest.fixture
def writer(layout: Layout) -> Iterator[SpanWriter]:
    """A writer whose segment is closed after the test."""
    writer = SpanWriter(layout)
    yield writer
    if writer.segment is not None:
        writer.segment.close()


@pytest.fixture
def tracer(writer: SpanWriter, tracer_of: Callable[[SpanWriter], Tracer]) -> Tracer:
    return tracer_of(writer)


def _records(path: Path) -> list[dict[str, Any]]:
    """Every record of a segment, in order, after the room for its last word."""
    return [parse_line(line) for line in path.read_bytes().splitlines()[1:]]


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


def test_seal_closes_the_segment_unless_a_span_is_open(
    layout: Layout, writer: SpanWriter, tracer: Tracer
) -> None:
    """A sealed segment says so and is unlocked; with a span open the process is not at its end."""
    writer.seal()
    none_yet = layout.segments()
    span = tracer.start_span("one")
    writer.seal()
    (first,) = layout.segments()
    was_locked = _is_locked(first)
    span.end()
    writer.seal()
    tracer.start_span("two").end()

    assert (none_yet, was_locked, _is_locked(first)) == ([], True, False)
    assert _records(first)[-1] == {"record": "seal", "rotated": False, "counts": {"ended": 1}}
    assert len(layout.segments()) == 2
    assert _ended(layout) == ["one", "two"]


def test_writer_that_is_asked_goes_on_in_a_new_segment(
    layout: Layout, writer: SpanWriter, tracer: Tracer
) -> None:
    """With its next line, whatever threads write; the old one is sealed, and nothing is lost."""
    root = tracer.start_span("root")
    first = writer.paths[0]
    request_rotation(first)
    idle = layout.segments()

    def work(name: str) -> None:
        for number in range(50):
            tracer.start_span(f"{name}.{number}").end()

    threads = [threading.Thread(target=work, args=(f"t{index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        request_rotation(writer.paths[-1])
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
    ended = threading.Event()

    class Handler(logging.Handler):
        """Ends a span on another thread and waits for it."""

        def emit(self, record: logging.LogRecord) -> None:
            def work() -> None:
                tracer.start_span("logged").end()
                ended.set()

            thread = threading.Thread(target=work)
            thread.start()
            thread.join(10)

    handler = Handler()
    journal.log.addHandler(handler)
    try:
        with refuse_segments(layout):
            tracer.start_span("first").end()
    finally:
        journal.log.removeHandler(handler)
    tracer.start_span("last").end()

    assert ended.is_set()
    assert sorted(_ended(layout)) == ["first", "last", "logged"]


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


PROGRAM = """
import ctypes, os, signal, sys
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from lightning_otel.store import journal
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
"""
FORKS_IN_C = """
tracer.start_span("before").end()
child = ctypes.PyDLL(None).fork()
tracer.start_span("child" if not child else "after").end()
if not child:
    os._exit(0)
os.waitpid(child, 0)
"""
HANDLES_SIGNALS = """
journal.ROTATE_BYTES = 20_000
handled = 0
def handle(number, frame):
    global handled
    handled += 1
    tracer.start_span(f"handled {handled}").end()
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
number = 0
while number < 3000 or handled < 50:
    number += 1
    tracer.start_span(f"main {number}").end()
signal.setitimer(signal.ITIMER_REAL, 0)
"""


@pytest.mark.parametrize("program", [FORKS_IN_C, HANDLES_SIGNALS])
def test_writer_in_a_program_that_does_odd_things(
    layout: Layout, run_python: Callable[..., str], program: str
) -> None:
    """One that forks in C, or ends spans in a handler; daemons are in ``tests/faults``."""
    numbers = "print(globals().get('number'), globals().get('handled'), os.getpid())"

    number, handled, pid = run_python(PROGRAM + program + numbers, layout.catalogue).split()

    wanted = ["after", "before", "child"]
    if program == HANDLES_SIGNALS:
        wanted = [f"main {n + 1}" for n in range(int(number))]
        wanted += [f"handled {n + 1}" for n in range(int(handled))]
    assert sorted(_ended(layout)) == sorted(wanted)
    processes = {path.name.split("-")[2] for path in layout.segments()}
    assert pid in processes
    assert len(processes) == 1 + (program == FORKS_IN_C)


def test_daemon_on_a_disk_with_room_again_takes_its_last_word_back(
    layout: Layout, run_python: Callable[..., str]
) -> None:
    """What a full disk refused, and the former segment told as lost, is counted once."""
    program = """
import logging, resource
logging.disable()  # it warns of the full disk
tracer.start_span("before").end()
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (writer.segment.size_bytes, hard))
tracer.start_span("waits").end()
writer.seal()
os.closerange(3, 4096)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
tracer.start_span("after").end()
"""

    run_python(PROGRAM + program, layout.catalogue)

    assert Store(layout.catalogue).accounting() == Accounting(3, 3)


@pytest.mark.parametrize("place", ["disk", "memory"])
@pytest.mark.parametrize("text", ["plain", 'quoted "x" \\ ✓', "rollout-0"])
def test_records_are_those_since_a_position_that_mention_a_text(
    layout: Layout, make_span: MakeSpan, text: str, place: str
) -> None:
    """What this process wrote is read back without DuckDB, across rotations; not half a line."""
    writer = SpanWriter(layout if place == "disk" else None)
    writer.add(make_span(name="earlier", attributes={"id": text}))
    since = writer.position()
    writer.add(make_span(name="one", attributes={"id": text}))
    writer.seal()
    writer.add(make_span(name="other"))
    writer.add(make_span(name="two", attributes={"id": text}))
    for path in writer.paths[-1:]:
        with path.open("ab") as file:
            file.write(b'{"record":"span","span_id":"ab","id":"' + text.encode())

    found = writer.records(since, orjson.dumps(text).decode()[1:-1])

    assert [record["name"] for record in found or ()] == ["one", "two"]


def test_segment_appears_only_when_it_is_locked(
    layout: Layout, writer: SpanWriter, tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No settler can find a segment between its making and its locking."""
    seen: list[tuple[list[Path], bool]] = []
    rename = os.rename

    def watch(made: Path, final: Path) -> None:
        seen.append((layout.segments(), _is_locked(made)))
        rename(made, final)

    # A patch, because the moment of the rename is the subject.
    monkeypatch.setattr(os, "rename", watch)

    tracer.start_span("one").end()

    assert seen == [([], True)]
    assert list(map(_is_locked, layout.segments())) == [True]


def test_process_without_a_boot_id_is_the_machines(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere than on Linux the machine's name serves."""
    # A patch, because this machine has the file.
    monkeypatch.setattr(Path, "read_text", lambda self: self.with_name("missing").read_bytes())

    names = {SpanWriter(layout).process.split("-")[0] for _ in range(2)}

    assert len(names) == 1
    assert len(names.pop()) == 8


def test_what_waits_for_a_hanging_disk_is_read_in_its_own_recording(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write of more than a second is followed by a rest, and spans wait in memory."""
    write = os.write

    def write_slowly(descriptor: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", write)
        time.sleep(2.0)  # of a hang a busy machine excuses some
        return write(descriptor, data)

    with auto_trace(store=store) as recording:
        monkeypatch.setattr(os, "write", write_slowly)
        for _ in range(6):
            with operation("step"):
                pass
        waiting = store.writer().accounting().pending
        live = [span for span in recording.spans() if span.parent_span_id == recording.span_id]

    assert waiting > 0
    assert len(live) == 6
    assert all(span.end_ns is not None for span in live)
