"""A store whose spans are forwarded."""

from collections.abc import Callable
from typing import Any

import pytest

from lightning_otel import Store
from lightning_otel.store.layout import Layout
from lightning_otel.types import Span


@pytest.fixture
def fill(store: Store, layout: Layout) -> Callable[..., list[Span]]:
    made: list[int] = []

    def fill(count: int, **changes: Any) -> list[Span]:
        spans = []
        for _ in range(count):
            made.append(len(made) + 1)
            fields: dict[str, Any] = {
                "trace_id": "ab" * 16,
                "span_id": f"{made[-1]:016x}",
                "parent_span_id": None,
                "name": "work",
                "start_ns": made[-1],
                "end_ns": made[-1] + 1,
            }
            spans.append(Span(**{**fields, **changes}))
        store.add(spans)
        return spans

    return fill
