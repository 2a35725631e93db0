"""A store is kept in order beside its writers, a small piece at a time."""

import threading

import pytest
from tests.store.conftest import MakeSpan, Settled, Write
from tests.waiting import wait_until

from lightning_otel import Store, config
from lightning_otel.store import maintenance
from lightning_otel.store import settle as settle_module
from lightning_otel.store.layout import WORTHWHILE_SEGMENTS, Layout, elect_settler
from lightning_otel.store.maintenance import Maintainer, maintain_store

pytestmark = pytest.mark.usefixtures("at_once")


def test_maintainer_settles_what_is_worthwhile_a_batch_at_a_time(
    layout: Layout, write: Write, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A little waits while more comes; much is settled, unless another settler is at it."""
    maintainer = Maintainer(layout)
    for _ in range(WORTHWHILE_SEGMENTS - 1):
        write([make_span()])
    done = [maintainer.run_once()]
    write([make_span()])
    with elect_settler(layout):
        done.append(maintainer.run_once())
    monkeypatch.setattr(settle_module, "BATCH_BYTES", 1)
    done += [maintainer.run_once(), maintainer.run_once()]
    monkeypatch.setattr(maintenance, "IDLE_S", 0.0)
    monkeypatch.setattr(settle_module, "BATCH_BYTES", 64 << 20)
    done += [maintainer.run_once(), maintainer.run_once()]

    assert [each.segments for each in done] == [0, 0, 1, 0, WORTHWHILE_SEGMENTS - 1, 0]


def test_maintainer_holds_the_size_and_says_what_went(
    store: Store,
    layout: Layout,
    settled: Settled,
    make_span: MakeSpan,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Above it the oldest rollouts go, counted and with a warning; other files stay as they are."""
    monkeypatch.setattr(settle_module, "GRACE_US", 60_000_000)
    for _ in range(3):
        settled([make_span()])
    files = layout.read_manifest().live_files
    size = sum(file.size_bytes for file in files)

    monkeypatch.setenv(config.MAX_SIZE.name, f"{2 * size}B")
    Maintainer(layout).run_once()
    below = layout.read_manifest().live_files
    monkeypatch.setenv(config.MAX_SIZE.name, f"{size - 1}B")
    Maintainer(layout).run_once()
    settle_module.wait_until_visible(layout)

    left = layout.read_manifest().live_files
    assert below == files
    assert 1 <= len(left) <= 2
    assert [file.name for file in left] == [file.name for file in files[-len(left) :]]
    assert len(store.spans().rows()) == len(left)
    assert layout.read_manifest().counts == {"dropped.size": 3 - len(left)}
    assert "LIGHTNING_OTEL_MAX_SIZE" in caplog.text


def test_store_is_kept_in_order_beside_others(
    layout: Layout, write: Write, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits is settled when all is quiet, and no thread is left; no store is made for it."""
    monkeypatch.setattr(maintenance, "IDLE_S", 0.1)
    nowhere = Layout(layout.root.parent / "other.duckdb")
    write([make_span(), make_span()])

    with maintain_store(nowhere, period_s=0.01), maintain_store(layout, period_s=0.01):
        wait_until(lambda: layout.read_manifest().files)

    assert [file.rows for file in layout.read_manifest().files] == [2]
    assert not nowhere.exists()
    assert "lightning-otel-maintenance" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10GB", 10**10), ("500 mb", 5 * 10**8), ("1.5GiB", 3 << 29), ("123", 123), ("7k", 7000),
        # A store is never emptied by a slip of the keyboard.
        *((text, None) for text in ("", "ten", "-1GB", "1 GBs", "1e9", "0")),
    ],
)  # fmt: skip
def test_max_size_is_what_people_write(
    text: str, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decimal units and binary ones, with or without the B; of nonsense it is no limit."""
    monkeypatch.setenv(config.MAX_SIZE.name, text)

    assert config.MAX_SIZE.read() == size
