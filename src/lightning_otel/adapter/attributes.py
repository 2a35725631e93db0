"""Attributes read as the type they should have: one of another type is as good as absent."""

import json
import math
from collections.abc import Mapping
from typing import Any

from lightning_otel.types import conventions as c

Attributes = Mapping[str, Any]
_NO_IDS = ("", "0" * 16)


def get_text(attributes: Attributes, key: str) -> str | None:
    """The attribute if it is text that says something."""
    value = attributes.get(key)
    return value if isinstance(value, str) and value else None


def to_text(value: object) -> str:
    """Return any value as text, even numbers of over 4,300 digits and what is nested too deep."""
    try:
        return value if isinstance(value, str) else str(value)
    except (ValueError, RecursionError):
        return f"<{type(value).__name__}>"


def get_integer(attributes: Attributes, key: str) -> int | None:
    """The attribute if it is a whole number of 64 bits, which is what tables take."""
    value = attributes.get(key)
    return value if type(value) is int and -(1 << 63) <= value < 1 << 63 else None


def to_number(value: object) -> float | None:
    """The value if it is a finite number; a bool is none."""
    # By its type: a value may lie about its class.
    if type(value) is bool or not issubclass(type(value), (int, float)):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]  # a number by its type
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def has_id(span_id: str) -> bool:
    """Return whether an id names a span; sixteen zeros mean none."""
    return span_id not in _NO_IDS


def finish_reason(reasons: object) -> str | None:
    """The first choice's reason, of what was recorded; None if that is no text."""
    first = reasons[0] if isinstance(reasons, (list, tuple)) and reasons else reasons
    return first if isinstance(first, str) else None


def link_pairs(attributes: Attributes) -> tuple[tuple[str, str], ...]:
    """Return a span's links: each matched key with its value."""
    pairs: list[tuple[str, str]] = []
    while (key := attributes.get(f"{c.LINK_PREFIX}.{len(pairs)}.key_match")) is not None:
        value = attributes.get(f"{c.LINK_PREFIX}.{len(pairs)}.value_match", "")
        pairs.append((to_text(key), matched_text(value)))
    return tuple(pairs)


def read_links(attributes: Attributes) -> dict[str, str]:
    """Return a span's links by matched key; the first value of a key counts."""
    return dict(reversed(link_pairs(attributes)))


def matched_text(value: object) -> str:
    """The text that a link compares an attribute by: its own, or of anything else its JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        return to_text(value)
