"""A running receiver with a store of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serve.serving import Serving

pytest.importorskip("hypercorn", reason="needs the extra serve")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A receiver that the tests of one module share."""
    folder: Path = tmp_path_factory.mktemp("shared")
    with Serving(folder / "traces.duckdb", "--port", "0") as running:
        yield running
