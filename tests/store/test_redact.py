"""Redaction of a store: gone from every file, each span still once, whatever cuts it off."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest
from tests.store.conftest import TEXT, MakeSpan, Start, Write, find_text, go_on

from lightning_otel import Store, auto_trace, emit_message
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.redact import MASK
from lightning_otel.store import settle as settle_module
from lightning_otel.store.layout import Layout
from lightning_otel.store.redact import RECORDS, read_redactions
from lightning_otel.store.settle import elect_settler
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

WHO = "alice@example.org"
PATTERN = r"alice@example\.org"
_KILLS = int(os.environ.get("LIGHTNING_TEST_KILLS", "6"))


@pytest.fixture(autouse=True)
def _without_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle_module, "COMMIT_AHEAD_US", 2_000)
    monkeypatch.setattr(settle_module, "GRACE_US", 20_000)


def _call(make_span: MakeSpan, rollout: str, text: str, **more: object) -> Span:
    said = json.dumps([{"role": "user", "parts": [{"type": "text", "content": text}]}])
    attributes = {c.ROLLOUT_ID: rollout, c.OPERATION: "chat", c.INPUT_MESSAGES: said, **more}
    return make_span(attributes=attributes, scope=c.SCOPE)


def _by_id(store: Store) -> dict[str, Span]:
    return {span.span_id: span for span in store.spans()}


def test_content_is_gone_from_files_and_segments_and_all_else_is_as_it_was(
    store: Store, layout: Layout, write: Write, make_span: MakeSpan
) -> None:
    """Settled, settled lately or not settled yet: it is masked, and the old files are unlinked."""
    late = {"start_ns": 5 * 10**18, "end_ns": 5 * 10**18}  # as a wrong clock says
    write([replace(_call(make_span, "r1", f"mail {WHO}"), **late), _call(make_span, "r2", "no")])
    store.settle()
    write([_call(make_span, "r1", f"again {WHO}", n=1.5), make_span()])
    before = _by_id(store)
    with store.follow("trainer") as follower:
        assert len(follower.batch()) == 4
    files = sorted(path.name for path in layout.root.rglob("*") if path.name != "settler.lock")

    foretold = store.redact(patterns=[PATTERN], is_dry_run=True)
    unchanged = sorted(p.name for p in layout.root.rglob("*") if p.name != "settler.lock")
    done = store.redact(patterns=[PATTERN], wait_s=20)

    assert (foretold.spans, foretold.rollouts, foretold.files) == (2, 1, 0)
    assert unchanged == files

    assert (done.spans, done.rollouts, done.values["pattern"], done.files) == (2, 1, 2, 2)
    assert done.is_gone
    assert find_text(layout, WHO) == []
    after = _by_id(store)
    assert after.keys() == before.keys()
    for span_id, span in before.items():
        if WHO not in str(span):
            assert after[span_id] == span
        else:
            assert MASK in after[span_id].attributes[c.INPUT_MESSAGES]
            assert done.redaction_id in after[span_id].attributes[c.REDACTED]
    with store.follow("trainer") as follower:  # a masked span is the same span: it was delivered
        assert follower.batch() == []
    assert store.accounting().is_balanced
    assert not store.redact(patterns=[PATTERN], wait_s=20).spans


def test_process_that_writes_on_closes_its_segment_for_it(
    store: Store, layout: Layout, start: Start
) -> None:
    """With a span open, and without losing, doubling or breaking off anything it writes."""
    child = start("busy")
    before = [path.name for path in layout.segments()]

    other = store.redact(patterns=["nowhere"], wait_s=5)
    untouched = [path.name for path in layout.segments()]
    modes = {path.stat().st_mode & 0o777 for path in layout.segments()}
    done = store.redact(patterns=[TEXT], wait_s=20)
    is_alive = child.poll() is None
    held = find_text(layout, TEXT)
    go_on(child)
    go_on(child)
    child.wait(20)

    assert (other.spans, other.open_spans, untouched, modes) == (0, 0, before, {0o600})
    assert (done.spans, done.open_spans, done.is_gone) == (1, 0, True)
    assert is_alive
    assert held == []
    spans = list(store.spans())
    assert len({span.span_id for span in spans}) == len(spans)
    assert not [span for span in spans if span.is_incomplete]
    assert store.accounting().is_balanced
    assert {span.rollout_id for span in spans} == {"over", "other"}


def test_process_that_is_idle_is_counted_and_closes_it_with_its_next_line(
    store: Store, layout: Layout, start: Start
) -> None:
    """It was asked, so the next redaction reaches what this one could not; and a killed one's."""
    child = start("idle")

    found = [store.redact(patterns=[TEXT], wait_s=5)]
    go_on(child)
    found.append(store.redact(patterns=[TEXT], wait_s=20))
    assert child.poll() is None
    assert find_text(layout, TEXT) == []
    other = start("idle")
    other.kill()
    other.wait(20)
    found.append(store.redact(patterns=[TEXT], wait_s=20))

    assert [(each.spans, each.open_spans) for each in found] == [(0, 1), (1, 0), (1, 0)]
    assert find_text(layout, TEXT) == []


def test_own_segment_is_reached_with_spans_open(store: Store, layout: Layout) -> None:
    """Whoever redacts what they record themselves need not seal it, nor end what goes on."""
    with auto_trace(store=store, rollout_id="r1"):
        emit_message(f"write to {WHO}")
        told = store.redact(patterns=[PATTERN], is_dry_run=True)
        done = store.redact(patterns=[PATTERN], wait_s=20)
        held = find_text(layout, WHO)
        emit_message("and so on")

    assert (told.spans, told.open_spans) == (done.spans, done.open_spans) == (1, 0)
    assert held == []
    spans = list(store.spans())
    bodies = {str(span.attributes.get(c.MESSAGE_BODY)) for span in spans}
    assert bodies >= {f"write to {MASK}", "and so on"}
    assert not [span for span in spans if span.is_incomplete]
    assert store.accounting().is_balanced


def test_only_what_is_named_is_looked_at(store: Store, write: Write, make_span: MakeSpan) -> None:
    """An id alone takes all that was said in it; with a rule, the rule is kept to it."""
    write([_call(make_span, name, f"{name} {WHO}") for name in ("rollout-a", "rollout-b", "other")])

    by_rule = store.redact(patterns=[PATTERN], ids=["rollout-a"])
    whole = store.redact(ids=["rollout-b"])

    texts = {s.rollout_id: str(s.attributes[c.INPUT_MESSAGES]) for s in store.spans()}
    assert (by_rule.spans, whole.spans) == (1, 1)
    assert f"rollout-a {MASK}" in texts["rollout-a"]
    assert f'"{MASK}"' in texts["rollout-b"]
    assert "rollout-b" not in texts["rollout-b"]
    assert WHO in texts["other"]


def test_packed_file_stays_packed_and_published_spans_are_told_of(
    store: Store, layout: Layout, write: Write, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file stands for the old one, rows in their order, however many slices it takes."""
    monkeypatch.setattr("lightning_otel.store.rewrite.SLICE_BYTES", 2_000)
    texts = [f"{n} {WHO if n > 40 else ''}" + "x" * 300 for n in range(60)]
    write([_call(make_span, f"r{n // 9}", text) for n, text in enumerate(texts)])
    store.settle()
    store.compact()
    manifest = layout.read_manifest()
    layout.write_manifest(
        replace(manifest, files=tuple(replace(f, publication="p") for f in manifest.files))
    )
    order = "SELECT span_id FROM read_parquet('{}') ORDER BY file_row_number"
    (old,) = layout.read_manifest().live_files
    before = duckdb.sql(order.format(layout.data / old.name)).fetchall()

    done = store.redact(patterns=[PATTERN])

    (new,) = layout.read_manifest().live_files
    assert (new.is_compact, new.publication, new.rows) == (True, "p", 60)
    assert (done.spans, done.published) == (19, 19)
    assert duckdb.sql(order.format(layout.data / new.name)).fetchall() == before
    assert sum(MASK in str(span.attributes) for span in store.spans()) == 19
    assert store.compact().merged == 0


def test_the_record_says_what_was_done_and_not_what_was_masked(
    store: Store, layout: Layout, write: Write, make_span: MakeSpan
) -> None:
    """Who, when, why and how much; a pattern may be the very thing to forget."""
    write([_call(make_span, "r1", WHO)])

    done = store.redact(patterns=[PATTERN], keys=["mail"], reason="request 7")

    (record,) = read_redactions(layout)
    assert "alice" not in (layout.root / RECORDS).read_text()
    assert record["redaction_id"] == done.redaction_id
    assert (record["reason"], record["patterns"], record["keys"]) == ("request 7", 1, ["mail"])
    assert (record["spans"], record["values"]) == (1, {"pattern": 1})
    assert record["began_ns"] < record["ended_ns"]
    assert (layout.root / RECORDS).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("is_known", [False, True])
def test_quarantine_is_told_of(
    store: Store, layout: Layout, write: Write, make_span: MakeSpan, is_known: bool
) -> None:
    """Damaged parts cannot be looked into, so nobody is told that they hold nothing."""
    write([_call(make_span, "r1", WHO)])
    store.settle()
    (file,) = layout.read_manifest().live_files
    path = layout.data / file.name
    path.write_bytes(path.read_bytes()[:-30] + b"\0" * 30)
    if is_known:  # as read while another process could not put it aside
        with elect_settler(layout):
            assert list(store.spans()) == []

    assert store.redact(patterns=[PATTERN]).aside == 1


def test_nothing_named_and_unknown_ids_are_refused(
    store: Store, write: Write, make_span: MakeSpan
) -> None:
    """Nobody masks a whole store by leaving something out."""
    write([_call(make_span, "r1", WHO)])

    with pytest.raises(ConfigError, match="nothing to redact is named"):
        store.redact()
    with pytest.raises(NotFoundError):
        store.redact(ids=["nobody"])
    with pytest.raises(ConfigError, match="on this disk"):
        Store(":memory:").redact(patterns=["x"])


_REDACTING = """
import sys
from lightning_otel import Store
from lightning_otel.store import settle
settle.COMMIT_AHEAD_US, settle.GRACE_US = 2_000, 20_000
store = Store(sys.argv[1])
print("ready", flush=True)
store.redact(patterns=[r"alice@example\\.org"], wait_s=20)
"""


def test_killed_at_any_point_each_span_is_there_once_and_the_next_one_finishes(
    store: Store, layout: Layout, write: Write, make_span: MakeSpan
) -> None:
    """SIGKILL again and again, while spans still come; in the end nothing of it is left."""
    ids = set()
    for part in range(4):
        spans = [_call(make_span, f"r{part}-{n % 5}", f"{n} {WHO}") for n in range(150)]
        ids |= {span.span_id for span in spans}
        write(spans)
        if part % 2:
            store.settle()
    choose = random.Random(7)

    for number in range(_KILLS):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_REDACTING), str(layout.catalogue)],
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(choose.uniform(0.0, 0.5) * (number + 1) / _KILLS)
        child.send_signal(signal.SIGKILL)
        child.wait(20)
        child.stdout.close()
        late = _call(make_span, f"late-{number}", WHO)
        ids.add(late.span_id)
        write([late])
        found = [span.span_id for span in store.spans()]
        assert sorted(found) == sorted(ids)

    done = store.redact(patterns=[PATTERN], wait_s=30)

    assert done.is_gone
    assert find_text(layout, WHO) == []
    assert sorted(span.span_id for span in store.spans()) == sorted(ids)
    assert store.accounting().is_balanced
    assert not [path for path in (Path(layout.new)).iterdir() if path.suffix == ".parquet"]
