"""A queue beside the test's store."""

import pytest

from lightning_otel import Queue, Store
from lightning_otel.state import State


@pytest.fixture
def queue(store: Store) -> Queue:
    return Queue(State(store.name))
