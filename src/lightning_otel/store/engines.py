"""Which engine holds a store, told from how it is named."""

from datetime import UTC, datetime
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from lightning_otel.errors import ConfigError
from lightning_otel.store import clickhouse, http
from lightning_otel.store.ducklake import DuckLakeSource
from lightning_otel.store.lake import is_lake, lake_address
from lightning_otel.store.layout import MEMORY, Layout
from lightning_otel.store.remote import RemoteSource, Window
from lightning_otel.store.source import LocalSource, MemorySource, SpanSource

_BOUNDS = ("since", "until")


def source_of(given: str, *, data: str | None = None) -> SpanSource:
    """The source that a path, ``:memory:`` or a URL names; nothing is opened or made yet.

    Args:
        given: The name.
        data: Where a lake's files lie, if the name does not say.

    Raises:
        ConfigError: The URL is of an engine this version does not know, or cannot be understood.
    """
    if given == MEMORY:
        return MemorySource()
    if is_lake(given):
        return DuckLakeSource(lake_address(given, data))
    scheme = given.partition("://")[0].lower() if "://" in given else ""
    if scheme in clickhouse.SCHEMES:
        url, window = _windowed(given)
        return RemoteSource(clickhouse.ClickHouse(url), window)
    if scheme in http.SCHEMES:
        url, window = _windowed(given)
        return RemoteSource(http.Server(url), window)
    return LocalSource(Layout(given))


def _windowed(url: str) -> tuple[str, Window]:
    """The URL without ``since`` and ``until``, and the time these name."""
    parts = urlsplit(url)
    options = parse_qsl(parts.query, keep_blank_values=True)
    bounds = {name: _time_ns(name, value) for name, value in options if name in _BOUNDS}
    rest = urlencode([option for option in options if option[0] not in _BOUNDS])
    window = Window(bounds.get("since"), bounds.get("until"))
    return urlunsplit(parts._replace(query=rest)), window


def _time_ns(name: str, text: str) -> int:
    """An ISO date or time, UTC where it names no zone, in Unix nanoseconds."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError as exc:
        raise ConfigError(
            f"{name}={text!r} is no time; write one such as 2026-11-21T08:00"
        ) from exc
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return int(time.timestamp()) * 10**9 + time.microsecond * 1000
