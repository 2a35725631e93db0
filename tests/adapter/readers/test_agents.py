"""Agents as Agent Lightning 0.3 really records them: `tests/data/make_agents.py` made the files."""

from pathlib import Path

import pytest
from tests.adapter.forest import steps_of

from lightning_otel.adapter import TripletAdapter, repair
from lightning_otel.receivers import Rejected, documents
from lightning_otel.types import Span

AGENTS = Path(__file__).resolve().parents[2] / "data" / "agents"


def stored(name: str) -> list[Span]:
    """The spans of a file, as `lightning-otel import` reads them."""
    spans: list[Span] = []
    for line in (AGENTS / f"{name}.jsonl").read_bytes().splitlines():
        for found in documents.spans_in(line):
            assert not isinstance(found, Rejected), found
            spans.append(found)
    return spans


@pytest.mark.parametrize(
    ("name", "expected", "moved"),
    [
        (
            "openai_agents",
            [
                ("Main Agent", None),
                ("MathAgent", 0.0),
                ("MathAgent", None),
                ("MathAgent", 1.0),
                ("Judge", 0.5),
            ],
            5,
        ),
        ("langgraph", [("model", None), ("model", 1.0), ("model", 0.25)], 0),
    ],
)
def test_calls_belong_to_their_agents(
    name: str, expected: list[tuple[str, float | None]], moved: int
) -> None:
    """Also those that lie beside their agent; so each reward goes to the call it is for."""
    found = TripletAdapter().explain(stored(name))

    assert [(step.agent, step.reward) for step in steps_of(found)] == expected
    assert [each.rule for each in found.report.repairs] == [repair.ENCLOSED] * moved
