"""Following a store: each ended span once a consumer, whatever is settled or killed meanwhile."""

import contextlib
import hashlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.trace import Tracer
from tests.store.conftest import MakeSpan, Write

from lightning_otel import Store
from lightning_otel.errors import ConfigError, StoreError, StoreMissingError
from lightning_otel.store import journal
from lightning_otel.store.layout import Layout
from lightning_otel.store.lines import append_checksum
from lightning_otel.store.settle import settle, wait_until_visible
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import Span
from lightning_otel.types import conventions as c


def names(spans: Iterable[Span]) -> list[str]:
    return [span.name for span in spans]


def test_follow_delivers_each_ended_span_once(
    store: Store, layout: Layout, make_span: MakeSpan, at_once: None, write: Write
) -> None:
    """Whole, from segments and files, since a time; not what never ended, nor what comes again."""
    early, first, second, third = (
        make_span(name=name, attributes={"q": "é", c.REWARD_VALUE: 0.5}) for name in "efst"
    )
    write([early, first, make_span(name="open", end_ns=None)])
    settle(layout)
    write([second])

    with store.follow("trainer", since_ns=first.start_ns) as follower:
        before = follower.batch()
        settle(layout)
        write([third, first, replace(second, name="forged"), replace(early, span_id="e1")])
        after, rest = follower.batch(), follower.batch()
    with store.follow("trainer", since_ns=first.start_ns) as follower:
        again = follower.batch()
    with store.follow("other") as other:
        every = other.batch()

    assert (before, after, rest, again) == ([first, second], [third], [], [])
    assert names(every) == ["e", "f", "s", "t", "e"]


def test_follow_waits_for_what_comes(store: Store, layout: Layout) -> None:
    """An iteration goes on with spans as they end; it ends after a while without, or if told."""
    from lightning_otel import auto_trace, emit_message

    found: list[str] = []
    is_ready = threading.Event()

    def consume() -> None:
        for span in store.follow("trainer", idle_s=0.4):
            found.append(span.name)
            is_ready.set()

    with auto_trace(store=store):
        emit_message("one")
        consumer = threading.Thread(target=consume)
        consumer.start()
        assert is_ready.wait(10)
        emit_message("two")
    consumer.join(20)

    with store.follow("other") as follower:
        waiting = threading.Thread(target=lambda: list(follower))
        waiting.start()
        follower.stop()
        waiting.join(10)

    assert not consumer.is_alive()
    assert not waiting.is_alive()
    assert len(found) == 3


def test_follow_counts_what_was_asked_past_as_delivered(
    store: Store, make_span: MakeSpan, write: Write
) -> None:
    """The span in hand when a consumer dies comes again, those before it do not."""
    write([make_span(name=name) for name in "abcde"])

    follower = store.follow("trainer")
    left_early = []
    for span in follower:
        left_early.append(span.name)
        if len(left_early) == 2:
            break
    follower.close()
    with contextlib.suppress(ZeroDivisionError), store.follow("trainer") as follower:
        failed = names(follower.batch(2))
        raise ZeroDivisionError
    with store.follow("trainer") as follower:
        fine = names(follower.batch(2))
    with store.follow("trainer") as follower:
        chosen = names(spans := follower.batch())
        follower.commit(spans[1:])
        follower.close()
    with store.follow("trainer") as follower:
        last = names(follower.batch())

    assert (left_early, failed, fine) == (["a", "b"], ["b", "c"], ["b", "c"])
    assert (chosen, last) == (["d", "e"], ["d"])


def test_follow_keeps_consumers_apart(
    store: Store, layout: Layout, make_span: MakeSpan, write: Write
) -> None:
    """Each name has its own position; two cannot follow under one name at a time."""
    write([make_span(name=name) for name in "abc"])

    with store.follow("one") as one, store.follow("two") as two:
        first, second = names(one.batch(2)), names(two.batch())
        with pytest.raises(StoreError, match="at work in another"):
            store.follow("one")
    with store.follow("one") as one:
        rest = names(one.batch())
        one.rewind()
        again = names(one.batch())

    assert (first, second, rest, again) == (["a", "b"], ["a", "b", "c"], ["c"], ["a", "b", "c"])
    folder = layout.root / "followers"
    assert sorted(path.stem for path in folder.glob("*.position")) == ["one", "two"]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_follow_refuses_what_cannot_be(store: Store, make_span: MakeSpan) -> None:
    """A missing store, a store in memory, a bad name and a damaged position are named."""
    with pytest.raises(StoreMissingError):
        store.follow("trainer")
    with pytest.raises(ConfigError, match="store on this disk"):
        Store(":memory:").follow("trainer")
    store.add([make_span()])
    for name in ("", "../x", "a b", "x" * 101, ".hidden"):
        with pytest.raises(ConfigError, match="cannot name a consumer"):
            store.follow(name)
    folder = Path(f"{store.name}.d", "followers")
    folder.mkdir()
    (folder / "torn.position").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match="everything is delivered again"):
        store.follow("torn")


def test_follow_passes_over_damage(
    store: Store,
    layout: Layout,
    make_span: MakeSpan,
    caplog: pytest.LogCaptureFixture,
    at_once: None,
    write: Write,
) -> None:
    """Damage costs no other span, nor what segments hold; half a line is waited for."""
    write([make_span(name="settled")])
    settle(layout)
    (file,) = layout.read_manifest().live_files
    (layout.data / file.name).write_bytes(b"PAR1 torn")
    writer = SpanWriter(layout)
    writer.add(make_span(name="whole"))
    line = writer.paths[0].read_bytes().splitlines()[-1]
    late = line.replace(b"whole", b"later").replace(b'span_id":"0', b'span_id":"1')
    late = append_checksum(late.partition(b',"crc"')[0] + b"}")
    with writer.paths[0].open("ab") as segment:
        segment.write(b'{"record":"span","trace_id":7}\n\xff\xfe\n{"record":"span"\n' + late[:-9])

    with store.follow("trainer") as follower:
        first = follower.batch()
        with writer.paths[0].open("ab") as segment:
            segment.write(late[-9:])
        second = follower.batch()
    writer.seal()

    assert sorted(names(first + second)) == ["later", "settled", "whole"]
    assert names(second)[-1] == "later"
    assert (layout.quarantine / file.name).exists()
    assert caplog.records == []  # no span is missing for it


def test_follow_delivers_once_across_segments_and_files(
    store: Store,
    layout: Layout,
    tracer_of: Callable[[SpanWriter], Tracer],
    monkeypatch: pytest.MonkeyPatch,
    at_once: None,
) -> None:
    """Eight threads, small segments, a settler: each span comes once, each thread's in order."""
    monkeypatch.setattr(journal, "ROTATE_BYTES", 40_000)
    writers = [SpanWriter(layout) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def work(tracer: Tracer) -> None:
        with tracer.start_as_current_span("outer"):
            for _ in range(60):
                tracer.start_span("inner").end()

    found: list[Span] = []
    with store.follow("trainer") as follower:
        for _ in range(2):
            threads = [
                threading.Thread(target=work, args=(tracer_of(writer),))
                for writer in writers
                for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                found += follower.batch(50)
            settle(layout)
            settle(layout)
            found += follower.batch(20)
        sys.setswitchinterval(interval)
        for writer in writers:
            writer.seal()
        settle(layout)
        settle(layout)
        while spans := follower.batch():
            found += spans

    assert len(found) == len({span.span_id for span in found}) == 16 * 61
    for parent in {span.parent_span_id for span in found} - {None}:
        ends = [span.end_sequence for span in found if span.parent_span_id == parent]
        assert ends == sorted(ends)


OPERATIONS = (
    "write", "write more", "end", "end", "send again", "rotate", "settle", "merge",
    "take", "take one", "take some", "lose", "die",
)  # fmt: skip


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(operations=st.lists(st.sampled_from(OPERATIONS), max_size=25))
def test_follow_delivers_once_whatever_happens(
    tmp_path: Path,
    at_once: None,
    make_span: MakeSpan,
    tracer_of: Callable[[SpanWriter], Tracer],
    operations: list[str],
) -> None:
    """Whatever is settled, merged or cut off, each span is committed once and none is left out."""
    folder = tmp_path / "any"
    shutil.rmtree(folder, ignore_errors=True)
    store, layout = Store(folder / "s.duckdb"), Layout(folder / "s.duckdb")
    layout.create()
    writers = [SpanWriter(layout)]
    written: list[str] = []
    sent: list[Span] = []
    delivered: list[str] = []
    follower = store.follow("trainer")
    for operation in operations:
        match operation:
            case "write" | "write more":
                for _ in range(1 if operation == "write" else 5):
                    span = make_span()
                    writers[-1].add(span)
                    sent.append(span)
                    written.append(span.span_id)
            case "end":
                ended = tracer_of(writers[-1]).start_span("own")
                ended.end()
                written.append(f"{ended.get_span_context().span_id:016x}")
            case "send again":
                for span in sent[-3:]:
                    writers[-1].add(span)
            case "rotate":
                writers[-1].seal()
                writers.append(SpanWriter(layout))
            case "settle":
                settle(layout)
                settle(layout)
            case "merge":
                store.compact()
            case "take" | "take one":
                spans = follower.batch(1 if operation == "take one" else 4)
                follower.commit()
                delivered += [span.span_id for span in spans]
            case "take some":
                spans = follower.batch(4)[::2]
                follower.commit(spans)
                delivered += [span.span_id for span in spans]
                follower.close()
                follower = store.follow("trainer")
            case "lose":
                follower.batch(2)
                follower.close()
                follower = store.follow("trainer")
            case "die":
                follower.close()
                follower = store.follow("trainer")
    while spans := follower.batch():
        follower.commit()
        delivered += [span.span_id for span in spans]
    follower.close()
    writers[-1].seal()

    assert Counter(delivered) == dict.fromkeys(written, 1)


CONSUMER = """\
import os, sys, lightning_otel
store, name, notes = sys.argv[1:]
out = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
follower = lightning_otel.Store(store).follow(name)
while True:
    for span in follower.batch(7):
        os.write(out, (span.span_id + "\\n").encode())
    follower.commit()
    os.write(out, b"-\\n")
"""
PRODUCER = """\
import sys, lightning_otel
from lightning_otel.store import journal
journal.ROTATE_BYTES = 30_000
with lightning_otel.auto_trace(store=sys.argv[1]):
    for number in range(int(sys.argv[2])):
        lightning_otel.emit_message(str(number))
"""
KILLS = int(os.environ.get("LIGHTNING_TEST_KILLS", "5"))


def test_follow_survives_kills(store: Store, layout: Layout, tmp_path: Path, at_once: None) -> None:
    """Killed at random, a consumer lacks no span, and is given at most its last batch again."""
    notes = tmp_path / "notes"
    producers = [
        subprocess.Popen([sys.executable, "-c", PRODUCER, store.name, "300"]) for _ in range(2)
    ]
    for _ in range(KILLS):
        command = [sys.executable, "-c", CONSUMER, store.name, "trainer", str(notes)]
        with subprocess.Popen(command) as consumer:
            before = notes.stat().st_size if notes.exists() else 0
            while not notes.exists() or notes.stat().st_size <= before:
                time.sleep(0.005)
            time.sleep(random.random() / 20)
            settle(layout)
            os.kill(consumer.pid, signal.SIGKILL)
        with notes.open("ab") as file:
            file.write(b"\nkilled\n")
    for producer in producers:
        assert producer.wait(40) == 0
    settle(layout)
    with store.follow("trainer") as follower, notes.open("a") as file:
        while spans := follower.batch():
            file.writelines(f"{span.span_id}\n" for span in spans)
            file.write("-\n")
            follower.commit()

    runs = notes.read_text().split("killed\n")
    counts = Counter(line for run in runs for line in run.split() if line != "-")
    in_window = sum(len(run.rsplit("-\n", 1)[-1].split()) for run in runs)
    assert set(counts) == {span.span_id for span in store.spans()}
    assert sum(counts.values()) - len(counts) <= in_window
    assert in_window <= 7 * KILLS


@pytest.mark.pain(23)
def test_follow_reads_little_of_what_it_knows(
    store: Store, layout: Layout, make_span: MakeSpan, at_once: None, write: Write
) -> None:
    """A file whose spans are delivered is not looked into again: nobody finds it damaged."""
    write([make_span()])
    settle(layout)
    wait_until_visible(layout)  # else the segment is read first, and then the file once
    (file,) = layout.read_manifest().live_files
    with store.follow("trainer") as follower:
        while not follower.batch():
            pass
        (layout.data / file.name).write_bytes(b"damaged")
        assert [follower.batch() for _ in range(3)] == [[], [], []]
    with store.follow("trainer") as follower:
        assert follower.batch() == []

    assert (layout.data / file.name).read_bytes() == b"damaged"


@pytest.mark.parametrize("is_numbered", [True, False])
def test_position_stays_small(
    store: Store,
    layout: Layout,
    make_span: MakeSpan,
    tracer_of: Callable[[SpanWriter], Tracer],
    at_once: None,
    is_numbered: bool,
) -> None:
    """A position takes no room for spans that are settled, nor for processes that ended."""
    sizes = []
    for _ in range(2):
        for _ in range(100):
            writer = SpanWriter(layout)
            for _ in range(20):
                if is_numbered:
                    tracer_of(writer).start_span("own").end()
                else:
                    writer.add(make_span())
            writer.seal()
        with store.follow("trainer") as follower:
            live = follower.batch(700)
        settle(layout)
        wait_until_visible(layout)  # a slow disk puts it off
        with store.follow("trainer") as follower:
            spans = live + follower.batch()
        assert len({span.span_id for span in spans}) == len(spans) == 2_000
        sizes.append((layout.root / "followers" / "trainer.position").stat().st_size)

    assert max(sizes) <= 12_000


def test_position_of_an_older_version_is_taken_over(
    store: Store,
    layout: Layout,
    make_span: MakeSpan,
    tracer_of: Callable[[SpanWriter], Tracer],
    at_once: None,
    write: Write,
) -> None:
    """Ids of delivered spans, settled and not: none of them comes again, all others come."""
    write([make_span(name="settled"), make_span(name="new, settled")])
    settle(layout)
    writer = SpanWriter(layout)
    for name in ("own", "new, own"):
        tracer_of(writer).start_span(name).end()
    for name in ("live", "new, live"):
        writer.add(make_span(name=name))
    spans = {span.name: span for span in store.spans()}
    (layout.root / "followers").mkdir()
    with contextlib.closing(sqlite3.connect(layout.root / "followers/old.position")) as old, old:
        old.execute("CREATE TABLE delivered (key BLOB PRIMARY KEY) WITHOUT ROWID")
        old.execute("CREATE TABLE files (name TEXT PRIMARY KEY) WITHOUT ROWID")
        for name in ("settled", "own", "live"):
            text = f"{spans[name].trace_id}/{spans[name].span_id}".encode()
            key = hashlib.blake2b(text, digest_size=12).digest()
            old.execute("INSERT INTO delivered VALUES (?)", [key])

    with store.follow("old") as follower:
        before = names(follower.batch())
    writer.seal()
    settle(layout)
    store.compact()
    write([make_span(name="late")])
    with store.follow("old") as follower:
        after = names(follower.batch())

    assert (before, after) == (["new, settled", "new, own", "new, live"], ["late"])


def test_follow_delivers_a_copy_that_names_the_same_process(
    store: Store, layout: Layout, tracer_of: Callable[[SpanWriter], Tracer]
) -> None:
    """A program's copy of its own span, under another id, is a span of its own."""
    writer = SpanWriter(layout)
    tracer_of(writer).start_span("first").end()
    with store.follow("trainer") as follower:
        (first,) = follower.batch()
        writer.add(replace(first, span_id="c" * 16, name="copy"))
        copies = names(follower.batch())
        follower.commit()
    with store.follow("trainer") as follower:
        rest = follower.batch()

    assert (copies, rest) == (["copy"], [])
