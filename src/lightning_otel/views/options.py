"""Options as the doors offer them: the command line, the HTTP API, the pages and MCP.

A list of options is a ``TypedDict``: Python's own door takes it as it is, by ``Unpack``. Each
annotation holds the help, and an example or the usual choice; a dataclass has the defaults.
"""

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import date
from typing import Any, Final, Literal, Union, get_args, get_origin

from lightning_otel.adapter import TripletAdapter
from lightning_otel.dataset import Store
from lightning_otel.dataset.formats.format import Format
from lightning_otel.dataset.query import QueryKeywords
from lightning_otel.views.table import Filter

_KINDS: Final = (date, tuple, bool, int, float, str)
"""Kinds of values that a text can stand for; of several the first."""


def list_options(keywords: type, settings: type) -> dict[str, Filter]:
    """Return the options that a text can stand for, by name, with the defaults of some settings."""
    defaults = {field.name: field.default for field in fields(settings)}
    options = {
        name: _read_option(annotation, defaults.get(name))
        for name, annotation in keywords.__annotations__.items()
    }
    return {name: option for name, option in options.items() if option is not None}


def _read_option(annotation: Any, default: object) -> Filter | None:
    text, *hints = annotation.__metadata__
    type_ = annotation.__origin__
    parts = get_args(type_) if get_origin(type_) in (Union, types.UnionType) else (type_,)
    choices = tuple(
        word for part in parts if get_origin(part) is Literal for word in get_args(part)
    )
    kinds = {tuple if part in (Iterable[str], Sequence[str]) else part for part in parts}
    kind = next((kind for kind in _KINDS if kind in kinds), str if choices else None)
    if kind is None:
        return None
    if type(default) in (str, int, float) and default != "":
        text, hints = f"{text.removesuffix('.')} [default: {default}].", [*hints, str(default)]
    return Filter("", text, kind, choices, next(iter(hints), ""))


_FORMAT_HELP: Final = {
    "threshold": "Least reward of a good answer; the others are left out, or marked as bad.",
    "gap": "Least difference between the rewards of a pair.",
    "form": "Columns prompt and completion, or messages with a weight each.",
    "arguments": "Tool arguments as objects; or as text, which old releases of datasets read.",
    "template": "Leave out what a chat template cannot write: a .jinja file, or a tokenizer.",
}


def list_format_options(format: Format) -> dict[str, Filter]:
    """Return the options of a format, whose defaults say what they are: without one a number."""
    return {
        name: Filter(
            "", _FORMAT_HELP.get(name, "An option of this format."),
            float if default is None else type(default),
            get_args(format.make.__annotations__.get(name))
            if get_origin(format.make.__annotations__.get(name)) is Literal
            else (),
            hint="" if default is None else str(default),
        )
        for name, default in format.options().items()
    }  # fmt: skip


TRANSITIONS: Final[Mapping[str, Filter]] = list_options(QueryKeywords, TripletAdapter)
"""Options of transitions."""


def make_keywords(store: Store, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of ``Store.transitions`` for values of ``TRANSITIONS``.

    Raises:
        NotFoundError: A rollout's id, or the beginning of one, matches none or several.
    """
    keywords = {name: value for name, value in values.items() if value not in (None, (), [])}
    if targets := keywords.get("rollout_id"):
        ids = (store.rollout_of(*store.find(target)) for target in targets)
        keywords["rollout_id"] = tuple(ids)
    return keywords
