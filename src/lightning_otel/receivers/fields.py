"""Fields of JSON that somebody else wrote: each is what it should be, or its span is unfit."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from lightning_otel.receivers.spans import UnfitError

Object: TypeAlias = Mapping[str, Any]


def integer(content: object, noun: str) -> int:
    """Return a 64-bit integer, which may come as text; 0 where there is none.

    Raises:
        UnfitError: It is something else.
    """
    if content is None or content == "":
        return 0
    if isinstance(content, str) and len(content) <= 20 and content.lstrip("-").isdecimal():
        content = int(content) if content.rfind("-") <= 0 else content
    elif isinstance(content, float) and content.is_integer():
        content = int(content)
    if type(content) is not int or not -(1 << 63) <= content < 1 << 64:
        raise UnfitError(f"{noun} is no 64-bit integer")
    return content


def id_bytes(content: object) -> bytes:
    """Return an id, which comes as hex of either case; empty where there is none.

    Raises:
        UnfitError: It is something else.
    """
    try:
        return bytes.fromhex(text(content).removeprefix("0x"))
    except ValueError as exc:
        raise UnfitError("id is not hex") from exc


def text(content: object) -> str:
    """Return a text; empty where there is none.

    Raises:
        UnfitError: It is something else.
    """
    if not isinstance(content, str | None):
        raise UnfitError("a text is none")
    return content or ""


def as_object(content: object) -> Object:
    """Return an object; empty where there is none.

    Raises:
        UnfitError: It is something else.
    """
    if not isinstance(content, dict | None):
        raise UnfitError("an object is none")
    return content or {}


def inner(found: Object, key: str) -> Object:
    """Return the object under a key; empty where none is."""
    content = found.get(key)
    return content if isinstance(content, dict) else {}


def items(found: Object, key: str) -> list[Any]:
    """Return the list under a key; empty where none is."""
    content = found.get(key)
    return content if isinstance(content, list) else []


def objects(found: Object, key: str) -> list[Object]:
    """Return the objects in the list under a key."""
    return [item for item in items(found, key) if isinstance(item, dict)]
