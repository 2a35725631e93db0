"""Deleted is deleted: no byte of it is on the disk when the command returns, or that is said.

A rollout's text is looked for in every file of the store's folder, whatever holds it.
"""

import json
import os
import shutil
import time
from typing import Any

import pytest
from tests.cli.conftest import Cli
from tests.cli.conftest import cli as cli
from tests.store.conftest import TEXT, MakeSpan, Settled, Start, Write, find_text, go_on
from tests.waiting import wait_until

from lightning_otel import Queue, State, Store, auto_trace, emit_feedback, emit_message
from lightning_otel.rewards.feedback import make_feedback
from lightning_otel.rewards.pending import Pending
from lightning_otel.store import settle as settle_module
from lightning_otel.store.layout import Layout
from lightning_otel.store.maintenance import maintain_store
from lightning_otel.types import Span
from lightning_otel.types import conventions as c


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle_module, "GRACE_US", 300_000)


def _disk_bytes(layout: Layout) -> int:
    paths = [layout.catalogue, *layout.root.rglob("*")]
    return sum(path.stat().st_size for path in paths if path.is_file())


def _span(make_span: MakeSpan, rollout_id: str, text: str, hours: float = 1.0) -> Span:
    end_ns = time.time_ns() - int(hours * 3.6e12)
    attributes = {c.ROLLOUT_ID: rollout_id, c.MESSAGE_BODY: text, "pad": os.urandom(2_000).hex()}
    return make_span(start_ns=end_ns - 1, end_ns=end_ns, attributes=attributes)


def _compact(cli: Cli, layout: Layout, *words: str) -> tuple[int, dict[str, Any]]:
    done = cli("compact", "--store", str(layout.catalogue), "--json", *words)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("words", [("--rollout", "over"), ("--older-than", "2d")])
@pytest.mark.parametrize("kind", ["settled", "packed", "killed", "mixed", "copied"])
def test_no_byte_is_left_when_the_command_returns(
    layout: Layout, settled: Settled, write: Write, make_span: MakeSpan, cli: Cli, kind: str,
    words: tuple[str, ...],
) -> None:  # fmt: skip
    """Settled, packed just before, of a dead process, half made by a dead settler, or in a copy."""
    settled([_span(make_span, "over", TEXT, 60), _span(make_span, "other", "hello")])
    if kind == "packed":
        Store(layout.catalogue).compact()
    if kind == "killed":
        path = write([_span(make_span, "over", TEXT, 61), _span(make_span, "other", "hi")])
        path.write_bytes(path.read_bytes().rpartition(b'{"record":"seal"')[0])
    if kind == "mixed":
        (layout.new / "spill").mkdir(exist_ok=True)
        (layout.new / "spill" / "slice-0.parquet").write_text(TEXT)
        (layout.new / "boot-1-2-000001.ndjson").write_text(TEXT)
        (file,) = layout.read_manifest().live_files
        shutil.copy(layout.data / file.name, layout.new / f"{file.name[:-8]}x.parquet")
    if kind == "copied":
        shutil.copytree(layout.root, layout.root.with_name("other.duckdb.d"))
        layout = Layout(layout.root.with_name("other.duckdb"))
    foretold = _compact(cli, layout, *words, "--dry-run")[1]
    rows = Store(layout.catalogue).sql("SELECT span_id FROM spans").dicts()
    next(iter(rows))

    code, done = _compact(cli, layout, *words)

    assert find_text(layout, TEXT) == []
    assert (code, done["is_gone"], done["bytes_waiting"]) == (0, True, 0)
    assert done["bytes_after"] == _disk_bytes(layout)
    assert foretold["dropped"] == done["dropped"]
    assert {span.rollout_id for span in Store(layout.catalogue).spans()} == {"other"}
    assert Store(layout.catalogue).accounting().is_balanced


def test_what_is_left_for_readers_is_said_by_the_command_and_by_stats(
    layout: Layout, settled: Settled, make_span: MakeSpan, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``--no-wait``, how much and how long; a process that keeps the store takes it away."""
    monkeypatch.setattr(settle_module, "GRACE_US", 60_000_000)
    old = settled([_span(make_span, "over", TEXT)])
    settled([_span(make_span, "other", "hello")])
    size, store = old.stat().st_size, str(layout.catalogue)

    done = cli("compact", "--store", store, "--rollout", "over", "--no-wait")
    redacted = cli("redact", "--store", store, "--pattern", "x", "--yes", "--no-wait", "--json")
    stats, words = (cli("stats", "--store", store, *form).stdout for form in (["--json"], []))
    kept = _disk_bytes(layout)
    limited = _compact(cli, layout, "--max-size", "1B")  # this one never waits
    monkeypatch.setattr(settle_module, "GRACE_US", 20_000)
    with maintain_store(layout, period_s=0.05):
        wait_until(lambda: not old.exists())

    assert (done.returncode, redacted.returncode, limited[0]) == (1, 1, 0)
    assert 0 < limited[1]["bytes_waiting"] < limited[1]["bytes_after"]
    assert "waiting    " in done.stdout
    assert " s more, as readers may have them open" in done.stdout
    assert "gone  " not in done.stdout
    removed = json.loads(stats)["removed"]
    assert size <= removed["size_bytes"] < json.loads(redacted.stdout)["bytes_waiting"]
    assert (json.loads(stats)["bytes"], "removed  " in words) == (kept, True)
    assert find_text(layout, TEXT) == []
    assert "removed" not in json.loads(cli("stats", "--store", store, "--json").stdout)


@pytest.mark.parametrize("kind", ["busy", "served"])
def test_process_that_writes_closes_its_segment_for_it(
    layout: Layout, start: Start, cli: Cli, kind: str
) -> None:
    """It goes on undisturbed, and loses nothing; a plain compact packs what it wrote, too."""
    child = start(kind)

    foretold = _compact(cli, layout, "--rollout", "over", "--dry-run")[1]
    code, done = _compact(cli, layout, "--rollout", "over")
    plain = _compact(cli, layout)[1]

    assert find_text(layout, TEXT) == []
    assert (code, done["open_spans"], done["segments_open"]) == (0, 0, 0)
    assert foretold["dropped"] == done["dropped"]
    assert (plain["segments"], plain["segments_open"]) == (1, 0)
    assert child.poll() is None
    store = Store(layout.catalogue)
    assert {span.rollout_id for span in store.spans()} == {"other"}
    assert store.accounting().is_balanced


def test_idle_process_is_named_and_closes_it_with_its_next_line(
    layout: Layout, start: Start, cli: Cli
) -> None:
    """What is left, why and until when; and with the exit code, as long as it is there."""
    child = start("idle")

    code, done = _compact(cli, layout, "--rollout", "over")
    said = cli("compact", "--store", str(layout.catalogue), "--rollout", "over").stdout
    plain = cli("compact", "--store", str(layout.catalogue))
    go_on(child)
    after = _compact(cli, layout, "--rollout", "over")

    assert (code, done["open_spans"], done["is_gone"]) == (1, 2, False)
    assert "not yet    2 spans that a living process holds open" in said
    assert "1 segment closed by the process that writes, with its next span" in said
    assert plain.returncode == 0
    assert "nothing to do" not in plain.stdout
    assert (after[0], after[1]["is_gone"], find_text(layout, TEXT)) == (0, True, [])


def test_rollout_that_goes_on_is_told_of(store: Store, layout: Layout, cli: Cli) -> None:
    """Its open span is begun anew in the next segment; a process that serves closes its own."""
    with auto_trace(store=store, rollout_id="over", task={"question": TEXT}):
        emit_message(TEXT)
        code, done = _compact(cli, layout, "--rollout", "over")

    assert (code, done["open_spans"], done["dropped"]["rollout"]["spans"]) == (1, 1, 1)
    assert _compact(cli, layout, "--rollout", "over")[0] == 0
    assert find_text(layout, TEXT) == []


def test_feedback_and_tasks_go_with_their_rollout(
    store: Store, layout: Layout, settled: Settled, make_span: MakeSpan, cli: Cli
) -> None:
    """Words given before or later, and the queue's task; those of another rollout stay."""
    store.writer()
    state = State.beside(store)
    (queued, waits) = Queue(state).put([TEXT, "hello"])
    judged = make_feedback("rollout", queued.rollout_id, feedback_id="f1", rating=1, text=TEXT)
    assert Pending(state).give(store, judged) is None
    call = _span(make_span, queued.rollout_id, TEXT)
    settled([call, _span(make_span, waits.rollout_id, "hello")])
    lone = make_span(name=c.SPAN_ANNOTATION, attributes={
        c.REWARD_NAME: "primary", c.REWARD_VALUE: 1.0, c.FEEDBACK_TEXT: TEXT,
        f"{c.LINK_PREFIX}.0.key_match": c.LINK_SPAN_ID,
        f"{c.LINK_PREFIX}.0.value_match": call.span_id,
    })  # fmt: skip
    settled([lone])
    emit_feedback(rollout_id=waits.rollout_id, rating=5, text="good", store=store)
    first = _compact(cli, layout, "--rollout", queued.rollout_id)
    Queue(state).cancel(waits.rollout_id)

    assert (first[0], first[1]["queued"]) == (1, 1)
    settled([_span(make_span, queued.rollout_id, TEXT)])
    Queue(state).cancel(queued.rollout_id)
    assert _compact(cli, layout, "--rollout", queued.rollout_id)[0] == 0
    assert find_text(layout, TEXT) == []
    assert [row.rollout_id for row in Queue(state).rollouts()] == [waits.rollout_id]
    assert len(store.sql("FROM rewards").rows()) == 1
    state.close()
