"""A rollout's reward by both of its definitions: the adapter's, and the SQL of the views.

The table of cases is ``tests/adapter/test_credit.py``'s.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tests.adapter.programs import programs

from lightning_otel import Store
from lightning_otel.adapter import TripletAdapter
from lightning_otel.adapter.advantages import last_rewards
from lightning_otel.store.earnings import LAST_REWARD
from lightning_otel.types import Span


def by_python(spans: list[Span]) -> dict[str, float]:
    """The adapter's."""
    return last_rewards(TripletAdapter().explain(spans).outcomes)


def by_sql(store: Store) -> dict[str, float]:
    """The view's."""
    query = f"SELECT rollout_id, {LAST_REWARD} AS reward FROM rollouts GROUP BY 1"
    found = {row["rollout_id"]: row["reward"] for row in store.sql(query)}
    return {name: value for name, value in found.items() if value is not None}


@given(programs)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_rewards_of_drawn_programs_are_the_same(tmp_path_factory: Any, spans: list[Span]) -> None:
    """So are those of programs nobody thought of."""
    store = Store(tmp_path_factory.mktemp("drawn") / "x.duckdb")
    store.add(spans)

    assert by_sql(store) == pytest.approx(by_python(spans))
