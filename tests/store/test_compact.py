"""Files are merged, spans dropped as asked for, and nothing else changes, whatever cuts it off."""

import itertools
import os
import random
import string
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import duckdb
import pytest
from tests.store.conftest import MakeSpan, Settled, Write

from lightning_otel import Store
from lightning_otel.errors import NotFoundError, StoreError
from lightning_otel.store import rewrite as rewrite_module
from lightning_otel.store import settle as settle_module
from lightning_otel.store.compact import Expired
from lightning_otel.store.layout import Layout
from lightning_otel.store.manifest import DataFile
from lightning_otel.store.settle import elect_settler, settle, wait_until_visible
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

HOUR_NS = 3_600_000_000_000


def _live(layout: Layout) -> Sequence[DataFile]:
    return layout.read_manifest().live_files


def _all(store: Store) -> list[Span]:
    return sorted(store.spans(), key=lambda span: span.span_id)


def test_compact_settles_and_merges_and_changes_no_span(
    store: Store, layout: Layout, settled: Settled, write: Write, make_span: MakeSpan
) -> None:
    """What was in many files is in one and reads the same; a second time there is nothing to do."""
    keep: Sequence[Callable[[Iterable[Span]], object]] = (settled, settled, settled, write)
    for number, each in enumerate(keep):
        each(
            make_span(
                name=f"s{number}",
                trace_id=f"{index % 3 + 1:032x}",
                attributes={"text": "ä" * 50, "n": index, "f": 0.5, "list": [1, "a"]},
            )
            for index in range(30)
        )
    before = _all(store)

    done = store.compact()
    wait_until_visible(layout)
    again = store.compact()

    assert (done.segments, done.merged, done.made, done.left) == (1, 4, 1, 0)
    assert (again.segments, again.merged, again.made) == (0, 0, 0)
    assert _all(store) == before
    (file,) = _live(layout)
    assert (file.rows, file.is_compact) == (120, True)
    assert (layout.data / file.name).stat().st_mode & 0o777 == 0o600
    assert file.size_bytes == (layout.data / file.name).stat().st_size
    assert list(layout.new.iterdir()) == []


def test_compact_orders_rollouts_by_time_and_keeps_their_calls_together(
    store: Store, layout: Layout, settled: Settled, make_span: MakeSpan
) -> None:
    """Interleaved conversations lie one after the other, each in order, in order of their begin."""
    ids = ["f" * 32, "1" * 32, "8" * 32]
    for start in range(0, 60, 20):
        settled(
            make_span(trace_id=ids[number % 3], start_ns=1_000 + number, end_ns=2_000 + number)
            for number in range(start, start + 20)
        )

    store.compact()

    path = layout.data / _live(layout)[0].name
    rows = duckdb.sql(f"SELECT trace_id, start_ns FROM '{path}'").fetchall()
    expected = sorted((number % 3, 1_000 + number) for number in range(60))
    assert rows == [(ids[number], start_ns) for number, start_ns in expected]


def test_compact_keeps_the_first_of_two_spans_with_one_id(
    store: Store, layout: Layout, settled: Settled, make_span: MakeSpan
) -> None:
    """The second is left out and counted, as a conflict if it is a different one."""
    first = make_span(name="first", start_ns=1_000, end_ns=2_000)
    settled([first, make_span(name="other")])
    # A day apart they are settled both; the same one twice only where a file was copied in.
    settled([make_span(span_id=first.span_id, trace_id=first.trace_id, start_ns=48 * HOUR_NS)])
    settled([make_span(name="third")])
    manifest = layout.read_manifest()
    copy = replace(manifest.files[0], name=manifest.files[0].name.replace("spans-", "spans-9"))
    (layout.data / copy.name).write_bytes((layout.data / manifest.files[0].name).read_bytes())
    layout.write_manifest(replace(manifest, files=(*manifest.files, copy)))

    done = store.compact()
    wait_until_visible(layout)

    assert done.rejected == {"rejected.conflict": 1, "rejected.duplicate": 2}
    assert [span.name for span in _all(store)] == ["first", "other", "third"]
    assert layout.read_manifest().counts == done.rejected


def _aged(make_span: MakeSpan, rollout_id: str, hours: float, count: int = 5) -> list[Span]:
    end_ns = time.time_ns() - int(hours * HOUR_NS)
    return [
        make_span(
            name=rollout_id,
            start_ns=end_ns - 1_000 * (number + 1),
            end_ns=end_ns,
            attributes={"agentlightning.rollout_id": rollout_id, "pad": os.urandom(400).hex()},
        )
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("options", "reason", "gone"),
    [
        ({"older_than_s": 48 * 3600}, "dropped.age", {"old", "older"}),
        ({"rollout_ids": ["old", "older"]}, "dropped.rollout", {"old", "older"}),
    ],
)
def test_compact_drops_rollouts_by_age_and_id(
    store: Store,
    layout: Layout,
    settled: Settled,
    make_span: MakeSpan,
    options: dict[str, Any],
    reason: str,
    gone: set[str],
) -> None:
    """A file whose rollouts all go is unlinked, one with some is written anew, all counted."""
    settled(_aged(make_span, "old", 50))
    settled([*_aged(make_span, "older", 60), *_aged(make_span, "young", 1)])
    # Its first spans are old, but it went on until an hour ago.
    settled([*_aged(make_span, "long", 60), *_aged(make_span, "long", 1)])
    with pytest.raises(NotFoundError, match="'nosuch'"):
        store.compact(rollout_ids=["old", "nosuch"])

    foretold = store.compact(**options, is_dry_run=True)
    untouched = len(_all(store))
    done = store.compact(**options)
    wait_until_visible(layout)

    assert foretold.dropped == done.dropped == {reason: Expired(rollouts=2, spans=10)}
    assert (foretold.unlinked, foretold.merged, foretold.made) == (1, 2, 1)
    assert (done.unlinked, done.merged, done.made) == (1, 2, 1)
    assert untouched == 25
    assert {span.name for span in store.spans()} == {"old", "older", "young", "long"} - gone
    assert len(_all(store)) == 15
    assert layout.read_manifest().counts == {reason: 10}


def test_dropped_rollout_stays_away_when_the_clock_goes_back(
    store: Store, layout: Layout, settled: Settled, make_span: MakeSpan
) -> None:
    """The clock is set back by an hour: to readers all commits lie an hour ahead of it."""
    settled([*_aged(make_span, "a", 3), *_aged(make_span, "b", 2)])
    store.compact(rollout_ids=["b"])
    hour_us = 3_600_000_000
    manifest = layout.read_manifest()
    files = [
        replace(
            file,
            added_us=file.added_us + hour_us,
            dropped_us=file.dropped_us and file.dropped_us + hour_us,
        )
        for file in manifest.files
    ]
    segments = [replace(each, settled_us=each.settled_us + hour_us) for each in manifest.segments]
    layout.write_manifest(replace(manifest, files=tuple(files), segments=tuple(segments)))

    names = [{row["name"] for row in store.sql("SELECT name FROM spans")}]
    names.append({span.name for span in store.spans()})
    names.append({row["rollout_id"] for row in store.rollouts()})

    assert names == [{"a"}] * 3
    assert len(layout.read_manifest().files) > 1


def test_compact_drops_the_oldest_rollouts_to_make_room(
    store: Store, layout: Layout, settled: Settled, make_span: MakeSpan
) -> None:
    """The newest stay, the store is as small as asked for, and what went is counted."""
    for hours in range(9, 0, -1):
        settled(_aged(make_span, f"r{hours}", hours, count=20))
    size = sum(file.size_bytes for file in _live(layout))

    done = store.compact(max_bytes=size // 2)
    wait_until_visible(layout)

    left = {span.name for span in store.spans()}
    assert left == {f"r{hours}" for hours in range(1, len(left) + 1)}
    assert 2 <= len(left) <= 4
    assert sum(file.size_bytes for file in _live(layout)) <= size // 2
    assert done.dropped["dropped.size"].spans == 180 - 20 * len(left)
    assert layout.read_manifest().counts == {"dropped.size": 180 - 20 * len(left)}


def test_compact_leaves_open_segments_alone(
    store: Store, settled: Settled, make_span: MakeSpan
) -> None:
    """A rollout that goes on now is young, and what its process writes stays readable."""
    settled(_aged(make_span, "goes on", 100))
    store.add(_aged(make_span, "goes on", 0))

    assert store.compact(older_than_s=3600).dropped == {}
    assert len(_all(store)) == 10


@pytest.mark.parametrize(
    "change", [Store.compact, Store.repair, lambda store: store.redact(patterns=["x"])]
)
def test_two_that_change_the_store_are_one(
    store: Store,
    layout: Layout,
    settled: Settled,
    make_span: MakeSpan,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Store], object],
) -> None:
    """The second waits for the settler of that moment, then says so and changes nothing."""
    monkeypatch.setattr("lightning_otel.store.layout.ELECTION_S", 0.05)
    settled([make_span()])
    before = layout.read_manifest()

    with elect_settler(layout), pytest.raises(StoreError, match="another process settles"):
        change(store)

    assert layout.read_manifest() == before


def test_compact_halves_what_is_too_tangled(
    store: Store,
    layout: Layout,
    settled: Settled,
    make_span: MakeSpan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files that all rollouts run through are merged a few at a time."""
    monkeypatch.setattr(rewrite_module, "SLICE_BYTES", 2_000)
    monkeypatch.setattr(rewrite_module, "MAX_READS", 2)
    for _ in range(4):
        settled(
            make_span(trace_id=f"{number:032x}", attributes={"pad": os.urandom(200).hex()})
            for number in range(20)
        )
    before = _all(store)

    done = store.compact()
    wait_until_visible(layout)

    assert done.merged == 4
    assert 1 < done.made <= 4
    assert _all(store) == before


def test_compact_takes_smaller_slices_where_rows_are_too_wide(
    store: Store,
    layout: Layout,
    settled: Settled,
    make_span: MakeSpan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It tries again with less at once, and leaves files alone that do not fit even so.

    Running out of memory is a patch: which size does it differs between versions of DuckDB.
    """
    settled([make_span()])
    settled([make_span()])
    write, refused = rewrite_module.write_file, [4, 16]

    def refuse(*arguments: Any, group_bytes: int, **named: Any) -> Any:
        if rewrite_module.ROW_GROUP_BYTES // group_bytes not in refused:
            raise duckdb.OutOfMemoryException("too wide")
        return write(*arguments, group_bytes=group_bytes, **named)

    monkeypatch.setattr(rewrite_module, "write_file", refuse)
    with_less = store.compact()
    wait_until_visible(layout)
    settled([make_span()])
    refused.clear()
    not_even_so = store.compact()

    assert (with_less.merged, with_less.left) == (2, 0)
    assert (not_even_so.merged, not_even_so.left) == (0, 2)
    assert len(_all(store)) == 3
    assert list(layout.new.iterdir()) == []


def test_compact_does_not_disturb_a_reader(
    store: Store,
    layout: Layout,
    settled: Settled,
    make_span: MakeSpan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Merged files stay for a period of grace; afterwards they are gone, and nothing names them."""
    for _ in range(3):
        settled(make_span() for _ in range(3_000))
    rows = store.sql("SELECT * FROM spans").dicts()
    first = [next(rows) for _ in range(10)]

    store.compact()
    settle(layout)
    with_grace = len(list(layout.data.glob("spans-*")))
    rest = list(rows)
    monkeypatch.setattr(settle_module, "GRACE_US", -1_000_000)
    settle(layout)

    assert with_grace == 4
    assert len(first) + len(rest) == len(_all(store)) == 9_000
    assert [file.name for file in layout.read_manifest().files] == [
        path.name for path in layout.data.glob("spans-*")
    ]


def test_a_conversation_costs_about_its_text(
    store: Store, layout: Layout, settled: Settled, make_span: MakeSpan
) -> None:
    """100 turns that send their history each time: 3 × the unique text settled, 1 × compact."""
    chance = random.Random(7)
    words = ["".join(chance.choices(string.ascii_lowercase, k=chance.randint(2, 10)))
             for _ in range(3_000)]  # fmt: skip
    histories = ["", "", "", ""]
    spans = []
    for turn, number in itertools.product(range(100), range(4)):
        histories[number] += " ".join(chance.choices(words, k=100))
        attributes = {c.INPUT_MESSAGES: histories[number]}
        ids = {"trace_id": f"{number + 1:032x}", "start_ns": turn * 1_000 + number}
        spans.append(make_span(**ids, attributes=attributes))
    unique = sum(map(len, histories))
    settled(spans[:200])
    settled(spans[200:])
    before = _all(store)
    settled_bytes = sum(file.size_bytes for file in _live(layout))

    store.compact()
    wait_until_visible(layout)

    assert settled_bytes <= 3 * unique
    assert sum(file.size_bytes for file in _live(layout)) <= unique
    assert _all(store) == before
