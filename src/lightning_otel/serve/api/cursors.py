"""Where a page of an answer ended, as a text that a client hands back unread; and times."""

import base64
import binascii
import re
import time
from typing import Final

import orjson

from lightning_otel.adapter.selection import Selection
from lightning_otel.errors import ConfigError
from lightning_otel.serve.answers import RefusalError

_AGO: Final = re.compile(r"(\d{1,6})\s*(s|m|h|d)")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_INT64: Final = range(-(1 << 63), 1 << 63)


def cursor_of(start_ns: int, *ids: str) -> str:
    """The place behind a row, which is known by its time and ids."""
    return base64.urlsafe_b64encode(orjson.dumps([start_ns, *ids])).decode().rstrip("=")


def place_of(cursor: str | None, ids: int) -> tuple[int, tuple[str, ...]] | None:
    """What a cursor says: a time, and so many ids; None without one.

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
    """A time in Unix nanoseconds: that number, ``10m`` ago, or ISO 8601 (UTC if it names no zone).

    Raises:
        RefusalError: It is none of these.
    """
    if given is None:
        return None
    if re.fullmatch(r"-?\d{1,19}", given) and int(given) in _INT64:
        return int(given)
    if (ago := _AGO.fullmatch(given)) is not None:
        return time.time_ns() - int(ago[1]) * _UNITS[ago[2]] * 1_000_000_000
    # A plus in a query that was not quoted is a space.
    text = given.replace(" ", "+") if re.search(r"T.* \d\d:\d\d$", given) else given
    zoned = (
        text if re.search(r"T.*(Z|[+-]\d\d:?\d\d)$", text) else f"{text}Z" if "T" in text else text
    )
    try:
        return Selection.of({"since": zoned}).since_ns
    except ConfigError as exc:
        raise RefusalError(
            400, f"{name} is a time; write 10m, 2h, 3d, 2026-11-22T08:00Z or Unix nanoseconds"
        ) from exc
