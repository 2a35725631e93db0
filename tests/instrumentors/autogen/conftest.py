"""A server that plays every model, and the stage on which AutoGen programs run before it."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.instrumentors.autogen.stage import Cast, Stage

from lightning_otel import Store
from lightning_otel.demo.server import DemoServer


@pytest.fixture
def server() -> Iterator[DemoServer]:
    """A server that plays the cast."""
    with DemoServer(Cast()) as running:
        yield running


@pytest.fixture
def stage(server: DemoServer, store: Store, facts: Any) -> Stage:
    return Stage(server, store, facts)
