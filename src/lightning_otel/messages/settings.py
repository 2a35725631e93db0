"""Sampling parameters and token counts, as the GenAI conventions name them."""

from collections.abc import Mapping
from typing import Any, Final

from lightning_otel.types import conventions as c

_NO_FIELDS: Final[Mapping[str, Any]] = {}
_GIVEN: Final = ("prompt_tokens_details", "input_tokens_details", "input_token_details")
_MADE: Final = ("completion_tokens_details", "output_tokens_details", "output_token_details")
_NUMBER: Final = (int, float)
SETTINGS: Final[Mapping[str, tuple[str, type | tuple[type, ...]]]] = {
    "temperature": (c.REQUEST_TEMPERATURE, _NUMBER),
    "top_p": (c.REQUEST_TOP_P, _NUMBER),
    "top_k": (c.REQUEST_TOP_K, int),
    "min_p": (c.REQUEST_MIN_P, _NUMBER),
    "repetition_penalty": (c.REQUEST_REPETITION_PENALTY, _NUMBER),
    "max_tokens": (c.REQUEST_MAX_TOKENS, int),
    "max_completion_tokens": (c.REQUEST_MAX_TOKENS, int),
    "max_output_tokens": (c.REQUEST_MAX_TOKENS, int),
    "frequency_penalty": (c.REQUEST_FREQUENCY_PENALTY, _NUMBER),
    "presence_penalty": (c.REQUEST_PRESENCE_PENALTY, _NUMBER),
    "seed": (c.REQUEST_SEED, int),
    "reasoning_effort": (c.REQUEST_REASONING_LEVEL, str),
    "previous_response_id": (c.REQUEST_PREVIOUS_RESPONSE, str),
    "dimensions": (c.EMBEDDING_DIMENSIONS, int),
}
"""By name of a request's field its attribute and type."""
_COUNTS: Final = (
    (c.INPUT_TOKENS, ("prompt_tokens", "input_tokens"), None),
    (c.OUTPUT_TOKENS, ("completion_tokens", "output_tokens"), None),
    (c.CACHED_TOKENS, ("cached_tokens", "cache_read"), _GIVEN),
    (c.REASONING_TOKENS, ("reasoning_tokens", "reasoning"), _MADE),
)
"""By attribute the names a count has, and those of the object it stands in."""


def fields_of(value: object) -> Mapping[str, Any]:
    """Return an object's fields, past its properties; empty if it has none."""
    try:
        fields = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return _NO_FIELDS
    return fields if isinstance(fields, dict) else _NO_FIELDS


def read_settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters and the like, where they have the type the conventions name."""
    settings: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in SETTINGS:
            continue
        key, kind = SETTINGS[name]
        if isinstance(value, kind) and not isinstance(value, bool):
            settings[key] = float(value) if kind == _NUMBER else value  # type: ignore[arg-type]  # checked by kind
    stop = fields.get("stop")
    if isinstance(stop, str):
        settings[c.REQUEST_STOP] = [stop]
    elif isinstance(stop, list) and all(isinstance(item, str) for item in stop):
        settings[c.REQUEST_STOP] = list(stop)
    return settings


def token_counts(counts: object, *, is_zero_known: bool = True) -> dict[str, Any]:
    """Return token counts under OpenAI's or LangChain's names; zeros only if ``is_zero_known``."""
    fields = counts if isinstance(counts, dict) else fields_of(counts)
    totals: dict[str, Any] = {}
    for key, names, holders in _COUNTS:
        holder = fields if holders is None else _first(fields, holders)
        if isinstance(holder, dict) or holders is None:
            value = _first(holder, names)
            if type(value) is int:
                totals[key] = value
    return totals if is_zero_known or any(totals.values()) else {}


def _first(fields: Any, names: tuple[str, ...]) -> Any:
    return next((fields[name] for name in names if name in fields), None)
