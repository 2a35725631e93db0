"""Prices of models, and what calls cost at them.

Ours are those of genai-prices, whose names and figures ``.ci/prices.py`` copies.
"""

import csv
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from lightning_otel import config
from lightning_otel.adapter.attributes import Attributes, get_integer, get_text, to_number
from lightning_otel.errors import ConfigError, warn_once
from lightning_otel.types import Span, Trajectory, Transition
from lightning_otel.types import conventions as c

if TYPE_CHECKING:
    import duckdb

    from lightning_otel.adapter import Adaptation

_PRICES: Final = Path(__file__).with_name("prices.csv")
_MOST_MODELS: Final = 1024
_FIGURES: Final = ("input", "output", "cached", "written")
_GLOB: Final = re.compile(r"[*?]|\[.*", re.DOTALL)
_DECIMALS: Final = 12
"""Of sums: another order of adding gives the same number."""

Models: TypeAlias = tuple[str | None, str | None]
"""The names of a call's model: the one that answered, and the one that was asked."""


class TokenCounts(NamedTuple):
    """Tokens of a call.

    Attributes:
        input: Tokens given, from a cache or not; None where nobody counted.
        output: Tokens answered; None likewise.
        cached: Those of the input that a cache held.
        written: Those of the input that a cache then took.
    """

    input: int | None
    output: int | None
    cached: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a model's tokens per million, in any currency.

    Attributes:
        input: Of those it is given.
        output: Of those it answers.
        cached: Of those it is given that a cache held; None if they cost what others do.
        written: Of those it is given that a cache then takes; None likewise.
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


class Prices:
    """A table of prices by name or glob of a model; the first that fits counts.

    Attributes:
        rows: The names and globs, with their prices.
    """

    def __init__(self, rows: Iterable[tuple[str, Price]]) -> None:
        self.rows = tuple(rows)
        self.list_fitting = lru_cache(_MOST_MODELS)(self._list_fitting)

    def cost_of(self, models: Models, tokens: TokenCounts) -> float | None:
        """Return the cost of a call; None where no price or no count of tokens is known."""
        prompt, answered = tokens.input or 0, tokens.output or 0
        fitting = self.list_fitting(models)
        price = next((tier for tier in fitting if tier.above < max(prompt, 1)), None)
        if price is None or tokens.input is tokens.output is None:
            return None
        cached = price.input if price.cached is None else price.cached
        written = price.input if price.written is None else price.written
        # In the order in which SQL adds them, too.
        plain = (prompt - tokens.cached - tokens.written) * price.input
        return (
            plain + tokens.cached * cached + tokens.written * written + answered * price.output
        ) / 1e6

    def _list_fitting(self, models: Models) -> tuple[Price, ...]:
        """Return the prices of a model under any of its names, the first that may count first."""
        names = [name or "" for name in models]
        return tuple(
            price
            for pattern, price in self.rows
            if any(name == pattern or _is_like(name, pattern) for name in names)
        )


def _is_like(name: str, pattern: str) -> bool:
    # A pattern costs 0.1 ms to compile, and most hold what the name does not.
    begin, *parts = _GLOB.split(pattern)
    is_possible = parts and name.startswith(begin) and all(part in name for part in parts)
    return bool(is_possible) and fnmatchcase(name, pattern)


def read_usage(span: Span, step: Transition | None = None) -> tuple[Models, TokenCounts]:
    """Return the names of a call's model, and its tokens as its server or its token ids tell."""
    attributes = span.attributes
    prompt, answered = attributes.get(c.INPUT_TOKENS), attributes.get(c.OUTPUT_TOKENS)
    if type(prompt) is not int:
        prompt = (len(step.prompt_ids) or None) if step is not None else None
    if type(answered) is not int:
        answered = (len(step.response_ids) or None) if step is not None else None
    cached = min(_read_count(attributes, c.CACHED_TOKENS), prompt or 0)
    written = min(_read_count(attributes, c.CACHE_CREATION_TOKENS), (prompt or 0) - cached)
    names = get_text(attributes, c.RESPONSE_MODEL), get_text(attributes, c.REQUEST_MODEL)
    return names, TokenCounts(prompt, answered, cached, written)


def _read_count(attributes: Attributes, key: str) -> int:
    if key not in attributes:
        return 0
    text = str(attributes[key])
    return int(text) if text.isdecimal() else 0


def add_usage(part: "Adaptation", key: str) -> Iterator[Trajectory]:
    """Yield trajectories whose answers hold cached tokens and cost of their calls, under a key.

    An imported document says there itself what it knows.
    """
    prices = read_prices()
    calls = {(span.trace_id, span.span_id): span for _, spans, _ in part.parts for span in spans}
    imported = {
        (path.rollout_id, path.attempt_id)
        for path in part.trajectories
        if any(key in message for step in path.transitions for message in step.action[:1])
    }

    def add(step: Transition) -> Transition:
        span = calls.get((step.trace_id, step.span_id))
        if span is None or not step.action:
            return step
        cost = prices.cost_of(*read_usage(span, step))
        usage = {"cached_tokens": get_integer(span.attributes, c.CACHED_TOKENS), "cost_usd": cost}
        metrics = {name: value for name, value in usage.items() if value is not None}
        answer = {**step.action[0], key: {"cost": cost, "step": {"metrics": metrics}}}
        return replace(step, action=(answer, *step.action[1:])) if metrics else step

    for path in part.trajectories:
        is_own = (path.rollout_id, path.attempt_id) not in imported
        yield replace(path, transitions=tuple(map(add, path.transitions))) if is_own else path


def add_costs(costs: Iterable[float | None]) -> float | None:
    """Return the sum of the costs that are known; None if none is."""
    numbers = [cost for cost in costs if cost is not None]
    return round(math.fsum(numbers), _DECIMALS) if numbers else None


SUM_COSTS: Final = f"round(fsum(cost), {_DECIMALS})"
"""The same in SQL."""


def read_prices() -> Prices:
    """Return prices per million tokens: the user's, and below them ours.

    Raises:
        ConfigError: The user's file cannot be read, or a row of it is not a price.
    """
    table = config.PRICES.read()
    paths = [Path(table), _PRICES] if table else [_PRICES]
    try:
        return _read_tables(tuple((path, path.stat().st_mtime_ns) for path in paths))
    except (OSError, KeyError, TypeError, ValueError, ConfigError) as exc:
        raise ConfigError(
            f"{config.PRICES.name}={table} is not a table of prices ({exc}); give a CSV file with "
            "the columns model, input and output, per million tokens; cached, written and above "
            "are optional"
        ) from exc


COSTS: Final = """
SELECT trace_id, span_id, rollout_id, attempt_id, fingerprint, agent, start_ns, end_ns, error_type,
  coalesce(response_model, request_model) AS model, input_tokens, output_tokens,
  price_input IS NOT NULL AS is_priced,
  CASE WHEN input_tokens IS NOT NULL OR output_tokens IS NOT NULL THEN (
    (coalesce(input_tokens, 0) - cached_tokens - written_tokens) * price_input
    + cached_tokens * price_cached + written_tokens * price_written
    + coalesce(output_tokens, 0) * price_output) / 1e6 END AS cost
FROM (FROM facts WHERE kind = 'call' AND NOT is_repeated) AS calls LEFT JOIN prices
ON coalesce(response_model, '') = answering AND coalesce(request_model, '') = requested
  AND greatest(coalesce(input_tokens, 0), 1) > above
  AND greatest(coalesce(input_tokens, 0), 1) <= up_to"""
"""Each call that counts, with its cost by the table ``prices``; null where that is unknown."""
_PRICE_COLUMNS: Final = {
    "answering": "VARCHAR", "requested": "VARCHAR", "above": "DOUBLE", "up_to": "DOUBLE",
    **{f"price_{name}": "DOUBLE" for name in _FIGURES},
}  # fmt: skip
NO_PRICES: Final = ", ".join(f"NULL::{kind} AS {name}" for name, kind in _PRICE_COLUMNS.items())
_DISTINCT: Final = """
SELECT DISTINCT coalesce(response_model, ''), coalesce(request_model, '') FROM facts
WHERE kind = 'call'"""


def create_prices(con: "duckdb.DuckDBPyConnection") -> None:
    """Make the table of the prices of each model in ``facts``, by their number of input tokens."""
    rows: list[tuple[object, ...]] = []
    try:
        table = read_prices()
    except ConfigError as exc:  # all but costs is read all the same
        warn_once(str(exc))
        table = Prices(())
    for models in con.execute(_DISTINCT).fetchall():
        up_to = math.inf
        for price in table.list_fitting(models):
            if price.above < up_to:
                figures = (price.input, price.output, price.cached, price.written)
                rows.append((*models, price.above, up_to, *(
                    price.input if figure is None else figure for figure in figures)))  # fmt: skip
                up_to = price.above
    columns = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in _PRICE_COLUMNS]
    values = ", ".join(f"unnest(?::{kind}[]) AS {name}" for name, kind in _PRICE_COLUMNS.items())
    con.execute(f"CREATE OR REPLACE TABLE prices AS SELECT {values}", columns)


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
