"""A lake gives the same rows as every other engine: their tests, with a lake in their place."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.store.contract import test_contract as contract
from tests.store.contract.conftest import Held
from tests.store.contract.test_contract import *  # noqa: F403  # each of them is a test here

from lightning_otel import Store
from lightning_otel.types import Span


@pytest.fixture
def held(lake: str, tmp_path: Path) -> Held:
    """An empty lake, and a machine that publishes into it."""
    local = Store(tmp_path / "machine")

    def write(spans: Iterable[Span]) -> None:
        local.add(spans)
        local.writer().seal()
        local.publish(lake, is_rest_included=True)

    local.writer()
    local.publish(lake)
    return Held(Store(lake), write)


def test_views_and_transitions_are_those_of_every_engine(  # stands for that one
    held: Held, expected: contract.Expected
) -> None:
    """Row for row, but for ``DESCRIBE``: DuckLake says of each column that NULL is its default."""
    rows = {text: found for text, found in expected.rows.items() if "DESCRIBE" not in text}
    same = contract.Expected(expected.spans, rows, expected.steps, expected.report)

    contract.test_views_and_transitions_are_those_of_every_engine(held, same)

    assert len(rows) == len(expected.rows) - 1
