"""Which engine holds a store, told from how it is named."""

from lightning_otel.store.layout import MEMORY, Layout
from lightning_otel.store.source import LocalSource, MemorySource, SpanSource


def source_of(given: str) -> SpanSource:
    """The source that a path, ``:memory:`` or a URL names; nothing is opened or made yet.

    Raises:
        ConfigError: The URL is of an engine this version does not know.
    """
    if given == MEMORY:
        return MemorySource()
    return LocalSource(Layout(given))
