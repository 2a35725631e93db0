"""A queue beside the test's store."""

import pytest

from lightning_otel import Store
from lightning_otel.state import State
from lightning_otel.state.queue import Queue


@pytest.fixture
def queue(store: Store) -> Queue:
    return Queue(State(store.name))
