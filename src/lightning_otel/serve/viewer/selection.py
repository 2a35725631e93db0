"""The selection of transitions by a page's query."""

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC
from functools import cache
from typing import Any, Final, cast, get_args

from lightning_otel.adapter.selection import Selection, SelectionKeywords
from lightning_otel.dataset import Store, formats
from lightning_otel.dataset.formats.format import Format
from lightning_otel.errors import ConfigError
from lightning_otel.types import CaptureLevel, Credit, Estimator
from lightning_otel.types.instants import instant_ns, utc_text

CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "rewarded": ("", "yes", "no"),
    "capture": ("", *get_args(CaptureLevel)),
    "received": ("", "no"),
    "incomplete": ("", "yes"),
    "credit": ("", *get_args(Credit)),
    "advantage": ("", *get_args(Estimator)),
}
"""What is one of a few words; the empty one is the default."""
_MOST: Final = 2000
_ADAPTING: Final = ("credit", "gamma", "include_incomplete", "received")


class FieldError(ConfigError):
    """A field of a form cannot be understood.

    Attributes:
        name: The field; empty if it is not known.
        values: All fields as they were written.
    """

    def __init__(self, name: str, values: Mapping[str, str], error: ConfigError) -> None:
        """Tell of an error of one field."""
        super().__init__(str(error))
        self.name, self.values = name, values


@dataclass(frozen=True, slots=True)
class SelectionForm:
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

    def command(self, store: Store, format: str = "triplets", *more: str) -> str:
        """Word the command that exports the same selection, with more options of the format."""
        words = ["lightning-otel", "export", format, f"{format}.jsonl", *self.options, *more]
        return shlex.join([*words, "--store", store.name])


def parse_selection(query: Mapping[str, str], store: Store) -> SelectionForm:
    """Parse a query into a selection; what is no field of ours is left alone.

    Args:
        query: Texts by field.
        store: Where the beginning of a rollout's id is looked for.

    Raises:
        FieldError: A field cannot be understood.
        NotFoundError: There is no such rollout.
    """
    values = {name: query.get(name, "").strip() for name in _FIELDS}
    keywords: dict[str, Any] = {}
    options: list[str] = []
    for name, text in values.items():
        if not text:
            continue
        try:
            value, named = _parse_field(name, text)
        except ConfigError as exc:
            raise FieldError(name, values, exc) from exc
        keywords[{"incomplete": "include_incomplete"}.get(name, name)] = value
        options += named
    if given := keywords.pop("rollout", ""):
        noun, whole = store.find(given)
        keywords["rollout_id"] = whole if noun == "rollout" else store.rollout_of(noun, whole)
    # Said here, and not in the middle of an answer.
    adapting = {*_ADAPTING, "advantage"} - {"received"}
    wanted = {name: value for name, value in keywords.items() if name not in adapting}
    try:
        Selection.of(cast(SelectionKeywords, wanted))
    except ConfigError as exc:
        name = next((name for name in values if str(exc).startswith(name)), "")
        raise FieldError(name, values, exc) from exc
    return SelectionForm(values, keywords, tuple(options))


def _parse_field(name: str, text: str) -> tuple[Any, list[str]]:
    """Return the value of a field and the options that name it at a shell."""
    if len(text) > _MOST or "\0" in text:
        raise ConfigError(f"{name} is not a text of at most {_MOST} characters; shorten it")
    if text not in CHOICES.get(name, (text,)):
        known = ", ".join(filter(None, CHOICES[name]))
        raise ConfigError(f"{name} is {text!r}; use one of {known}")
    value = _FIELDS[name](name, text)
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return value, [f"--{option}" if value else f"--no-{option}"]
    # At a shell a time without a zone is that of the machine, and in an address it is not.
    written = [utc_text(value)] if _FIELDS[name] is _parse_time else [text]
    # With its sign, a value that begins with a dash is no option.
    return value, [f"--{option}={each}" for each in (value if isinstance(value, list) else written)]


def parse_number(name: str, text: str) -> float:
    """A finite number.

    Raises:
        ConfigError: The text is none.
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ConfigError(f"{name} is {text!r}, which is not a number; use one such as 0.5")
    return found


def _parse_time(name: str, text: str) -> int:
    return instant_ns(text, name, zone=UTC)


def _parse_text(name: str, text: str) -> str:
    return text


def _parse_flag(name: str, text: str) -> bool:
    return text == "yes"


_FIELDS: Final[Mapping[str, Callable[[str, str], Any]]] = {
    "agents": lambda _, text: [each.strip() for each in text.split(",") if each.strip()],
    "since": _parse_time,
    "until": _parse_time,
    **dict.fromkeys(("min_reward", "max_reward", "gamma"), parse_number),
    **dict.fromkeys(("mode", "resource_version", "rollout"), _parse_text),
    **dict.fromkeys(("capture", "credit", "advantage"), _parse_text),
    **dict.fromkeys(("rewarded", "received", "incomplete"), _parse_flag),
}


@cache
def list_formats() -> tuple[tuple[str, Format], ...]:
    """The formats by name; to look for them takes a fifth of a second, and they stay the same."""
    return tuple((name, formats.get(name)) for name in formats.names())
