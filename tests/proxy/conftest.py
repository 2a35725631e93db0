"""A server and the proxy before it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.proxy.origin import Origin, proxying

from lightning_otel import Store
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

Calls = Callable[[Path], list[Span]]


@pytest.fixture
def origin() -> Iterator[Origin]:
    """A server that answers as it is told."""
    server = Origin()
    yield server
    server.close()


@pytest.fixture
def proxied(tmp_path: Path, origin: Origin) -> Iterator[str]:
    """The address of a proxy before the server."""
    with proxying(tmp_path, origin.url) as address:
        yield address


@pytest.fixture
def calls() -> Calls:
    """Reads the calls of the store in a folder, in order."""

    def read(folder: Path) -> list[Span]:
        rows = Store(folder / "t.duckdb").spans().rows()
        return [span for span in rows if span.attributes.get(c.OPERATION) in c.CALL_OPERATIONS]

    return read
