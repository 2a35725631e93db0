"""Prices of models, and what calls cost at them.

Ours are those of genai-prices, whose names and figures ``.ci/prices.py`` copies.
"""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from lightning_otel import config
from lightning_otel.adapter.attributes import to_number
from lightning_otel.errors import ConfigError

_PRICES: Final = Path(__file__).with_name("prices.csv")
_MOST_MODELS: Final = 1024
_FIGURES: Final = ("input", "output", "cached", "written")


class Tokens(NamedTuple):
    """Tokens of calls; ``cached`` and ``written`` are input that a cache held, or then took."""

    input: int
    output: int
    cached: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a model's tokens per million, in any currency.

    Attributes:
        input: Of those it is given.
        output: Of those it answers.
        cached: Of input that a cache held; None if it costs what other input does.
        written: Of input that a cache then takes; None likewise.
        above: It holds for calls with more input tokens than this.
    """

    input: float
    output: float
    cached: float | None = None
    written: float | None = None
    above: int = 0

    def __post_init__(self) -> None:
        for name in _FIGURES:
            value = getattr(self, name)
            number = to_number(value)
            if (number is None or number < 0) and not (value is None and name in _FIGURES[2:]):
                raise ConfigError(
                    f"a price for {name} is {value!r}; give what a million tokens cost, from 0 on"
                )


def cost_of(price: Price, tokens: Tokens) -> float:
    """Return the cost of tokens at a price."""
    cached = min(tokens.cached, tokens.input)
    written = min(tokens.written, tokens.input - cached)
    figures = (
        (tokens.input - cached - written, price.input),
        (cached, price.input if price.cached is None else price.cached),
        (written, price.input if price.written is None else price.written),
        (tokens.output, price.output),
    )
    return sum(count * figure for count, figure in figures) / 1e6


class Prices:
    """A table of prices by name or glob of a model; the first that fits counts."""

    def __init__(self, rows: Iterable[tuple[str, Price]]) -> None:
        self.rows = tuple(rows)
        self._list_fitting = lru_cache(_MOST_MODELS)(self._find_fitting)

    def find(self, models: Sequence[str], input_tokens: int) -> Price | None:
        """Return the price of a model, under any of its names, for calls of so many tokens."""
        fitting = self._list_fitting(tuple(models))
        return next((price for price in fitting if price.above < max(input_tokens, 1)), None)

    def cost_of(self, models: Sequence[str], tokens: Tokens) -> float | None:
        """Return the cost of a call; None where no price is known."""
        price = self.find(models, tokens.input)
        return None if price is None else cost_of(price, tokens)

    def _find_fitting(self, models: tuple[str, ...]) -> list[Price]:
        return [
            price
            for pattern, price in self.rows
            if any(model == pattern or fnmatchcase(model, pattern) for model in models)
        ]


def read_prices() -> Prices:
    """Return prices per million tokens: the user's, and below them ours.

    Raises:
        ConfigError: The user's file cannot be read, or a row of it is not a price.
    """
    custom = config.PRICES.read()
    paths = [Path(custom), _PRICES] if custom else [_PRICES]
    try:
        return _read_tables(tuple((path, path.stat().st_mtime_ns) for path in paths))
    except (OSError, KeyError, TypeError, ValueError, ConfigError) as exc:
        raise ConfigError(
            f"{config.PRICES.name}={custom} is not a table of prices ({exc}); give a CSV file with "
            "the columns model, input and output, per million tokens; cached, written and above "
            "are optional"
        ) from exc


@lru_cache(2)
def _read_tables(files: tuple[tuple[Path, int], ...]) -> Prices:
    rows = []
    for path, _ in files:
        with path.open(newline="", encoding="utf-8") as file:
            lines = (line for line in file if not line.startswith("#"))
            for row in csv.DictReader(lines):
                figures = [row.get(name) for name in _FIGURES[2:]]
                cached, written = (float(figure) if figure else None for figure in figures)
                price = Price(
                    float(row["input"]), float(row["output"]), cached, written,
                    int(row.get("above") or 0),
                )  # fmt: skip
                rows.append((row["model"], price))
    return Prices(rows)
