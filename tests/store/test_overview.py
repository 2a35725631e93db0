"""A look at a whole store tells what the views tell, of whatever lies in it."""

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.errors import StoreMissingError
from lightning_otel.store import overview as module
from lightning_otel.store import settle
from lightning_otel.store.compact import compact
from lightning_otel.store.moment import moment_of
from lightning_otel.store.overview import overview
from lightning_otel.store.schema import NARROW_COLUMNS
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import Span

OTHER = "opentelemetry.instrumentation.langchain"
QUERIES = (
    "SELECT * FROM rollouts ORDER BY ALL",
    "SELECT * FROM rewards ORDER BY ALL",
    f"SELECT {', '.join(NARROW_COLUMNS)}, attributes FROM spans ORDER BY ALL",
    "SELECT count(*) AS n FROM rollouts WHERE status <> 'succeeded'",
)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is settled counts from the next look on."""
    monkeypatch.setattr(settle, "COMMIT_AHEAD_US", 2_000)


def recorded(number: int) -> Iterator[Span]:
    """Random rollouts, several tries and makers each; rewards of all kinds for any of them."""
    chance = random.Random(number)
    clock = iter(range(1_000, 1_000_000_000, 7))
    for rank in range(12):
        rollout, attempts = f"r{chance.randint(0, 7)}", chance.choice([("",), ("1",), ("1", "2")])
        for attempt in attempts:
            own: dict[str, Any] = {c.ROLLOUT_ID: rollout if chance.random() < 0.8 else ""}
            if attempt:
                own[c.ATTEMPT_ID] = attempt
            trace = f"{chance.randint(1, 20):032x}"
            for index in range(chance.randint(1, 5)):
                start = next(clock)
                given, scope = _kind(chance, rank, index)
                end = None if chance.random() < 0.05 else start + chance.randint(1, 90)
                yield Span(
                    trace, f"{number:04x}{rank:04x}{next(clock):08x}", None,
                    c.SPAN_ROLLOUT if c.TASK in given else "work", start, end,
                    attributes={**own, **given}, scope=scope, process="p",
                    status=chance.choice(["UNSET", "ERROR"]),
                )  # fmt: skip


def _kind(chance: random.Random, rank: int, index: int) -> tuple[dict[str, Any], str]:
    scope = chance.choice([c.SCOPE, OTHER])
    reward = {c.REWARD_VALUE: chance.random(), c.REWARD_NAME: "primary"}
    link = {
        f"{c.LINK_PREFIX}.0.key_match": c.RESPONSE_ID,
        f"{c.LINK_PREFIX}.0.value_match": f"a{chance.randint(0, 11)}-{chance.randint(0, 2)}",
    }
    call = {c.OPERATION: c.CHAT, c.INPUT_TOKENS: 3, c.RESPONSE_ID: f"a{rank}-{index // 2}"}
    kinds = ({c.TASK: f'"{rank}"'}, {c.AGENT_NAME: "calc"}, reward, {**reward, **link}, call, call)
    return chance.choice(kinds), scope


def agree(store: Store) -> None:
    """Every query has the same rows either way."""
    for query in QUERIES:
        assert overview(store.source, query) == list(store.sql(query))


def keep(store: Store, spans: list[Span]) -> None:
    """Keep spans as a process does that ended."""
    assert store.layout is not None
    store.layout.create()
    writer = SpanWriter(store.layout)
    for span in spans:
        writer.add(span)
    writer.seal()


@pytest.mark.parametrize("number", range(4))
def test_an_overview_is_what_the_views_tell(store: Store, number: int) -> None:
    """Settled, waiting and sent again; with rewards and calls that belong elsewhere."""
    spans = list(recorded(number))
    third = len(spans) // 3

    keep(store, spans[:third])
    store.settle()
    keep(store, spans[third : 2 * third])
    agree(store)
    store.settle()
    keep(store, spans[third - 5 : third + 5])  # once more, as by a sender that heard no answer
    store.add(spans[2 * third :])
    agree(store)

    (found,) = overview(store.source, "SELECT count(*) AS n FROM spans")
    assert found["n"] == len(spans)


def test_an_overview_of_compacted_files_is_the_same(store: Store) -> None:
    """Files that ceased to count are not read, though they still lie there."""
    spans = list(recorded(9))
    for part in (spans[::2], spans[1::2]):
        keep(store, part)
        store.settle()
    assert store.layout is not None
    compact(store.layout)

    agree(store)


@pytest.mark.parametrize("is_seen", [True, False])
def test_an_overview_without_what_is_damaged(
    store: Store, make_span: Callable[..., Span], is_seen: bool
) -> None:
    """The rest is told, be the damage seen at a glance or only by who reads the file."""
    for _ in range(2):
        keep(store, [make_span() for _ in range(50)])
        store.settle()
    assert store.layout is not None
    for segment in store.layout.segments():  # else its spans are read from there
        segment.unlink()
    path = store.layout.data / store.layout.read_manifest().live_files[0].name
    status, content = path.stat(), path.read_bytes()
    path.write_bytes(content[:60] if is_seen else b"PAR1" + bytes(len(content) - 4))
    if not is_seen:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    (found,) = overview(store.source, "SELECT count(*) AS n, sum(start_ns) AS at FROM spans")

    assert found["n"] == 50


def test_an_overview_looks_again_where_a_file_was_taken_away(
    store: Store, make_span: Callable[..., Span], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was listed may be gone when it is read, where reading takes longer than the grace."""
    keep(store, [make_span()])
    store.settle()
    assert store.layout is not None
    for _ in range(500):  # until the file counts
        moments = [moment_of(store.layout)]
        if moments[0].files:
            break
        time.sleep(0.01)
    gone = [replace(file, name="spans-gone.parquet") for file in moments[0].files]
    assert gone
    moments.append(moments[0]._replace(files=gone))
    monkeypatch.setattr(module, "moment_of", lambda layout: moments.pop())

    (found,) = overview(store.source, "SELECT count(*) AS n, sum(start_ns) AS at FROM spans")

    assert (found["n"], moments) == (1, [])


def test_an_overview_of_other_stores(
    store: Store, served: Callable[..., str], make_span: Callable[..., Span]
) -> None:
    """Behind a server and in memory it is the same question; of no store there is none."""
    with pytest.raises(StoreMissingError):
        overview(store.source, QUERIES[0])
    memory = Store(":memory:")
    spans = [make_span(attributes={c.REWARD_VALUE: 0.5}), make_span()]
    for each in (store, memory):
        each.add(spans)

    found = overview(store.source, QUERIES[0])

    assert overview(Store(served(store)).source, QUERIES[0]) == found
    assert overview(memory.source, QUERIES[0]) == found
    assert [row["reward"] for row in found] == [0.5, None]


def test_many_small_segments_are_told(store: Store, make_span: Callable[..., Span]) -> None:
    """They are read in another way, and tell the same."""
    for _ in range(70):
        keep(store, [make_span(attributes={c.REWARD_VALUE: 1.0})])

    agree(store)
