"""Rewards credited without messages: as the general way does, which reads them."""

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given
from tests.adapter.programs import programs

from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter
from lightning_otel.adapter.crediting import credited
from lightning_otel.types import Span


def bare(spans: Iterable[Span]) -> list[Span]:
    """The spans without what was said in them."""
    return [
        replace(span, attributes={k: v for k, v in span.attributes.items() if k not in c.BODY_KEYS})
        for span in spans
    ]


@given(programs)
def test_rewards_go_where_the_general_way_puts_them(spans: list[Span]) -> None:
    """To the same calls and by the same rule, though no message is there to be read."""
    found = TripletAdapter().explain(spans)
    steps = {
        (step.trace_id, step.span_id) for path in found.trajectories for step in path.transitions
    }

    told = credited(bare(spans), steps)

    assert sorted(told, key=str) == sorted(found.credited, key=str)
