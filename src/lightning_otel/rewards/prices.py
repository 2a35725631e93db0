"""Prices of models, and what calls cost at them."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from lightning_otel import config
from lightning_otel.adapter.attributes import to_number
from lightning_otel.errors import ConfigError

_PRICES: Final = Path(__file__).with_name("prices.csv")


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a model's tokens per million, in any currency.

    Attributes:
        input: Of those it is given.
        output: Of those it answers.
    """

    input: float
    output: float

    def __post_init__(self) -> None:
        for name, value in (("input", self.input), ("output", self.output)):
            found = to_number(value)
            if found is None or found < 0:
                raise ConfigError(
                    f"a price for {name} is {value!r}; give what a million tokens cost, from 0 on"
                )


def find_price(prices: Mapping[str, Price], *models: str) -> Price | None:
    """Return the first price whose name or glob is that of a model, under any of its names."""
    for pattern, price in prices.items():
        if any(fnmatchcase(model, pattern) or model == pattern for model in models):
            return price
    return None


def cost_of(price: Price, given: int, answered: int) -> float:
    """Return what so many input and output tokens cost."""
    return (given * price.input + answered * price.output) / 1e6


def read_prices() -> dict[str, Price]:
    """Return prices per million tokens by name or glob of a model: the user's file, else ours.

    Raises:
        ConfigError: The file cannot be read, or a row of it is not a price.
    """
    path = Path(config.PRICES.read() or _PRICES)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return {row["model"]: Price(float(row["input"]), float(row["output"])) for row in rows}
    except (OSError, KeyError, TypeError, ValueError, ConfigError) as exc:
        raise ConfigError(
            f"{config.PRICES.name}={path} is not a table of prices ({exc}); give a CSV file with "
            "the columns model, input and output, per million tokens"
        ) from exc
