"""Transforms: a user's function sees each span before a disk does, and can do no other harm."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.store.conftest import find_text

import lightning_otel as lo
from lightning_otel import Span, Store
from lightning_otel.errors import ConfigError
from lightning_otel.store import transforms
from lightning_otel.store.layout import Layout
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import conventions as c
from lightning_otel.views.doctor import examine

SECRET = "hunter2"


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    """No transform of one test is there in the next."""
    yield
    transforms.global_transforms.clear()
    transforms._named.clear()


def redact(span: Span) -> Span:
    """The span without the secret."""
    clean = {
        key: value.replace(SECRET, "***") if isinstance(value, str) else value
        for key, value in span.attributes.items()
    }
    return replace(span, attributes=clean, name=span.name.replace(SECRET, "***"))


def fails(span: Span) -> Span:
    """Raises, and says what it was given."""
    raise ValueError(f"cannot read {span.attributes}")


def test_transform_redacts_before_anything_is_written(store: Store, layout: Layout) -> None:
    """A secret in an attribute, a body or a name never reaches the disk, nor does its start's."""
    with lo.auto_trace(store=store, task=f"use {SECRET}", transforms=[redact]) as recording:
        lo.emit_message(f"the password is {SECRET}")
        with lo.operation(f"op {SECRET}"):
            on_disk = find_text(layout, SECRET)
        spans = recording.spans()

    assert on_disk + find_text(layout, SECRET) == []
    (message,) = (span for span in spans if span.name == c.SPAN_MESSAGE)
    assert message.attributes[c.MESSAGE_BODY] == "the password is ***"
    assert len(store.spans().rows()) == 3
    assert store.accounting().is_balanced


def test_transform_drops(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """A dropped span is nowhere, live or settled, though its start was kept; it is no loss."""

    def at_its_end(span: Span) -> Span | None:
        return None if span.name == c.SPAN_MESSAGE and not span.is_incomplete else span

    seen: list[int] = []
    with lo.auto_trace(store=store, transforms=[at_its_end]) as recording:
        lo.emit_message("one")
        lo.emit_reward(1.0)
        seen.append(len(recording.spans()))
        seen.append(len(store.spans().rows()))
    live = [span.name for span in store.spans()]
    store.writer().seal()
    store.settle()
    settled = [span.name for span in store.spans()]
    accounting = store.accounting()
    with store.follow("any") as follower:
        followed = follower.batch()

    assert seen == [2, 2]
    assert c.SPAN_MESSAGE not in live + settled
    assert len(live) == len(settled) == len(followed) == 2
    assert (accounting.ended, accounting.stored) == (3, 2)
    assert accounting.dropped == {"transform": 1}
    assert accounting.is_balanced
    assert caplog.records == []
    assert [
        (finding.level, finding.text) for finding in examine(store) if finding.code == "not-stored"
    ] == [("ok", "not stored: 1 span: a transform dropped them")]


def test_transform_that_raises_loses_no_span_and_lets_nothing_out(
    store: Store, layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    """Its span is kept without content, counted, and one warning says so without the content."""
    with (
        caplog.at_level(logging.DEBUG),
        lo.auto_trace(store=store, rollout_id="r1", task=SECRET, transforms=[fails]),
    ):
        lo.emit_message(SECRET)
        with pytest.raises(KeyError), lo.operation(SECRET, secret=SECRET):
            raise KeyError(SECRET)

    spans = store.spans().rows()
    assert len(spans) == 3
    assert find_text(layout, SECRET) == []
    assert SECRET not in caplog.text
    assert {span.rollout_id for span in spans} == {"r1"}
    assert transforms.FAILED in {span.attributes.get(c.MESSAGE_BODY) for span in spans}
    assert {span.name for span in spans} >= {c.SPAN_ROLLOUT, c.SPAN_MESSAGE}
    assert len([each for each in caplog.records if each.levelno == logging.WARNING]) == 1
    assert store.accounting().is_balanced


@pytest.mark.parametrize(
    "transform",
    [
        lambda span: 7,
        lambda span: replace(span, attributes=None),
        lambda span: replace(span, events=({"name": SECRET},)),
        lambda span: span.attributes[SECRET],
        # What a transform itself records is kept without its content, and nothing hangs.
        lambda span: [lo.emit_message(SECRET), replace(span, attributes={})][1],
    ],
)
def test_transform_that_gives_nonsense_has_failed(
    store: Store, layout: Layout, transform: object
) -> None:
    """What is no span is not written, and what was given to it is not either."""
    with lo.auto_trace(store=store, transforms=[transform]):  # type: ignore[list-item]  # nonsense
        lo.emit_message(SECRET)

    assert find_text(layout, SECRET) == []
    assert {span.name for span in store.spans()} == {c.SPAN_ROLLOUT, c.SPAN_MESSAGE}


def test_transform_cannot_change_what_a_span_is(store: Store) -> None:
    """Ids, place and whether it ended stay; name, times and attributes are the user's."""

    def rename(span: Span) -> Span:
        return replace(
            span, trace_id="0" * 32, span_id="x", process="", sequence=-1, end_sequence=-1,
            end_ns=None, name="renamed", attributes={**span.attributes, "new": 1},
        )  # fmt: skip

    with lo.auto_trace(store=store, transforms=[rename]) as recording:
        pass

    (span,) = store.spans()
    assert (span.trace_id, span.span_id) == (recording.trace_id, recording.span_id)
    assert (span.name, span.attributes["new"], span.is_incomplete) == ("renamed", 1, False)
    assert span.sequence < span.end_sequence


def test_transforms_are_applied_in_order_and_inherited(store: Store) -> None:
    """Those of the process first, then the outer recording's, then the inner one's."""

    def adds(mark: str) -> transforms.Transform:
        def add(span: Span) -> Span:
            marks = str(span.attributes.get("marks", "")) + mark
            return replace(span, attributes={**span.attributes, "marks": marks})

        return add

    everywhere = lo.add_transform(adds("a"))
    with lo.auto_trace(store=store, transforms=[adds("b")]):
        with lo.auto_trace(transforms=[adds("c")]):
            lo.emit_message("inner")
        with lo.context(agent="x"):
            lo.emit_message("outer")
    lo.remove_transform(everywhere)
    lo.remove_transform(everywhere)
    with lo.auto_trace(store=store, name="plain"):
        pass

    marks = {
        span.attributes.get(c.MESSAGE_BODY, span.name): span.attributes.get("marks")
        for span in store.spans()
    }
    assert (marks["inner"], marks["outer"]) == ("abc", "ab")
    assert store.spans().rows()[-1].attributes.get("marks") is None


def test_transform_applies_to_what_is_added(store: Store, layout: Layout) -> None:
    """Spans that come complete, as received ones do, pass through those of the process."""
    lo.add_transform(redact)
    span = Span("ab" * 16, "cd" * 8, None, SECRET, 1, 2, attributes={"text": SECRET})
    store.add([span])

    assert find_text(layout, SECRET) == []
    lo.add_transform(lambda span: None)
    store.add([replace(span, span_id="ef" * 8)])
    assert len(store.spans().rows()) == 1
    assert store.accounting().dropped == {"transform": 1}


def test_transform_must_be_a_function(store: Store) -> None:
    """What cannot be called is refused at once."""
    with pytest.raises(ConfigError, match="no transform"):
        lo.auto_trace(store=store, transforms=["redact"])  # type: ignore[list-item]  # on purpose
    with pytest.raises(ConfigError, match="no transform"):
        lo.add_transform(3)  # type: ignore[arg-type]  # on purpose


MINE = f"""\
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
import lightning_otel as lo
def clean(span):
    return replace(span, attributes={{
        key: value.replace({SECRET!r}, "***") if isinstance(value, str) else value
        for key, value in span.attributes.items()}})
def says():
    lo.emit_message({SECRET!r})
def main(transform):
    with lo.auto_trace(store=sys.argv[1], transforms=[transform]):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            pool.submit(lo.carried(says)).result(30)
"""
RUN = ("-m", "lightning_otel", "run", "--store", "STORE", "--task", SECRET)
PROGRAM = ("--", "python", "-c", "import mine; mine.says(); print('ran')")


@pytest.mark.parametrize(
    ("words", "setting", "body"),
    [
        (["-c", "import mine; mine.main(mine.clean)", "STORE"], "", "***"),
        (["-c", "import mine; mine.main(lambda span: mine.clean(span))", "STORE"], "", None),
        ([*RUN, "--transform", "mine:clean", *PROGRAM], "", "***"),
        ([*RUN, *PROGRAM], "mine:clean", "***"),
        ([*RUN, *PROGRAM], "mine:cleaner", None),
    ],
)
def test_transform_holds_in_other_processes(
    store: Store, layout: Layout, tmp_path: Path, words: list[str], setting: str, body: str | None
) -> None:
    """Of a carried function, of ``run`` and its program; one not found there lets nothing out."""
    (tmp_path / "mine.py").write_text(MINE)
    environment = {**os.environ, "LIGHTNING_OTEL_TRANSFORMS": setting, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, *(store.name if word == "STORE" else word for word in words)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50
    )

    assert done.returncode == 0, done.stderr
    assert find_text(layout, SECRET) == []
    bodies = [span.attributes.get(c.MESSAGE_BODY) for span in store.spans()]
    assert (body or transforms.FAILED) in bodies
    assert ("cannot load the transform 'mine:cleaner'" in done.stderr) == (
        setting == "mine:cleaner"
    )


def test_run_refuses_a_transform_that_is_not_there(store: Store, tmp_path: Path) -> None:
    """A misspelt name is refused before the program runs."""
    words = [store.name if word == "STORE" else word for word in RUN]
    done = subprocess.run(
        [sys.executable, *words, "--transform", "json:nothing", *PROGRAM],
        capture_output=True, text=True, cwd=tmp_path, timeout=50,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (2, "")
    assert "json:nothing" in done.stderr


def test_transforms_of_threads_do_not_mix(store: Store, layout: Layout) -> None:
    """A transform in one thread does not make another thread's span a span within it."""
    entered, free = threading.Event(), threading.Event()

    def waits(span: Span) -> Span:
        if span.attributes.get(c.MESSAGE_BODY) == "slow":
            entered.set()
            free.wait(10)
        return span

    lo.add_transform(waits)
    slow = Span("ab" * 16, "01" * 8, None, "slow", 1, 2, attributes={c.MESSAGE_BODY: "slow"})
    thread = threading.Thread(target=SpanWriter(layout).add, args=(slow,))
    thread.start()
    entered.wait(10)
    store.add([replace(slow, span_id="02" * 8, name="quick", attributes={"a": "b"})])
    free.set()
    thread.join()

    assert {span.name for span in store.spans()} == {"slow", "quick"}
