"""Values of any kind as what JSON knows, without ever calling into the value itself.

A value that raises, sleeps or lies about its class must not hurt the traced program's thread; so
nothing here asks a value for its ``str``, its attributes or its ``__class__``; generators are not
drained. Bytes become base64, NaN and infinities their names, integers beyond 64 bits their digits,
dates and decimals their usual text, sets lists, numpy values what they stand for, enumerations
their values, dataclasses and pydantic models objects, and anything else ``<Class>``.
"""

import base64
import dataclasses
import enum
import json
import math
import re
import sys
import types
import typing
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from functools import lru_cache
from itertools import islice
from numbers import Integral, Real
from typing import Any, Final, TypeGuard
from uuid import UUID

import orjson

from lightning_otel.errors import ConfigError
from lightning_otel.types import conventions as c

TEXT_LIMIT: Final = 4 * 1024 * 1024
"""Characters of the text of one argument or result; the store's own limit is 8 MiB a record."""
ITEM_LIMIT: Final = 10_000
_STORED_ITEMS: Final = 1 << 20
"""Items of one value in a store: lists that share their parts can unfold to any number."""
_MAX_DEPTH: Final = 40
_TIMES: Final = range(1 << 62)
"""Nanoseconds until the year 2116: the difference of any two fits 64 bits."""
_WHOLE: Final = (1 << 63) - 1
_LONGEST_S: Final = 1e9
_INTEGERS: Final = range(-(1 << 63), 1 << 64)
_ATOMS: Final = frozenset({int, bool, type(None)})
_CONTAINERS: Final = (list, tuple, set, frozenset, array)
_TEXTS: Final[Mapping[type, Callable[[Any], str]]] = {
    Decimal: str,
    datetime: datetime.isoformat,
    date: date.isoformat,
    time: time.isoformat,
    UUID: str,
}


def is_object(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value is a mapping, without asking it for its ``__class__``."""
    # By its type first: to ask the abstract class costs five times as much.
    return type(value) is dict or issubclass(type(value), Mapping)


def make_plain(value: Any) -> Any:
    """Return the value as what JSON knows, bounded in depth and number."""
    if type(value) in (tuple, list) and _is_plain(value):  # as nearly every list on a span is
        return list(value)
    return _Copier(_STORED_ITEMS, None).copy(value)


def make_attributes_plain(attributes: dict[str, Any]) -> int:
    """Replace the values that JSON does not know; return the length of all text."""
    size = 0
    for key, value in attributes.items():
        kind = type(value)
        if kind is str:
            size += len(value)
        elif kind not in _ATOMS and not (kind is float and math.isfinite(value)):
            attributes[key] = plain = make_plain(value)
            size += len(plain) if type(plain) is str else 0
    return size


def repair_text(value: Any) -> Any:
    """Return a plain value with ``?`` for lone surrogates, long integers and keys as text."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {
            repair_text(_key_text(make_plain(key))): repair_text(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [repair_text(item) for item in value]
    return value if isinstance(value, orjson.Fragment) else make_plain(value)


def write_json(value: object) -> bytes:
    """Return a plain value's JSON, without invalid text."""
    # To repair a record costs ten times what writing it does, and hardly any needs it.
    try:
        return orjson.dumps(value)
    except (TypeError, ValueError):
        return orjson.dumps(repair_text(value))


def json_text(value: object) -> str:
    """Return a plain value's JSON as text."""
    return write_json(value).decode()


def json_fragment(attributes: Mapping[str, Any]) -> orjson.Fragment:
    """Return attributes as ready JSON, for what stands on every span of a process."""
    return orjson.Fragment(json_text(make_plain(dict(attributes))))


def text_or_none(value: Any) -> str | None:
    """Return the value if it is text: a hot column of another type would lose the whole line."""
    if value is None or type(value) is str:
        return value
    return str.__str__(value) if issubclass(type(value), str) else None


def name_text(value: object) -> str:
    """Return the text form of what should have been text, such as a span's name."""
    if type(value) is str:
        return value
    return "" if value is None else _key_text(make_plain(value))


def describe_exception(kind: object, message: str, stack: str) -> dict[str, str]:
    """Return the attributes of the event of an exception. Source: OpenTelemetry, Exceptions."""
    return {
        c.EXCEPTION_TYPE: str(kind),
        c.EXCEPTION_MESSAGE: message,
        c.EXCEPTION_STACKTRACE: stack,
    }


def time_of(value: Any) -> int:
    """Return a time in nanoseconds; 0 for what is none, as it would lose the whole line."""
    if type(value) is float and math.isfinite(value):
        value = int(value)
    return value if type(value) is int and value in _TIMES else 0


def text_of(value: Any) -> str:
    """Return an argument or result as bounded JSON text, and a string as it is."""
    plain = _Copier(ITEM_LIMIT, TEXT_LIMIT).copy(value)
    if issubclass(type(value), str):
        return str(repair_text(plain))
    return json_text(plain)


def dump(value: object, default: Callable[[Any], Any] | None = None) -> str:
    """Return the JSON text of a value; ``default``, else :func:`text_of`, converts the rest."""
    try:
        # Most messages are plain text in lists of ours: copying these would cost thrice as much.
        return orjson.dumps(value, default).decode()
    except (TypeError, ValueError):
        if default is None:
            return text_of(value)
        return json.dumps(value, default=default, skipkeys=True)


def parse_json(text: Any) -> Any:
    """Return the value of a JSON text; anything else, such as a text of others', as it is."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text


def check_whole(name: str, value: Any, least: int = -_WHOLE, most: int = _WHOLE) -> int:
    """Return a whole number within bounds; by default those of 64 bits, as databases have them.

    Raises:
        ConfigError: It is none, or a truth value.
    """
    is_whole = type(value) is not bool and isinstance(value, Integral)
    if is_whole and least <= value <= most:
        return int(value)
    bounds = f"{least} or more" if most == _WHOLE > -least else f"from {least} to {most}"
    raise ConfigError(f"{name} is {_show_value(value)}; give a whole number, {bounds}")


def check_seconds(name: str, value: Any) -> float:
    """Return a length of time above 0, of 31 years at most.

    Raises:
        ConfigError: It is none, or a truth value.
    """
    is_number = type(value) is not bool and isinstance(value, Real)
    if is_number and 0 < value <= _LONGEST_S:
        return float(value)
    raise ConfigError(f"{name} is {_show_value(value)}; give seconds above 0, up to 1e9")


def check_finite(name: str, value: Any) -> float:
    """Return a finite number, of whichever type: of the arrays of one element of many a library.

    Raises:
        ConfigError: It is none.
    """
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError("text")
        number = float(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as exc:
        raise ConfigError(f"{name} is {_show_value(value)}; it must be a number") from exc
    if not math.isfinite(number):
        raise ConfigError(f"{name} is {_show_value(value)}; it must be finite")
    return number


def _show_value(value: object) -> str:
    # Python refuses to print integers of more than 4,300 digits.
    is_large = isinstance(value, int) and value not in _INTEGERS
    return "beyond 64 bits" if is_large else f"{value!r:.80}"


class _Copier:
    def __init__(self, items: int, characters: int | None) -> None:
        self._items = items
        self._characters = sys.maxsize if characters is None else characters
        self._has_bytes = characters is None

    def copy(self, value: Any, within: tuple[int, ...] = ()) -> Any:
        kind = type(value)
        if kind in _TEXTS:
            return _TEXTS[kind](value)
        if value is None or kind is bool:
            return value
        if issubclass(kind, str):
            # By the built-in's own methods, here and below: a subclass may have overridden them.
            text = str.__getitem__(value, slice(max(self._characters, 0)))
            self._characters -= len(text)
            return text
        if issubclass(kind, int):
            number = int.__index__(value)
            return number if number in _INTEGERS else _shorten_digits(number)
        if issubclass(kind, float):
            return float.__float__(value) if math.isfinite(value) else _name_of(value)
        if issubclass(kind, (bytes, bytearray, memoryview)) and self._has_bytes:
            return base64.b64encode(bytes(value)).decode("ascii")
        if kind.__module__ == "numpy" and hasattr(kind, "tolist"):
            too_many = f"<{kind.__name__} of too many items>"
            return too_many if value.size > self._items else self.copy(value.tolist(), within)
        if issubclass(kind, enum.Enum):
            return self.copy(_read_field(value, "_value_"), within)
        return self._copy_items(value, kind, within)

    def _copy_items(self, value: Any, kind: Any, within: tuple[int, ...]) -> Any:
        base: Any = next((item for item in _CONTAINERS if issubclass(kind, item)), None)
        fields = _fields_of(value, kind) if base is None else ()
        if fields is None:
            return f"<{kind.__name__}>"
        if id(value) in within:
            return f"<{kind.__name__} inside itself>"
        if len(within) >= _MAX_DEPTH:
            return f"<{kind.__name__} nested too deep>"
        items: Any = list(islice(base.__iter__(value) if base else fields, self._items))
        self._items -= len(items)
        surplus = (base.__len__(value) if base else len(fields)) - len(items)
        if surplus and not items:
            return f"<{kind.__name__} of too many items>"
        inner, more = (*within, id(value)), f"<{surplus:,} more items>"
        if base is None:
            copies = {_key_text(self.copy(key)): self.copy(item, inner) for key, item in items}
            return {**copies, "…": more} if surplus else copies
        if not _is_plain(items) or type(items[0]) is str:
            items = [self.copy(item, inner) for item in items]
        return [*items, more] if surplus else items


def _fields_of(value: Any, kind: Any) -> Collection[tuple[Any, Any]] | None:
    if issubclass(kind, dict):
        return dict.items(value)
    if _has_name(kind, "__dataclass_fields__"):
        return [(field.name, _read_field(value, field.name)) for field in dataclasses.fields(kind)]
    fields = _read_field(value, "__dict__") if _has_name(kind, "__pydantic_fields__") else None
    return dict.items(fields) if isinstance(fields, dict) else None


def _has_name(kind: type, name: str) -> bool:
    # A metaclass may answer getattr as it likes.
    return any(name in vars(base) for base in kind.__mro__)


def _read_field(value: Any, name: str) -> Any:
    # Past the class's own __getattribute__ and properties, which may do anything.
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return None


def _is_plain(items: list[Any] | tuple[Any, ...]) -> bool:
    kinds = set(map(type, items))
    if kinds == {int}:
        return min(items) in _INTEGERS and max(items) in _INTEGERS
    return kinds == {str} or (kinds == {float} and all(map(math.isfinite, items)))


def _key_text(plain: object) -> str:
    return plain if type(plain) is str else json_text(plain)


def _shorten_digits(number: int) -> str:
    # Python refuses to print integers of more than 4,300 digits in decimal.
    return str(number) if number.bit_length() < 10_000 else hex(number)


def _name_of(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def check_names(owner: str, names: Iterable[str], valid: Iterable[str]) -> None:
    """Check that options are known, such as those of ``the format``.

    Raises:
        ConfigError: One is not; it names the nearest option, or else all of them.
    """
    options = list(valid)
    for name in names:
        if name not in options:
            raise ConfigError(f"{owner} has no option {name!r:.80}; {suggest_name(name, options)}")


def suggest_name(name: str, options: Sequence[str]) -> str:
    """Return advice for an unknown name: the nearest known one, or else all of them."""
    from difflib import get_close_matches

    match = get_close_matches(name, options, n=1)
    if match:
        return f"did you mean {match[0]!r}?"
    return f"there are {', '.join(options)}" if options else "it has none"


def check_types(values: Mapping[str, Any], annotations: Mapping[str, Any]) -> None:
    """Check values by the annotations of their names; what these leave open is let pass.

    Raises:
        ConfigError: One of them is of another type.
    """
    for name, value in values.items():
        kinds = _list_kinds(annotations.get(name, Any))
        is_exact = type(value) in kinds and value == value
        if not is_exact and not any(_is_of(value, kind) for kind in kinds):
            words = ", or ".join(dict.fromkeys(map(_word_kind, kinds)))
            raise ConfigError(f"{name} is {_show_value(value)}; it must be {words}")


@lru_cache(maxsize=256)
def _list_kinds(kind: Any) -> tuple[Any, ...]:
    if typing.get_origin(kind) is typing.Annotated:
        return _list_kinds(kind.__origin__)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return tuple(member for part in typing.get_args(kind) for member in _list_kinds(part))
    return (kind,)


def _is_of(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    if origin is typing.Literal:
        return any(type(value) is type(item) and value == item for item in typing.get_args(kind))
    if not isinstance(origin, type) or origin in (object, Any):
        return True  # also names that only a type checker resolves
    if isinstance(value, bool):
        return origin is bool
    if origin in (int, float):
        return isinstance(value, Integral if origin is int else Real) and value == value
    if isinstance(value, (str, bytes)):  # no list of things
        return isinstance(value, str) and origin is str
    if not isinstance(value, origin):
        return False
    if isinstance(value, (list, tuple)) and typing.get_args(kind):
        parts = _list_kinds(typing.get_args(kind)[0])
        return all(any(_is_of(item, part) for part in parts) for item in value)
    return True


def _word_kind(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(kind)))}"
    if typing.get_args(kind):
        return re.sub(r"\b(?:\w+\.)+", "", str(kind))
    return "None" if kind is types.NoneType else getattr(kind, "__name__", str(kind))
