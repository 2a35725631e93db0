"""Renews the table of prices: ``python .ci/prices.py DATA_SLIM_JSON VERSION DATE``.

The file is ``prices/data_slim.json`` of a copy of https://github.com/pydantic/genai-prices, of that
version and date. Only names and figures are taken: of those who make models, not of those who host
them, since under a name alone a model may run anywhere.
"""

import csv
import datetime
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

TARGET: Final = Path("src/lightning_otel/store/prices.csv")
COLUMNS: Final = ("model", "above", "input", "output", "cached", "written")
NOT_TEXT: Final = ("image", "audio", "realtime", "live")
"""Words in the names of models whose tokens have several prices each."""
UNITS: Final = ("input_mtok", "output_mtok", "cache_read_mtok", "cache_write_mtok")
MAKERS: Final = (
    "openai", "anthropic", "google", "mistral", "deepseek", "x-ai", "cohere", "moonshotai",
    "minimax", "zhipuai", "voyageai",
)  # fmt: skip
HEADER: Final = """\
# US dollars per million tokens, in force on {today} as far as known on {date}; audio as text.
# Names and figures: genai-prices {version}, https://github.com/pydantic/genai-prices
# MIT License, Copyright (c) Pydantic Services Inc. 2025 to present
# Renewed with .ci/prices.py. In a call of more input tokens than "above", a row counts for all.
"""


def list_globs(match: dict[str, Any]) -> Iterator[str]:
    """Yield the names that a rule matches, as globs.

    Raises:
        ValueError: A glob cannot say it.
    """
    for kind, text in match.items():
        if kind == "or":
            for part in text:
                yield from list_globs(part)
        elif kind == "regex":
            glob = re.sub(r"\\d\{(\d+)\}", lambda count: "[0-9]" * int(count[1]), text)
            glob = glob.replace(r"\d", "[0-9]").replace(r"\.", ".")
            if re.search(r"[\\^$(){}|+?]", glob.removeprefix("^").removesuffix("$")):
                raise ValueError(text)
            yield glob.strip("^$") if glob.endswith("$") else f"{glob.strip('^')}*"
        else:
            before, after = kind in ("contains", "ends_with"), kind in ("contains", "starts_with")
            yield f"{'*' * before}{text}{'*' * after}"


def find_prices(prices: Any, today: str) -> dict[str, Any]:
    """Return the prices in force; none where they depend on the hour, or on more than tokens."""
    if isinstance(prices, list):
        rules = [entry.get("constraint") or {} for entry in prices]
        if any("start_time" in rule for rule in rules):
            return {}
        in_force = [n for n, rule in enumerate(rules) if rule.get("start_date", "") <= today]
        prices = prices[in_force[-1]]["prices"]
    has_all = "input_mtok" in prices and "requests_kcount" not in prices
    return dict(prices) if has_all else {}


def list_rows(model: dict[str, Any], today: str) -> Iterator[tuple[Any, ...]]:
    """Yield a model's rows, those for the longest calls first."""
    prices = find_prices(model["prices"], today)
    tiers = {unit: list_tiers(prices[unit]) for unit in UNITS if unit in prices}
    starts = {start for figures in tiers.values() for start, _ in figures}
    for start in sorted(starts, reverse=True):
        figures = [
            next((figure for least, figure in tiers.get(unit, ()) if least <= start), "")
            for unit in UNITS
        ]
        figures[1] = figures[1] or 0  # what answers with vectors
        for glob in list_globs(model["match"]):
            yield glob, start, *figures


def list_tiers(price: Any) -> list[tuple[int, float]]:
    """Return a price by the number of input tokens from which it holds, the highest first."""
    if not isinstance(price, dict):
        return [(0, price)]
    return sorted([(0, price["base"]), *((t["start"], t["price"]) for t in price["tiers"])])[::-1]


def main(file: str, version: str, date: str) -> None:
    """Write the table."""
    today = datetime.date.today().isoformat()
    providers = {entry["id"]: entry["models"] for entry in json.loads(Path(file).read_text())}
    with TARGET.open("w", newline="") as table:
        table.write(HEADER.format(today=today, date=date, version=version))
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(COLUMNS)
        for maker in MAKERS:
            for model in providers[maker]:
                if not any(word in model["id"] for word in NOT_TEXT):
                    writer.writerows(list_rows(model, today))


if __name__ == "__main__":
    main(*sys.argv[1:])
