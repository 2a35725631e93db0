"""The order of calls whose clocks disagree: right where something tells it, a guess where not."""

import re

import pytest
from tests.adapter.forest import draw, text_of
from tests.adapter.test_branches import told

from lightning_otel import TripletAdapter
from lightning_otel.types import Span

HERE = "#process=p1,clock=0"
ANY_CLOCK = {
    "a host that serves requests": (
        "root( POST@kind=CLIENT( {there} serve@kind=SERVER( a ) {here} ) !0"
        " POST@kind=CLIENT( {there} serve@kind=SERVER( b ) {here} ) !1 )",
        "start a=0 b=1",
    ),
    "a call here, one there, one here": (
        "root( a POST@kind=CLIENT( {there} serve@kind=SERVER( b ) {here} ) d )",
        "start a b d",
    ),
    "a conversation over two hosts": (
        "a<hello {there} #trace=b b<hello|a|more {here} #trace=a d<hello|a|more|b|end !1",
        "start a b d=1",
    ),
}
CASES = {
    "nothing ties two hosts": ("root( a #process=p2 b #process=p1 )", "start? a b"),
    "nobody waited for the server": (
        "root( step( #process=p2 a #process=p1 ) b )",
        "start? a b",
    ),
    "a clock steps back an hour": ("A[ a !0 #clock=-3600 b !1 d !2 ]", "A start a=0 b=1 d=2"),
    "a clock steps back beside another process": (
        "A[ a !0 #clock=-3600 b !1 d !2 ] #trace=b,process=p2,clock=0,tick=50 B[ e ]",
        "A start a=0 b=1 d=2, B start e",
    ),
    "a clock steps back, uncounted": ("#counted=no A[ a #clock=-3600 b d ]", "A start? b d a"),
    "the conversation puts an uncounted clock right": (
        "#counted=no A[ a<hello #clock=-3600 b<hello|a|more b/!1 d<hello|a|more|b|end d/!2 ]",
        "A start a b=1 d=2",
    ),
    "two left the same words": (
        "#process=p2,tick=50 a<hello a<hello #process=p1,tick=0 b<hello|a|more",
        "start? b a, retry? b a",
    ),
    "a clock that runs backwards": ("#counted=no a@at=9-1 b@at=3-4", "start? b a"),
    "an end before a start at one instant": ("#counted=no b@at=5-9 a@at=1-5", "start? a b"),
}
EVERY = {
    **CASES,
    **{
        f"{name}, {skew}": (drawing.format(there=f"#process=p2,clock={skew}", here=HERE), expected)
        for name, (drawing, expected) in ANY_CLOCK.items()
        for skew in (0, 300, -300)
    },
}


@pytest.mark.parametrize(("drawing", "expected"), EVERY.values(), ids=EVERY)
def test_calls_are_in_the_order_they_were_made(drawing: str, expected: str) -> None:
    """By what a process counted, who asked whom, and what was said; else by the clocks."""
    found = TripletAdapter().explain(reversed(draw(drawing).spans))

    text = ", ".join(map(told, found.trajectories))
    for path in found.trajectories:
        for step in path.transitions:
            if step.reward is not None:
                answer = text_of(step.action)
                text = re.sub(rf"\b{answer}\b", f"{answer}={step.reward:g}", text)
    assert text == expected
    assert found.report.repairs == ()


def test_contradicting_parents_and_counts_lose_nothing() -> None:
    """A count that says the child came first, and clients that wait in circles, are no trap."""
    spans = [
        Span("t", "a", "b", "a", 1, 9, process="p", sequence=0, end_sequence=1, kind="CLIENT"),
        Span("t", "b", "c", "b", 2, 8, process="q", sequence=0, end_sequence=1, kind="SERVER"),
        Span("t", "c", None, "c", 3, 7, process="p", sequence=2, end_sequence=3, kind="CLIENT"),
        Span("t", "d", "c", "d", 4, None, process="q", sequence=-1, kind="SERVER"),
    ]

    assert TripletAdapter().explain(spans).report.spans == 4
