"""Queries of a store for transitions: how they are made, and which are wanted."""

from dataclasses import fields
from typing import Any, Final, NamedTuple, cast

from lightning_otel.adapter import Advantage, TripletAdapter
from lightning_otel.adapter.selection import Matcher, Selection, Wanted
from lightning_otel.dataset.adapters import Adapter, Explaining, adapter_of
from lightning_otel.types import Compose, Credit, CreditRule, Estimator


class Keywords(Wanted, total=False):
    """The keywords of whatever adapts spans; ``Store.transitions`` says what they mean."""

    credit: Credit | CreditRule
    gamma: float
    compose: Compose
    advantage: Advantage | Estimator | None
    is_call: Matcher | None
    is_reward: Matcher | None
    adapter: Adapter | str | None
    include_incomplete: bool


_OURS: Final = tuple(each.name for each in fields(TripletAdapter))


class Asked(NamedTuple):
    """The same, understood.

    Attributes:
        adapter: What makes trajectories of spans.
        wanted: Which of its transitions are wanted.
        include_incomplete: Whether attempts that broke off count.
    """

    adapter: Explaining
    wanted: Selection
    include_incomplete: bool

    @classmethod
    def of(cls, keywords: Keywords) -> "Asked":
        """Parse the keywords."""
        given: dict[str, Any] = dict(keywords)
        include_incomplete = given.pop("include_incomplete", False)
        other = given.pop("adapter", None)
        ours = TripletAdapter(**{name: given.pop(name) for name in _OURS if name in given})
        wanted = Selection.of(cast(Wanted, given))
        return cls(adapter_of(other, ours), wanted, include_incomplete)
