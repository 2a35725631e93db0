"""Keywords of wrong types, at every door that takes one: refused by name, where they enter."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest

import lightning_otel as lo
from lightning_otel import Store
from lightning_otel.algorithms import get
from lightning_otel.errors import ConfigError
from lightning_otel.trainer import Trainer

Door = Callable[[Store, str, Any], object]
TEXT, NUMBER, FLAG, LIST, FUNCTION = "x", 5, True, [5], print
OTHERS: Final = (object(), b"x", 1.5)
KINDS: Final[Mapping[str, tuple[Any, ...]]] = {
    "text": (NUMBER, FLAG, LIST, FUNCTION, *OTHERS),
    "id": (FLAG, LIST, FUNCTION, *OTHERS),
    "names": (NUMBER, FLAG, LIST, FUNCTION, *OTHERS),
    "flag": (NUMBER, TEXT, LIST, FUNCTION, *OTHERS),
    "number": (TEXT, FLAG, LIST, FUNCTION, *OTHERS[:2], float("nan")),
    "whole": (TEXT, FLAG, LIST, FUNCTION, *OTHERS, float("nan")),
    "time": (NUMBER, FLAG, LIST, FUNCTION, *OTHERS, 1_790_000_000, 1_790_000_000_000),
    "function": (NUMBER, TEXT, FLAG, LIST, *OTHERS),
    "place": (NUMBER, FLAG, LIST, FUNCTION, *OTHERS),
    "word": (NUMBER, TEXT, FLAG, LIST, FUNCTION, *OTHERS),
    "table": (NUMBER, TEXT, FLAG, LIST, FUNCTION, *OTHERS),
}
"""By kind of keyword, values of other types."""


def select(store: Store, name: str, value: Any) -> object:
    """Make a table; nothing is read yet."""
    return store.transitions(**{name: value})


def trace(store: Store, name: str, value: Any) -> object:
    """Make a block; nothing is entered yet."""
    return lo.auto_trace(**{"store": store, name: value})


def surround(store: Store, name: str, value: Any) -> object:
    return lo.context(**{"store": store, name: value})


def train(store: Store, name: str, value: Any) -> object:
    return Trainer(**{"store": store, name: value})


def search(store: Store, name: str, value: Any) -> object:
    """Make a trainer of APO, whose options these are."""
    return Trainer(None, "apo", store=store, **{name: value})


def export(store: Store, name: str, value: Any) -> object:
    return list(store.rows("kto", **{name: value}))


SELECTION: Final = {
    "text": "mode resource_version", "names": "agents", "flag": "rewarded received bodies",
    "number": "min_reward max_reward gamma", "time": "since until", "word": "capture",
    "function": "is_call is_reward compose", "place": "rollout_id",
}  # fmt: skip
OPTIONS: Final = {
    "id": "rollout_id attempt_id agent mode conversation_id resource_version",
    "names": "track_only", "flag": "apply debug enable_retokenization_fix",
    "function": "reward_evaluator", "place": "store", "table": "resources",
}  # fmt: skip
TABLE: Final[Mapping[Door, Mapping[str, str]]] = {
    select: {**SELECTION, "flag": f"{SELECTION['flag']} include_incomplete"},
    export: {"number": "threshold"},
    trace: OPTIONS,
    surround: OPTIONS,
    train: {
        "number": "timeout_s reward_timeout_s min_gain", "place": "store run_dir", "flag": "apply",
        "whole": "min_batch_size max_iterations samples workers max_attempts seed",
        "function": "reward_evaluator progress", "table": "resources select state",
        "word": "kind", "text": "consumer", "names": "hooks agent",
    },
    search: {
        "number": "failure_score timeout_s", "whole": "few_shot num_candidates seed",
        "text": "model evaluation_metric base_url", "function": "reflection_lm",
    },
}  # fmt: skip
CASES: Final = [
    (door, kind, name)
    for door, kinds in TABLE.items()
    for kind, names in kinds.items()
    for name in names.split()
]


@pytest.mark.parametrize(("door", "kind", "name"), CASES)
def test_wrong_types_are_refused_by_name(store: Store, door: Door, kind: str, name: str) -> None:
    """The error is ours, and says which keyword."""
    for value in KINDS[kind]:
        if callable(value) and name == "agent":
            continue
        with pytest.raises(ConfigError, match=name):
            door(store, name, value)


def test_algorithms_and_stores_check_their_own(store: Store) -> None:
    """Made by themselves, too."""
    makers: tuple[tuple[Any, dict[str, Any]], ...] = (
        (get("apo"), {"failure_score": "x"}), (Store, {"path": 5}), (lo.Advantage, {"size": "x"}),
        (lo.Composition, {"weights": 5}), (lo.TripletAdapter, {"gamma": "x"}),
        (lo.Resources, {"state": store.name}), (lo.Queue, {"state": store.name}),
    )  # fmt: skip
    for make, options in makers:
        with pytest.raises(ConfigError, match=f"{next(iter(options))} is .*; it must be "):
            make(**options)
    with lo.auto_trace(store=store):
        pass
    with pytest.raises(ConfigError, match="id is 5"):
        lo.analyze_episode(5, store)  # type: ignore[arg-type]
