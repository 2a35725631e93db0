"""Spans of other conventions, read into the one convention the rest of the adapter knows.

A reader alone knows the keys of its convention: ``summary`` gives who did what with which model
(cheap: the store fills its hot columns with it), ``content`` messages, tools and token ids. A
span's keys decide which readers look at it; at spans of ours none does.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

from lightning_otel.adapter.readers import (
    agentops,
    genai,
    haystack,
    legacy,
    litellm,
    openinference,
    vercel,
)
from lightning_otel.types import Span
from lightning_otel.types import conventions as c


class ConventionReader(Protocol):
    """A module that reads one convention."""

    @property
    def MARKS(self) -> tuple[str, ...]:  # noqa: N802  # a module's constant
        """A span with one of these keys is its business."""

    def summary(self, name: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes of today's conventions: operation, names, model, ids and usage."""

    def content(self, span: Span) -> dict[str, Any]:
        """Attributes of today's conventions: messages, tools, arguments and token ids."""


# What a later one says holds: the general ones come first.
_READERS: Final[tuple[ConventionReader, ...]] = (
    genai,
    legacy,
    openinference,
    agentops,
    haystack,
    litellm,
    vercel,
)
_MARKED: Final = tuple((reader, frozenset(reader.MARKS)) for reader in _READERS)
_MARKS: Final = frozenset(mark for reader in _READERS for mark in reader.MARKS)
_OWN_KEYS: Final = (c.PROMPT_TOKEN_IDS, c.RESPONSE_TOKEN_IDS)


def summary(
    name: str, scope: str, attributes: Mapping[str, Any], otel_resource: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The attributes with what readers make of them; the very same where none has a say."""
    if scope == c.SCOPE:
        return attributes
    values = _find_ids(attributes, otel_resource)
    for reader in _readers_of(attributes):
        values |= reader.summary(name, attributes)
    return {**attributes, **values} if values else attributes


def read(spans: Iterable[Span]) -> Iterable[Span]:
    """The spans, foreign ones with the attributes ours would have beside their own."""
    parts: dict[tuple[str, str], Span] = {}
    read_so_far: list[Span] = []
    for span in spans:
        if span.scope != c.SCOPE:
            span = _read_span(span)
            if agentops.CALLED_TOOL in span.attributes:
                parts[span.trace_id, span.span_id] = span  # once, though it may be given again
        read_so_far.append(span)
    return agentops.join_tool_calls(read_so_far, parts.values()) if parts else read_so_far


def _read_span(span: Span) -> Span:
    attributes = span.attributes
    if any(key in attributes for key in _OWN_KEYS):
        return span
    values = _find_ids(attributes, span.otel_resource)
    for reader in _readers_of(attributes):
        values |= reader.summary(span.name, attributes)
        values |= reader.content(span)
    if not values:
        return span
    return replace(span, attributes={**attributes, **values})


def _find_ids(attributes: Mapping[str, Any], otel_resource: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rollout and attempt that a span's resource names, as Agent Lightning's does."""
    if not otel_resource.get(c.ROLLOUT_ID) or attributes.get(c.ROLLOUT_ID):
        return {}
    ids = {key: otel_resource.get(key) for key in (c.ROLLOUT_ID, c.ATTEMPT_ID)}
    return {key: value for key, value in ids.items() if value}


def _readers_of(attributes: Mapping[str, Any]) -> Iterable[ConventionReader]:
    present = _MARKS.intersection(attributes)
    return [reader for reader, marks in _MARKED if not marks.isdisjoint(present)] if present else ()
