"""Arguments and results of any type as bounded JSON text, without running any code of theirs.

Frameworks hand over whatever the program made: objects whose ``__str__`` raises or sleeps, dicts
that hold themselves, generators that must not be drained, strings of 100 MB. Plain JSON types,
dataclasses and pydantic models are written out; of everything else only the type's name is.
"""

import dataclasses
import enum
import json
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final

import orjson

TEXT_LIMIT: Final = 4 * 1024 * 1024
"""Characters of one value's text; the store's own limit is 8 MiB a record."""
ITEM_LIMIT: Final = 10_000
DEPTH_LIMIT: Final = 24


def dump(value: object, default: Callable[[Any], Any] | None = None) -> str:
    """Return the JSON text of a value made of JSON; whatever else it holds, as :func:`text_of`.

    Args:
        value: The value.
        default: Makes plain what is not JSON, in a value that is to be written whole.
    """
    try:
        # Most messages are plain text in lists of ours: copying these would cost thrice as much.
        return orjson.dumps(value, default).decode()
    except (TypeError, ValueError):
        if default is None:
            return text_of(value)
        return json.dumps(value, default=default, skipkeys=True)


def parse_json(given: object) -> object:
    """Return the value of a JSON text; anything else, such as a text of others', as it is."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given


def text_of(value: Any) -> str:
    """The value as JSON text, and a string as it is; what is too large or too deep is left out."""
    # By its type, not isinstance, here and below: that asks the value itself for its class.
    if issubclass(type(value), str):
        return _valid_text(value, TEXT_LIMIT)
    plain = _Writer().plain(value, DEPTH_LIMIT)
    try:
        return orjson.dumps(plain).decode()
    except (TypeError, ValueError):  # an integer of more than 64 bits
        return json.dumps(plain, ensure_ascii=False)


class _Writer:
    """Makes plain copies, of no more items and characters than it has left."""

    def __init__(self) -> None:
        self._items = ITEM_LIMIT
        self._characters = TEXT_LIMIT

    def plain(self, value: Any, depth: int) -> Any:
        """A copy of plain types only."""
        self._items -= 1
        kind = type(value)
        if value is None or kind is bool or kind is int or kind is float:
            return value
        if issubclass(kind, str):
            return self._take_text(value)
        if depth == 0 or self._items <= 0:
            return f"<{kind.__name__}>"
        # By the built-in's own methods: a subclass may have overridden them.
        if issubclass(kind, dict):
            return self._write_object(dict.items(value), depth)
        if issubclass(kind, list):
            return self._write_array(list.__iter__(value), depth)
        if issubclass(kind, tuple):
            return self._write_array(tuple.__iter__(value), depth)
        if issubclass(kind, set):
            return self._write_array(set.__iter__(value), depth)
        if issubclass(kind, frozenset):
            return self._write_array(frozenset.__iter__(value), depth)
        return self._of_class(value, kind, depth)

    def _of_class(self, value: Any, kind: Any, depth: int) -> Any:
        if issubclass(kind, enum.Enum):
            return self.plain(value._value_, depth - 1)
        if _has_name(kind, "__dataclass_fields__"):
            names = (found.name for found in dataclasses.fields(kind))
            return self._write_object(((name, _read_field(value, name)) for name in names), depth)
        if _has_name(kind, "__pydantic_fields__"):
            held = _read_field(value, "__dict__")
            if isinstance(held, dict):
                return self._write_object(dict.items(held), depth)
        return f"<{kind.__name__}>"

    def _write_object(self, items: Iterable[tuple[Any, Any]], depth: int) -> dict[str, Any]:
        return {
            self._write_key(key): self.plain(value, depth - 1)
            for key, value in islice(items, max(self._items, 0))
        }

    def _write_array(self, items: Iterable[Any], depth: int) -> list[Any]:
        return [self.plain(item, depth - 1) for item in islice(items, max(self._items, 0))]

    def _write_key(self, key: Any) -> str:
        if issubclass(type(key), str):
            return self._take_text(key)
        is_plain = key is None or type(key) in (bool, int, float)
        return json.dumps(key) if is_plain else f"<{type(key).__name__}>"

    def _take_text(self, text: str) -> str:
        taken = _valid_text(text, max(self._characters, 0))
        self._characters -= len(taken)
        return taken


def _has_name(kind: type, name: str) -> bool:
    # A metaclass may answer getattr as it likes.
    return any(name in vars(base) for base in kind.__mro__)


def _read_field(value: Any, name: str) -> Any:
    # Past the class's own __getattribute__ and properties, which may do anything.
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return None


def _valid_text(text: str, limit: int) -> str:
    """An exact, valid and bounded string."""
    kept = str.__getitem__(text, slice(limit))
    return kept if str.isascii(kept) else kept.encode("utf-8", "replace").decode("utf-8")
