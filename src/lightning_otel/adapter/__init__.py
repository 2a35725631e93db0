"""Spans in, transitions out: pure, near-linear, without I/O, clock or randomness.

The spans of each attempt become a tree; its model calls (or, where there are none, the actions and
observations marked by hand) become transitions; rewards are credited to them; each agent's calls
become one trajectory per branch. What is left out is in the report, with its reason.

Read ``triplet`` first, which sorts spans into ``attempts``, then ``linear``, which walks over
nearly all of these with ``calls``, ``tokens`` and ``rewards``. What the walk refuses goes to
``assembly``. The names are imported when one is first used: the store needs the readers of
conventions alone.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_otel.adapter.advantages import Advantage, Composition
    from lightning_otel.adapter.linear import Adaptation
    from lightning_otel.adapter.triplet import WAITING, TraceAdapter, TripletAdapter

__all__ = ["WAITING", "Adaptation", "Advantage", "Composition", "TraceAdapter", "TripletAdapter"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_otel.adapter import triplet  # which has all of them

    return globals().setdefault(name, getattr(triplet, name))
