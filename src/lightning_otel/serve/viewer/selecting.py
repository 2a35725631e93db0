"""The selection of transitions by a page's query."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from functools import cache
from typing import Any, Final, cast, get_args

from lightning_otel import formats
from lightning_otel.adapter.selection import Selection, Wanted
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError
from lightning_otel.formats.format import Format
from lightning_otel.instants import instant_ns, utc_text
from lightning_otel.types import CaptureLevel, Credit, Estimator

SHARED: Final = (
    "agents", "since", "until", "mode", "resource_version", "min_reward", "max_reward",
)  # fmt: skip
"""What the query, the store and the command line call by one name."""
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "rewarded": ("", "yes", "no"),
    "capture": ("", *get_args(CaptureLevel)),
    "received": ("", "no"),
    "incomplete": ("", "yes"),
    "credit": ("", *get_args(Credit)),
    "advantage": ("", *get_args(Estimator)),
}
"""What is one of a few words; the empty one is the default."""
FIELDS: Final = (*SHARED, "rollout", "gamma", *CHOICES)
_MOST: Final = 2000
_NUMBERS: Final = ("min_reward", "max_reward", "gamma")
_TIMES: Final = ("since", "until")
_ADAPTING: Final = ("credit", "gamma", "include_incomplete", "received")


@dataclass(frozen=True, slots=True)
class Chosen:
    """The selection that a query asks for.

    Attributes:
        values: Each field as it was written; empty where it was not.
        keywords: The same as ``Store.transitions`` takes it.
        options: The same as ``lightning-otel export FORMAT`` takes it.
    """

    values: Mapping[str, str]
    keywords: Mapping[str, Any]
    options: tuple[str, ...]

    @property
    def adapting(self) -> dict[str, Any]:
        """The keywords that change rewards rather than select steps."""
        return {name: value for name, value in self.keywords.items() if name in _ADAPTING}

    @property
    def query(self) -> dict[str, str]:
        """The fields that are set, for an address."""
        return {name: value for name, value in self.values.items() if value}

    def command(self, store: Store, format: str = "triplets", out: str = "", *more: str) -> str:
        """Word the command that exports the same selection.

        Args:
            store: Where from.
            format: The format's name.
            out: The file's name.
            *more: Options of the format.
        """
        words = ["lightning-otel", "export", format, out or f"{format}.jsonl"]
        return shlex.join([*words, *self.options, *more, "--store", store.name])


def chosen(query: Mapping[str, str], store: Store) -> Chosen:
    """Parse a query into a selection.

    Args:
        query: Texts by field; what is no field of ours is left alone.
        store: Where the beginning of a rollout's id is looked for.

    Raises:
        ConfigError: A field cannot be understood.
        NotFoundError: There is no such rollout.
    """
    values = {name: query.get(name, "").strip() for name in FIELDS}
    for name, value in values.items():
        if len(value) > _MOST or "\0" in value:
            raise ConfigError(f"{name} is no text of up to {_MOST} characters; shorten it")
        if name in CHOICES and value not in CHOICES[name]:
            known = ", ".join(filter(None, CHOICES[name]))
            raise ConfigError(f"{name} is {value!r}; it may be {known}")
    keywords = _make_keywords(values)
    if values["rollout"]:
        noun, whole = store.find(values["rollout"])
        keywords["rollout_id"] = whole if noun == "rollout" else store.rollout_of(noun, whole)
    adapting = {*_ADAPTING, "advantage"} - {"received"}
    # Said here, and not in the middle of an answer.
    wanted = {name: value for name, value in keywords.items() if name not in adapting}
    Selection.of(cast(Wanted, wanted))
    # At a shell a time without a zone is that of the machine, and in an address it is not.
    written = values | {name: utc_text(keywords[name]) for name in _TIMES if name in keywords}
    return Chosen(values, keywords, tuple(_make_options(written)))


def _make_keywords(values: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {name: values[name] for name in SHARED if values[name]}
    for name in _NUMBERS:
        if values[name]:
            found[name] = number(name, values[name])
    if "agents" in found:
        found["agents"] = _split_patterns(values["agents"])
    if values["rewarded"]:
        found["rewarded"] = values["rewarded"] == "yes"
    for name in ("capture", "credit", "advantage"):
        if values[name]:
            found[name] = values[name]
    if values["received"]:
        found["received"] = False
    if values["incomplete"]:
        found["include_incomplete"] = True
    for name in _TIMES:
        if name in found:
            found[name] = instant_ns(found[name], name, zone=UTC)
    return found


@cache
def registered() -> tuple[tuple[str, Format], ...]:
    """The formats by name; to look for them takes a fifth of a second, and they stay the same."""
    return tuple((name, formats.get(name)) for name in formats.names())


def number(name: str, text: str) -> float:
    """A finite number.

    Raises:
        ConfigError: The text is none.
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ConfigError(f"{name} is {text!r}, which is no number; write one such as 0.5")
    return found


def _split_patterns(text: str) -> list[str]:
    return [part for part in (each.strip() for each in text.split(",")) if part]


def _make_options(values: Mapping[str, str]) -> "list[str]":
    found: list[str] = []
    for name in (*SHARED, "rollout", "gamma", "capture", "credit", "advantage"):
        if not values[name]:
            continue
        several = _split_patterns(values[name]) if name == "agents" else [values[name]]
        for each in several:
            # With its sign, a value that begins with a dash is no option.
            found.append(f"--{name.replace('_', '-')}={each}")
    if values["rewarded"]:
        found.append("--rewarded" if values["rewarded"] == "yes" else "--no-rewarded")
    if values["received"]:
        found.append("--no-received")
    if values["incomplete"]:
        found.append("--incomplete")
    return found
