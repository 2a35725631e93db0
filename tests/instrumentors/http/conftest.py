"""One server for a test."""

from collections.abc import Iterator

import pytest
from tests.instrumentors.http.wire import Wire, serve


@pytest.fixture
def wire() -> Iterator[Wire]:
    """A server that answers what it is told to."""
    with serve() as running:
        yield running
