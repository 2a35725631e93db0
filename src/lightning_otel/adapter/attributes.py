"""Attributes read as the type they should have: one of another type is as good as absent."""

import math
from collections.abc import Mapping
from typing import Any

Attributes = Mapping[str, Any]
_NO_IDS = ("", "0" * 16)


def text(attributes: Attributes, key: str) -> str | None:
    """The attribute if it is text that says something."""
    value = attributes.get(key)
    return value if isinstance(value, str) and value else None


def integer(attributes: Attributes, key: str) -> int | None:
    """The attribute if it is a whole number."""
    value = attributes.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: object) -> float | None:
    """The value if it is a finite number; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def has_id(span_id: str) -> bool:
    """Whether an id names a span: OpenTelemetry means none by sixteen zeros."""
    return span_id not in _NO_IDS
