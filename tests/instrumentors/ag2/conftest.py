"""AG2 leaves its clients open; they are dropped with the test that ignores the warnings."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _drop_clients() -> Iterator[None]:
    """Collect what AG2 has left while the test's own filter for warnings holds."""
    yield
    gc.collect()
