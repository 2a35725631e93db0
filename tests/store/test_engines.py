"""A store's name tells which engine holds it."""

import pytest

from lightning_otel import Store
from lightning_otel.errors import ConfigError
from lightning_otel.store.engines import source_of
from lightning_otel.store.engines.remote import RemoteSource
from lightning_otel.store.source import LocalSource, MemorySource


def test_a_name_tells_the_engine() -> None:
    """Nothing is opened for it, nor asked."""
    assert isinstance(source_of(":memory:"), MemorySource)
    assert isinstance(source_of("some/folder"), LocalSource)
    for url in ("http://h:1", "https://h", "clickhouse://h/db", "HTTP://h:1"):
        assert isinstance(source_of(url), RemoteSource)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://:secret@host:4318", "http://host:4318"),
        ("https://secret@host/under/", "https://host/under"),
        ("http://[::1]:4318?since=2026-01-01", "http://[::1]:4318"),
        ("clickhouse://me:secret@h/db", "clickhouse://h:8123/db?table=otel_traces"),
        ("clickhouse://h", "clickhouse://h:8123/default?table=otel_traces"),
        (
            "clickhouses://me:secret@[::1]:9000/a%60b?table=spans",
            "clickhouses://::1:9000/a`b?table=spans",
        ),
    ],
)
def test_a_name_holds_no_secret(url: str, name: str) -> None:
    """It is shown, logged and pasted."""
    store = Store(url)

    assert store.name == name
    assert "secret" not in repr(store)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h/0",
        "http://",
        "http://h:x",
        "http://h:1?sinse=2026-01-01",
        "http://h:1?since=yesterday",
        "clickhouse://h/db?until=",
        "clickhouse://",
        "clickhouse+chdb://",
        "clickhouse://h:port/x",
        "clickhouse://h/x?tabel=a",
    ],
)
def test_what_names_no_engine_is_refused(url: str) -> None:
    """Before anything is asked."""
    with pytest.raises(ConfigError):
        Store(url)


def test_times_are_utc_where_they_name_no_zone() -> None:
    """To the microsecond."""
    source = source_of("http://h:1?since=2026-01-01&until=2026-01-01T01:00:00.000001%2B01:00")

    assert isinstance(source, RemoteSource)
    assert source.window.since_ns == 1_767_225_600 * 10**9
    assert source.window.until_ns == 1_767_225_600 * 10**9 + 1000
