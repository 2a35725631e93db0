"""Points in time as people write them, and as they are written for people."""

import re
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Final, TypeAlias

from lightning_otel.errors import ConfigError

Instant: TypeAlias = int | str | date
"""Unix nanoseconds; a date or time; or the text of one, as :func:`instant_ns` reads it."""

SINCE_HELP: Final = "Only rollouts that began since: 2h, today, 2026-11-01."
UNTIL_HELP: Final = "Only rollouts that began before that time."
FORMS: Final = (
    "write 10m, 2h or 3d for so long ago, today, yesterday, 2026-11-01, 2026-11-01T12:00:00Z, or "
    "Unix nanoseconds"
)
"""What to do about a text that is no time."""

_AGE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|m|min|h|d|w)", re.ASCII)
_DAYS_AGO: Final = {"today": 0, "yesterday": 1}
_SECONDS: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_NUMBER: Final = re.compile(r"-?\d{1,19}", re.ASCII)
_DAY: Final = len("20261101")
_LEAST_NS: Final = 10**15
"""Below it, after eleven days of 1970, a written number is one of seconds or milliseconds."""
_FRACTION: Final = re.compile(r"(?<=:\d\d)[.,](\d{1,9})(?!\d)", re.ASCII)
_SPACED: Final = re.compile(r"(?<=\d) (?=\d\d:?\d\d$)", re.ASCII)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND_NS: Final = 1_000_000_000
_INT64: Final = range(-(1 << 63), 1 << 63)


def instant_ns(
    instant: Instant, name: str = "", *, zone: tzinfo | None = None, now_ns: int | None = None
) -> int:
    """Return a point in time, in Unix nanoseconds.

    A text is ``now``; how long ago it was (``45s``, ``10m`` or ``10min``, ``2h``, ``7d``, ``2w``,
    ``1.5h``, ``2h ago``); ``today`` or ``yesterday``, the midnight that it began with; a date or
    time in ISO 8601, with ``Z``, an offset or neither; or Unix nanoseconds.

    Args:
        instant: The text, or the time as a value.
        name: What errors call it, such as ``since``.
        zone: The zone of a text without one; by default this machine's, right for what is written
            on it. For what was written elsewhere pass UTC.
        now_ns: The present, Unix nanoseconds; by default from the clock.

    Raises:
        ConfigError: It is no time, or none of the years 1678 to 2261; the message ends with what
            to write.
    """
    label = f"{name}: {instant!r}" if name else repr(instant)
    try:
        time_ns = _read_instant(instant, zone, now_ns)
    except (AttributeError, OSError, OverflowError, TypeError, ValueError) as exc:
        raise ConfigError(f"{label} is no time; {FORMS}") from exc
    if isinstance(instant, str) and _is_number(instant.strip()) and 0 < abs(time_ns) < _LEAST_NS:
        raise ConfigError(f"{label} is too small a number for nanoseconds; {FORMS}")
    if time_ns not in _INT64:
        raise ConfigError(f"{label} is too far away to be kept in nanoseconds; {FORMS}")
    return time_ns


def age_s(text: str) -> float | None:
    """The seconds that ``10m``, ``2h`` or ``30d`` says; None if it says none."""
    match = _AGE.fullmatch(text.strip())
    return float(match[1]) * _SECONDS[match[2]] if match else None


def utc_text(time_ns: int) -> str:
    """Return the inverse of :func:`instant_ns`: ISO 8601, UTC, of fixed length, for sorting."""
    seconds, nanoseconds = divmod(time_ns, _SECOND_NS)
    whole = _EPOCH + timedelta(seconds=seconds)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{nanoseconds:09}Z"


def _read_instant(instant: Instant, zone: tzinfo | None, now_ns: int | None) -> int:
    if isinstance(instant, bool):
        raise TypeError("it is a truth value")
    if isinstance(instant, int):
        return instant
    if not isinstance(instant, str):
        return _ns_of(instant, zone)
    text = instant.strip()
    now_ns = _ns_of(datetime.now(UTC), UTC) if now_ns is None else now_ns
    if text.lower() in _DAYS_AGO:
        now = (_EPOCH + timedelta(seconds=now_ns // _SECOND_NS)).astimezone(zone)
        return _ns_of(now.date() - timedelta(days=_DAYS_AGO[text.lower()]), zone)
    passed_s = 0.0 if text == "now" else age_s(text.removesuffix(" ago"))
    if passed_s is not None:
        return now_ns - round(passed_s * _SECOND_NS)
    if _is_number(text):
        return int(text)
    # A plus in an address that was not quoted comes as a space.
    text = _SPACED.sub("+", text) if "T" in text else text
    fraction = _FRACTION.search(text)
    nanoseconds = 0 if fraction is None else int(fraction[1].ljust(9, "0"))
    return _ns_of(datetime.fromisoformat(_FRACTION.sub("", text, count=1)), zone) + nanoseconds


def _is_number(text: str) -> bool:
    return len(text) != _DAY and _NUMBER.fullmatch(text) is not None


def _ns_of(day: date, zone: tzinfo | None) -> int:
    moment = day if isinstance(day, datetime) else datetime(day.year, day.month, day.day)
    if moment.tzinfo is None and zone is not None:
        moment = moment.replace(tzinfo=zone)
    # In whole numbers: a float of seconds would be off by a hundred nanoseconds. What names no
    # zone by now is taken for this machine's.
    return (moment.astimezone(UTC) - _EPOCH) // timedelta(microseconds=1) * 1000
