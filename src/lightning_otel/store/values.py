"""Values of any kind as what JSON knows, without ever calling into the value itself.

A value that raises, sleeps or lies about its class must not hurt the traced program's thread; so
nothing here asks a value for its ``str``, nor, as ``isinstance`` would, for its ``__class__``.
"""

import base64
import math
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import orjson

_MAX_DEPTH: Final = 40
_MAX_ITEMS: Final = 1 << 20
"""Items nested in one value: lists that share their parts can unfold to any number."""
_TIMES: Final = range(1 << 62)
"""Nanoseconds until the year 2116: the difference of any two fits 64 bits."""
_INTEGERS: Final = range(-(1 << 63), 1 << 64)
_ATOMS: Final = frozenset({int, bool, type(None)})
_CONTAINERS: Final = (dict, list, tuple, set, frozenset)
_TEXTS: Final[Mapping[type, Callable[[Any], str]]] = {
    Decimal: str,
    datetime: datetime.isoformat,
    date: date.isoformat,
    time: time.isoformat,
    UUID: str,
}


def plain(value: Any) -> Any:
    """The value made of what JSON knows, bounded in depth and number.

    Bytes become base64, NaN and infinities their names, integers beyond 64 bits their digits, dates
    and decimals their usual text, sets lists, numpy values what they stand for, other objects
    ``<Class>``.
    """
    if type(value) in (tuple, list) and _is_plain(value):  # as nearly every list on a span is
        return list(value)
    return _plain_value(value, (), [_MAX_ITEMS])


def make_plain(attributes: dict[str, Any]) -> int:
    """Replace the values that JSON does not know; gives the length of all text."""
    size = 0
    for key, value in attributes.items():
        kind = type(value)
        if kind is str:
            size += len(value)
        elif kind not in _ATOMS and not (kind is float and math.isfinite(value)):
            attributes[key] = found = plain(value)
            size += len(found) if type(found) is str else 0
    return size


def repaired(value: Any) -> Any:
    """A plain value without what only shows when it is written.

    Lone surrogates become ``?``, integers beyond 64 bits their digits, keys text.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {repaired(_plain_key(key)): repaired(item) for key, item in value.items()}
    if isinstance(value, list):
        return [repaired(item) for item in value]
    return value if isinstance(value, orjson.Fragment) else plain(value)


def text_or_none(value: Any) -> str | None:
    """The value if it is text: a hot column of another type would lose the whole line."""
    if value is None or type(value) is str:
        return value
    return str.__str__(value) if issubclass(type(value), str) else None


def text_of(value: object) -> str:
    """The text form of what should have been text, such as a span's name."""
    if type(value) is str:
        return value
    found = plain(value)
    return found if type(found) is str else "" if found is None else json_of(found)


def time_of(value: Any) -> int:
    """A time in nanoseconds; 0 for what is none, as it would lose the whole line."""
    if type(value) is not int:
        value = int(value) if type(value) is float and math.isfinite(value) else 0
    return value if value in _TIMES else 0


def dumped(value: object) -> bytes:
    """Return a plain value's JSON, without invalid text."""
    # To repair a record costs ten times what writing it does, and hardly any needs it.
    try:
        return orjson.dumps(value)
    except (TypeError, ValueError):
        return orjson.dumps(repaired(value))


def json_of(value: object) -> str:
    """Return a plain value's JSON as text."""
    return dumped(value).decode()


def fragment_of(attributes: Mapping[str, Any]) -> orjson.Fragment:
    """Attributes as ready JSON, for what stands on every span of a process."""
    return orjson.Fragment(json_of(plain(dict(attributes))))


def _plain_value(value: Any, within: tuple[int, ...], left: list[int]) -> Any:
    """As :func:`plain`, ``within`` containers of these ids and with so many items left."""
    kind = type(value)
    if kind in _TEXTS:
        return _TEXTS[kind](value)
    if value is None or kind is bool or kind is str:
        return value
    if issubclass(kind, str):
        return str.__str__(value)
    if issubclass(kind, int):
        number = int.__index__(value)
        return number if number in _INTEGERS else _shorten_digits(number)
    if issubclass(kind, float):
        return float.__float__(value) if math.isfinite(value) else _name_of(value)
    if issubclass(kind, (bytes, bytearray, memoryview)):
        return base64.b64encode(bytes(value)).decode("ascii")
    if kind.__module__ == "numpy" and hasattr(kind, "tolist"):
        return _plain_value(value.tolist(), within, left)
    return _plain_items(value, kind, within, left)


def _plain_items(value: Any, kind: type, within: tuple[int, ...], left: list[int]) -> Any:
    base: Any = next((each for each in _CONTAINERS if issubclass(kind, each)), None)
    if base is None:
        return f"<{kind.__name__}>"
    if id(value) in within:
        return f"<{kind.__name__} inside itself>"
    if len(within) >= _MAX_DEPTH:
        return f"<{kind.__name__} nested too deep>"
    items = list(dict.items(value) if base is dict else base.__iter__(value))
    if base is not dict and _is_plain(items):
        return items
    left[0] -= len(items)
    if left[0] < 0:
        return f"<{kind.__name__} of too many items>"
    inner = (*within, id(value))
    if base is dict:
        return {_plain_key(key): _plain_value(item, inner, left) for key, item in items}
    return [_plain_value(item, inner, left) for item in items]


def _is_plain(items: list[Any]) -> bool:
    """Return whether all items are of one JSON type; quick, since token ids may be many."""
    kinds = set(map(type, items))
    if kinds == {int}:
        return min(items) in _INTEGERS and max(items) in _INTEGERS
    return kinds == {str} or (kinds == {float} and all(map(math.isfinite, items)))


def _plain_key(key: object) -> str:
    found = plain(key)
    return found if type(found) is str else json_of(found)


def _shorten_digits(number: int) -> str:
    # Python refuses to print integers of more than 4,300 digits in decimal.
    return str(number) if number.bit_length() < 10_000 else hex(number)


def _name_of(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
