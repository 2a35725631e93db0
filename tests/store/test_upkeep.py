"""A store is kept in order beside its writers, a small piece at a time."""

import time
from collections.abc import Callable

import pytest

from lightning_otel import Store, config
from lightning_otel.store import settle as settle_module
from lightning_otel.store import upkeep as upkeep_module
from lightning_otel.store.layout import Layout
from lightning_otel.store.settle import Settled, settle_some, settler_elected
from lightning_otel.store.upkeep import Keeper, Upkeep, keep_up
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import Span


@pytest.fixture
def layout(store: Store, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """The paths of a store that exists, with settled spans in effect at once."""
    assert store.layout is not None
    store.layout.create()
    monkeypatch.setattr(settle_module, "COMMIT_AHEAD_US", 2_000)
    return store.layout


@pytest.fixture
def write(layout: Layout, make_span: Callable[..., Span]) -> Callable[[int], None]:
    """A function that writes a number of sealed segments, a span in each."""

    def write(count: int) -> None:
        for _ in range(count):
            writer = SpanWriter(layout)
            writer.add(make_span(start_ns=time.time_ns(), end_ns=time.time_ns()))
            writer.seal()

    return write


def test_settle_some_packs_a_batch_at_a_time(
    layout: Layout, write: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backlog of any size is worked off in pieces, and another settler is not waited for."""
    write(3)
    monkeypatch.setattr(settle_module, "BATCH_BYTES", 1)

    too_little = settle_some(layout, least_bytes=1 << 20)
    with settler_elected(layout):
        beside_another = settle_some(layout)
    pieces = [settle_some(layout), settle_some(layout, 5), settle_some(layout)]

    assert too_little == beside_another == Settled()
    assert pieces == [Settled(1, 1, 1), Settled(2, 2, 2), Settled()]


def test_keep_up_settles_what_is_worthwhile(layout: Layout, write: Callable[[int], None]) -> None:
    """A little is left where it reads as fast, until nobody writes any more."""
    write(2)
    busy = keep_up(layout)
    idle = keep_up(layout, is_idle=True)
    write(upkeep_module.WORTHWHILE_SEGMENTS)
    many = keep_up(layout)

    assert (busy.segments, idle.segments, many.segments) == (0, 2, 64)


def test_keep_up_holds_the_size_and_says_what_went(
    store: Store,
    layout: Layout,
    write: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The oldest rollouts go, are counted in the manifest, and a warning says so."""
    for _ in range(3):
        write(1)
        store.settle()
    newest = max(span.start_ns for span in store.spans())
    size = sum(file.size_bytes for file in layout.read_manifest().live_files)
    monkeypatch.setenv(config.MAX_SIZE.name, f"{size - 1}B")

    keep_up(layout)
    time.sleep(0.01)

    left = store.spans().rows()
    assert 1 <= len(left) <= 2
    assert newest in [span.start_ns for span in left]
    assert layout.read_manifest().counts == {"dropped.size": 3 - len(left)}
    assert "LIGHTNING_OTEL_MAX_SIZE" in caplog.text


def test_keep_up_of_no_store_does_nothing(store: Store) -> None:
    """A server may watch a place where nothing was recorded yet."""
    assert store.layout is not None

    assert keep_up(store.layout) == Settled()
    assert not store.layout.exists()


def test_upkeep_works_beside_others_and_stops(
    store: Store, layout: Layout, write: Callable[[int], None]
) -> None:
    """What was sealed is settled while somebody else goes on, and no thread is left."""
    write(upkeep_module.WORTHWHILE_SEGMENTS)

    with Upkeep(layout, period_s=0.01) as upkeep:
        deadline = time.monotonic() + 20
        while not layout.read_manifest().files and time.monotonic() < deadline:
            time.sleep(0.02)

    assert layout.read_manifest().files
    assert not upkeep._thread.is_alive()


def test_upkeep_settles_a_little_when_all_is_quiet(
    layout: Layout, write: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while without anything new, whatever waits is settled."""
    monkeypatch.setattr(upkeep_module, "IDLE_S", 0.1)
    write(2)

    with Upkeep(layout, period_s=0.01):
        deadline = time.monotonic() + 20
        while not layout.read_manifest().files and time.monotonic() < deadline:
            time.sleep(0.02)

    assert [file.rows for file in layout.read_manifest().files] == [2]


def test_keeper_lets_a_little_wait_while_more_comes(
    layout: Layout, write: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time counts from what was sealed last."""
    monkeypatch.setattr(upkeep_module, "IDLE_S", 0.3)
    keeper = Keeper(layout)
    done = []
    for _ in range(3):
        write(1)
        done.append(keeper.look().segments)
        time.sleep(0.2)
    time.sleep(0.2)
    done.append(keeper.look().segments)

    assert done == [0, 0, 0, 3]


@pytest.mark.parametrize(
    ("text", "size"),
    [("10GB", 10**10), ("500 mb", 5 * 10**8), ("1.5GiB", 3 << 29), ("123", 123), ("7k", 7000)],
)
def test_size_of_reads_what_people_write(text: str, size: int) -> None:
    """Decimal units and binary ones, with or without the B."""
    assert config.size_of(text) == size


@pytest.mark.parametrize("text", ["", "ten", "-1GB", "1 GBs", "1e9", "0"])
def test_max_size_of_nonsense_is_no_limit(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store is never emptied by a slip of the keyboard."""
    monkeypatch.setenv(config.MAX_SIZE.name, text)

    assert config.max_size_bytes() is None
