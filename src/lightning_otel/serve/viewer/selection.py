"""The selection of transitions by a page's query."""

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from typing import Any, Final

from starlette.requests import Request

from lightning_otel.adapter.selection import StepSelection
from lightning_otel.dataset import Store, formats
from lightning_otel.dataset.formats.format import Format
from lightning_otel.errors import ConfigError
from lightning_otel.serve.viewer import page
from lightning_otel.types.instants import utc_text
from lightning_otel.views.options import TRANSITIONS, make_keywords
from lightning_otel.views.table import Filter

_ADAPTING: Final = ("credit", "gamma", "reward", "adapter", "include_incomplete", "received")


@dataclass(frozen=True, slots=True)
class SelectionForm:
    """The selection that a query asks for.

    Attributes:
        keywords: As ``Store.transitions`` takes it.
        options: As ``lightning-otel export FORMAT`` takes it.
        query: The fields of transitions that are set, for an address.
    """

    keywords: Mapping[str, Any]
    options: tuple[str, ...]
    query: Mapping[str, str]

    @property
    def adapting(self) -> dict[str, Any]:
        """The keywords that change rewards rather than select steps."""
        return {name: self.keywords[name] for name in _ADAPTING if name in self.keywords}

    def command(self, store: Store, format: str = "triplets") -> str:
        """Word the command that exports the same selection."""
        words = ["lightning-otel", "export", format, f"{format}.jsonl", *self.options]
        return shlex.join([*words, "--store", store.name])


def read_selection(
    request: Request, store: Store, parameters: Collection[str], filters: Mapping[str, Filter]
) -> SelectionForm:
    """Read a selection from the query, by ``TRANSITIONS`` and the filters of a format.

    Raises:
        NotFoundError: There is no such rollout.
    """
    values = page.read_filters(request, filters, parameters)
    options = [
        word for name, value in values.items() for word in _word_option(name, filters[name], value)
    ]
    query = {name: text for name in TRANSITIONS if (text := page.text(request, name))}
    keywords = make_keywords(store, values)
    try:  # said here, and not in the middle of an answer
        StepSelection.of({"agents": keywords.get("agents")})
    except ConfigError as exc:
        page.refuse_field(request, "agents", exc.remedy or exc.what)
    return SelectionForm(keywords, tuple(options), query)


def _word_option(name: str, filter: Filter, value: Any) -> list[str]:
    """Word a filter for a shell; with its sign, a value that begins with a dash is no option."""
    option, kind = name.replace("_", "-"), filter.kind
    if value is None:
        return []
    if kind is bool:
        return [f"--{option}" if value else f"--no-{option}"]
    # At a shell a time without a zone is that of the machine, and in an address it is not.
    texts = value if kind is tuple else [utc_text(value) if kind is date else value]
    return [f"--{option}={text}" for text in texts]


@cache
def list_formats() -> tuple[tuple[str, Format], ...]:
    """The formats by name; to look for them takes a fifth of a second, and they stay the same."""
    return tuple((name, formats.get(name)) for name in formats.names())
