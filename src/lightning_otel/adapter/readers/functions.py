"""Calls of functions as decorators tell them: ``{"args": …, "kwargs": …}``, and what they gave."""

from collections.abc import Mapping
from typing import Any

from lightning_otel import conventions as c
from lightning_otel.adapter.readers import chat
from lightning_otel.adapter.readers.flat import loaded


def called(given: object, result: object) -> dict[str, Any]:
    """Arguments and result of a tool by attribute, from two JSON texts."""
    found: dict[str, Any] = {}
    arguments = loaded(given)
    if isinstance(arguments, Mapping):
        named = arguments.get("kwargs")
        is_plain = isinstance(named, Mapping) and not arguments.get("args")
        found[c.TOOL_ARGUMENTS] = chat.dump(named if is_plain else arguments)
    if isinstance(result, str):
        told = loaded(result)
        found[c.TOOL_RESULT] = told if isinstance(told, str) else result
    return found
