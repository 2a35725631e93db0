"""Engines of stores, chosen by the store's name."""

from datetime import UTC
from urllib.parse import parse_qsl, urlencode, urlsplit

from lightning_otel.store.lake import is_lake, lake_address
from lightning_otel.store.layout import MEMORY, Layout
from lightning_otel.store.selection import Selection
from lightning_otel.store.source import LocalSource, MemorySource, SpanSource
from lightning_otel.types.instants import instant_ns

_BOUNDS = ("since", "until")


def make_source(given: str, *, data: str | None = None) -> SpanSource:
    """Return the source that a path, ``:memory:`` or a URL names; nothing is opened or made yet.

    Raises:
        ConfigError: The URL is of an engine this version does not know, or cannot be understood.
    """
    if given == MEMORY:
        return MemorySource()
    if is_lake(given):
        from lightning_otel.store.engines.ducklake import DuckLakeSource

        return DuckLakeSource(lake_address(given, data))
    if "://" not in given:
        return LocalSource(Layout(given))
    from lightning_otel.store.engines import clickhouse, http

    scheme = given.partition("://")[0].lower()
    if scheme not in (*clickhouse.SCHEMES, *http.SCHEMES):
        return LocalSource(Layout(given))  # which names the engines there are
    parts = urlsplit(given)
    options = parse_qsl(parts.query, keep_blank_values=True)
    # UTC where it names no zone: a URL means the same on every machine.
    bounds = {name: instant_ns(value, name, zone=UTC) for name, value in options if name in _BOUNDS}
    rest = urlencode([option for option in options if option[0] not in _BOUNDS])
    # Not urlunsplit, which of the path //x makes the host x.
    url = given.partition("?")[0] + f"?{rest}"
    source = http.Server(url) if scheme in http.SCHEMES else clickhouse.ClickHouse(url)
    source.window = Selection(since_ns=bounds.get("since"), until_ns=bounds.get("until"))
    return source
