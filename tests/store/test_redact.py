"""Redaction of a store: gone from every file, each span still once, whatever cuts it off."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.errors import ConfigError, NotFoundError, StoreError
from lightning_otel.store import settle as settle_module
from lightning_otel.store.layout import Layout
from lightning_otel.store.masking import MASK
from lightning_otel.store.redactions import RECORDS, redactions
from lightning_otel.store.settle import settler_elected
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import Span

WHO = "alice@example.org"
PATTERN = r"alice@example\.org"
_KILLS = int(os.environ.get("LIGHTNING_TEST_KILLS", "6"))


@pytest.fixture(autouse=True)
def _without_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle_module, "COMMIT_AHEAD_US", 2_000)
    monkeypatch.setattr(settle_module, "GRACE_US", 20_000)


def _call(make_span: Callable[..., Span], rollout: str, text: str, **more: object) -> Span:
    said = json.dumps([{"role": "user", "parts": [{"type": "text", "content": text}]}])
    attributes = {c.ROLLOUT_ID: rollout, c.OPERATION: "chat", c.INPUT_MESSAGES: said, **more}
    return make_span(attributes=attributes, scope=c.SCOPE)


def _stored(layout: Layout) -> str:
    """Everything that stands in any file of the store, Parquet read as text."""
    texts = []
    for path in sorted(layout.root.rglob("*")):
        if path.suffix == ".parquet":
            rows = duckdb.sql(f"SELECT * FROM read_parquet('{path}')").fetchall()
            texts += [str(row) for row in rows]
        elif path.is_file():
            texts.append(path.read_text(errors="replace"))
    return "\n".join(texts)


def _by_id(store: Store) -> dict[str, Span]:
    return {span.span_id: span for span in store.spans()}


def test_content_is_gone_from_files_and_segments_and_all_else_is_as_it_was(
    store: Store, layout: Layout, write: Callable[..., None], make_span: Callable[..., Span]
) -> None:
    """Settled, settled lately or not settled yet: it is masked, and the old files are unlinked."""
    write([_call(make_span, "r1", f"mail {WHO}"), _call(make_span, "r2", "nothing")])
    store.settle()
    write([_call(make_span, "r1", f"again {WHO}", n=1.5), make_span()])
    before = _by_id(store)

    done = store.redact(patterns=[PATTERN], wait_s=20)

    assert (done.spans, done.rollouts, done.values["pattern"], done.files) == (2, 1, 2, 2)
    assert done.is_gone
    assert WHO not in _stored(layout)
    after = _by_id(store)
    assert after.keys() == before.keys()
    for span_id, span in before.items():
        if WHO not in str(span):
            assert after[span_id] == span
        else:
            assert MASK in after[span_id].attributes[c.INPUT_MESSAGES]
            assert done.redaction_id in after[span_id].attributes[c.REDACTED]
    assert store.accounting().is_balanced
    assert not store.redact(patterns=[PATTERN], wait_s=20).spans


def test_dry_run_counts_the_same_and_changes_nothing(
    store: Store, layout: Layout, write: Callable[..., None], make_span: Callable[..., Span]
) -> None:
    """What would be masked is told, and nothing is settled, written or noted."""
    write([_call(make_span, "r1", WHO)])
    store.settle()
    write([_call(make_span, "r2", WHO)])
    before = sorted(path.name for path in layout.root.rglob("*") if path.name != "settler.lock")

    told = store.redact(patterns=[PATTERN], is_dry_run=True)

    assert (told.spans, told.rollouts, told.files) == (2, 2, 0)
    assert sorted(p.name for p in layout.root.rglob("*") if p.name != "settler.lock") == before
    assert store.redact(patterns=[PATTERN]).spans == 2


def test_what_is_still_written_to_is_counted_and_done_later(
    store: Store, layout: Layout, make_span: Callable[..., Span]
) -> None:
    """A segment that its process has open stays as it is, and the answer says so."""
    writer = SpanWriter(layout)
    writer.add(_call(make_span, "r1", WHO))

    first = store.redact(patterns=[PATTERN], wait_s=5)
    writer.seal()
    second = store.redact(patterns=[PATTERN], wait_s=20)

    assert (first.spans, first.open_spans) == (0, 1)
    assert (second.spans, second.open_spans) == (1, 0)
    assert WHO not in _stored(layout)


def test_only_what_is_named_is_looked_at(
    store: Store, write: Callable[..., None], make_span: Callable[..., Span]
) -> None:
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
    store: Store, layout: Layout, write: Callable[..., None], make_span: Callable[..., Span]
) -> None:
    """The new file stands for the old one in all that is noted of it."""
    write([_call(make_span, f"r{n}", f"{n} {WHO if n % 2 else ''}") for n in range(50)])
    store.settle()
    store.compact()
    manifest = layout.read_manifest()
    layout.write_manifest(
        replace(manifest, files=tuple(replace(f, publication="p") for f in manifest.files))
    )

    done = store.redact(patterns=[PATTERN])

    (file,) = layout.read_manifest().live_files
    assert (file.is_compact, file.publication, file.rows) == (True, "p", 50)
    assert (done.spans, done.published) == (25, 25)
    assert store.compact().merged == 0


def test_consumer_that_follows_is_given_nothing_twice(
    store: Store, write: Callable[..., None], make_span: Callable[..., Span]
) -> None:
    """A masked span is the same span: it was delivered."""
    write([_call(make_span, "r1", WHO)])
    with store.follow("trainer") as follower:
        assert len(follower.batch()) == 1

    store.redact(patterns=[PATTERN], wait_s=20)

    with store.follow("trainer") as follower:
        assert follower.batch() == []


def test_the_record_says_what_was_done_and_not_what_was_masked(
    store: Store, layout: Layout, write: Callable[..., None], make_span: Callable[..., Span]
) -> None:
    """Who, when, why and how much; a pattern may be the very thing to forget."""
    write([_call(make_span, "r1", WHO)])

    done = store.redact(patterns=[PATTERN], keys=["mail"], reason="request 7")

    (record,) = redactions(layout)
    assert "alice" not in (layout.root / RECORDS).read_text()
    assert record["redaction_id"] == done.redaction_id
    assert (record["reason"], record["patterns"], record["keys"]) == ("request 7", 1, ["mail"])
    assert (record["spans"], record["values"]) == (1, {"pattern": 1})
    assert record["began_ns"] < record["ended_ns"]
    assert (layout.root / RECORDS).stat().st_mode & 0o777 == 0o600


def test_quarantine_is_told_of(
    store: Store, layout: Layout, write: Callable[..., None], make_span: Callable[..., Span]
) -> None:
    """Damaged parts cannot be looked into, so nobody is told that they hold nothing."""
    write([_call(make_span, "r1", WHO)])
    store.settle()
    (file,) = layout.read_manifest().live_files
    path = layout.data / file.name
    path.write_bytes(path.read_bytes()[:-30] + b"\0" * 30)

    assert store.redact(patterns=[PATTERN]).aside == 1


def test_nothing_named_and_unknown_ids_are_refused(
    store: Store,
    layout: Layout,
    write: Callable[..., None],
    make_span: Callable[..., Span],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody masks a whole store by leaving something out."""
    write([_call(make_span, "r1", WHO)])

    with pytest.raises(ConfigError, match="nothing to redact is named"):
        store.redact()
    with pytest.raises(NotFoundError):
        store.redact(ids=["nobody"])
    with pytest.raises(ConfigError, match="on this disk"):
        Store(":memory:").redact(patterns=["x"])
    monkeypatch.setattr("lightning_otel.store.redact._ELECTION_S", 0.05)
    with settler_elected(layout), pytest.raises(StoreError, match="another process"):
        store.redact(patterns=["x"])


def test_file_with_wide_rows_is_rewritten_slice_by_slice(
    store: Store,
    layout: Layout,
    write: Callable[..., None],
    make_span: Callable[..., Span],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that are read a few at a time stand in the new file in their old order."""
    monkeypatch.setattr("lightning_otel.store.redact.SLICE_BYTES", 2_000)
    write([_call(make_span, f"r{n % 7}", f"{n} {WHO}" + "x" * 300) for n in range(60)])
    store.settle()
    order = "SELECT span_id FROM read_parquet('{}') ORDER BY file_row_number"
    (old,) = layout.read_manifest().live_files
    before = duckdb.sql(order.format(layout.data / old.name)).fetchall()

    store.redact(patterns=[PATTERN])

    (new,) = layout.read_manifest().live_files
    assert duckdb.sql(order.format(layout.data / new.name)).fetchall() == before
    assert all(MASK in str(span.attributes) for span in store.spans())


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
    store: Store, layout: Layout, write: Callable[..., None], make_span: Callable[..., Span]
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
    assert WHO not in _stored(layout)
    assert sorted(span.span_id for span in store.spans()) == sorted(ids)
    assert store.accounting().is_balanced
    assert not [path for path in (Path(layout.new)).iterdir() if path.suffix == ".parquet"]
