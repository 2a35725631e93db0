"""Opaque cursors of paged answers, and times in queries."""

import base64
import binascii
from datetime import UTC
from typing import Final

import orjson

from lightning_otel.errors import ConfigError
from lightning_otel.instants import FORMS, instant_ns
from lightning_otel.serve.answers import RefusalError

_INT64: Final = range(-(1 << 63), 1 << 63)


def cursor_of(start_ns: int, *ids: str) -> str:
    """The place behind a row, which is known by its time and ids."""
    return base64.urlsafe_b64encode(orjson.dumps([start_ns, *ids])).decode().rstrip("=")


def place_of(cursor: str | None, ids: int) -> tuple[int, tuple[str, ...]] | None:
    """Decode a cursor into a time and so many ids; None without one.

    Raises:
        RefusalError: It is none of ours.
    """
    if cursor is None:
        return None
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        found = orjson.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, binascii.Error):
        found = None
    if (
        not isinstance(found, list)
        or len(found) != ids + 1
        or type(found[0]) is not int
        or found[0] not in _INT64
        or not all(isinstance(each, str) for each in found[1:])
    ):
        raise RefusalError(400, "the cursor is none of this server's; begin without one")
    return found[0], tuple(found[1:])


def instant_of(given: str | None, name: str) -> int | None:
    """A time in Unix nanoseconds, UTC where it names no zone; None where none is given.

    Raises:
        RefusalError: It is no time.
    """
    if given is None:
        return None
    try:
        return instant_ns(given, zone=UTC)
    except ConfigError as exc:
        raise RefusalError(400, f"{name} is no time; {FORMS}") from exc
