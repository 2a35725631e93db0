"""Spans of one trace by number, as tests of its pages record them."""

from typing import Any

import orjson

from lightning_otel.types import Span
from lightning_otel.types import conventions as c

TRACE = "a" * 32


def span(number: int, parent: int | None = None, **changes: Any) -> Span:
    fields: dict[str, Any] = {
        "name": f"work {number}",
        "start_ns": 1_000 * number,
        "end_ns": 1_000 * number + 500,
        "scope": c.SCOPE,
        "trace_id": TRACE,
        **changes,
    }
    parent_id = None if parent is None else f"{parent:016x}"
    return Span(span_id=f"{number:016x}", parent_span_id=parent_id, **fields)


def said(*turns: tuple[str, str]) -> str:
    """Messages as spans hold them."""
    return orjson.dumps(
        [{"role": role, "parts": [{"type": "text", "content": text}]} for role, text in turns]
    ).decode()


def call(number: int, parent: int | None, given: str, answered: str, **changes: Any) -> Span:
    """A request to a model; more attributes than its messages are given as ``attributes``."""
    attributes = {c.OPERATION: c.CHAT, c.INPUT_MESSAGES: given, c.OUTPUT_MESSAGES: answered}
    attributes |= changes.pop("attributes", {})
    return span(number, parent, attributes=attributes, **changes)
